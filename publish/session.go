package publish

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/room"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/stream"
)

// Session is a held entry to one stream: it allocates, uploads, launches and
// publishes there, in order. One session at most holds a stream.
type Session struct{ st *session }

// session is what a cleanup needs of a Session.
type session struct {
	rt   *Runtime
	lane *stream.Lane
	cell own.Cell

	origin *origin   // with Config.Stacks
	ended  room.Room // tells that it was closed

	values, launches, uploads, publications atomic.Int64
}

// SessionStats count what a session did.
type SessionStats struct {
	Values       int // allocated
	Launches     int
	Uploads      int
	Publications int
}

// OpenSession captures a stream, or one of its own if st is nil
// (cuStreamCreate, where none is idle). It returns at once. It fails with
// driver.ErrClosed on a closed runtime, with ErrLost on a lost context, with
// ErrSessionHeld, before any driver call, while another session holds the stream,
// and with ErrForeign for one of another context.
func (rt *Runtime) OpenSession(st *stream.Stream) (*Session, error) {
	if rt.none() {
		return nil, none("runtime")
	}
	if err := rt.pin(); err != nil {
		return nil, err
	}
	l, err := rt.capture(st)
	if err != nil {
		rt.unpin()
		return nil, fmt.Errorf("publish: open session: %w", err)
	}
	rt.mu.Lock()
	rt.sessions++
	rt.mu.Unlock()
	s := &Session{&session{rt: rt, lane: l, origin: rt.origins.born("session")}}
	s.st.cell.Open()
	runtime.AddCleanup(s, (*session).abandon, s.st)
	return s, nil
}

func (rt *Runtime) capture(st *stream.Stream) (*stream.Lane, error) {
	if st == nil {
		l, err := stream.Take(rt.core)
		if err == nil {
			l.Hold()
		}
		return l, err
	}
	pinned, err := wire.PinLane(st)
	if err != nil {
		return nil, err
	}
	l := pinned.(*stream.Lane)
	switch {
	case l.Core() != rt.core:
		err = fmt.Errorf("stream: %w", ErrForeign)
	case !l.Hold():
		err = ErrSessionHeld
	default:
		return l, nil
	}
	l.Drop()
	return nil, err
}

// begin borrows the session for one call.
func (s *Session) begin() (*session, error) {
	if s == nil || s.st == nil {
		return nil, none("session")
	}
	if _, err := sessionTable.Enqueue.enter(&s.st.cell); err != nil {
		return nil, unusable("session", err)
	}
	if sessionTable.Enqueue.at[s.st.condition()] == refuses {
		s.end()
		return nil, &lostError{s.st.rt.core.Lost()}
	}
	return s.st, nil
}

func (s *Session) end() {
	if s.st.cell.Return() {
		s.st.release()
	}
	runtime.KeepAlive(s)
}

func (st *session) close() {
	release, _ := sessionTable.Close.enter(&st.cell)
	st.ended.Signal() // who waits for room in it gets none
	if release {
		st.release()
	}
}

// abandon is the cleanup of a Session that was not closed: it makes no driver
// call.
func (st *session) abandon() {
	if st.cell.Close() {
		st.rt.abandons.Add(1)
		st.rt.origins.end(st.origin, "abandoned")
		st.release()
	}
}

func (st *session) release() {
	st.rt.origins.end(st.origin, "") // unless it has another fate
	st.lane.Unhold()
	st.lane.Drop()
	st.rt.mu.Lock()
	st.rt.sessions--
	st.rt.mu.Unlock()
	st.rt.unpin()
}

// Close lets the stream go. It never waits: what was enqueued goes on, and
// values, publications and transfers stay as they are. While another goroutine
// is in a call of the session, the stream is let go at the end of that call.
func (s *Session) Close() error {
	if s != nil && s.st != nil {
		s.st.close()
		runtime.KeepAlive(s)
	}
	return nil
}

// Stats returns what the session did so far, also after Close.
func (s *Session) Stats() SessionStats {
	if s == nil || s.st == nil {
		return SessionStats{}
	}
	st := s.st
	return SessionStats{int(st.values.Load()), int(st.launches.Load()), int(st.uploads.Load()), int(st.publications.Load())}
}

// Raw returns the driver's stream, for other code that enqueues in it while
// the session is open. From then on each enqueue here asks first whether the
// stream captures a graph.
func (s *Session) Raw() (uintptr, error) {
	st, err := s.begin()
	if err != nil {
		return 0, err
	}
	defer s.end()
	return st.lane.Expose(), nil
}

// Submit has the driver send to the device what it may hold back
// (cuStreamQuery). It never waits.
func (s *Session) Submit() error {
	st, err := s.begin()
	if err != nil {
		return err
	}
	defer s.end()
	return st.lane.Submit()
}

