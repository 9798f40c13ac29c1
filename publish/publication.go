package publish

import (
	"context"
	"fmt"
	"runtime"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/outside"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/stream"
)

// Publication is an immutable value with its producer frontier. It is consumed
// once, and works after the session that made it and every other handle are
// gone. It has no accessor of its device address.
type Publication struct {
	r    *record
	life *life
}

// Bytes returns the size in bytes, in every state.
func (p *Publication) Bytes() int64 {
	if p == nil || p.r == nil {
		return 0
	}
	return p.r.bytes
}

// DType returns the data type, in every state.
func (p *Publication) DType() DType {
	if p == nil || p.r == nil {
		return 0
	}
	return p.r.dtype
}

// Shape returns the dimensions, outermost first, in every state.
func (p *Publication) Shape() []int {
	if p == nil || p.r == nil {
		return nil
	}
	return p.r.shape()
}

// Err returns nil while the caller owns the publication and it did not fail,
// without a driver call: else driver.ErrMoved, driver.ErrClosed, or the first
// failure as an [*UnprovenError].
func (p *Publication) Err() error {
	if p == nil || p.r == nil {
		return none("publication")
	}
	r, rule := p.r, &publicationTable.Err
	if _, err := rule.enter(&r.pub); err != nil {
		return unusable("publication", err)
	}
	if c, err := work(&r.frontier); rule.at[c] == fails {
		return &UnprovenError{"publication", err}
	}
	return nil
}

// FrontierReady tells whether everything that the producing session ran before
// the publication is done (cuEventQuery). It never waits. After a failure it
// returns that failure, an [*UnprovenError], and never true.
func (p *Publication) FrontierReady() (bool, error) {
	if p == nil || p.r == nil {
		return false, none("publication")
	}
	r, rule := p.r, &publicationTable.FrontierReady
	if _, err := rule.enter(&r.pub); err != nil {
		return false, unusable("publication", err)
	}
	defer p.end()
	return rule.look("frontier", &r.frontier)
}

// look follows a rule that looks at the mark, or answers, or fails.
func (r *rule) look(op string, m *stream.Mark) (bool, error) {
	c, err := work(m)
	if r.at[c] == looks {
		m.Poll()
		c, err = work(m)
	}
	if r.at[c] == fails {
		return false, &UnprovenError{op, err}
	}
	return r.at[c] == answers, nil
}

func (p *Publication) end() {
	release := p.r.pub.Return()
	p.r.idle.Signal()
	if release {
		p.r.closePublication()
	}
	runtime.KeepAlive(p)
}

// AwaitFrontier waits until the frontier is complete. The end of ctx ends this
// wait alone, with ctx.Err(). A failure is terminal and an [*UnprovenError]:
// nothing is released. The publication keeps what it owns either way, and may
// be consumed by another goroutine meanwhile.
func (p *Publication) AwaitFrontier(ctx context.Context) error {
	if p == nil || p.r == nil {
		return none("publication")
	}
	r, rule := p.r, &publicationTable.AwaitFrontier
	if _, err := rule.enter(&r.pub); err != nil {
		return unusable("publication", err)
	}
	r.rt.retain() // the wait does not hold the publication up, but the context
	p.end()
	defer r.rt.unpin()
	_, err := rule.await(ctx, "await frontier", &r.frontier)
	return err
}

// await waits while the rule says so, and returns what it says then. With waits
// the error is ctx's, whose end ended the wait and changed nothing, with fails an
// [*UnprovenError].
func (r *rule) await(ctx context.Context, op string, m *stream.Mark) (act, error) {
	for {
		c, err := work(m)
		switch act := r.at[c]; act {
		case waits:
		case fails:
			return act, &UnprovenError{op, err}
		default:
			return act, nil
		}
		if err := m.Wait(ctx); err != nil && err == ctx.Err() {
			return waits, err
		}
	}
}

