package driver

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/outside"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
)

// Context is a device's primary context, retained, with what all its users
// share: the latch of its loss, the pools and the completion watcher. Each
// call of [Device.Primary] for one device returns the same Context.
type Context struct {
	core *wire.Context
	dev  *Device

	made    chan struct{} // closed when Primary is through
	makeErr error
	gone    chan struct{} // closed when Shutdown is through
	goneErr error
	kept    error // why no other context may follow this one
	lost    chan struct{}

	mu    sync.Mutex
	state contextState
	users int // calls of Primary less calls of Shutdown
	pins  int // runtimes and what they left behind
}

type contextState uint8

const (
	open   contextState = iota
	ending              // its last Shutdown is under way
	gone                // that is through: another context may follow
	stuck               // that failed on a lost context: none may follow
	numContextStates
)

type contextAct uint8

const (
	proceeds contextAct = iota
	waits               // for the end of the shutdown, and looks again
	renews              // makes the context that follows
	answers             // what the shutdown came to
	refuses             // with an error
)

// contextTable is the state machine of a context. A Shutdown that proceeds is
// one use less, the last one is refused while anything is open, and turns the
// context to ending; release turns it to gone or stuck. Whether the context is
// lost is a latch of its own, which Err tells in every state.
var contextTable = struct {
	Primary, Pin, Shutdown [numContextStates]contextAct
}{
	//                                     open      ending   gone     stuck
	Primary:  [numContextStates]contextAct{proceeds, waits, renews, refuses},
	Pin:      [numContextStates]contextAct{proceeds, refuses, refuses, refuses},
	Shutdown: [numContextStates]contextAct{proceeds, waits, answers, answers},
}

// Primary retains the device's primary context (cuDevicePrimaryCtxRetain) and
// measures whether this driver's calls need it current. Each call is paired
// with one of [Context.Shutdown]. It is set-up: it may wait for the driver.
//
// It fails with the first cause when the context was lost and its Shutdown could
// not release it: what it would retain once more is lost.
func (d *Device) Primary() (*Context, error) {
	if d == nil || d.drv == nil {
		return nil, fmt.Errorf("driver: no device: %w", ErrClosed)
	}
	drv := d.drv
	drv.mu.Lock()
	c := drv.contexts[d.handle]
	first := c == nil
	if first {
		c = &Context{dev: d, made: outside.Chan(), gone: outside.Chan(), lost: outside.Chan()}
		drv.contexts[d.handle] = c
	}
	drv.mu.Unlock()
	if first {
		c.makeErr = c.retain()
		if c.makeErr != nil {
			c.forget()
		}
		close(c.made)
	}
	<-c.made
	if c.makeErr != nil {
		return nil, c.makeErr
	}
	for {
		c.mu.Lock()
		act := contextTable.Primary[c.state]
		if act == proceeds {
			c.users++
		}
		c.mu.Unlock()
		switch act {
		case proceeds:
			return c, nil
		case waits:
			<-c.gone
		case renews:
			return d.Primary()
		default:
			return nil, c.kept
		}
	}
}

func (c *Context) retain() error {
	t := c.dev.drv.table
	c.core = &wire.Context{
		Owner: c, Table: t, Device: c.dev.handle, Pools: c.dev.MemoryPools(),
		Current: c.current, Fail: c.fail, Retain: c.pin, Release: c.unpin,
	}
	if r := t.DevicePrimaryCtxRetain(&c.core.Raw, c.dev.handle); r != cuapi.Success {
		return newError(t, cuapi.IDDevicePrimaryCtxRetain, r, fmt.Sprintf("device %d", c.dev.ordinal))
	}
	need, err := c.probe()
	if err != nil {
		t.DevicePrimaryCtxRelease(c.dev.handle)
		return err
	}
	if need {
		c.core.Table = bracketed(t, c.current)
	}
	return nil
}

func (c *Context) forget() {
	drv := c.dev.drv
	drv.mu.Lock()
	if drv.contexts[c.dev.handle] == c {
		delete(drv.contexts, c.dev.handle)
	}
	drv.mu.Unlock()
}

// none tells that there is no context: a nil or a zero one.
func (c *Context) none() bool { return c == nil || c.core == nil }

// Device returns the context's device.
func (c *Context) Device() *Device {
	if c.none() {
		return nil
	}
	return c.dev
}

// Err returns the first cause of the context's loss, or nil while no driver call
// told of one. A lost context fails every call for the life of the process.
func (c *Context) Err() error {
	if c.none() {
		return fmt.Errorf("driver: no context: %w", ErrClosed)
	}
	return c.core.Lost()
}

// Lost returns a channel that is closed when a driver call tells that the context
// is lost. It is nil for a nil Context.
func (c *Context) Lost() <-chan struct{} {
	if c.none() {
		return nil
	}
	return c.lost
}