// Synchronize waits until everything that the session enqueued before is done,
// and drains. The end of ctx ends the wait alone: nothing is lost. It records an
// event (cuEventRecord); if that fails the error is an [*UnprovenError], and the
// stream publishes no more.
func (s *Session) Synchronize(ctx context.Context) error {
	st, err := s.begin()
	if err != nil {
		return err
	}
	st.rt.retain() // the wait does not hold the session up, but its stream
	st.lane.Retain()
	s.end()
	defer st.rt.unpin()
	defer st.lane.Drop()
	if rejected, unproven := outcome(st.lane.Synchronize(ctx)); unproven != nil {
		return &UnprovenError{"synchronize", unproven}
	} else if rejected != nil {
		return st.rt.because(rejected)
	}
	st.rt.Drain()
	return nil
}

// Alloc takes device memory for a value of that type and shape, outermost
// dimension first, ready in the order of the session's stream
// (cuMemAllocFromPoolAsync). Its content is undefined. It never waits. The error
// is a [*RejectedError]: it matches driver.ErrOutOfMemory when memory is short
// even after a drain, and ErrQueueFull when the retirement slots are used up.
// Any other code of the driver is an [*UnprovenError]: there may be memory that
// nobody can reach, and it is counted.
func (s *Session) Alloc(d DType, shape ...int) (*Value, error) {
	st, err := s.begin()
	if err != nil {
		return nil, &RejectedError{Op: "alloc", Reason: err}
	}
	defer s.end()
	ext, err := extentOf(d, shape)
	if err != nil {
		return nil, &RejectedError{Op: "alloc", Reason: err}
	}
	lf, err := st.rt.newLife(st.lane, true, ext.bytes)
	if err != nil {
		return nil, &RejectedError{Op: "alloc", Reason: err}
	}
	r := lf.value.r
	r.extent = ext
	r.block, err = st.rt.mem.Alloc(st.lane, ext.bytes)
	if errors.Is(err, driver.ErrOutOfMemory) {
		st.rt.Drain()
		r.block, err = st.rt.mem.Alloc(st.lane, ext.bytes)
	}
	if _, unproven := outcome(err); unproven != nil && !errors.Is(err, driver.ErrOutOfMemory) {
		r.lost = true // there may be memory of an address that nobody knows
		r.keep(unproven)
		return nil, &UnprovenError{"alloc", fmt.Errorf("%v %v: %w", d, shape, unproven)}
	} else if unproven != nil {
		err = unproven
	}
	if err != nil {
		r.cancel()
		return nil, &RejectedError{Op: "alloc", Reason: fmt.Errorf("%v %v: %w", d, shape, st.rt.because(err))}
	}
	r.use(st.lane.Issued())
	r.born("value")
	r.val.Open()
	st.values.Add(1)
	return &lf.value, nil
}

// own returns the record of one of the session's own values (law of
// provenance: an unpublished value belongs to the stream that made it).
func (st *session) own(v *Value) (*record, error) {
	switch {
	case v == nil || v.r == nil:
		return nil, none("value")
	case v.r.rt != st.rt:
		return nil, fmt.Errorf("value: %w", ErrForeign)
	case v.r.lane != st.lane:
		return nil, ErrOtherStream
	}
	return v.r, nil
}

// borrow begins a use of one of the session's own values.
func (st *session) borrow(v *Value) (*record, error) {
	r, err := st.own(v)
	if err != nil {
		return nil, err
	}
	if _, err := valueTable.Use.enter(&r.val); err != nil {
		return nil, unusable("value", err)
	}
	if valueTable.Use.at[r.value()] == refuses {
		st.giveBack(r, nil)
		return nil, r.cause(nil)
	}
	return r, nil
}

// giveBack ends the use. cause is why an enqueue that used it is unproven.
func (st *session) giveBack(r *record, cause error) {
	if cause != nil {
		r.taint.CompareAndSwap(nil, &cause)
	}
	r.use(st.lane.Issued())
	release := r.val.Return()
	r.idle.Signal()
	if release {
		r.closeValue()
	}
}

// outcome sorts the error of an enqueue: nil, or a rejection, or an unproven
// one with its cause.
func outcome(err error) (rejected, unproven error) {
	if err == nil {
		return nil, nil // the usual case takes no memory
	}
	var e *stream.Enqueued
	if errors.As(err, &e) {
		return nil, e.Err
	}
	return err, nil
}

