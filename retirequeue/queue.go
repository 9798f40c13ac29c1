// Package retirequeue is the bounded queue of owners that wait to be released
// until the device is done with what they own. It knows no CUDA: an owner says
// by its [Fence] when it may be released, and how.
//
// The queue has two sides. Entries of the drainable side are released once
// their fence is done. Entries of the permanent side may never be released,
// because nothing can prove that the device is done with them: they are
// counted and reported, and never looked at again. A fence that fails and a
// release that fails move an entry there.
//
// A slot is reserved at admission, so that retiring later never fails and
// never waits. The counters conserve at every instant:
//
//	Entered = Released + Permanent + Pending
package retirequeue

import (
	"errors"
	"fmt"
	"sync"
)

// ErrFull is in the error of an admission that the queue's bounds refuse.
var ErrFull = errors.New("retirement queue is full")

// Fence tells whether the device is done with what an entry owns.
type Fence interface {
	// Done never waits. false and nil mean not yet; an error means that it
	// can never be proven.
	Done() (bool, error)
}

// An Owner is what an entry holds: a fence, and the release behind it.
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

// Stats are the queue's counters. Bytes are what the entries said they own.
type Stats struct {
	Reserved       int // slots of owners that are still in use
	Entered        int // owners that came in, ever
	Released       int
	Pending        int // the drainable side
	PendingBytes   int64
	Permanent      int // the permanent side
	PermanentBytes int64
	Cause          error // why the first permanent entry is there
}

// Queue is a bounded retirement queue, safe for concurrent use.
type Queue struct {
	limit int

	mu    sync.Mutex
	head  *Ticket // the drainable side, oldest first
	tail  *Ticket
	out   int // entries that a drain looks at
	stats Stats
}

// New returns a queue of that many slots.
func New(limit int) *Queue { return &Queue{limit: limit} }

// A Ticket is a slot of the queue, reserved by Admit. It is used up by one of
// Cancel, Retire and Keep. The zero Ticket has no slot; it is embedded in what
// it will retire.
type Ticket struct {
	q     *Queue
	owner Owner
	bytes int64
	next  *Ticket
}

// Admit reserves a slot. It fails with an error that matches [ErrFull] and
// changes nothing when all are taken.
func (q *Queue) Admit(t *Ticket) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.q != nil {
		panic("retirequeue: a ticket is admitted twice")
	}
	if used := q.stats.Reserved + q.stats.Pending; used >= q.limit {
		return fmt.Errorf("%w: %d of %d slots are taken, %d of them retired", ErrFull, used, q.limit, q.stats.Pending)
	}
	q.stats.Reserved++
	t.q = q
	return nil
}

// Cancel gives the slot back unused: the owner was released otherwise.
func (t *Ticket) Cancel() {
	q := t.q
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stats.Reserved--
	t.q = nil
}

// Retire hands an owner to the drainable side. It never waits.
func (t *Ticket) Retire(o Owner, bytes int64) {
	q := t.q
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stats.Reserved--
	q.stats.Entered++
	t.owner, t.bytes = o, bytes
	q.push(t)
}

// Keep hands an owner to the permanent side.
func (t *Ticket) Keep(o Owner, bytes int64, cause error) {
	q := t.q
	q.mu.Lock()
	q.stats.Reserved--
	q.stats.Entered++
	t.owner, t.bytes = o, bytes
	q.keep(t, cause)
	q.mu.Unlock()
	o.Kept(cause)
}

func (q *Queue) push(t *Ticket) {
	q.stats.Pending++
	q.stats.PendingBytes += t.bytes
	q.link(t)
}

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
	q.stats.PermanentBytes += t.bytes
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

// Drain releases the entries whose fence is done and returns how many. It
// never waits, and holds no lock over a fence or a release. Each entry is out
// of the queue's list only while it is looked at, so that drains on several
// goroutines do not hide work from each other.
func (q *Queue) Drain() (released int) {
	q.mu.Lock()
	left := q.stats.Pending // one look at each, however they turn
	for ; left > 0 && q.head != nil; left-- {
		t := q.head
		if q.head = t.next; q.head == nil {
			q.tail = nil
		}
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
			continue
		}
		q.keep(t, err)
		q.mu.Unlock()
		t.owner.Kept(err)
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