// Supports returns nil if the driver has the entry point, see [Driver.Supports].
func (c *Context) Supports(name string) error {
	if c.none() {
		return fmt.Errorf("driver: no context: %w", ErrClosed)
	}
	return c.dev.drv.Supports(name)
}

// Shutdown ends one use of the context. The last one frees its pools and
// releases it (cuDevicePrimaryCtxRelease), which may stall every driver call
// of the process until pending work is done; it does so on a goroutine of its
// own, so that the end of ctx ends the wait and not the shutdown: another call
// of Shutdown waits again, and has its result.
//
// While runtimes still use the context, publications that pin them, streams or
// pinned buffers that are open, the last Shutdown is refused with an error that
// matches [ErrBusy], and may be tried again. Where owners were retained because
// the device may still touch their memory, the context stays retained and the
// error says so. A context that is lost and stays retained is the device's last
// one in this process.
func (c *Context) Shutdown(ctx context.Context) error {
	if c.none() {
		return nil
	}
	c.mu.Lock()
	switch {
	case contextTable.Shutdown[c.state] == answers:
		c.mu.Unlock()
		return c.goneErr
	case contextTable.Shutdown[c.state] == waits:
		c.mu.Unlock()
		return c.wait(ctx)
	case c.users > 1:
		c.users--
		c.mu.Unlock()
		return nil
	case c.pins > 0:
		n := c.pins
		c.mu.Unlock()
		return own.StillOpen("driver: context of device %d: %d runtimes and streams are open, or pinned by what they left open", c.dev.ordinal, n)
	}
	if err := c.core.StillOpen(); err != nil {
		c.mu.Unlock()
		return fmt.Errorf("driver: context of device %d: %w", c.dev.ordinal, err)
	}
	c.users, c.state = 0, ending
	c.mu.Unlock()

	outside.Go(func() {
		c.goneErr = c.release()
		next := gone
		if lost := c.core.Lost(); lost != nil && c.goneErr != nil {
			next = stuck
			c.kept = fmt.Errorf("driver: context of device %d is lost, and stays retained: %w", c.dev.ordinal, lost)
		} else {
			c.forget()
		}
		c.mu.Lock()
		c.state = next
		c.mu.Unlock()
		close(c.gone)
	})
	return c.wait(ctx)
}

func (c *Context) wait(ctx context.Context) error {
	select {
	case <-c.gone:
		return c.goneErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Context) release() error {
	var errs []error
	for _, f := range c.core.Closers() {
		errs = append(errs, f())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("driver: context of device %d stays retained: %w", c.dev.ordinal, err)
	}
	t := c.dev.drv.table
	if r := t.DevicePrimaryCtxRelease(c.dev.handle); r != cuapi.Success {
		return c.fail(cuapi.IDDevicePrimaryCtxRelease, r, "")
	}
	return nil
}

func (c *Context) pin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if contextTable.Pin[c.state] == refuses {
		return fmt.Errorf("driver: context of device %d: %w", c.dev.ordinal, ErrClosed)
	}
	c.pins++
	return nil
}

func (c *Context) unpin() {
	c.mu.Lock()
	c.pins--
	c.mu.Unlock()
}

func (c *Context) fail(op cuapi.ID, r cuapi.Result, detail string) error {
	op, r = blamed(op, r)
	e := newError(c.dev.drv.table, op, r, detail)
	if r.Sticky() && c.core.Lose(e) {
		close(c.lost)
	}
	return e
}

// blame makes the result of a call that current itself made and that failed.
// Its upper half names the entry point: the caller's fail would blame the call
// that was never made.
func blame(id cuapi.ID, r cuapi.Result) cuapi.Result { return cuapi.Result(id)<<16 | r }

// blamed undoes blame, and leaves what is none of its results.
func blamed(op cuapi.ID, r cuapi.Result) (cuapi.ID, cuapi.Result) {
	if id := cuapi.ID(r >> 16); id == cuapi.IDCtxPushCurrent || id == cuapi.IDThreadExchangeStreamCaptureMode {
		return id, r & 0xffff
	}
	return op, r
}

// current runs f with this context current, and in the relaxed capture mode, on
// a thread that it keeps for so long, and restores what was before. Where that
// fails f does not run, and only fail understands the result.
func (c *Context) current(f func() cuapi.Result) cuapi.Result {
	t := c.dev.drv.table
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mode := new(int32)
	*mode = cuapi.CaptureModeRelaxed
	if r := t.ThreadExchangeStreamCaptureMode(mode); r != cuapi.Success {
		return blame(cuapi.IDThreadExchangeStreamCaptureMode, r)
	}
	defer t.ThreadExchangeStreamCaptureMode(mode)
	if r := t.CtxPushCurrent(c.core.Raw); r != cuapi.Success {
		return blame(cuapi.IDCtxPushCurrent, r)
	}
	defer func() {
		if r := t.CtxPopCurrent(new(cuapi.Context)); r.Sticky() {
			c.fail(cuapi.IDCtxPopCurrent, r, "")
		}
	}()
	return f()
}

