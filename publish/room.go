package publish

import (
	"context"
	"errors"
	"fmt"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
)

// The forms that wait for room: each tries as the form without a context does,
// and while it is refused for want of room it waits for some. The end of ctx ends
// the wait, with the last refusal, which matches ctx.Err() too: every owner stays
// with the caller.

// AllocContext is [Session.Alloc], but waits while the retirement slots or bytes
// are used up, too much is in flight, or the device's memory is short and
// something of this context may give some back.
func (s *Session) AllocContext(ctx context.Context, d DType, shape ...int) (v *Value, err error) {
	err = s.room(ctx, func() error { v, err = s.Alloc(d, shape...); return err })
	return v, err
}

// UploadContext is [Session.Upload], but waits while the retirement slots or
// bytes are used up or too much is in flight.
func (s *Session) UploadContext(ctx context.Context, v *Value, buf *pinned.Buffer) (t *Transfer, err error) {
	err = s.room(ctx, func() error { t, err = s.Upload(v, buf); return err })
	return t, err
}

// LaunchContext is [Session.Launch], but waits while too much is in flight.
func (s *Session) LaunchContext(ctx context.Context, f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	return s.room(ctx, func() error { return s.Launch(f, c, args...) })
}

func (s *Session) room(ctx context.Context, try func() error) error {
	if s == nil || s.st == nil {
		return try()
	}
	return s.st.rt.room(ctx, try)
}

// DownloadIntoContext is [Publication.DownloadInto], but waits while the
// retirement bytes are used up or too much is in flight.
func (p *Publication) DownloadIntoContext(ctx context.Context, buf *pinned.Buffer) (*Transfer, error) {
	return p.DownloadRangeContext(ctx, buf, 0, p.Bytes())
}

// DownloadRangeContext is [Publication.DownloadRange], but waits as
// DownloadIntoContext does.
func (p *Publication) DownloadRangeContext(ctx context.Context, buf *pinned.Buffer, offset, n int64) (t *Transfer, err error) {
	try := func() error { t, err = p.DownloadRange(buf, offset, n); return err }
	if p == nil || p.r == nil {
		return t, try()
	}
	err = p.r.rt.room(ctx, try)
	return t, err
}

// room repeats a try until it is not refused for want of room, or ctx ends.
func (rt *Runtime) room(ctx context.Context, try func() error) error {
	for first := true; ; first = false {
		freed, stop := (<-chan struct{})(nil), func() {}
		if !first { // from here on what comes free is told
			freed, stop = rt.flow.Await(rt.core)
		}
		lent := rt.mem.Stats().InUse > rt.kept.device() // to somebody who may give it back
		err := try()
		switch {
		case !wantsRoom(err) && !(lent && errors.Is(err, driver.ErrOutOfMemory)):
			stop()
			return err
		case first:
			continue
		}
		select {
		case <-freed:
		case <-rt.ctx.Lost():
		case <-ctx.Done():
			stop()
			var r *RejectedError
			if errors.As(err, &r) {
				r.Reason = fmt.Errorf("%w: %w", ctx.Err(), r.Reason)
			}
			return err
		}
		stop()
	}
}

// wantsRoom tells whether a try was refused for want of a slot, bytes or
// credits, which come back.
func wantsRoom(err error) bool {
	var never *tooLarge
	return !errors.As(err, &never) &&
		(errors.Is(err, ErrStreamFull) || errors.Is(err, ErrContextFull) || errors.Is(err, ErrQueueFull))
}

// tooLarge is the reason of a refusal of what fits into no empty queue.
type tooLarge struct{ bytes, limit int64 }

func (e *tooLarge) Error() string {
	return fmt.Sprintf("%v: %d bytes are more than all of the runtime's %d", ErrQueueFull, e.bytes, e.limit)
}
func (e *tooLarge) Unwrap() error { return ErrQueueFull }
