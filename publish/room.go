package publish

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/stream"
)

// AllocContext is [Session.Alloc], but waits while the retirement slots or bytes
// are used up, too much is in flight, or the device's memory is short and
// somebody of this context may give back as much.
//
// The end of ctx ends the wait, with a [*RejectedError] that matches ctx.Err()
// and the last refusal. So does a close of the session or the runtime, and the
// loss of the context. When several wait, none is first: who tries first when
// room came has it.
func (s *Session) AllocContext(ctx context.Context, d DType, shape ...int) (v *Value, err error) {
	ext, _ := extentOf(d, shape)
	err = s.room(ctx, ext.bytes, func() error { v, err = s.Alloc(d, shape...); return err })
	return v, err
}

// UploadContext is [Session.Upload], but waits while the retirement slots or
// bytes are used up or too much is in flight. The wait ends as AllocContext's
// does: v and buf stay the caller's then.
func (s *Session) UploadContext(ctx context.Context, v *Value, buf *pinned.Buffer) (t *Transfer, err error) {
	err = s.room(ctx, 0, func() error { t, err = s.Upload(v, buf); return err })
	return t, err
}

// LaunchContext is [Session.Launch], but waits while too much is in flight. The
// wait ends as AllocContext's does: nothing was enqueued then.
func (s *Session) LaunchContext(ctx context.Context, f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	return s.room(ctx, 0, func() error { return s.Launch(f, c, args...) })
}

// room pins the runtime and waits with it.
func (s *Session) room(ctx context.Context, bytes int64, try func() error) error {
	st, err := s.begin()
	if err != nil {
		return try() // which has the words
	}
	st.rt.retain()
	s.end()
	defer st.rt.unpin()
	return st.rt.room(ctx, bytes, try)
}

// DownloadIntoContext is [Publication.DownloadInto], but waits while the
// retirement bytes are used up or too much is in flight.
//
// The end of ctx ends the wait, with a [*RejectedError] that matches ctx.Err()
// and the last refusal: publication and buffer stay the caller's. So does a close
// of the publication, and the loss of the context.
func (p *Publication) DownloadIntoContext(ctx context.Context, buf *pinned.Buffer) (*Transfer, error) {
	return p.DownloadRangeContext(ctx, buf, 0, p.Bytes())
}

// DownloadRangeContext is [Publication.DownloadRange], but waits as
// DownloadIntoContext does.
func (p *Publication) DownloadRangeContext(ctx context.Context, buf *pinned.Buffer, offset, n int64) (t *Transfer, err error) {
	try := func() error { t, err = p.DownloadRange(buf, offset, n); return err }
	if p == nil || p.r == nil || p.r.pub.Borrow() != nil {
		err = try() // which has the words
		return t, err
	}
	rt := p.r.rt
	rt.retain()
	p.end()
	defer rt.unpin()
	err = rt.room(ctx, 0, try)
	return t, err
}

// room repeats a try while it is rejected for want of room, until ctx ends. bytes
// are those of device memory that it takes.
func (rt *Runtime) room(ctx context.Context, bytes int64, try func() error) error {
	for first := true; ; first = false {
		var freed <-chan struct{}
		stop := func() {}
		if !first { // from here on what comes free is told
			freed, stop = stream.AwaitRoom(rt.core)
		}
		// Asked before the try: what comes back between the two it finds.
		lent := bytes > 0 && (first || rt.mem.Lent(bytes, rt.kept.device()))
		err := try()
		rejected, ok := err.(*RejectedError)
		busy := errors.Is(err, own.ErrBusy) // another call has a look at a handle
		if !ok || !busy && !wantsRoom(err) && !(lent && errors.Is(err, driver.ErrOutOfMemory)) {
			stop()
			return err
		}
		if busy {
			runtime.Gosched()
		} else if !first {
			select {
			case <-freed:
			case <-ctx.Done():
			}
		}
		stop()
		if err := ctx.Err(); err != nil {
			rejected.Reason = fmt.Errorf("%w: %w", err, rejected.Reason)
			return rejected
		}
	}
}

// wantsRoom tells whether a try was refused for want of a slot, bytes or
// credits, which come back.
func wantsRoom(err error) bool {
	return !errors.Is(err, ErrTooLarge) &&
		(errors.Is(err, ErrStreamFull) || errors.Is(err, ErrContextFull) || errors.Is(err, ErrQueueFull))
}
