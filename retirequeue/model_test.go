package retirequeue_test

import (
	"errors"
	"math/big"
	"slices"

	"github.com/purecuda/purecuda/retirequeue"
)

// An event is one call that a queue makes: a look, a release, kept, or freed.
type event struct {
	what  string
	id    int
	cause error
}

// fate says how an entry will answer.
type fate struct {
	done  bool
	fails error // of the fence
	stuck error // of the release
}

// entry is one ticket with its owner, as the model sees it.
type entry struct {
	state string // "new", "used", "pending", "released", "kept", "cancelled"
	bytes int64
	fate
}

// model is what a queue should be: nothing but a list of entries, in the order
// in which they were retired. All counters are counted anew from it, with
// numbers that do not overflow.
type model struct {
	slots   int
	bound   int64 // 0: that of the counters
	entries []*entry
	pending []int // ids
	cause   error
	log     []event
}

const most = 1<<63 - 1

// sum adds up the bytes of all entries in the states.
func (m *model) sum(states ...string) (n int, bytes *big.Int) {
	bytes = new(big.Int)
	for _, e := range m.entries {
		if slices.Contains(states, e.state) {
			n++
			bytes.Add(bytes, big.NewInt(e.bytes))
		}
	}
	return n, bytes
}

func (m *model) stats() retirequeue.Stats {
	var s retirequeue.Stats
	var reserved, pending, permanent *big.Int
	s.Reserved, reserved = m.sum("used")
	s.Pending, pending = m.sum("pending")
	s.Permanent, permanent = m.sum("kept")
	s.Released, _ = m.sum("released")
	s.Entered = s.Pending + s.Permanent + s.Released
	s.ReservedBytes, s.PendingBytes = reserved.Int64(), pending.Int64()
	s.PermanentBytes = most
	if permanent.IsInt64() {
		s.PermanentBytes = permanent.Int64()
	}
	s.Cause = m.cause
	return s
}

// fits says "" or which bound refuses so many bytes more for an entry.
func (m *model) fits(e *entry, bytes int64) string {
	bound := big.NewInt(most)
	if m.bound > 0 {
		bound = big.NewInt(m.bound)
	}
	alone := new(big.Int).Add(big.NewInt(e.bytes), big.NewInt(bytes))
	if alone.Cmp(bound) > 0 {
		return "never"
	}
	_, all := m.sum("used", "pending")
	if all.Add(all, big.NewInt(bytes)).Cmp(bound) > 0 {
		return "bytes"
	}
	return ""
}

func (m *model) admit(id int, bytes int64) string {
	e := m.entries[id]
	if (e.state != "new" && e.state != "cancelled") || bytes < 0 {
		return "panic"
	}
	if why := m.fits(e, bytes); why != "" {
		return why
	}
	if n, _ := m.sum("used", "pending"); n >= m.slots {
		return "entries"
	}
	e.state, e.bytes = "used", bytes
	return ""
}

func (m *model) grow(id int, bytes int64) string {
	e := m.entries[id]
	if e.state != "used" || bytes < 0 {
		return "panic"
	}
	why := m.fits(e, bytes)
	if why == "" {
		e.bytes += bytes
	}
	return why
}

func (m *model) shrink(id int, bytes int64) string {
	e := m.entries[id]
	if e.state != "used" || bytes < 0 || bytes > e.bytes {
		return "panic"
	}
	e.bytes -= bytes
	if bytes > 0 {
		m.freed()
	}
	return ""
}

func (m *model) cancel(id int) string {
	e := m.entries[id]
	if e.state != "used" {
		return "panic"
	}
	e.state, e.bytes = "cancelled", 0
	m.freed()
	return ""
}

func (m *model) retire(id int) string {
	e := m.entries[id]
	if e.state != "used" {
		return "panic"
	}
	e.state = "pending"
	m.pending = append(m.pending, id)
	return ""
}

func (m *model) keep(id int, cause error) string {
	if m.entries[id].state != "used" {
		return "panic"
	}
	m.kept(id, cause)
	return ""
}

func (m *model) kept(id int, cause error) {
	m.entries[id].state = "kept"
	if m.cause == nil {
		m.cause = cause
	}
	m.log = append(m.log, event{"kept", id, cause})
	m.freed()
}

func (m *model) drain() (released int) {
	var left []int
	for _, id := range m.pending {
		e := m.entries[id]
		m.log = append(m.log, event{"look", id, nil})
		switch {
		case e.fails != nil:
			m.kept(id, e.fails)
		case !e.done:
			left = append(left, id)
		case e.stuck != nil:
			m.log = append(m.log, event{"release", id, nil})
			m.kept(id, e.stuck)
		default:
			e.state = "released"
			released++
			m.log = append(m.log, event{"release", id, nil})
			m.freed()
		}
	}
	m.pending = left
	return released
}

func (m *model) freed() { m.log = append(m.log, event{"freed", -1, nil}) }

// broken says which invariant the counters break, or nil. bound 0 is none.
func broken(s retirequeue.Stats, slots int, bound int64) error {
	if bound == 0 {
		bound = most
	}
	switch {
	case s.Entered != s.Released+s.Permanent+s.Pending:
		return errors.New("entered is not released + permanent + pending")
	case min(s.Reserved, s.Entered, s.Released, s.Pending, s.Permanent) < 0,
		min(s.ReservedBytes, s.PendingBytes, s.PermanentBytes) < 0:
		return errors.New("a counter is negative")
	case s.Reserved+s.Pending > slots:
		return errors.New("more entries than slots")
	case s.ReservedBytes > bound-s.PendingBytes:
		return errors.New("more bytes than the bound")
	case s.Reserved == 0 && s.ReservedBytes != 0,
		s.Pending == 0 && s.PendingBytes != 0,
		s.Permanent == 0 && s.PermanentBytes != 0:
		return errors.New("bytes of no entries")
	}
	return nil
}
