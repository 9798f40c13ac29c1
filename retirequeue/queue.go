// Package retirequeue is the bounded queue of owners that wait to be released
// until the device is done with what they own. It knows no CUDA: an owner says
// by its [Fence] when it may be released, and how.
//
// The queue has two sides. Entries of the drainable side are released once
// their fence is done. Entries of the permanent side may never be released,
// because nothing can prove that the device is done with them: they are
// counted and reported, never looked at again, and take nothing of the bounds.
// A fence that fails and a release that fails move an entry there.
//
// A slot and bytes are reserved at admission, so that retiring later never
// fails and never waits. At every instant no counter is negative, and
//
//	Entered = Released + Permanent + Pending
//	Reserved + Pending <= Limits.Slots
//	ReservedBytes + PendingBytes <= Limits.Bytes, where there is such a bound
package retirequeue

import (
	"errors"
	"fmt"
	"math"
	"sync"
)

// ErrFull is in the error of an admission that the queue's bounds refuse.
var ErrFull = errors.New("retirement queue is full")

// ErrNever is, besides ErrFull, in the error of an admission that the empty queue
// would refuse.
var ErrNever = errors.New("never admitted")

// Fence tells whether the device is done with what an entry owns.
type Fence interface {
	// Done never waits. false and nil mean not yet; an error means that it
	// can never be proven, whatever the other result.
	Done() (bool, error)
}

// An Owner is what an entry holds: a fence, and the release behind it. Its
// methods may call back into the queue. They must not panic.
type Owner interface {
	Fence
	// Release gives back what the entry owns. It is called once, with no lock
	// held, after Done returned true. It must not wait. An error means that
	// the release cannot be proven.
	Release() error
	// Kept tells that the entry is on the permanent side now, and why. It is
	// called once, with no lock held.
	Kept(cause error)
}

// Stats are the queue's counters. Bytes are what the tickets were given.
type Stats struct {
	Reserved       int   // slots of owners that are still in use
	ReservedBytes  int64 // of these
	Entered        int   // owners that came in, ever
	Released       int
	Pending        int // the drainable side
	PendingBytes   int64
	Permanent      int   // the permanent side
	PermanentBytes int64 // math.MaxInt64 where the sum is more
	Cause          error // why the first permanent entry is there
}

// Limits are the bounds of a queue. They count owners in use and on the
// drainable side.
type Limits struct {
	Slots int
	Bytes int64 // 0: no bound, but that of the counters

	// Freed, if not nil, is called after a slot or bytes came free, with no
	// lock held, by whoever freed them. It may call back into the queue, and
	// must not wait.
	Freed func()
}

// Queue is a bounded retirement queue, safe for concurrent use.
type Queue struct {
	slots int
	bytes int64
	freed func()

	mu    sync.Mutex
	head  *Ticket // the drainable side, least recently looked at first
	tail  *Ticket
	turn  uint64 // of the newest entry, or of the newest look at one
	out   int    // entries that a drain looks at
	stats Stats
}

// New returns an empty queue. It panics on negative limits; a queue without
// slots admits nothing.
func New(l Limits) *Queue {
	if l.Slots < 0 || l.Bytes < 0 {
		panic(fmt.Sprintf("retirequeue: negative limits: %d slots, %d bytes", l.Slots, l.Bytes))
	}
	if l.Bytes == 0 {
		l.Bytes = math.MaxInt64
	}
	return &Queue{slots: l.Slots, bytes: l.Bytes, freed: l.Freed}
}

// notify tells that something came free. No lock is held.
func (q *Queue) notify() {
	if q.freed != nil {
		q.freed()
	}
}

// room returns why n more bytes do not fit beside the had bytes of one owner,
// or nil. Differences of what is in bounds do not overflow; sums would.
func (q *Queue) room(had, n int64) error {
	if n > q.bytes-had {
		return fmt.Errorf("%w: an owner of %d bytes is %w, the whole bound is %d bytes", ErrFull, uint64(had)+uint64(n), ErrNever, q.bytes)
	}
	if left := q.bytes - q.stats.ReservedBytes - q.stats.PendingBytes; n > left {
		return fmt.Errorf("%w: %d bytes are asked for, %d of %d bytes are taken, %d of them retired", ErrFull, n, q.bytes-left, q.bytes, q.stats.PendingBytes)
	}
	return nil
}

// enter counts the ticket's owner in. From here on the ticket is used up.
func (q *Queue) enter(t *Ticket, o Owner) {
	q.stats.Reserved--
	q.stats.ReservedBytes -= t.bytes
	q.stats.Entered++
	t.owner, t.spent = o, true
}

// link puts an entry last.
func (q *Queue) link(t *Ticket) {
	t.next = nil
	if q.tail == nil {
		q.head = t
	} else {
		q.tail.next = t
	}
	q.tail = t
}

// keep counts an entry that is never released. What it owns stays reachable
// through kept for the life of the process: it may be memory that the device
// still writes.
func (q *Queue) keep(t *Ticket, cause error) {
	q.stats.Permanent++
	q.stats.PermanentBytes += min(t.bytes, math.MaxInt64-q.stats.PermanentBytes)
	if q.stats.Cause == nil {
		q.stats.Cause = cause
	}
	kept.mu.Lock()
	t.next = kept.head
	kept.head = t
	kept.mu.Unlock()
}

var kept struct {
	mu   sync.Mutex
	head *Ticket
}

// Drain looks once at each entry that it finds, releases those whose fence is
// done and returns how many. It never waits, and holds no lock over a fence or
// a release. An entry is out of the queue's list only while it is looked at, so
// that drains on several goroutines do not hide work from each other.
func (q *Queue) Drain() (released int) {
	q.mu.Lock()
	// Each look takes a turn, so an entry with an older one was not looked at
	// since this drain began, neither here nor by a drain inside of a callback.
	// Without that, drains in each other look at an entry without end.
	for last := q.turn; q.head != nil && q.head.turn <= last; {
		t := q.head
		if q.head = t.next; q.head == nil {
			q.tail = nil
		}
		q.turn++
		t.turn = q.turn
		q.out++
		q.mu.Unlock()
		done, err := t.owner.Done()
		if err == nil && done {
			err = t.owner.Release()
		}
		q.mu.Lock()
		q.out--
		if err == nil && !done {
			q.link(t)
			continue
		}
		q.stats.Pending--
		q.stats.PendingBytes -= t.bytes
		if err == nil {
			q.stats.Released++
			released++
			t.owner, t.next = nil, nil
		} else {
			q.keep(t, err)
		}
		q.mu.Unlock()
		if err != nil {
			t.owner.Kept(err)
		}
		q.notify()
		q.mu.Lock()
	}
	q.mu.Unlock()
	return released
}

// Draining tells whether a drain looks at an entry right now, so that a slot may
// be free in a moment.
func (q *Queue) Draining() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.out > 0
}

// Stats returns the counters at this instant.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stats
}
