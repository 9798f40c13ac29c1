package retirequeue

import "fmt"

// A Ticket is a slot of the queue with the bytes of one owner, reserved by
// Admit. It is used up by Retire or Keep; Cancel makes it a zero Ticket again,
// which has no slot. It is embedded in what it will retire, must not be copied
// while it has a slot, and is used by one goroutine at a time.
//
// To use a ticket that has no slot, to give it negative bytes or to take more
// from it than it has is a bug of the caller: it panics and changes nothing.
type Ticket struct {
	q     *Queue
	spent bool // by Retire or Keep
	bytes int64
	owner Owner
	turn  uint64
	next  *Ticket
}

// Admit reserves a slot and so many bytes. It never waits. It fails with an
// error that matches [ErrFull] and changes nothing when one of the bounds
// refuses; the error has that bound's figures. More bytes than the whole bound
// are never admitted, and the error says so.
func (q *Queue) Admit(t *Ticket, bytes int64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.q != nil {
		panic("retirequeue: a ticket is admitted twice")
	}
	if bytes < 0 {
		panic(fmt.Sprintf("retirequeue: a ticket is admitted with %d bytes", bytes))
	}
	if err := q.room(0, bytes); err != nil {
		return err
	}
	if used := q.stats.Reserved + q.stats.Pending; used >= q.slots {
		return fmt.Errorf("%w: %d of %d entries are taken, %d of them retired", ErrFull, used, q.slots, q.stats.Pending)
	}
	q.stats.Reserved++
	q.stats.ReservedBytes += bytes
	t.q, t.bytes = q, bytes
	return nil
}

// lock locks the queue of a ticket that has a slot.
func (t *Ticket) lock(use string) *Queue {
	q := t.q
	if q == nil {
		panic("retirequeue: " + use + " of a ticket that was not admitted")
	}
	q.mu.Lock()
	if t.spent {
		q.mu.Unlock()
		panic("retirequeue: " + use + " of a ticket that is used up")
	}
	return q
}

// Grow reserves so many bytes more. It never waits. It fails with an error that
// matches [ErrFull], as that of Admit, and changes nothing.
func (t *Ticket) Grow(bytes int64) error {
	q := t.lock("Grow")
	defer q.mu.Unlock()
	if bytes < 0 {
		panic(fmt.Sprintf("retirequeue: a ticket grows by %d bytes", bytes))
	}
	if err := q.room(t.bytes, bytes); err != nil {
		return err
	}
	q.stats.ReservedBytes += bytes
	t.bytes += bytes
	return nil
}

// Shrink gives so many of the ticket's bytes back. It never waits.
func (t *Ticket) Shrink(bytes int64) {
	q := t.lock("Shrink")
	if bytes < 0 || bytes > t.bytes {
		had := t.bytes
		q.mu.Unlock()
		panic(fmt.Sprintf("retirequeue: a ticket of %d bytes shrinks by %d", had, bytes))
	}
	q.stats.ReservedBytes -= bytes
	t.bytes -= bytes
	q.mu.Unlock()
	if bytes > 0 {
		q.notify()
	}
}

// Cancel gives slot and bytes back unused: the owner was released otherwise. It
// never waits.
func (t *Ticket) Cancel() {
	q := t.lock("Cancel")
	q.stats.Reserved--
	q.stats.ReservedBytes -= t.bytes
	*t = Ticket{}
	q.mu.Unlock()
	q.notify()
}

// Retire hands an owner, with the ticket's bytes, to the drainable side. It
// never fails and never waits.
func (t *Ticket) Retire(o Owner) {
	q := t.lock("Retire")
	defer q.mu.Unlock()
	q.enter(t, o)
	q.stats.Pending++
	q.stats.PendingBytes += t.bytes
	q.turn++
	t.turn = q.turn
	q.link(t)
}

// Keep hands an owner, with the ticket's bytes, to the permanent side, and calls
// its Kept. It never fails and never waits.
func (t *Ticket) Keep(o Owner, cause error) {
	q := t.lock("Keep")
	q.enter(t, o)
	q.keep(t, cause)
	q.mu.Unlock()
	o.Kept(cause)
	q.notify()
}
