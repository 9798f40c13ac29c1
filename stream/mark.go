package stream

import (
	"fmt"
	"sync/atomic"

	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/outside"
)

// A Mark is one event recorded in a lane: the fence behind everything that the
// lane enqueued before it. It is embedded in what waits for it, and belongs to
// its lane from the record on.
type Mark struct {
	lane  *Lane
	ev    *event.Event
	upto  uint64 // operations of the lane that it is behind
	solo  bool   // recorded outside the enqueue lock: stands for itself alone
	next  *Mark
	state atomic.Uint32 // markState

	// Guarded by lane.mu.
	kept    bool // looked for until it is complete or failed
	waiters int  // parked, and looked for as long
	wanted  bool // either, and pending: counted by the lane
	err     error
	wake    chan struct{} // for waits: closed when complete or failed
	done    chan struct{} // for Done: closed then too, or by LetGo
	letGo   bool
}

type markState = uint32

const (
	unset    markState = iota // not recorded: never ready, whatever the driver says
	pending                   // recorded, completion not observed
	complete                  // observed
	failed                    // can never be proven
	numMarkStates
	impossible markState = 99 // only a bug of this module gets here
)

// A markEvent is what happens to a mark.
type markEvent uint8

const (
	recorded markEvent = iota // its event was recorded
	needless                  // all that it would be behind is known to be complete
	seenDone                  // a query of it, or of a later one of the lane, says so
	seenNot                   // a query says: not yet
	seenBad                   // a query fails, or the context is lost
	numMarkEvents
)

// markTable is the state machine of a mark. Complete and failed are final.
var markTable = [numMarkStates][numMarkEvents]markState{
	//        recorded    needless    seenDone    seenNot     seenBad
	unset:    {pending, complete, impossible, impossible, impossible},
	pending:  {impossible, impossible, complete, pending, failed},
	complete: {impossible, impossible, complete, complete, complete},
	failed:   {impossible, impossible, failed, failed, failed},
}

// turn executes an event, and tells whether the state is another one. Its lane is
// locked, or nobody else has the mark yet.
func (m *Mark) turn(e markEvent) bool {
	old := m.state.Load()
	next := markTable[old][e]
	if next == impossible {
		panic(fmt.Sprintf("purecuda: event %d of a mark in state %d", e, old))
	}
	m.state.Store(next)
	return next != old
}

// Recorded tells whether the mark's event was recorded.
func (m *Mark) Recorded() bool { return m.state.Load() != unset }

// Peek tells what was observed so far, without a driver call: true when the
// mark is complete, an error when it failed or its context is lost.
func (m *Mark) Peek() (bool, error) {
	switch m.state.Load() {
	case complete:
		return true, m.lane.core.Lost()
	case failed:
		m.lane.mu.Lock()
		defer m.lane.mu.Unlock()
		return false, m.err
	case unset:
		return false, errUnset
	}
	return false, m.lane.core.Lost()
}

// Poll makes one look at the mark (cuEventQuery) unless its state is known.
// It never waits.
func (m *Mark) Poll() (bool, error) {
	if done, err := m.Peek(); done || err != nil {
		return done, err
	}
	m.lane.look(m)
	return m.Peek()
}

// Want has the watcher look for the mark until it is complete or failed.
func (m *Mark) Want() {
	l := m.lane
	l.mu.Lock()
	m.kept = true
	l.countLocked(m)
	l.mu.Unlock()
	l.watcher.Add(l)
}

// countLocked keeps the lane's count of marks that the watcher looks for.
func (l *Lane) countLocked(m *Mark) {
	now := (m.kept || m.waiters > 0) && m.state.Load() == pending
	switch {
	case now && !m.wanted:
		l.wanted++
	case !now && m.wanted:
		l.wanted--
	}
	m.wanted = now
}

// Done returns a channel that is closed when the mark is complete, failed or
// let go of. The watcher looks for it from now on. A mark whose context is lost
// has failed.
func (m *Mark) Done() <-chan struct{} {
	l := m.lane
	l.mu.Lock()
	if lost := l.core.Lost(); lost != nil && m.state.Load() == pending {
		l.failLocked(m, lost)
	}
	if m.done == nil {
		m.done = outside.Chan()
		if m.letGo || m.state.Load() != pending {
			close(m.done)
		}
	}
	ch := m.done
	m.kept = true
	l.countLocked(m)
	l.mu.Unlock()
	l.watcher.Add(l)
	return ch
}

