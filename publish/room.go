package publish

import (
	"context"
	"errors"
	"fmt"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/room"
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
	err = s.room(ctx, ext.bytes, nil, func() error { v, err = s.Alloc(d, shape...); return err })
	return v, err
}

// UploadContext is [Session.Upload], but waits while the retirement slots or
// bytes are used up or too much is in flight. The wait ends as AllocContext's
// does, and with a close or a move of v: v and buf stay the caller's then.
func (s *Session) UploadContext(ctx context.Context, v *Value, buf *pinned.Buffer) (t *Transfer, err error) {
	err = s.room(ctx, 0, v, func() error { t, err = s.Upload(v, buf); return err })
	return t, err
}

// LaunchContext is [Session.Launch], but waits while too much is in flight. The
// end of ctx ends the wait, with a [*RejectedError] that matches ctx.Err() and
// the last refusal. So does a close of the session, and the loss of the context:
// nothing was enqueued then.
func (s *Session) LaunchContext(ctx context.Context, f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	return s.room(ctx, 0, nil, func() error { return s.Launch(f, c, args...) })
}

// room pins the runtime and waits with it, the session and a value, if any.
func (s *Session) room(ctx context.Context, bytes int64, v *Value, try func() error) error {
	st, err := s.begin()
	if err != nil {
		return try() // which has the words
	}
	st.rt.retain()
	s.end()
	defer st.rt.unpin()
	var r *record
	if v != nil {
		r = v.r
	}
	return st.rt.room(ctx, bytes, st, r, try)
}

// DownloadIntoContext is [Publication.DownloadInto], but waits while the
// retirement bytes are used up or too much is in flight.
//
// The end of ctx ends the wait, with a [*RejectedError] that matches ctx.Err()
// and the last refusal: publication and buffer stay the caller's. So does a close
// or a move of the publication, and the loss of the context.
func (p *Publication) DownloadIntoContext(ctx context.Context, buf *pinned.Buffer) (*Transfer, error) {
	return p.DownloadRangeContext(ctx, buf, 0, p.Bytes())
}

// DownloadRangeContext is [Publication.DownloadRange], but waits as
// DownloadIntoContext does.
func (p *Publication) DownloadRangeContext(ctx context.Context, buf *pinned.Buffer, offset, n int64) (t *Transfer, err error) {
	try := func() error { t, err = p.DownloadRange(buf, offset, n); return err }
	if p == nil || p.r == nil {
		err = try()
		return t, err
	}
	r := p.r
	for {
		idle, stop := r.idle.Await()
		held := r.pub.Borrow()
		if held == nil {
			stop()
			break
		}
		if held != own.ErrBusy || ctx.Err() != nil {
			stop()
			err = try() // which has the words
			return t, inTime(ctx, err)
		}
		select { // another call moves it, or is refused
		case <-idle:
		case <-ctx.Done():
		}
		stop()
	}
	r.rt.retain()
	p.end()
	defer r.rt.unpin()
	err = r.rt.room(ctx, 0, nil, r, try)
	return t, err
}

// room repeats a try while it is rejected for want of room, until ctx ends. bytes
// are those of device memory that it takes. The ends of the session and of the
// record, if it is made with any, and of the runtime wake it.
func (rt *Runtime) room(ctx context.Context, bytes int64, st *session, r *record, try func() error) error {
	err := try()
	on, again := rt.lacks(err)
	for again {
		// In this order: what comes free behind the try is told.
		var freed, session, record <-chan struct{}
		var stops []func()
		await := func(ch <-chan struct{}, stop func()) <-chan struct{} {
			stops = append(stops, stop)
			return ch
		}
		switch {
		case on == &rt.core.Credits:
			freed = await(stream.AwaitCredits(rt.core))
		case on != nil:
			freed = await(on.Await())
		case r != nil: // a handle is busy
			freed = await(r.idle.Await())
		}
		runtime := await(rt.ended.Await())
		if st != nil {
			session = await(st.ended.Await())
		}
		if r != nil {
			record = await(r.gone.Await())
		}
		lent := on == &rt.core.Memory && rt.mem.Lent(bytes)
		was := on
		err = try()
		on, again = rt.lacks(err)
		if on == &rt.core.Memory {
			// In vain only if nobody had any, neither before the try nor behind it.
			again = bytes > 0 && (lent || rt.mem.Lent(bytes))
		}
		if again && on == was {
			select {
			case <-freed:
			case <-runtime:
			case <-session:
			case <-record:
			case <-rt.ctx.Lost():
			case <-ctx.Done():
			}
		}
		for _, stop := range stops {
			stop()
		}
		if again && ctx.Err() != nil {
			return inTime(ctx, err)
		}
	}
	return err
}

// inTime adds to a refusal that ctx has ended, if so.
func inTime(ctx context.Context, err error) error {
	if rejected, ok := err.(*RejectedError); ok && ctx.Err() != nil {
		rejected.Reason = fmt.Errorf("%w: %w", ctx.Err(), rejected.Reason)
	}
	return err
}

// lacks tells what a try was refused for, if it may be tried again: a slot or
// bytes, credits, memory, or the end of another call with a handle, which has no
// room of its own.
func (rt *Runtime) lacks(err error) (what *room.Room, again bool) {
	if _, ok := err.(*RejectedError); !ok {
		return nil, false
	}
	switch {
	case errors.Is(err, ErrTooLarge):
		return nil, false
	case errors.Is(err, own.ErrBusy):
		return nil, true
	case errors.Is(err, ErrStreamFull), errors.Is(err, ErrContextFull):
		return &rt.core.Credits, true
	case errors.Is(err, ErrQueueFull):
		return &rt.slots, true
	case errors.Is(err, driver.ErrOutOfMemory):
		return &rt.core.Memory, true
	}
	return nil, false
}
