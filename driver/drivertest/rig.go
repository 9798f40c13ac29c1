package drivertest

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
)

// deadline bounds what must return. It only ever fails: nothing waits for it
// to pass.
const deadline = time.Minute

// A rig is a target with the primary context of its first device current on
// the test's thread.
type rig struct {
	*testing.T
	*cuapi.Table
	target Target
	dev    cuapi.Device
	ctx    *driver.Context
	core   *wire.Context

	witness cuapi.Event // recorded and complete: its query returns in every situation
	stuck   int         // callers that must be blocked now
	gone    bool        // the context is lost: nothing can be freed
	ended   bool        // and was shut down by the case
	holds   []func()
	frees   []func() cuapi.Result
}

func newRig(t *testing.T, target Target, misuse bool) *rig {
	t.Helper()
	// The thread stays locked and ends with the test, and what is current on
	// it with the thread.
	runtime.LockOSThread()
	dev, err := target.Driver.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, Table: wire.Table(target.Driver), target: target, ctx: ctx, core: wire.ContextOf(ctx)}
	t.Cleanup(func() { r.end(misuse) })
	r.ok(r.CtxSetCurrent(r.core.Raw))
	r.witness = r.event()
	s := r.stream()
	r.ok(r.EventRecord(r.witness, s))
	r.ok(r.EventSynchronize(r.witness))
	return r
}

// end lets go of what is held, frees what was made, and ends the context.
func (r *rig) end(misuse bool) {
	r.release()
	if !r.gone {
		r.want(r.CtxSynchronize(), cuapi.Success, "cuCtxSynchronize at the end")
		for i := len(r.frees) - 1; i >= 0; i-- {
			r.want(r.frees[i](), cuapi.Success, "a release at the end")
		}
	}
	r.CtxSetCurrent(0)
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := r.ctx.Shutdown(ctx); err != nil && !r.ended {
		r.Errorf("Shutdown: %v", err)
	}
	if r.target.Done != nil {
		if err := r.target.Done(misuse); err != nil {
			r.Error(err)
		}
	}
}

func (r *rig) onEnd(f func() cuapi.Result) { r.frees = append(r.frees, f) }

// ok ends the test unless a call succeeded.
func (r *rig) ok(got cuapi.Result) {
	r.Helper()
	if got != cuapi.Success {
		r.Fatalf("%v, want success", driver.Result(got))
	}
}

func (r *rig) want(got, want cuapi.Result, what string) {
	r.Helper()
	if got != want {
		r.Errorf("%s: %v, want %v", what, driver.Result(got), driver.Result(want))
	}
}

func (r *rig) stream() cuapi.Stream {
	r.Helper()
	h := new(cuapi.Stream)
	r.ok(r.StreamCreate(h, cuapi.StreamNonBlocking))
	r.onEnd(func() cuapi.Result { return r.StreamDestroy(*h) })
	return *h
}

func (r *rig) event() cuapi.Event {
	r.Helper()
	h := new(cuapi.Event)
	r.ok(r.EventCreate(h, cuapi.EventDisableTiming))
	r.onEnd(func() cuapi.Result { return r.EventDestroy(*h) })
	return *h
}

// device takes n bytes of device memory, all of that value.
func (r *rig) device(n int, fill byte) cuapi.DevicePtr {
	r.Helper()
	p := new(cuapi.DevicePtr)
	r.ok(r.MemAlloc(p, uintptr(n)))
	r.onEnd(func() cuapi.Result { return r.MemFree(*p) })
	s := r.stream()
	r.ok(r.MemsetD8Async(*p, fill, uintptr(n), s))
	r.ok(r.StreamSynchronize(s))
	return *p
}

// pinned takes n bytes of pinned memory, cleared.
func (r *rig) pinned(n int) (cuapi.HostPtr, []byte) {
	r.Helper()
	p := r.pinnedLoose(n)
	r.onEnd(func() cuapi.Result { return r.MemFreeHost(p) })
	return p, bytesOf(p, n)
}

// pinnedLoose takes pinned memory that the case frees.
func (r *rig) pinnedLoose(n int) cuapi.HostPtr {
	r.Helper()
	p := new(cuapi.HostPtr)
	r.ok(r.MemHostAlloc(p, uintptr(n), cuapi.MemHostAllocPortable))
	clear(bytesOf(*p, n))
	return *p
}

// hold holds a stream until release, which releases all.
func (r *rig) hold(s cuapi.Stream) {
	r.Helper()
	free, err := hold.Stream(r.ctx, uintptr(s))
	if err != nil {
		r.Fatal(err)
	}
	r.holds = append(r.holds, free)
}

func (r *rig) release() {
	for _, free := range r.holds {
		free()
	}
	r.holds = nil
}

// A call runs on a goroutine of its own.
type call struct {
	what   string
	done   chan struct{}
	result cuapi.Result
}

// start makes a call on another thread, with the context current.
func (r *rig) start(what string, f func() cuapi.Result) *call {
	c := &call{what: what, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.result = r.core.Current(f)
	}()
	return c
}

// mustReturn waits for a call, and checks its result.
func (r *rig) mustReturn(c *call, want cuapi.Result) {
	r.Helper()
	select {
	case <-c.done:
		r.want(c.result, want, c.what)
	case <-time.After(deadline):
		r.Fatalf("%s does not return", c.what)
	}
}

// looks is how many queries another thread makes before a call that has not
// returned counts as blocked, where the target can not tell: some 40 ms on the
// measured driver, against 0.1 ms for a call that does not block.
const looks = 200_000

// mustBlock checks that a call does not return. The case lets it go by
// release, and then has it return.
func (r *rig) mustBlock(c *call) {
	r.Helper()
	r.stuck++
	for i := 0; i < looks || r.target.Blocked != nil; i++ {
		if r.target.Blocked != nil && r.target.Blocked() >= r.stuck {
			return
		}
		select {
		case <-c.done:
			r.Fatalf("%s returned %v, and should block", c.what, driver.Result(c.result))
		default:
			r.ok(r.EventQuery(r.witness))
		}
	}
}

// returned notes that callers are let go.
func (r *rig) returned() { r.release(); r.stuck = 0 }
