// Package stream has the streams that sessions capture: queues of device work
// that complete in order.
//
// A stream is created non-blocking (CU_STREAM_NON_BLOCKING): it is not ordered
// with the legacy default stream, which purecuda never uses. Operations in
// flight are counted and bounded, since the driver blocks the caller of the
// next one when a stream is full.
package stream

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
)

// Stream is a stream of one context. Its handle can be closed while
// publications that were produced on it are pending: the stream itself lives
// until the last of them is done. An open Stream pins its context.
type Stream struct{ ref *ref }

// ref is what a cleanup needs of a Stream.
type ref struct {
	cell own.Cell
	lane *Lane
}

func init() {
	wire.PinLane = func(s any) (any, error) { return s.(*Stream).pin() }
	wire.Cleanups = append(wire.Cleanups, func(h any) bool {
		s, ok := h.(*Stream)
		if ok {
			s.ref.close()
		}
		return ok
	})
}

// New makes a stream of the context (cuStreamCreate), or takes an idle one
// whose work is done. It returns at once unless the process is stalled.
func New(ctx *driver.Context) (*Stream, error) {
	core := wire.ContextOf(ctx)
	if core == nil {
		return nil, fmt.Errorf("stream: no context: %w", driver.ErrClosed)
	}
	if err := core.Retain(); err != nil {
		return nil, err
	}
	l, err := Take(core)
	if err != nil {
		core.Release()
		return nil, err
	}
	return handle(l), nil
}

// Adopt makes a Stream of a stream that other code created and will destroy,
// after this handle was closed and what it produced is done. Work that other
// code enqueues in it is not counted, so that a full stream may block calls
// here. A stream that is known here already is the same one: one session at
// most holds it. The default streams (0, 1 and 2) are refused, and so is a
// stream of another context (cuStreamGetCtx).
func Adopt(ctx *driver.Context, raw uintptr) (*Stream, error) {
	core := wire.ContextOf(ctx)
	if core == nil {
		return nil, fmt.Errorf("stream: no context: %w", driver.ErrClosed)
	}
	if raw <= 2 {
		return nil, fmt.Errorf("stream: %d is a default stream: %w", raw, driver.ErrInvalidHandle)
	}
	if err := core.Retain(); err != nil {
		return nil, err
	}
	l, err := adopt(core, cuapi.Stream(raw))
	if err != nil {
		core.Release()
		return nil, err
	}
	return handle(l), nil
}

func adopt(core *wire.Context, h cuapi.Stream) (*Lane, error) {
	of := new(cuapi.Context)
	if r := core.Table.StreamGetCtx(h, of); r != cuapi.Success {
		return nil, core.Fail(cuapi.IDStreamGetCtx, r, "")
	}
	if *of != core.Raw {
		return nil, fmt.Errorf("stream: %#x belongs to another context: %w", h, driver.ErrInvalidContext)
	}
	l := idleOf(core).adopt(h)
	if l == nil {
		return nil, fmt.Errorf("stream: %#x is purecuda's own, and was closed: %w", h, driver.ErrClosed)
	}
	l.Expose()
	return l, nil
}

func handle(l *Lane) *Stream {
	r := &ref{lane: l}
	r.cell.Open()
	s := &Stream{r}
	runtime.AddCleanup(s, (*ref).close, r)
	return s
}

// pin keeps the lane for a user other than the handle.
func (s *Stream) pin() (*Lane, error) {
	l, err := s.begin()
	if err != nil {
		return nil, err
	}
	defer s.end()
	l.Retain()
	return l, nil
}

func (s *Stream) begin() (*Lane, error) {
	if s == nil || s.ref == nil {
		return nil, fmt.Errorf("stream: %w", driver.ErrClosed)
	}
	if err := s.ref.cell.Borrow(); err != nil {
		return nil, fmt.Errorf("stream: %w", err)
	}
	return s.ref.lane, nil
}

func (s *Stream) end() {
	if s.ref.cell.Return() {
		s.ref.drop()
	}
	runtime.KeepAlive(s)
}

// close makes no driver call: a cleanup may be its caller.
func (r *ref) close() {
	if r.cell.Close() {
		r.drop()
	}
}

func (r *ref) drop() {
	r.lane.Drop()
	r.lane.core.Release()
}

// Close ends the handle. It never waits: pending work goes on, and what was
// produced on the stream stays valid.
func (s *Stream) Close() error {
	if s != nil && s.ref != nil {
		s.ref.close()
		runtime.KeepAlive(s)
	}
	return nil
}

// Raw returns the driver's stream, for other code that enqueues in it. From
// then on each enqueue here asks first whether the stream captures a graph.
// The handle must be kept open while that code uses the stream.
func (s *Stream) Raw() (uintptr, error) {
	l, err := s.begin()
	if err != nil {
		return 0, err
	}
	defer s.end()
	return l.Expose(), nil
}

// Synchronize waits until everything that was enqueued before the call is
// done. The end of ctx ends the wait alone.
func (s *Stream) Synchronize(ctx context.Context) error {
	l, err := s.begin()
	if err != nil {
		return err
	}
	defer s.end()
	err = l.Synchronize(ctx)
	var e *Enqueued
	if errors.As(err, &e) {
		return e.Err
	}
	return err
}
