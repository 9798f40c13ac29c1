// Package own holds the ownership cell: the one word that says who may use a
// thing that was handed out. A cell is live, borrowed by calls in progress,
// being moved, moved, or closed. All transitions stand in one table.
package own

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
)

var (
	// ErrMoved is what a use after a move returns.
	ErrMoved = errors.New("moved: its owner is now another handle")
	// ErrClosed is what a use after a close returns.
	ErrClosed = errors.New("closed")
	// ErrBusy is what a move returns while another call uses the handle.
	ErrBusy = errors.New("in use by another call")
	// ErrForeign is what a use together with another owner's thing returns.
	ErrForeign = errors.New("belongs to another runtime or context")
)

// StillOpen is the error of an end that is refused because something is open.
// It matches ErrBusy.
func StillOpen(format string, args ...any) error {
	return &openError{fmt.Sprintf(format, args...)}
}

type openError struct{ text string }

func (e *openError) Error() string        { return e.text }
func (e *openError) Is(target error) bool { return target == ErrBusy }

// A State of a cell.
type State uint8

const (
	Absent    State = iota // the zero cell: never handed out
	Live                   // owned by the caller
	Busy                   // borrowed by one or more calls in progress
	Closing                // busy, and a close is remembered
	Moving                 // a call is taking it
	Revoked                // moving, and a close is remembered
	Moved                  // another owner has it
	Closed                 // released, or about to be by who closed it
	NumStates              // count of the states
)

func (s State) String() string {
	return [...]string{"absent", "live", "busy", "closing", "moving", "revoked", "moved", "closed"}[s]
}

// An Action on a cell.
type Action uint8

const (
	Open    Action = iota // hand it out
	Ask                   // whether it can be used
	Borrow                // use it for one call
	Return                // the end of that call
	Take                  // begin a move
	Restore               // the move was refused: it is the caller's again
	Give                  // the move is done
	Close                 // the caller is through with it
	NumActions
)

func (a Action) String() string {
	return [...]string{"open", "ask", "borrow", "return", "take", "restore", "give", "close"}[a]
}

// A Step is one entry of the table: the next state, the change of the borrow
// count, and what the caller is told.
type Step struct {
	Next    State
	Borrows int8
	Err     error
	Release bool // the caller must release the thing now; nobody else will
	Panic   bool // only a bug in this module gets here
}

// Table is the state machine of a cell. For Return, the entry is that of the
// last borrow; earlier ones only lower the count.
var Table = [NumStates][NumActions]Step{
	Absent: {
		Open: {Next: Live}, Ask: {Next: Absent, Err: ErrClosed},
		Borrow: {Next: Absent, Err: ErrClosed}, Return: {Panic: true},
		Take: {Next: Absent, Err: ErrClosed}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Absent},
	},
	Live: {
		Open: {Panic: true}, Ask: {Next: Live},
		Borrow: {Next: Busy, Borrows: 1}, Return: {Panic: true},
		Take: {Next: Moving}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Closed, Release: true},
	},
	Busy: {
		Open: {Panic: true}, Ask: {Next: Busy},
		Borrow: {Next: Busy, Borrows: 1}, Return: {Next: Live, Borrows: -1},
		Take: {Next: Busy, Err: ErrBusy}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Closing},
	},
	Closing: {
		Open: {Panic: true}, Ask: {Next: Closing, Err: ErrClosed},
		Borrow: {Next: Closing, Err: ErrClosed}, Return: {Next: Closed, Borrows: -1, Release: true},
		Take: {Next: Closing, Err: ErrClosed}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Closing},
	},
	Moving: {
		Open: {Panic: true}, Ask: {Next: Moving},
		Borrow: {Next: Moving, Err: ErrBusy}, Return: {Panic: true},
		Take: {Next: Moving, Err: ErrBusy}, Restore: {Next: Live}, Give: {Next: Moved},
		Close: {Next: Revoked},
	},
	Revoked: {
		Open: {Panic: true}, Ask: {Next: Revoked, Err: ErrClosed},
		Borrow: {Next: Revoked, Err: ErrClosed}, Return: {Panic: true},
		Take: {Next: Revoked, Err: ErrClosed}, Restore: {Next: Closed, Release: true}, Give: {Next: Moved},
		Close: {Next: Revoked},
	},
	Moved: {
		Open: {Panic: true}, Ask: {Next: Moved, Err: ErrMoved}, // what comes back gets a fresh handle: a stale one stays stale
		Borrow: {Next: Moved, Err: ErrMoved}, Return: {Panic: true},
		Take: {Next: Moved, Err: ErrMoved}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Moved},
	},
	Closed: {
		Open: {Panic: true}, Ask: {Next: Closed, Err: ErrClosed},
		Borrow: {Next: Closed, Err: ErrClosed}, Return: {Panic: true},
		Take: {Next: Closed, Err: ErrClosed}, Restore: {Panic: true}, Give: {Panic: true},
		Close: {Next: Closed},
	},
}

// A Cell is the ownership word of one handle. The zero Cell is absent.
type Cell struct {
	word atomic.Uint64 // State | borrows<<8
}

// Do executes one action by compare-and-swap.
func (c *Cell) Do(a Action) Step {
	for {
		old := c.word.Load()
		state, borrows := State(old&0xff), old>>8
		step := Table[state][a]
		if step.Panic {
			panic("purecuda: " + a.String() + " of a cell that is " + state.String())
		}
		if a == Return && borrows > 1 {
			step = Step{Next: state, Borrows: -1}
		}
		next := uint64(step.Next) | (borrows+uint64(int64(step.Borrows)))<<8
		if c.word.CompareAndSwap(old, next) {
			return step
		}
	}
}

// Open hands the thing out.
func (c *Cell) Open() { c.Do(Open) }

// Enter executes an action as Do does. No call waits while it borrows or moves,
// so that a conflict is over soon: the step has ErrBusy only if it is not over
// after some yields.
func (c *Cell) Enter(a Action) (step Step) {
	for range patience {
		if step = c.Do(a); step.Err != ErrBusy {
			break
		}
		runtime.Gosched()
	}
	return step
}

// Borrow begins a call that uses the thing. Each success is paired with Return.
// A conflict is as in Enter.
func (c *Cell) Borrow() error { return c.Enter(Borrow).Err }

// Return ends a borrow. It tells whether the caller must release the thing
// now, because it was closed meanwhile and this was the last borrow.
func (c *Cell) Return() (release bool) { return c.Do(Return).Release }

// Take begins a move: exactly one caller gets nil. It ends with Give or Restore.
// A conflict is as in Enter.
func (c *Cell) Take() error { return c.Enter(Take).Err }

// patience is how often a conflict is looked at again.
const patience = 128

// Restore ends a refused move: the same handle is live again. It tells
// whether the caller must release the thing, because it was closed meanwhile.
func (c *Cell) Restore() (release bool) { return c.Do(Restore).Release }

// Give ends a move that happened.
func (c *Cell) Give() { c.Do(Give) }

// Close tells whether the caller must release the thing now. While it is in
// use the close is remembered, and who ends that use releases it.
func (c *Cell) Close() (release bool) { return c.Do(Close).Release }

// State returns the state at this instant.
func (c *Cell) State() State { return State(c.word.Load() & 0xff) }

// Err returns why the thing can not be used: nil, ErrMoved or ErrClosed.
func (c *Cell) Err() error { return Table[c.State()][Ask].Err }
