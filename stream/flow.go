package stream

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/outside"
	"github.com/purecuda/purecuda/internal/wire"
)

var (
	// ErrFull is in the error of an enqueue that would take more of what may be
	// in flight than the stream's share: nothing was enqueued.
	ErrFull = errors.New("stream is full")
	// ErrContextFull is in the error of an enqueue while all that may be in
	// flight in the context is: nothing was enqueued.
	ErrContextFull = errors.New("context is full")
)

// Bound is how many operations may be in flight in one context. The driver
// blocks the enqueue behind 1,021 pending copies, launches, fills and host
// functions in one hardware queue, and which streams share a queue is not
// known: only below that number in all of them together no enqueue blocks
// (docs/driver-facts.md, "A full stream blocks"). The rest is for work that
// other code enqueues.
const Bound = 960

// Credits is what a stream may have in flight while no other has any. A stream
// may have as many in flight as are left for the others: one alone half of the
// bound, a second beside it a quarter, so that those that stand still leave room
// for those that move.
const Credits = Bound / 2

// Flow counts the operations in flight in one context.
type Flow struct {
	used atomic.Int64

	mu    sync.Mutex
	lanes []*Lane // those that may have something in flight

	waiting atomic.Int64
	wake    chan struct{} // closed when something may have come free
}

type flowKey struct{}

// FlowOf returns the context's flow.
func FlowOf(core *wire.Context) *Flow {
	return core.Shared(flowKey{}, func() any { return new(Flow) }).(*Flow)
}

func (f *Flow) add(l *Lane) {
	f.mu.Lock()
	f.lanes = append(f.lanes, l)
	f.mu.Unlock()
}

// drop forgets a lane that will enqueue no more, and gives back what it took.
func (f *Flow) drop(l *Lane) {
	f.mu.Lock()
	for i, other := range f.lanes {
		if other == l {
			f.lanes = append(f.lanes[:i], f.lanes[i+1:]...)
			break
		}
	}
	f.mu.Unlock()
	l.give(l.credits.Load())
}

// take takes n credits for the lane, or says why there are none.
func (l *Lane) take(n int64) error {
	for {
		used, own := l.flow.used.Load(), l.credits.Load()
		switch left := Bound - used; {
		case n > left:
			return fmt.Errorf("%w: %d operations are in flight, the bound is %d: wait for some", ErrContextFull, used, Bound)
		case own+n > left:
			return fmt.Errorf("%w: %d operations are in flight, and %d in other streams: %d in all are the bound, and half of what the others leave is one stream's share: wait for some, with Synchronize for all", ErrFull, own, used-own, Bound)
		}
		if l.flow.used.CompareAndSwap(used, used+n) {
			l.credits.Add(n)
			return nil
		}
	}
}

// give returns n credits.
func (l *Lane) give(n int64) {
	if n != 0 {
		l.credits.Add(-n)
		l.flow.used.Add(-n)
		l.flow.Signal()
	}
}

// Poll looks at every lane with something in flight. It never waits, and is the
// watcher's look while somebody waits for room.
func (f *Flow) Poll() (progress, more bool) {
	f.mu.Lock()
	lanes := append([]*Lane(nil), f.lanes...)
	f.mu.Unlock()
	before := f.used.Load()
	for _, l := range lanes {
		if l.credits.Load() > 0 {
			l.sweep(!l.foreign.Load()) // what other code knows may capture, which a query spoils
		}
	}
	return f.used.Load() < before, f.waiting.Load() > 0
}

// sweep looks at the lane's marks and, if it may, asks for the stream where
// operations are in flight that no mark is behind (cuStreamQuery).
func (l *Lane) sweep(ask bool) {
	l.Poll()
	issued := l.issued.Load() // these were enqueued before the query
	l.mu.Lock()
	ask = ask && l.head == nil && l.retired < issued && l.core.Lost() == nil
	if !ask {
		l.mu.Unlock()
		return
	}
	l.looking++
	l.mu.Unlock()
	r := l.query()
	if r != cuapi.Success && r != cuapi.NotReady {
		l.core.Fail(cuapi.IDStreamQuery, r, "") // latched, if the context is lost
	}
	l.mu.Lock()
	l.looking--
	if r == cuapi.Success {
		l.retireLocked(issued)
	}
	l.mu.Unlock()
}

// retireLocked notes that the first n operations are complete.
func (l *Lane) retireLocked(n uint64) {
	if n > l.retired {
		back := int64(n - l.retired)
		l.retired = n
		l.give(back)
	}
}

// Signal tells those who wait that something may have come free.
func (f *Flow) Signal() {
	if f.waiting.Load() == 0 {
		return
	}
	f.mu.Lock()
	if f.wake != nil {
		close(f.wake)
		f.wake = nil
	}
	f.mu.Unlock()
}

// Await begins a wait for room: the channel is closed once something may have
// come free since. The watcher looks at all lanes until stop.
func (f *Flow) Await(core *wire.Context) (freed <-chan struct{}, stop func()) {
	f.waiting.Add(1)
	f.mu.Lock()
	if f.wake == nil {
		f.wake = outside.Chan()
	}
	freed = f.wake
	f.mu.Unlock()
	WatcherOf(core).Add(f)
	return freed, func() { f.waiting.Add(-1) }
}

// Waiting returns how many wait for room.
func (f *Flow) Waiting() int { return int(f.waiting.Load()) }
