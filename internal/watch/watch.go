// Package watch is the completion watcher: one goroutine looks at all that is
// waited for, so that ten thousand waits cost one thread. It runs only while
// something is watched, and an idle process has none.
//
// # Bubbles
//
// The watcher lives outside every bubble of testing/synctest, whoever started
// it, and so do the channels that it closes: code that waits may run in a
// bubble. A device works in real time, as a network does, and its waits are no
// durable blocking, so that of a bubble's own means some have no say:
//
//   - While a goroutine of the bubble waits for a device, the bubble's clock
//     stands still and synctest.Wait does not return. A deadline of that clock
//     that lies ahead does not end the wait; one that has passed does, and a
//     cancellation.
//   - What the watcher calls, as the release functions of adopted memory, it
//     calls outside: they must not touch channels or timers of a bubble.
//   - A goroutine of the bubble that the simulator blocks, in a raw driver call
//     that waits for the device, must be let go from within the bubble, which a
//     running watcher may not heed. No call of purecuda's blocks there: those
//     that may stall are made outside, or wait by polling.
package watch

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/purecuda/purecuda/internal/outside"
)

// A Source is something that completes without telling. Poll makes one look,
// which never waits, and tells whether there was progress and whether there
// is more to look for.
type Source interface {
	Poll() (progress, more bool)
}

// Watcher polls its sources. The zero Watcher is ready for use.
type Watcher struct {
	mu      sync.Mutex
	sources map[Source]bool // true: added again since its last look
	order   []Source        // the same, as they were added: looks have an order
	running atomic.Bool
	nudged  atomic.Bool
	byHand  atomic.Bool
}

// ByHand keeps the watcher from running by itself: somebody else calls Round, and
// Go runs what it is given at once. So a simulation on one goroutine repeats.
func (w *Watcher) ByHand() { w.byHand.Store(true) }

// Go runs f on a goroutine of its own, outside every bubble.
func (w *Watcher) Go(f func()) {
	if w.byHand.Load() {
		f()
		return
	}
	outside.Go(f)
}

// Back-off between rounds without progress: the first rounds only yield, then
// sleeps double from first to last.
const (
	yields = 64
	first  = 20 * time.Microsecond
	last   = time.Millisecond
)

// Add watches s until a look at it finds nothing more. A source that is
// watched already is looked at once more at least.
func (w *Watcher) Add(s Source) {
	w.mu.Lock()
	if w.sources == nil {
		w.sources = map[Source]bool{}
	}
	if _, watched := w.sources[s]; !watched {
		w.order = append(w.order, s)
	}
	w.sources[s] = true
	w.mu.Unlock()
	w.Wake()
}

// Wake makes the watcher look again without long sleeps, after the one that it
// may be in, and starts it if it is not running. Neither Wake nor Add touches a
// channel or a timer of the caller's bubble, nor a lock that is held for long,
// so that a cleanup may call them.
func (w *Watcher) Wake() {
	w.nudged.Store(true)
	if w.byHand.Load() {
		return
	}
	if w.running.CompareAndSwap(false, true) {
		outside.Go(w.run)
	}
}

func (w *Watcher) run() {
	idle := 0
	for {
		if w.nudged.Swap(false) {
			idle = 0
		}
		progress, more := w.Round()
		if !more {
			w.running.Store(false)
			// What was added between the round and now found us running.
			if !w.nudged.Load() && w.empty() || !w.running.CompareAndSwap(false, true) {
				return
			}
			continue
		}
		switch {
		case progress || w.nudged.Load():
			idle = 0
		case idle < yields:
			idle++
			runtime.Gosched()
		default:
			time.Sleep(min(last, first<<min(idle-yields, 10)))
			idle++
		}
	}
}

// Round makes one look at each source, and forgets those that have nothing more:
// what the watcher does again and again.
func (w *Watcher) Round() (progress, more bool) {
	w.mu.Lock()
	list := slices.Clone(w.order)
	for _, s := range list {
		w.sources[s] = false
	}
	w.mu.Unlock()
	for _, s := range list {
		p, m := s.Poll()
		progress = progress || p
		if m {
			more = true
			continue
		}
		w.mu.Lock()
		if w.sources[s] {
			more = true // added again while we looked
		} else if i := slices.Index(w.order, s); i >= 0 {
			w.order = slices.Delete(w.order, i, i+1)
			delete(w.sources, s)
		}
		w.mu.Unlock()
	}
	return progress, more
}

// Running tells whether the watcher has something to look for.
func (w *Watcher) Running() bool { return w.running.Load() || w.nudged.Load() || !w.empty() }

// Look makes one look at each source, on the caller's goroutine. What it finds
// more to look for is watched on, though a look of the watcher's beside it may
// have found nothing.
func (w *Watcher) Look() {
	w.mu.Lock()
	list := slices.Clone(w.order)
	w.mu.Unlock()
	for _, s := range list {
		if _, more := s.Poll(); more {
			w.mu.Lock()
			_, watched := w.sources[s]
			w.mu.Unlock()
			if !watched {
				w.Add(s)
			}
		}
	}
}

func (w *Watcher) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.sources) == 0
}
