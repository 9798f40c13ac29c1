// Package room wakes those who wait for one thing: for credits, slots, bytes or
// memory that others have, or for the end of another call with a handle. Whatever
// may have brought it signals; who waits tries again, and may find that another
// was faster.
package room

import (
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/outside"
)

// Room is one place where room may come. The zero Room is ready for use.
type Room struct {
	waiting atomic.Int64
	mu      sync.Mutex
	wake    chan struct{} // closed by the next Signal
}

// Await begins a wait: the channel is closed by the next Signal. stop ends it.
func (r *Room) Await() (freed <-chan struct{}, stop func()) {
	r.mu.Lock()
	if r.wake == nil {
		r.wake = outside.Chan()
	}
	freed = r.wake
	r.mu.Unlock()
	r.waiting.Add(1)
	return freed, func() { r.waiting.Add(-1) }
}

// Signal tells those who wait that there may be room. It never waits, and costs
// nothing while nobody waits.
func (r *Room) Signal() {
	if r.waiting.Load() == 0 {
		return
	}
	r.mu.Lock()
	if r.wake != nil {
		close(r.wake)
		r.wake = nil
	}
	r.mu.Unlock()
}

// Waiting returns how many wait.
func (r *Room) Waiting() int { return int(r.waiting.Load()) }