// LetGo closes what Done returns: who owned the mark is through with it.
func (m *Mark) LetGo() {
	m.lane.mu.Lock()
	defer m.lane.mu.Unlock()
	if m.done != nil && !m.letGo && m.state.Load() == pending {
		close(m.done)
	}
	m.letGo = true
}

func (m *Mark) wakeLocked() chan struct{} {
	if m.wake == nil {
		m.wake = outside.Chan()
		if m.state.Load() != pending {
			close(m.wake)
		}
	}
	return m.wake
}

// park begins a parked wait, which unpark ends. The watcher looks for the mark
// meanwhile.
func (m *Mark) park() <-chan struct{} {
	l := m.lane
	l.mu.Lock()
	ch := m.wakeLocked()
	m.waiters++
	l.countLocked(m)
	l.mu.Unlock()
	l.watcher.Add(l)
	return ch
}

func (m *Mark) unpark() {
	m.lane.mu.Lock()
	m.waiters--
	m.lane.countLocked(m)
	m.lane.mu.Unlock()
}

// look queries one pending mark and records what it saw.
func (l *Lane) look(m *Mark) (progress bool) {
	l.mu.Lock()
	if m.state.Load() != pending {
		l.mu.Unlock()
		return true
	}
	if lost := l.core.Lost(); lost != nil { // found out elsewhere: latched for all
		l.failLocked(m, lost)
		l.mu.Unlock()
		return true
	}
	l.looking++
	ev := m.ev
	ev.Borrow() // it is the mark's: nobody put it back
	l.mu.Unlock()

	list := cuapi.NewList()
	list.EventQuery(ev.Handle())
	list.Relax()
	_, r := l.core.Table.Run(list)
	list.Free()

	var err error
	if r != cuapi.Success && r != cuapi.NotReady {
		err = l.core.Fail(cuapi.IDEventQuery, r, "")
	}
	l.mu.Lock()
	switch {
	case r == cuapi.Success:
		l.completeLocked(m)
		progress = true
	case err != nil:
		l.failLocked(m, err)
		progress = true
	default:
		m.turn(seenNot)
	}
	ev.Return()
	l.looking-- // from here on a shutdown may destroy the event
	l.mu.Unlock()
	return progress
}

// completeLocked settles m, and with it every mark before it in the lane: a
// stream completes in order.
func (l *Lane) completeLocked(m *Mark) {
	if m.state.Load() != pending { // another look was faster
		m.turn(seenDone)
		return
	}
	if m.solo {
		l.unlinkLocked(m)
		l.settleLocked(m, seenDone, nil)
		l.retireLocked(m.upto)
		return
	}
	for {
		h := l.head
		l.head = h.next
		if l.head == nil {
			l.tail = nil
		}
		h.next = nil
		l.settleLocked(h, seenDone, nil)
		if h == m {
			break
		}
	}
	l.retireLocked(m.upto)
}

func (l *Lane) failLocked(m *Mark, err error) {
	if m.state.Load() != pending {
		m.turn(seenBad)
		return
	}
	l.unlinkLocked(m)
	l.settleLocked(m, seenBad, err)
	if lost := l.core.Lost(); lost != nil { // then so are all others
		for _, list := range []**Mark{&l.head, &l.solo} {
			for *list != nil {
				h := *list
				*list = h.next
				h.next = nil
				l.settleLocked(h, seenBad, lost)
			}
		}
		l.tail = nil
	}
}

func (l *Lane) settleLocked(m *Mark, e markEvent, err error) {
	m.err = err
	m.turn(e)
	l.countLocked(m)
	if m.wake != nil {
		close(m.wake)
	}
	if m.done != nil && !m.letGo {
		close(m.done)
	}
	if e == seenDone {
		l.events.Put(m.ev)
	} else {
		l.events.Bar(m.ev)
	}
	m.ev = nil
}

func (l *Lane) unlinkLocked(m *Mark) {
	list := &l.head
	if m.solo {
		list = &l.solo
	}
	var prev *Mark
	for h := *list; h != nil; prev, h = h, h.next {
		if h != m {
			continue
		}
		if prev == nil {
			*list = h.next
		} else {
			prev.next = h.next
		}
		if !m.solo && l.tail == h {
			l.tail = prev
		}
		h.next = nil
		return
	}
}
