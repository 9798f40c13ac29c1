package publish

import (
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/stream"
)

// The state machines of this package, of which the methods read their rows, and
// tests make each method meet each state. Who owns a handle is the business of
// its cell: its states and transitions are own.Table, and a rule says which action
// a method takes on it. What is known of the device is the handle's condition, a
// column of its table. Frontiers and copies have a machine of their own, package
// stream's markTable, as contexts have in package driver and buffers in package
// pinned.

// A condition is what a method finds, besides who owns the handle: a column of
// its machine's table.
type condition uint8

// numColumns is how many conditions each machine has.
const numColumns = 3

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
)

// A rule is the row of one method.
type rule struct {
	does own.Action      // to the handle's cell
	at   [numColumns]act // by condition
}

// enter takes the rule's action on the cell. release tells that the caller must
// see to the end of what the handle owned.
func (r *rule) enter(c *own.Cell) (release bool, err error) {
	if r.does == own.Ask {
		return false, c.Err()
	}
	step := c.Enter(r.does)
	return step.Release, step.Err
}

// Conditions of a publication's frontier and a transfer's copy.
const (
	workPending  condition = iota // not seen complete
	workComplete                  // seen complete
	workFailed                    // by its first failure, or lost with its context
)

// publicationTable has the methods of a Publication; Bytes, DType and Shape
// answer in every state of the cell, too. Done answers after a close, with a
// closed channel.
var publicationTable = struct {
	Err, FrontierReady, AwaitFrontier, Done, Download, Close, Leak rule
}{
	//                                                     pending   complete  failed
	Err:           rule{own.Ask, [numColumns]act{answers, answers, fails}},
	FrontierReady: rule{own.Borrow, [numColumns]act{looks, answers, fails}},
	AwaitFrontier: rule{own.Borrow, [numColumns]act{waits, answers, fails}},
	Done:          rule{own.Ask, [numColumns]act{waits, answers, answers}},
	Download:      rule{own.Take, [numColumns]act{proceeds, proceeds, refuses}},
	Close:         rule{own.Close, [numColumns]act{retires, retires, keeps}},
	Leak:          rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

// transferTable has the methods of a Transfer. Wait takes the transfer once its
// copy is complete or failed. Done is as a publication's.
var transferTable = struct {
	Err, Ready, Wait, Done, Close, Leak rule
}{
	//                                             pending   complete  failed
	Err:   rule{own.Ask, [numColumns]act{answers, answers, fails}},
	Ready: rule{own.Borrow, [numColumns]act{looks, answers, fails}},
	Wait:  rule{own.Borrow, [numColumns]act{waits, proceeds, fails}},
	Done:  rule{own.Ask, [numColumns]act{waits, answers, answers}},
	Close: rule{own.Close, [numColumns]act{retires, retires, keeps}},
	Leak:  rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

// work tells what is known of the work that m is behind, and why it failed.
func work(m *stream.Mark) (condition, error) {
	switch done, err := m.Peek(); {
	case err != nil:
		return workFailed, err
	case done:
		return workComplete, nil
	}
	return workPending, nil
}

// Conditions of a value.
const (
	valueSound   condition = iota
	valueTainted           // an operation that borrowed it is unproven
	valueLost              // with its context
)

// valueTable has what is done with a Value: Use is an argument of a launch or
// the target of an upload. Bytes, DType and Shape answer in every state.
var valueTable = struct {
	Err, Use, Publish, Close, Leak rule
}{
	//                                                sound     tainted   lost
	Err:     rule{own.Ask, [numColumns]act{answers, answers, answers}},
	Use:     rule{own.Borrow, [numColumns]act{proceeds, proceeds, refuses}},
	Publish: rule{own.Take, [numColumns]act{proceeds, refuses, refuses}},
	Close:   rule{own.Close, [numColumns]act{retires, keeps, keeps}},
	Leak:    rule{own.Close, [numColumns]act{keeps, keeps, keeps}},
}

func (r *record) value() condition {
	switch {
	case r.rt.core.Lost() != nil:
		return valueLost
	case r.taint.Load() != nil:
		return valueTainted
	}
	return valueSound
}

// Conditions of a session's stream.
const (
	streamMoving condition = iota
	streamBroken           // an enqueue of it failed
	streamLost             // with its context
)

// sessionTable has the methods of a Session. Enqueue stands for all that
// enqueue in its stream, but for Publish: Adopt, Alloc, Launch, Submit,
// Synchronize, Upload, the forms that wait for room; and Raw. Stats answers in
// every state.
var sessionTable = struct {
	Enqueue, Publish, Close rule
}{
	//                                                moving    broken    lost
	Enqueue: rule{own.Borrow, [numColumns]act{proceeds, proceeds, refuses}},
	Publish: rule{own.Borrow, [numColumns]act{proceeds, refuses, refuses}},
	Close:   rule{own.Close, [numColumns]act{ends, ends, ends}},
}

func (st *session) condition() condition {
	switch {
	case st.rt.core.Lost() != nil:
		return streamLost
	case st.lane.Failed() != nil:
		return streamBroken
	}
	return streamMoving
}

// Conditions of a runtime. A closed one is closed, also on a lost context.
const (
	runtimeOpen condition = iota
	runtimeClosed
	runtimeLost // with its context
)

// runtimeTable has the methods of a Runtime. Begin stands for OpenSession,
// WithSession, Pinned and Reserve. Context, Drain, Err, Lost and Stats answer in
// every state, and Shutdown waits in each.
var runtimeTable = struct {
	Begin, Close, Shutdown [numColumns]act
}{
	//                          open      closed    lost
	Begin:    [numColumns]act{proceeds, refuses, refuses},
	Close:    [numColumns]act{ends, answers, ends},
	Shutdown: [numColumns]act{waits, waits, waits},
}

// conditionLocked is called with rt.mu held.
func (rt *Runtime) conditionLocked() condition {
	switch {
	case rt.closed:
		return runtimeClosed
	case rt.core.Lost() != nil:
		return runtimeLost
	}
	return runtimeOpen
}
