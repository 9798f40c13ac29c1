package stream

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
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
// (docs/driver-facts.md, "Streams share what fills them"). The rest is for work
// that other code enqueues.
const Bound = 960

// Credits is what a stream may have in flight while no other has any. A stream
// may have as many in flight as are left for the others: one alone half of the
// bound, a second beside it a quarter, so that those that stand still leave room
// for those that move.
const Credits = Bound / 2

// flow counts the operations in flight in one context.
type flow struct {
	core *wire.Context
	used atomic.Int64

	hungry atomic.Bool // somebody was refused

	mu    sync.Mutex
	lanes []*Lane // those that may have something in flight
}

type flowKey struct{}

func flowOf(core *wire.Context) *flow {
	return core.Shared(flowKey{}, func() any { return &flow{core: core} }).(*flow)
}

// AwaitCredits begins a wait for credits, as core.Credits.Await does. The watcher
// looks at all lanes meanwhile.
func AwaitCredits(core *wire.Context) (freed <-chan struct{}, stop func()) {
	freed, stop = core.Credits.Await()
	WatcherOf(core).Add(flowOf(core))
	return freed, stop
}

// InFlight returns how many operations of a context are not known to be complete.
func InFlight(core *wire.Context) int { return int(flowOf(core).used.Load()) }

func (f *flow) add(l *Lane) {
	f.mu.Lock()
	f.lanes = append(f.lanes, l)
	f.mu.Unlock()
}

// drop forgets a lane that will enqueue no more, and gives back what it took.
func (f *flow) drop(l *Lane) {
	f.mu.Lock()
	f.lanes = slices.DeleteFunc(f.lanes, func(other *Lane) bool { return other == l })
	f.mu.Unlock()
	l.give(l.credits.Load())
}

// take takes n credits for the lane, or says why there are none.
func (l *Lane) take(n int64) error {
	for {
		used, own := l.flow.used.Load(), l.credits.Load()
		if own+n > Bound-used { // before a last look: what comes back behind it is told
			l.flow.hungry.Store(true)
			used, own = l.flow.used.Load(), l.credits.Load()
		}
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

// give returns n credits. Only a refusal makes that news to who waits for room:
// else a try that gives its own credit back would wake itself.
func (l *Lane) give(n int64) {
	if n != 0 {
		l.credits.Add(-n)
		l.flow.used.Add(-n)
		if l.flow.hungry.Load() && l.flow.hungry.Swap(false) {
			l.core.Credits.Signal()
		}
	}
}

// Poll looks at every lane with something in flight. It never waits, and is the
// watcher's look while somebody waits for room.
func (f *flow) Poll() (progress, more bool) {
	f.mu.Lock()
	lanes := slices.Clone(f.lanes)
	f.mu.Unlock()
	before := f.used.Load()
	for _, l := range lanes {
		if l.credits.Load() > 0 {
			l.sweep(false)
		}
	}
	return f.used.Load() < before, f.core.Credits.Waiting() > 0
}

// sweep looks at the lane's marks and asks for the stream where operations are
// in flight that no mark is behind (cuStreamQuery). What other code knows may
// capture, which a query would spoil: it is asked for on behalf of its own user
// alone, who found that it does not capture, or where it has no user.
func (l *Lane) sweep(mine bool) {
	l.Poll()
	issued := l.issued.Load() // these were enqueued before the query
	l.mu.Lock()
	foreign := l.foreign.Load() && !mine
	idle := l.users.Load() == 0 && !l.adopted
	if l.dead || l.head != nil || l.retired >= issued || foreign && !idle || l.core.Lost() != nil {
		l.mu.Unlock()
		return
	}
	l.asking++ // from here on a shutdown waits, and so does Expose
	l.mu.Unlock()
	r := cuapi.Result(cuapi.NotReady)
	if !foreign || l.capturing() == nil {
		r = l.query()
	}
	if r != cuapi.Success && r != cuapi.NotReady {
		l.core.Fail(cuapi.IDStreamQuery, r, "") // latched, if the context is lost
	}
	l.mu.Lock()
	l.asking--
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

// over tells, without a look, whether all that the lane enqueued is known to be
// complete.
func (l *Lane) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head == nil && l.solo == nil && l.looking == 0 && l.asking == 0 && l.retired == l.issued.Load()
}
