package hold_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
)

type rig struct {
	*testing.T
	*cuapi.Table
	ctx  *driver.Context
	core *wire.Context
}

// open makes a simulator whose driver lacks some entry points.
func open(t *testing.T, cfg cudasim.Config, lacks []cuapi.ID) (*cudasim.Sim, *driver.Context) {
	t.Helper()
	sim := cudasim.New(cfg)
	table := *sim.Table()
	for _, id := range lacks {
		table.Remove(id)
	}
	table.Init(0)
	made, err := wire.NewDriver(&table, "simulator")
	if err != nil {
		t.Fatal(err)
	}
	dev, err := made.(*driver.Driver).Device(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		t.Fatal(err)
	}
	return sim, ctx
}

// ways are drivers on which streams are held differently.
var ways = map[string][]cuapi.ID{"flag": nil, "host function": {cuapi.IDStreamWaitValue32}}

// each runs a test on each kind of driver.
func each(t *testing.T, cfg cudasim.Config, f func(r *rig)) {
	for name, lacks := range ways {
		t.Run(name, func(t *testing.T) {
			sim, ctx := open(t, cfg, lacks)
			r := &rig{t, sim.Table(), ctx, wire.ContextOf(ctx)}
			t.Cleanup(func() {
				if err := ctx.Shutdown(context.Background()); err != nil {
					t.Error(err)
				}
				if err := sim.Close(); err != nil {
					t.Error(err)
				}
			})
			sim.StartTrace()
			f(r)
			for _, c := range sim.Trace() { // no test would tell one way from the other
				if c.ID == cuapi.IDLaunchHostFunc && lacks == nil || c.ID == cuapi.IDStreamWaitValue32 && lacks != nil {
					t.Errorf("held by %s", c.Name)
				}
			}
		})
	}
}

func (r *rig) stream() cuapi.Stream {
	r.Helper()
	h := new(cuapi.Stream)
	if got := r.core.Current(func() cuapi.Result { return r.StreamCreate(h, cuapi.StreamNonBlocking) }); got != cuapi.Success {
		r.Fatal(got)
	}
	r.Cleanup(func() { r.want(r.StreamDestroy(*h), cuapi.Success) })
	return *h
}

func (r *rig) hold(h cuapi.Stream) (release func()) {
	r.Helper()
	release, err := hold.Stream(r.ctx, uintptr(h))
	if err != nil {
		r.Fatal(err)
	}
	return release
}

func (r *rig) want(got, want cuapi.Result) {
	r.Helper()
	if got != want {
		r.Errorf("got %v, want %v", got, want)
	}
}

func TestHoldsUntilReleased(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		a, b := r.stream(), r.stream()
		free := r.hold(a)
		r.want(r.StreamQuery(a), cuapi.NotReady)
		r.want(r.StreamQuery(b), cuapi.Success)
		free()
		free()
		r.want(r.StreamSynchronize(a), cuapi.Success)
	})
}

// Two holds of one stream are two operations, released apart, in any order.
func TestHoldTwice(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		s := r.stream()
		first, second := r.hold(s), r.hold(s)
		second()
		r.want(r.StreamQuery(s), cuapi.NotReady)
		first()
		r.want(r.StreamSynchronize(s), cuapi.Success)
	})
}

// A released word serves again before its stream saw the release: here the
// stream is held by another flag in front. A semaphore may not: its post would be
// taken by the wrong stream. There are more of them here than one block has.
func TestFlagServesAgain(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		a, b := r.stream(), r.stream()
		front := r.hold(a)
		for range 100 {
			r.hold(a)()
		}
		again := r.hold(b)
		r.want(r.StreamQuery(b), cuapi.NotReady)
		front()
		r.want(r.StreamSynchronize(a), cuapi.Success)
		r.want(r.StreamQuery(b), cuapi.NotReady)
		again()
		r.want(r.StreamSynchronize(b), cuapi.Success)
	})
}

func TestMoreThanABlock(t *testing.T) {
	each(t, cudasim.Config{HardwareQueues: 256}, func(r *rig) {
		s := r.stream()
		var free []func()
		for range 200 {
			free = append(free, r.hold(s))
		}
		for _, f := range free {
			r.want(r.StreamQuery(s), cuapi.NotReady)
			f()
		}
		r.want(r.StreamSynchronize(s), cuapi.Success)
	})
}

func TestManyGoroutines(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		var wg sync.WaitGroup
		for range 4 {
			s := r.stream()
			wg.Go(func() {
				for range 100 {
					free, err := hold.Stream(r.ctx, uintptr(s))
					if err != nil {
						r.Error(err)
						return
					}
					r.want(r.StreamQuery(s), cuapi.NotReady)
					free()
					r.want(r.StreamSynchronize(s), cuapi.Success)
				}
			})
		}
		wg.Wait()
	})
}

