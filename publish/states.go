package publish

import (
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/stream"
)

// The state machines of this package. Who owns a handle is the business of its
// cell, whose states and transitions are own.Table: what the rules below say
// holds once the cell let the method in. What the driver is known to have done
// is the handle's condition, a column of its table; frontiers and copies have a
// machine of their own, stream.MarkTable. The methods read their row here, and
// a test makes each method meet each state.

// A condition is what a method finds, besides who owns the handle.
type condition uint8

// An act is what a method does then.
type act uint8

const (
	impossible act = iota // no such cell: only a bug of this module gets here
	answers               // returns what is known, and makes no driver call
	looks                 // makes one look (cuEventQuery), and returns what it saw
	waits                 // until the condition is another one, or the context ends
	proceeds              // does its work; what it moves is moved, from the first enqueue on
	fails                 // returns the first failure, an *UnprovenError
	refuses               // returns a *RejectedError, or the runtime's error: all owners stay
	retires               // hands over to the drainable side
	keeps                 // hands over to the permanent side
	ends                  // lets go of the stream, or refuses new work from here on
	numActs
)

func (a act) String() string {
	return [...]string{"impossible", "answers", "looks", "waits", "proceeds", "fails", "refuses", "retires", "keeps", "ends"}[a]
}

// A rule is the row of one method.
type rule struct {
	does own.Action      // to the handle's cell
	at   [numColumns]act // by condition
}

const numColumns = 3

// Conditions of a publication's frontier and a transfer's copy.
const (
	pending  condition = iota // not seen complete
	complete                  // seen complete
	failed                    // by its first failure, or lost with its context
)

// publicationTable has the methods of a Publication; Bytes, DType and Shape
// answer in every state of the cell, too.
var publicationTable = struct {
	Err, FrontierReady, AwaitFrontier, Done, Download, Close, Leak rule
}{
	//                          pending   complete  failed
	Err:           rule{own.Ask, [numColumns]act{answers, answers, fails}},
	FrontierReady: rule{own.Borrow, [numColumns]act{looks, answers, fails}},
	AwaitFrontier: rule{own.Borrow, [numColumns]act{waits, answers, fails}},
	Done:          rule{own.Ask, [numColumns]act{waits, answers, answers}},
	Download:      rule{own.Take, [numColumns]act{proceeds, proceeds, refuses}},
	Close:         rule{own.Close, [numColumns]act{retires, retires, keeps}},
	Leak:          rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

// transferTable has the methods of a Transfer. Wait takes the transfer once its
// copy is complete or failed.
var transferTable = struct {
	Err, Ready, Wait, Done, Close, Leak rule
}{
	//                  pending   complete  failed
	Err:   rule{own.Ask, [numColumns]act{answers, answers, fails}},
	Ready: rule{own.Borrow, [numColumns]act{looks, answers, fails}},
	Wait:  rule{own.Borrow, [numColumns]act{waits, proceeds, fails}},
	Done:  rule{own.Ask, [numColumns]act{waits, answers, answers}},
	Close: rule{own.Close, [numColumns]act{retires, retires, keeps}},
	Leak:  rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

// condition tells what is known of the work that m is behind. A failure is
// latched.
func (r *record) condition(m *stream.Mark) condition {
	if r.failed.Load() != nil {
		return failed
	}
	done, err := m.Peek()
	if err == nil {
		err = r.rt.core.Lost()
	}
	switch {
	case err != nil:
		r.fail(err)
		return failed
	case done:
		return complete
	}
	return pending
}

// failure is the first failure, of a record whose condition is failed.
func (r *record) failure(op string) error { return &UnprovenError{op, *r.failed.Load()} }

// Conditions of a value.
const (
	sound   condition = iota
	tainted           // an operation that borrowed it is unproven
	lost              // with its context
)

// valueTable has what is done with a Value: Use is an argument of a launch or
// the target of an upload. Bytes, DType and Shape answer in every state.
var valueTable = struct {
	Err, Use, Publish, Close, Leak rule
}{
	//                     sound     tainted   lost
	Err:     rule{own.Ask, [numColumns]act{answers, answers, answers}},
	Use:     rule{own.Borrow, [numColumns]act{proceeds, proceeds, refuses}},
	Publish: rule{own.Take, [numColumns]act{proceeds, refuses, refuses}},
	Close:   rule{own.Close, [numColumns]act{retires, keeps, keeps}},
	Leak:    rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

func (r *record) valueCondition() condition {
	switch {
	case r.rt.core.Lost() != nil || r.failed.Load() != nil:
		return lost
	case r.taint.Load() != nil:
		return tainted
	}
	return sound
}

// Conditions of a session's stream. It is lost with its context.
const (
	moving condition = iota
	broken           // an enqueue of it failed
)

// sessionTable has the methods of a Session. Enqueue stands for all that
// enqueue in its stream, but for Publish: Adopt, Alloc, Launch, Submit,
// Synchronize, Upload; and Raw. Stats answers in every state.
var sessionTable = struct {
	Enqueue, Publish, Close rule
}{
	//                     moving    broken    lost
	Enqueue: rule{own.Borrow, [numColumns]act{proceeds, proceeds, refuses}},
	Publish: rule{own.Borrow, [numColumns]act{proceeds, refuses, refuses}},
	Close:   rule{own.Close, [numColumns]act{ends, ends, ends}},
}

func (st *session) condition() condition {
	switch {
	case st.rt.core.Lost() != nil:
		return lost
	case st.lane.Failed() != nil:
		return broken
	}
	return moving
}

// Conditions of a runtime, whose context may be lost as well.
const (
	open condition = iota
	closed
)

// runtimeTable has the methods of a Runtime. Begin stands for OpenSession,
// WithSession, Pinned and Reserve. Context, Drain, Err, Lost and Stats answer in
// every state.
var runtimeTable = struct {
	Begin, Close, Shutdown [numColumns]act
}{
	//          open      closed    lost
	Begin:    [numColumns]act{proceeds, refuses, refuses},
	Close:    [numColumns]act{ends, answers, ends},
	Shutdown: [numColumns]act{waits, waits, waits},
}

// conditionLocked is called with rt.mu held. A closed runtime is closed, also on
// a lost context.
func (rt *Runtime) conditionLocked() condition {
	switch {
	case rt.closed:
		return closed
	case rt.core.Lost() != nil:
		return lost
	}
	return open
}
