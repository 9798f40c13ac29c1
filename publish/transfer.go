package publish

import (
	"context"
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

// Err returns nil while the caller owns the transfer and it did not fail.
func (t *Transfer) Err() error {
	if t == nil || t.r == nil {
		return none("transfer")
	}
	r := t.r
	if err := r.transfer.Err(); err != nil {
		return t.over("transfer", err)
	}
	if transferTable.Err.at[r.condition(&r.copied)] == fails {
		return r.failure("transfer")
	}
	return nil
}

// over is the error of a use after the end: the failure that ended it, if any.
func (t *Transfer) over(op string, err error) error {
	if f := t.r.failed.Load(); f != nil {
		return &UnprovenError{op, *f}
	}
	return unusable("transfer", err)
}

// Ready tells whether the copy is done (cuEventQuery). It never waits. After a
// failure it returns that failure, an [*UnprovenError].
func (t *Transfer) Ready() (bool, error) {
	if t == nil || t.r == nil {
		return false, none("transfer")
	}
	r := t.r
	if err := r.transfer.Borrow(); err != nil {
		return false, t.over("transfer", err)
	}
	defer t.end()
	rule := &transferTable.Ready.at
	act := rule[r.condition(&r.copied)]
	if act == looks {
		r.copied.Poll()
		act = rule[r.condition(&r.copied)]
	}
	if act == fails {
		return false, r.failure("transfer")
	}
	return act == answers, nil
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
	r := t.r
	if err := r.transfer.Borrow(); err != nil {
		return nil, t.over("wait", err)
	}
	r.rt.retain()
	t.end()
	defer r.rt.unpin()
	act, err := r.await(ctx, &r.copied, &transferTable.Wait)
	if err != nil {
		return nil, err
	}
	if act == fails {
		err = r.failure("wait")
	}
	taken := r.transfer.Take()
	for taken == own.ErrBusy { // a look of another goroutine, which never waits
		taken = r.transfer.Take()
	}
	if taken != nil {
		if err != nil {
			return nil, err
		}
		return nil, t.over("wait", taken)
	}
	runtime.KeepAlive(t)
	r.transfer.Give()
	if act == fails {
		r.keep(*r.failed.Load())
		return nil, err
	}
	block := r.buf
	r.buf = nil
	r.ticket.Shrink(int64(r.n))
	buf := wire.NewBuffer(block, r.n).(*pinned.Buffer)
	if cause := r.terminal(); cause != nil {
		r.keep(cause) // the copy is done; the source was tainted, or is on a lost context
	} else {
		r.releaseNow()
	}
	return buf, nil
}

// Done returns a channel that is closed when the copy is done or failed, and
// when the transfer is closed or leaked. It is nil once Wait gave the buffer
// back.
func (t *Transfer) Done() <-chan struct{} {
	if t == nil || t.r == nil || t.r.transfer.Err() == own.ErrMoved {
		return nil
	}
	defer runtime.KeepAlive(t)
	return t.r.copied.Done()
}

// Close retires the transfer behind its copy: buffer and source are released
// once it is done. It never waits. Closing a transfer that has ended does
// nothing.
func (t *Transfer) Close() error {
	if t == nil || t.r == nil {
		return nil
	}
	if t.r.transfer.Close() {
		t.r.closeTransfer()
	}
	runtime.KeepAlive(t)
	return nil
}

// Leak retains what the transfer owns for the life of the process, and counts
// it.
func (t *Transfer) Leak() {
	if t != nil && t.r != nil {
		t.r.leak(stageTransfer, &t.r.transfer, t.r.closeTransfer)
	}
	runtime.KeepAlive(t)
}