// probe tells whether calls on handles need the context current, which the
// reference allows and no measured driver does. It asks on a thread without a
// current context, with handles of its own. What fails otherwise is an error.
func (c *Context) probe() (need bool, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		need, err = c.ask()
	}()
	<-done
	return need, err
}

// ask is probe, on a thread that it has to itself.
func (c *Context) ask() (need bool, err error) {
	t := c.dev.drv.table
	stream, event := new(cuapi.Stream), new(cuapi.Event)
	check := func(id cuapi.ID, r cuapi.Result) bool {
		if r != cuapi.Success && err == nil {
			err = c.fail(id, r, "")
		}
		return r == cuapi.Success
	}
	if !check(cuapi.IDStreamCreate, c.current(func() cuapi.Result { return t.StreamCreate(stream, cuapi.StreamNonBlocking) })) {
		return false, err
	}
	if check(cuapi.IDEventCreate, c.current(func() cuapi.Result { return t.EventCreate(event, cuapi.EventDisableTiming) })) {
		stack, id, r := c.clear()
		for _, call := range []struct {
			id cuapi.ID
			f  func() cuapi.Result
		}{
			{cuapi.IDEventRecord, func() cuapi.Result { return t.EventRecord(*event, *stream) }},
			{cuapi.IDEventQuery, func() cuapi.Result { return t.EventQuery(*event) }},
			{cuapi.IDEventSynchronize, func() cuapi.Result { return t.EventSynchronize(*event) }},
			{cuapi.IDStreamWaitEvent, func() cuapi.Result { return t.StreamWaitEvent(*stream, *event, 0) }},
			{cuapi.IDStreamQuery, func() cuapi.Result { return t.StreamQuery(*stream) }},
		} {
			if !check(id, r) || need {
				break
			}
			switch id, r = call.id, call.f(); r {
			case cuapi.InvalidContext:
				need, r = true, cuapi.Success
			case cuapi.NotReady:
				if id == cuapi.IDEventQuery || id == cuapi.IDStreamQuery {
					r = cuapi.Success
				}
			}
		}
		check(id, r)
		for _, h := range slices.Backward(stack) {
			check(cuapi.IDCtxPushCurrent, t.CtxPushCurrent(h))
		}
		check(cuapi.IDEventDestroy, c.current(func() cuapi.Result { return t.EventDestroy(*event) }))
	}
	check(cuapi.IDStreamDestroy, c.current(func() cuapi.Result { return t.StreamDestroy(*stream) }))
	return need && err == nil, err
}

// clear takes every context off the calling thread's stack, and returns them:
// unbinding the current one alone uncovers the one below. It tells which call
// failed, if one did.
func (c *Context) clear() (stack []cuapi.Context, id cuapi.ID, r cuapi.Result) {
	t := c.dev.drv.table
	for {
		top := new(cuapi.Context)
		if r := t.CtxGetCurrent(top); r != cuapi.Success || *top == 0 {
			return stack, cuapi.IDCtxGetCurrent, r
		}
		if r := t.CtxPopCurrent(top); r != cuapi.Success {
			return stack, cuapi.IDCtxPopCurrent, r
		}
		stack = append(stack, *top)
	}
}

// bracketed makes every call that works on a context's things with the context
// current: the fallback for a driver on which probe found that they need it.
func bracketed(t *cuapi.Table, current func(func() cuapi.Result) cuapi.Result) *cuapi.Table {
	free := map[cuapi.ID]bool{
		cuapi.IDInit: true, cuapi.IDDriverGetVersion: true, cuapi.IDGetErrorName: true, cuapi.IDGetErrorString: true,
		cuapi.IDGetProcAddress: true, cuapi.IDGetProcAddressV2: true, cuapi.IDDeviceGet: true, cuapi.IDDeviceGetCount: true,
		cuapi.IDCtxGetCurrent: true, cuapi.IDCtxSetCurrent: true, cuapi.IDCtxPushCurrent: true, cuapi.IDCtxPopCurrent: true,
		cuapi.IDThreadExchangeStreamCaptureMode: true, cuapi.IDDevicePrimaryCtxRetain: true, cuapi.IDDevicePrimaryCtxRelease: true, cuapi.IDDevicePrimaryCtxGetState: true,
	}
	return cuapi.Intercept(t, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if free[c.ID] {
			return next()
		}
		return current(next)
	})
}
