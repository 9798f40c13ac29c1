// Package wire lets this module's packages reach what their public types keep
// to themselves. A public package fills its variables when it is initialized;
// only packages that import that one use them. Nothing here is API.
package wire

import (
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/room"
)

// NewDriver makes a *driver.Driver over a table that is already initialized
// (cuInit was called). source says where the table comes from, for people:
// a library's path, or "simulator". Filled by package driver.
var NewDriver func(t *cuapi.Table, source string) (any, error)

// Table returns the table of a *driver.Driver. Filled by package driver.
var Table func(drv any) *cuapi.Table

// ContextOf returns what a *driver.Context shares with the packages above it.
// Filled by package driver.
var ContextOf func(ctx any) *Context

// PinLane returns the *stream.Lane of a *stream.Stream, retained for one more
// user. Filled by package stream.
var PinLane func(stream any) (lane any, err error)

// BufferOf returns the cell and the *pinned.Block of a *pinned.Buffer, or nil
// for a nil one. Filled by package pinned.
var BufferOf func(buf any) (cell *own.Cell, block any)

// NewBuffer makes a fresh *pinned.Buffer of n bytes over a *pinned.Block that
// came back from a transfer. Filled by package pinned.
var NewBuffer func(block any, n int) any

// OperandArg makes a kernel.Arg of an owner of device memory, and ArgOperand
// returns the owner of a *kernel.Arg, or nil. Launch enqueues a *kernel.Function
// in a *stream.Lane with a kernel.Config, []kernel.Arg and the addresses of the
// operands. Filled by package kernel.
var (
	OperandArg func(operand any) any
	ArgOperand func(arg any) any
	Launch     func(function, lane, config, args any, addresses []uint64) error
)

// Cleanups run what the collector runs when that handle is garbage, and tell
// whether it is of their kind. Filled by the packages that have handles.
var Cleanups []func(handle any) bool

// Abandon does what the collector does when it finds that handle dropped, so that
// a simulation says when. Nobody uses the handle after it.
func Abandon(handle any) {
	for _, f := range Cleanups {
		if f(handle) {
			return
		}
	}
	panic("wire: a handle of no known kind")
}

// Context is the part of a *driver.Context that the packages above it use.
type Context struct {
	Owner  any          // the *driver.Context
	Table  *cuapi.Table // calls that need no current context, or brackets around them
	Raw    cuapi.Context
	Device cuapi.Device
	Pools  bool // stream-ordered allocation is there

	// Current makes calls that need this context current, on this thread in the
	// relaxed capture mode, and restores what was before.
	Current func(f func() cuapi.Result) cuapi.Result
	// Fail makes the error of a driver call. A sticky result is latched:
	// the context is lost. detail adds sizes and offsets, or is empty.
	Fail func(op cuapi.ID, r cuapi.Result, detail string) error
	// Retain and Release pin the context: Shutdown refuses while it is pinned.
	Retain  func() error
	Release func()

	// Credits and Memory wake who waits for operations in flight to end, and for
	// device memory to come back.
	Credits, Memory room.Room

	lost atomic.Pointer[error]

	mu     sync.Mutex
	shared map[any]any

	closing sync.Mutex // apart from mu: build may call OnShutdown
	closers []func() error
	asks    []func() error
}

// OnAsk adds a function that tells what is still open, so that a shutdown is
// refused. It makes no driver call.
func (c *Context) OnAsk(f func() error) {
	c.closing.Lock()
	defer c.closing.Unlock()
	c.asks = append(c.asks, f)
}

// StillOpen asks what is still open.
func (c *Context) StillOpen() error {
	c.closing.Lock()
	defer c.closing.Unlock()
	for _, f := range c.asks {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// Lost returns the first cause of the context's loss, or nil.
func (c *Context) Lost() error {
	if p := c.lost.Load(); p != nil {
		return *p
	}
	return nil
}

// Lose latches the loss of the context. It tells whether it was the first.
func (c *Context) Lose(cause error) bool {
	return c.lost.CompareAndSwap(nil, &cause)
}

// Shared returns what is kept under key for all users of the context, made by
// build on first use. build must not call Shared, nor the driver.
func (c *Context) Shared(key any, build func() any) any {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shared == nil {
		c.shared = map[any]any{}
	}
	v, ok := c.shared[key]
	if !ok {
		v = build()
		c.shared[key] = v
	}
	return v
}

// OnShutdown adds a function that the context's shutdown calls before it
// releases the context, the last one added first. It may stall.
func (c *Context) OnShutdown(f func() error) {
	c.closing.Lock()
	defer c.closing.Unlock()
	c.closers = append(c.closers, f)
}

// Closers takes the functions of OnShutdown, the last one added first.
func (c *Context) Closers() []func() error {
	c.closing.Lock()
	defer c.closing.Unlock()
	fs := c.closers
	c.closers = nil
	for i, j := 0, len(fs)-1; i < j; i, j = i+1, j-1 {
		fs[i], fs[j] = fs[j], fs[i]
	}
	return fs
}