// Done returns a channel that is closed when the frontier is complete or
// failed, and when the publication is closed or leaked. It is nil after a move:
// a channel that was taken before tells of the frontier alone.
func (p *Publication) Done() <-chan struct{} {
	if p == nil || p.r == nil {
		return nil
	}
	defer runtime.KeepAlive(p)
	return publicationTable.Done.done(&p.r.pub, &p.r.frontier)
}

// done follows a rule that tells of the mark by a channel.
func (r *rule) done(cell *own.Cell, m *stream.Mark) <-chan struct{} {
	if _, err := r.enter(cell); err == own.ErrMoved {
		return nil
	}
	if c, _ := work(m); r.at[c] == answers {
		return outside.Closed
	}
	return m.Done() // closed, after a close
}

// DownloadInto consumes the publication: it moves publication and buffer into
// a transfer, a copy behind the frontier, on the stream that produced it
// (cuMemcpyDtoHAsync, cuEventRecord). The buffer must have exactly the
// publication's bytes. It never waits, and needs no session.
//
// Rejected, both stay as they were, and are in the error. Unproven, both are
// retained.
func (p *Publication) DownloadInto(buf *pinned.Buffer) (*Transfer, error) {
	return p.DownloadRange(buf, 0, p.Bytes())
}

// DownloadRange is DownloadInto for n bytes from that offset.
func (p *Publication) DownloadRange(buf *pinned.Buffer, offset, n int64) (*Transfer, error) {
	reject := func(reason error) (*Transfer, error) {
		return nil, &RejectedError{Op: "download", Reason: reason, Publication: p, Buffer: buf}
	}
	if p == nil || p.r == nil {
		return reject(none("publication"))
	}
	r, rule := p.r, &publicationTable.Download
	if _, err := rule.enter(&r.pub); err != nil {
		return reject(unusable("publication", err))
	}
	defer runtime.KeepAlive(p)
	refuse := func(reason error) (*Transfer, error) {
		release := r.pub.Restore()
		r.idle.Signal()
		if release {
			r.closePublication()
		}
		return reject(r.rt.because(reason))
	}
	if c, err := work(&r.frontier); rule.at[c] == refuses {
		return refuse(r.cause(err))
	}
	if offset < 0 || n <= 0 || offset > r.bytes || n > r.bytes-offset {
		return refuse(fmt.Errorf("%w: %d bytes from %d of a publication of %d", ErrLength, n, offset, r.bytes))
	}
	cell, block, err := r.rt.takeBuffer(buf, n)
	if err != nil {
		return refuse(err)
	}
	defer runtime.KeepAlive(buf)
	if err := r.rt.reserve(func() error { return r.ticket.Grow(n) }); err != nil {
		giveBack(cell, block)
		return refuse(err)
	}
	rejected, unproven := outcome(r.lane.Download(block.Addr(), r.block.Addr+cuapi.DevicePtr(offset), uintptr(n), &r.copied))
	if rejected != nil {
		r.ticket.Shrink(n)
		giveBack(cell, block)
		return refuse(rejected)
	}
	r.pub.Give()
	r.gone.Signal()
	r.idle.Signal()
	cell.Give()
	r.buf, r.n = block, buf.Len()
	if unproven != nil {
		r.keep(unproven)
		return nil, &UnprovenError{"download", unproven}
	}
	r.born("download")
	r.transfer.Open()
	return &p.life.transfer, nil
}

// Close retires the publication behind its frontier. It never waits. After a
// failure what it owns is retained for good. Closing a publication that was
// moved or closed does nothing.
func (p *Publication) Close() error {
	if p == nil || p.r == nil {
		return nil
	}
	release, _ := publicationTable.Close.enter(&p.r.pub)
	p.r.gone.Signal()
	if release {
		p.r.closePublication()
	}
	runtime.KeepAlive(p)
	return nil
}

// Leak retains what the publication owns for the life of the process, and
// counts it.
func (p *Publication) Leak() {
	if p != nil && p.r != nil {
		p.r.leak(stagePublication, &publicationTable.Leak, &p.r.pub, p.r.closePublication)
	}
	runtime.KeepAlive(p)
}
