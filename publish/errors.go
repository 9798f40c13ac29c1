package publish

import (
	"errors"
	"strings"

	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/retirequeue"
	"github.com/purecuda/purecuda/stream"
)

// Reasons of a rejection, found by [errors.Is]. Others are driver.ErrMoved,
// driver.ErrClosed and driver.ErrBusy of a handle, kernel.ErrArguments, and the
// first cause of a lost context.
var (
	// ErrForeign: the handle belongs to another runtime or context.
	ErrForeign = own.ErrForeign
	// ErrOtherStream: an unpublished value belongs to the stream of the
	// session that made it.
	ErrOtherStream = errors.New("the value belongs to another stream")
	// ErrStreamFailed: an earlier enqueue on the session's stream failed, so
	// that what a value holds can not be known.
	ErrStreamFailed = errors.New("an earlier operation on the stream failed")
	// ErrDType: no such data type.
	ErrDType = errors.New("unknown data type")
	// ErrShape: a dimension is not positive, or there are too many, or the
	// size is beyond any memory.
	ErrShape = errors.New("bad shape")
	// ErrLength: lengths differ, or a range reaches past the end.
	ErrLength = errors.New("wrong length")
	// ErrSessionHeld: the stream is held by another session.
	ErrSessionHeld = stream.ErrHeld
	// ErrStreamFull: the stream has its share of what may be in flight.
	ErrStreamFull = stream.ErrFull
	// ErrContextFull: all that may be in flight in the context is.
	ErrContextFull = stream.ErrContextFull
	// ErrCapturing: the stream captures a graph.
	ErrCapturing = stream.ErrCapturing
	// ErrQueueFull: no retirement slot is left, or too few bytes.
	ErrQueueFull = retirequeue.ErrFull
	// ErrTooLarge is, besides ErrQueueFull, in the error of what Config.Bytes
	// would refuse though nothing else were there.
	ErrTooLarge = retirequeue.ErrNever
	// ErrLost: the context was known to be lost. The error wraps the first
	// cause as well. Whether it is lost tells Runtime.Err.
	ErrLost = errors.New("the context is lost")

	errLeaked = errors.New("leaked on purpose")
)

// RejectedError tells that an operation was refused before anything was
// enqueued: every owner stays with the caller, as it was. The owners that the
// operation would have moved are in its fields.
type RejectedError struct {
	Op          string
	Reason      error
	Value       *Value
	Publication *Publication
	Buffer      *pinned.Buffer
}

func (e *RejectedError) Error() string {
	if e.Reason == nil {
		return "publish: " + e.Op + " rejected"
	}
	return "publish: " + e.Op + " rejected: " + strings.TrimPrefix(e.Reason.Error(), "publish: ")
}

// Unwrap returns the reason.
func (e *RejectedError) Unwrap() error { return e.Reason }

// UnprovenError tells that something may have been enqueued and that its
// completion can not be proven. What the operation moved does not come back:
// it is retained for the life of the process, and counted. What it only
// borrowed is still the caller's, tainted: its close retains it too.
type UnprovenError struct {
	Op    string
	Cause error // the first failure, a *driver.Error
}

func (e *UnprovenError) Error() string {
	if e.Cause == nil {
		return "publish: " + e.Op + " unproven"
	}
	return "publish: " + e.Op + " unproven: " + e.Cause.Error()
}

// Unwrap returns the first cause.
func (e *UnprovenError) Unwrap() error { return e.Cause }

// lostError is the reason of a rejection on a lost context.
type lostError struct{ cause error }

func (e *lostError) Error() string   { return ErrLost.Error() + ": " + e.cause.Error() }
func (e *lostError) Unwrap() []error { return []error{ErrLost, e.cause} }

// because returns the reason of a refusal, which the loss of the context comes
// before, also where the refused call is the one that found out.
func (rt *Runtime) because(reason error) error {
	if lost := rt.core.Lost(); lost != nil && !errors.Is(reason, ErrLost) {
		return &lostError{lost}
	}
	return reason
}

// A useError is the error of a handle that can not be used: what it is, and why.
type useError struct {
	what string
	err  error // own.ErrMoved, own.ErrClosed or own.ErrBusy
}

func (e *useError) Error() string { return "publish: " + e.what + " " + e.err.Error() }
func (e *useError) Unwrap() error { return e.err }

func unusable(what string, err error) error {
	if err == nil {
		return nil
	}
	return &useError{what, err}
}

// none is the error of a nil or a zero handle: it counts as closed.
func none(what string) error { return &useError{"no " + what + ":", own.ErrClosed} }