// A release that is called again releases nobody else.
func TestShutdownWhileHeld(t *testing.T) {
	for name, lacks := range ways {
		sim, ctx := open(t, cudasim.Config{}, lacks)
		h := new(cuapi.Stream)
		core := wire.ContextOf(ctx)
		if r := core.Current(func() cuapi.Result { return sim.Table().StreamCreate(h, cuapi.StreamNonBlocking) }); r != cuapi.Success {
			t.Fatal(r)
		}
		other, err := hold.Stream(ctx, uintptr(*h))
		if err != nil {
			t.Fatal(err)
		}
		free, err := hold.Stream(ctx, uintptr(*h))
		if err != nil {
			t.Fatal(err)
		}
		other()
		other()
		if err := ctx.Shutdown(context.Background()); !errors.Is(err, driver.ErrBusy) {
			t.Errorf("%s: Shutdown while held: %v, want ErrBusy", name, err)
		}
		free()
	}
}

// A driver with neither call, and one whose host functions can not wait.
func TestUnsupported(t *testing.T) {
	unsupported := func(ctx *driver.Context) error {
		t.Helper()
		_, err := hold.Stream(ctx, 3)
		var missing *driver.UnsupportedError
		if !errors.As(err, &missing) || missing.Feature != "cuStreamWaitValue32_v2" || !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("without cuStreamWaitValue32: %v", err)
		}
		return err
	}
	_, ctx := open(t, cudasim.Config{}, []cuapi.ID{cuapi.IDStreamWaitValue32, cuapi.IDLaunchHostFunc})
	unsupported(ctx)

	_, ctx = open(t, cudasim.Config{}, []cuapi.ID{cuapi.IDStreamWaitValue32})
	table := wire.ContextOf(ctx).Table
	why := errors.New("no semaphores here")
	table.HostWait = func() (*cuapi.HostWait, error) { return nil, why }
	if err := unsupported(ctx); !errors.Is(err, why) {
		t.Errorf("the reason is missing: %v", err)
	}
	table.HostWait = nil
	unsupported(ctx)
}

// A stream that the driver refuses to hold leaves nothing behind: Shutdown
// would fail.
func TestRefused(t *testing.T) {
	for name, lacks := range ways {
		_, ctx := open(t, cudasim.Config{}, lacks)
		if _, err := hold.Stream(ctx, 0x12345); !errors.Is(err, driver.ErrInvalidHandle) {
			t.Errorf("%s: no stream: %v, want ErrInvalidHandle", name, err)
		}
		if err := ctx.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// A refused hold may have enqueued its wait all the same: it is let go, and what
// it may have left serves nobody else.
func TestRefusedAndEnqueued(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		s, other := r.stream(), r.stream()
		table := r.core.Table
		wait, launch := table.StreamWaitValue32, table.LaunchHostFunc
		if wait != nil {
			table.StreamWaitValue32 = func(s cuapi.Stream, at cuapi.DevicePtr, v, flags uint32) cuapi.Result {
				wait(s, at, v, flags)
				return cuapi.Unknown
			}
		}
		table.LaunchHostFunc = func(s cuapi.Stream, fn, data uintptr) cuapi.Result {
			launch(s, fn, data)
			return cuapi.Unknown
		}
		if _, err := hold.Stream(r.ctx, uintptr(s)); !errors.Is(err, driver.Result(cuapi.Unknown)) {
			r.Error(err)
		}
		table.StreamWaitValue32, table.LaunchHostFunc = wait, launch
		free := r.hold(other)
		r.want(r.StreamQuery(s), cuapi.Success)
		r.want(r.StreamQuery(other), cuapi.NotReady)
		free()
		r.want(r.StreamSynchronize(other), cuapi.Success)
	})
}

// Flags serve again: many holds, one at a time, take one block of memory.
func TestFlagsAreReused(t *testing.T) {
	each(t, cudasim.Config{}, func(r *rig) {
		s, blocks := r.stream(), 0
		alloc := r.core.Table.MemHostAlloc
		r.core.Table.MemHostAlloc = func(p *cuapi.HostPtr, n uintptr, flags uint32) cuapi.Result {
			blocks++
			return alloc(p, n, flags)
		}
		for range 200 {
			free := r.hold(s)
			r.want(r.StreamQuery(s), cuapi.NotReady)
			free()
			r.want(r.StreamSynchronize(s), cuapi.Success)
		}
		if blocks != 1 {
			r.Errorf("%d blocks, want 1", blocks)
		}
	})
}
