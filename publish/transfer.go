package publish

import (
	"context"
	"errors"
	"runtime"

	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/pinned"
)

// Transfer is a pending copy: it owns the buffer, and for a download the
// publication that it consumed. It is ended by Wait or Close.
type Transfer struct {
	r    *record
	life *life
}

// Err returns nil while the caller owns the transfer and it did not fail, without
// a driver call: else driver.ErrMoved, driver.ErrClosed, or the first failure as an
// [*UnprovenError].
func (t *Transfer) Err() error {
	if t == nil || t.r == nil {
		return none("transfer")
	}
	r, rule := t.r, &transferTable.Err
	if _, err := rule.enter(&r.transfer); err != nil {
		return t.over("transfer", err)
	}
	if c, err := work(&r.copied); rule.at[c] == fails {
		return &UnprovenError{"transfer", err}
	}
	return nil
}

// over is the error of a use after the end: the failure of a Wait that did not
// give the buffer back, if that was it.
func (t *Transfer) over(op string, err error) error {
	if c, failure := work(&t.r.copied); err == own.ErrMoved && c == workFailed && !t.r.back.Load() {
		return &UnprovenError{op, failure}
	}
	return unusable("transfer", err)
}

// Ready tells whether the copy is done (cuEventQuery). It never waits. After a
// failure it returns that failure, an [*UnprovenError].
func (t *Transfer) Ready() (bool, error) {
	if t == nil || t.r == nil {
		return false, none("transfer")
	}
	r, rule := t.r, &transferTable.Ready
	if _, err := rule.enter(&r.transfer); err != nil {
		return false, t.over("transfer", err)
	}
	defer t.end()
	return rule.look("transfer", &r.copied)
}

func (t *Transfer) end() {
	if t.r.transfer.Return() {
		t.r.closeTransfer()
	}
	runtime.KeepAlive(t)
}

// Wait waits until the copy is done, ends the transfer, and gives the buffer
// back under a new handle; what else the transfer owned is released. The end
// of ctx ends this wait alone, with ctx.Err(): the transfer stays as it is. A
// failure is an [*UnprovenError]: what the transfer owns is retained for good.
func (t *Transfer) Wait(ctx context.Context) (*pinned.Buffer, error) {
	if t == nil || t.r == nil {
		return nil, none("transfer")
	}
	r, rule := t.r, &transferTable.Wait
	if _, err := rule.enter(&r.transfer); err != nil {
		return nil, t.over("wait", err)
	}
	r.rt.retain()
	t.end()
	defer r.rt.unpin()
	act, err := rule.await(ctx, "wait", &r.copied)
	if act == waits {
		return nil, err
	}
	taken := r.transfer.Take()
	for taken == own.ErrBusy { // a look of another goroutine, which never waits
		runtime.Gosched()
		taken = r.transfer.Take()
	}
	if taken != nil {
		if err != nil {
			return nil, err
		}
		return nil, t.over("wait", taken)
	}
	runtime.KeepAlive(t)
	if act == fails {
		r.transfer.Give()
		r.keep(errors.Unwrap(err))
		return nil, err
	}
	r.back.Store(true)
	r.transfer.Give()
	block := r.buf
	r.buf = nil
	r.ticket.Shrink(int64(r.n))
	buf := wire.NewBuffer(block, r.n).(*pinned.Buffer)
	r.releaseNow()
	return buf, nil
}

// Done returns a channel that is closed when the copy is done or failed, and
// when the transfer is closed or leaked. It is nil once Wait gave the buffer
// back.
func (t *Transfer) Done() <-chan struct{} {
	if t == nil || t.r == nil {
		return nil
	}
	defer runtime.KeepAlive(t)
	return transferTable.Done.done(&t.r.transfer, &t.r.copied)
}

// Close retires the transfer behind its copy: buffer and source are released
// once it is done. It never waits. Closing a transfer that has ended does
// nothing.
func (t *Transfer) Close() error {
	if t == nil || t.r == nil {
		return nil
	}
	if release, _ := transferTable.Close.enter(&t.r.transfer); release {
		t.r.closeTransfer()
	}
	runtime.KeepAlive(t)
	return nil
}

// Leak retains what the transfer owns for the life of the process, and counts
// it.
func (t *Transfer) Leak() {
	if t != nil && t.r != nil {
		t.r.leak(stageTransfer, &transferTable.Leak, &t.r.transfer, t.r.closeTransfer)
	}
	runtime.KeepAlive(t)
}