// Upload copies buf, which it moves, to v, in the order of the session's stream
// (cuMemcpyHtoDAsync). The lengths must be equal. v stays the caller's. It never
// waits; [Transfer.Wait] gives the buffer back.
//
// Rejected, v and buf stay as they were. Unproven, buf is retained and v is
// tainted.
func (s *Session) Upload(v *Value, buf *pinned.Buffer) (*Transfer, error) {
	reject := func(reason error) (*Transfer, error) {
		return nil, &RejectedError{Op: "upload", Reason: reason, Value: v, Buffer: buf}
	}
	st, err := s.begin()
	if err != nil {
		return reject(err)
	}
	defer s.end()
	dst, err := st.borrow(v)
	if err != nil {
		return reject(err)
	}
	var taint error
	defer func() { st.giveBack(dst, taint); runtime.KeepAlive(v) }()

	cell, block, err := st.rt.takeBuffer(buf, dst.bytes)
	if err != nil {
		return reject(err)
	}
	defer runtime.KeepAlive(buf)
	lf, err := st.rt.newLife(st.lane, false, int64(buf.Len()))
	if err != nil {
		giveBack(cell, block)
		return reject(err)
	}
	r := lf.transfer.r
	rejected, unproven := outcome(st.lane.Upload(dst.block.Addr, block.Addr(), uintptr(dst.bytes), &r.copied))
	if rejected != nil {
		r.cancel()
		giveBack(cell, block)
		return reject(st.rt.because(rejected))
	}
	cell.Give()
	r.buf, r.n = block, buf.Len()
	if unproven != nil {
		taint = unproven
		r.keep(unproven)
		return nil, &UnprovenError{"upload", unproven}
	}
	r.born("upload")
	r.transfer.Open()
	st.uploads.Add(1)
	return &lf.transfer, nil
}

// Launch starts a kernel in the order of the session's stream (cuLaunchKernel).
// Arguments are scalars of package kernel, and In and Out values of this
// session. It never waits. The kernel is trusted: one that writes through In,
// or through an address that it was not given, voids every promise made here.
//
// Rejected, nothing was enqueued. Unproven, all values of the launch are
// tainted.
func (s *Session) Launch(f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	reject := func(reason error) error { return &RejectedError{Op: "launch", Reason: reason} }
	st, err := s.begin()
	if err != nil {
		return reject(err)
	}
	defer s.end()
	var addresses []uint64
	var borrowed []*record
	var taint error
	defer func() {
		for _, r := range borrowed {
			st.giveBack(r, taint)
		}
		runtime.KeepAlive(args)
	}()
	for i := range args {
		v, ok := wire.ArgOperand(&args[i]).(*Value)
		if !ok {
			continue
		}
		r, err := st.borrow(v)
		if err != nil {
			return reject(fmt.Errorf("argument %d: %w", i, err))
		}
		borrowed = append(borrowed, r)
		addresses = append(addresses, uint64(r.block.Addr))
	}
	rejected, unproven := outcome(wire.Launch(f, st.lane, c, args, addresses))
	if rejected != nil {
		return reject(st.rt.because(rejected))
	}
	if unproven != nil {
		taint = unproven
		return &UnprovenError{"launch", unproven}
	}
	st.launches.Add(1)
	return nil
}

// In passes a value to a kernel that reads it.
func In(v *Value) kernel.Arg { return wire.OperandArg(v).(kernel.Arg) }

// Out passes a value to a kernel that writes it.
func Out(v *Value) kernel.Arg { return wire.OperandArg(v).(kernel.Arg) }

// Publish moves v into a publication with its producer frontier, an event
// behind everything that the session's stream ran before (cuEventRecord). It
// never waits, and is not refused for want of room.
//
// Rejected, v stays as it was, and is in the error. Unproven, v is retained.
func (s *Session) Publish(v *Value) (*Publication, error) { return s.publish(v, false) }

func (s *Session) publish(v *Value, asserted bool) (*Publication, error) {
	reject := func(reason error) (*Publication, error) {
		return nil, &RejectedError{Op: "publish", Reason: reason, Value: v}
	}
	st, err := s.begin()
	if err != nil {
		return reject(err)
	}
	defer s.end()
	r, err := st.own(v)
	if err != nil {
		return reject(err)
	}
	if r.adopted != nil && !asserted {
		return reject(ErrProvenance)
	}
	if _, err := valueTable.Publish.enter(&r.val); err != nil {
		return reject(unusable("value", err))
	}
	defer runtime.KeepAlive(v)
	refuse := func(reason error) (*Publication, error) {
		release := r.val.Restore()
		r.idle.Signal()
		if release {
			r.closeValue()
		}
		return reject(st.rt.because(reason))
	}
	// Asked once the value is ours: a launch that used it has told by now.
	if sessionTable.Publish.at[st.condition()] == refuses || valueTable.Publish.at[r.value()] == refuses {
		if err := st.rt.core.Lost(); err != nil {
			return refuse(&lostError{err})
		}
		cause := st.lane.Failed()
		if cause == nil {
			cause = r.terminal()
		}
		return refuse(fmt.Errorf("%w: %w", ErrStreamFailed, cause))
	}
	rejected, unproven := outcome(st.lane.Record(&r.frontier))
	if rejected != nil {
		return refuse(rejected)
	}
	r.val.Give()
	r.gone.Signal()
	r.idle.Signal()
	if unproven != nil {
		r.keep(unproven)
		return nil, &UnprovenError{"publish", unproven}
	}
	r.born("publication")
	r.pub.Open()
	st.publications.Add(1)
	return &v.life.pub, nil
}
