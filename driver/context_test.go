package driver_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

const ptx = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
`

// Two views of one device's primary context are one context, and it is
// released once.
func TestFault25PrimaryIsShared(t *testing.T) {
	sim, d := open(t, cudasim.Config{Devices: 2}, nil)
	a, b, other := primary(t, d, 0), primary(t, d, 0), primary(t, d, 1)
	if a != b || a == other || a.Device().Ordinal() != 0 || other.Device().Ordinal() != 1 {
		t.Fatal("contexts are not shared by device")
	}
	sim.StartTrace()
	must(t, a.Shutdown(within(t)))
	if n := len(sim.Trace()); n != 0 {
		t.Errorf("the first of two Shutdowns made %d driver calls", n)
	}
	if _, err := roundTrip(b, within(t)); err != nil {
		t.Fatal(err)
	}
	must(t, b.Shutdown(within(t)))
	must(t, b.Shutdown(within(t)))
	must(t, other.Shutdown(within(t)))
	released := 0
	for _, c := range sim.Trace() {
		if c.ID == cuapi.IDDevicePrimaryCtxRelease {
			released++
		}
	}
	if released != 2 {
		t.Errorf("%d releases of two contexts", released)
	}
}

func TestShutdownThenPrimaryAgain(t *testing.T) {
	_, d := open(t, cudasim.Config{}, nil)
	var last *driver.Context
	for range 3 {
		ctx := primary(t, d, 0)
		if ctx == last {
			t.Fatal("a context that was shut down came back")
		}
		last = ctx
		mod, err := kernel.Load(ctx, []byte(ptx))
		must(t, err)
		f, err := mod.Function("nothing")
		must(t, err)
		if _, err := roundTrip(ctx, within(t)); err != nil {
			t.Fatal(err)
		}
		must(t, ctx.Shutdown(within(t)))
		for what, err := range map[string]error{
			"publish.New":  second(publish.New(ctx, publish.Config{})),
			"stream.New":   second(stream.New(ctx)),
			"stream.Adopt": second(stream.Adopt(ctx, 0x10000)),
			"kernel.Load":  second(kernel.Load(ctx, []byte(ptx))),
			"Function":     second(mod.Function("nothing")),
			"Occupancy":    second(f.Occupancy(256, 0)),
			"AllowShared":  f.AllowShared(1000),
		} {
			if !errors.Is(err, driver.ErrClosed) {
				t.Errorf("%s after Shutdown: %v", what, err)
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }

// Children keep their parent: whatever is open refuses the last Shutdown, which
// may be tried again.
func TestFault24ShutdownIsRefusedWhileUsed(t *testing.T) {
	_, d := open(t, cudasim.Config{}, nil)
	ctx := primary(t, d, 0)
	refused := func(what string) {
		t.Helper()
		if err := ctx.Shutdown(within(t)); !errors.Is(err, driver.ErrBusy) {
			t.Fatalf("Shutdown with %s: %v", what, err)
		}
	}
	rt, err := publish.New(ctx, publish.Config{})
	must(t, err)
	refused("a runtime")
	s, err := rt.OpenSession(nil)
	must(t, err)
	v, err := s.Alloc(publish.U8, 10)
	must(t, err)
	pub, err := s.Publish(v)
	must(t, err)
	must(t, rt.Close())
	must(t, s.Close())
	refused("a publication")
	st, err := stream.New(ctx)
	must(t, err)
	must(t, pub.Close())
	refused("a stream")
	must(t, st.Close())
	must(t, rt.Shutdown(within(t)))
	must(t, ctx.Shutdown(within(t)))
}

// stuck makes a context whose Shutdown blocks in the driver until release.
func stuck(t *testing.T, sim *cudasim.Sim, d *driver.Driver) (ctx *driver.Context, release func()) {
	t.Helper()
	ctx = primary(t, d, 0)
	core := wire.ContextOf(ctx)
	buf, err := pinned.PoolOf(core).Take(100)
	must(t, err)
	must(t, buf.Close()) // idle, so that Shutdown frees it (cuMemFreeHost)
	h := new(cuapi.Stream)
	if r := core.Current(func() cuapi.Result { return core.Table.StreamCreate(h, cuapi.StreamNonBlocking) }); r != cuapi.Success {
		t.Fatal(r)
	}
	sim.Hold(uintptr(*h))
	core.Table.StreamDestroy(*h) // its work stays pending
	return ctx, func() { sim.Release(uintptr(*h)) }
}

// The end of ctx ends the wait alone: the shutdown goes on, can be waited for
// again, and gives its result then. Primary waits for it.
func TestShutdownEndsTheWaitAlone(t *testing.T) {
	fail := false
	sim, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if r := next(); c.ID == cuapi.IDDevicePrimaryCtxRelease && fail {
			return cuapi.Unknown
		} else {
			return r
		}
	})
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, fail = range []bool{false, true} {
		ctx, release := stuck(t, sim, d)
		for range 2 {
			if err := ctx.Shutdown(ended); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		until(t, func() bool { return sim.Blocked() == 1 })
		again := make(chan *driver.Context)
		go func() {
			dev, _ := d.Device(0)
			next, _ := dev.Primary()
			again <- next
		}()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := ctx.Shutdown(within(t)); errors.Is(err, driver.Result(cuapi.Unknown)) != fail || (err != nil) != fail {
					t.Errorf("the result of the shutdown: %v", err)
				}
			})
		}
		release()
		wg.Wait()
		next := <-again
		if next == nil || next == ctx {
			t.Fatal("Primary during a shutdown")
		}
		fail = false
		must(t, next.Shutdown(within(t)))
	}
}

// A failed Primary leaves nothing retained, and the next one may succeed.
func TestEachCallOfPrimaryFails(t *testing.T) {
	for i := 0; ; i++ {
		n := 0
		_, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if c.ID == cuapi.IDDevicePrimaryCtxRetain || c.ID == cuapi.IDStreamCreate || c.ID == cuapi.IDEventCreate {
				if n++; n == i+1 {
					return cuapi.OutOfMemory
				}
			}
			return next()
		})
		dev, err := d.Device(0)
		must(t, err)
		ctx, err := dev.Primary()
		if n <= i {
			must(t, err)
			must(t, ctx.Shutdown(within(t)))
			if i != 3 {
				t.Fatalf("%d calls were failed", i)
			}
			return
		}
		if !errors.Is(err, driver.ErrOutOfMemory) || ctx != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		ctx = primary(t, d, 0)
		must(t, ctx.Shutdown(within(t)))
	}
}

func TestPrimaryAndShutdownHammer(t *testing.T) {
	_, d := open(t, cudasim.Config{}, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 60 {
				dev, err := d.Device(0)
				if err != nil {
					t.Error(err)
					return
				}
				ctx, err := dev.Primary()
				if err != nil {
					t.Error(err)
					return
				}
				// Another user may hold a stream at this instant: then its
				// Shutdown is the last one.
				if st, err := stream.New(ctx); err != nil {
					t.Error(err)
				} else if err := st.Synchronize(context.Background()); err != nil {
					t.Error(err)
				} else {
					st.Close()
				}
				for {
					err := ctx.Shutdown(context.Background())
					if err == nil {
						break
					}
					if !errors.Is(err, driver.ErrBusy) {
						t.Error(err)
						break
					}
					runtime.Gosched()
				}
			}
		})
	}
	wg.Wait()
}

// With a foreign context current, everything works on its own context and
// leaves the foreign one current.
func TestFault07ForeignContextStaysCurrent(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	sim, d := open(t, cudasim.Config{Devices: 2}, nil)
	foreign := primary(t, d, 1)
	raw := wire.ContextOf(foreign).Raw
	table := sim.Table()
	for _, current := range []cuapi.Context{raw, 0} {
		if r := table.CtxSetCurrent(current); r != cuapi.Success {
			t.Fatal(r)
		}
		check := func(after string) {
			t.Helper()
			if now := new(cuapi.Context); table.CtxGetCurrent(now) != cuapi.Success || *now != current {
				t.Fatalf("after %s: %#x is current, not %#x", after, *now, current)
			}
		}
		ctx := primary(t, d, 0)
		check("Primary")
		mod, err := kernel.Load(ctx, []byte(ptx))
		must(t, err)
		check("Load")
		f, err := mod.Function("nothing")
		must(t, err)
		must(t, f.AllowShared(1024))
		check("Function")
		if _, err := mod.Function("missing"); err == nil {
			t.Fatal("found a function that is not there")
		}
		check("a failed Function")
		st, err := stream.New(ctx)
		must(t, err)
		must(t, st.Synchronize(within(t)))
		check("Synchronize")
		must(t, st.Close())
		check("Close")
		if _, err := roundTrip(ctx, within(t)); err != nil {
			t.Fatal(err)
		}
		check("publish and download")
		done := make(chan error)
		go func() { done <- ctx.Shutdown(within(t)) }() // another goroutine, any thread
		must(t, <-done)
		check("Shutdown")
	}
	must(t, foreign.Shutdown(within(t)))
}

// The probe asks on a thread without a current context, whatever stack of
// contexts the thread has, and puts that stack back.
func TestFault07ProbeRestoresTheThread(t *testing.T) {
	var sim *cudasim.Sim
	var foreign []cuapi.Context // the two to be found on the probe's thread
	var stack []cuapi.Context   // of that thread, as the calls left it
	probed := 0
	sim, d := open(t, cudasim.Config{Devices: 3}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if foreign == nil {
			return next()
		}
		if stack == nil {
			stack = slices.Clone(foreign)
			for _, h := range foreign {
				sim.Table().CtxPushCurrent(h)
			}
		}
		switch c.ID {
		case cuapi.IDCtxPushCurrent:
			stack = append(stack, cuapi.Context(c.Args[0]))
		case cuapi.IDCtxPopCurrent:
			stack = stack[:len(stack)-1]
		case cuapi.IDCtxSetCurrent:
			stack = stack[:len(stack)-1]
			if h := cuapi.Context(c.Args[0]); h != 0 {
				stack = append(stack, h)
			}
		case cuapi.IDEventRecord, cuapi.IDEventQuery, cuapi.IDEventSynchronize, cuapi.IDStreamWaitEvent, cuapi.IDStreamQuery:
			now := new(cuapi.Context)
			if sim.Table().CtxGetCurrent(now); *now != 0 {
				t.Errorf("%s is probed with %#x current", c.Name(), *now)
			}
			probed++
		}
		return next()
	})
	one, two := primary(t, d, 1), primary(t, d, 2)
	dev, err := d.Device(0)
	must(t, err)
	retained := make(chan struct{})
	go func() { // the probe's goroutine alone makes calls on its thread from the first push on
		defer close(retained)
		foreign = []cuapi.Context{wire.ContextOf(one).Raw, wire.ContextOf(two).Raw}
		var ctx *driver.Context
		if ctx, err = dev.Primary(); err == nil {
			want := foreign
			foreign = nil
			if !slices.Equal(stack, want) {
				t.Errorf("the thread's stack is %#x, was %#x", stack, want)
			}
			err = ctx.Shutdown(context.Background())
		}
	}()
	<-retained
	must(t, err)
	if probed != 5 {
		t.Errorf("%d calls were probed", probed)
	}
	must(t, one.Shutdown(within(t)))
	must(t, two.Shutdown(within(t)))
}

// Without any one optional entry point the driver opens and values go up and
// down; that entry point alone is reported as unsupported.
func TestFault05EachOptionalSymbolIsMissing(t *testing.T) {
	pools := map[cuapi.ID]bool{
		cuapi.IDMemPoolCreate: true, cuapi.IDMemPoolSetAttribute: true, cuapi.IDMemPoolDestroy: true,
		cuapi.IDMemAllocFromPoolAsync: true, cuapi.IDMemFreeAsync: true,
	}
	optional := 0
	for _, e := range cuapi.Entries {
		if e.Required {
			continue
		}
		optional++
		t.Run(e.Symbol(), func(t *testing.T) {
			sim := cudasim.New(cudasim.Config{})
			table := *sim.Table()
			table.Init(0)
			table.Remove(e.ID)
			// Lists too then go through what is left of the table.
			d := over(t, cuapi.Intercept(&table, func(_ cuapi.Call, next func() cuapi.Result) cuapi.Result { return next() }))
			for _, other := range cuapi.Entries {
				err := d.Supports(other.Symbol())
				var u *driver.UnsupportedError
				if missing := errors.As(err, &u); missing != (other.ID == e.ID) || !missing && err != nil {
					t.Errorf("%s: %v", other.Symbol(), err)
				}
			}
			ctx := primary(t, d, 0)
			pooled, err := roundTrip(ctx, within(t))
			must(t, err)
			if pooled == pools[e.ID] || ctx.Device().MemoryPools() != pooled {
				t.Errorf("memory pools: %v", pooled)
			}
			mod, err := kernel.Load(ctx, []byte(ptx))
			must(t, err)
			_, err = mod.Function("nothing")
			must(t, err)
			must(t, ctx.Shutdown(within(t)))
			must(t, sim.Close())
		})
	}
	if optional < 15 {
		t.Errorf("only %d optional entry points", optional)
	}
}

// The first cause of a loss is kept, is told to all, and closes Lost once.
func TestFault20FirstCauseIsKept(t *testing.T) {
	_, d := open(t, cudasim.Config{}, nil)
	ctx := primary(t, d, 0)
	core := wire.ContextOf(ctx)
	must(t, ctx.Err())
	core.Fail(cuapi.IDEventQuery, cuapi.LaunchOutOfResources, "")
	must(t, ctx.Err())
	select {
	case <-ctx.Lost():
		t.Fatal("lost by a code that loses nothing")
	default:
	}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { core.Fail(cuapi.IDEventQuery, cuapi.Assert, "") })
	}
	wg.Wait()
	<-ctx.Lost()
	core.Fail(cuapi.IDEventRecord, cuapi.LaunchFailed, "")
	var e *driver.Error
	if err := ctx.Err(); !errors.As(err, &e) || e.Op != "cuEventQuery" || e.Code != driver.ErrAssert {
		t.Error(err)
	}
	must(t, ctx.Shutdown(within(t)))
}

// A lost context that can not be released is the device's last one. One that
// can be is followed by another.
func TestFault20LostAndRetained(t *testing.T) {
	for _, test := range []struct {
		name           string
		lost, released cuapi.Result
		closer         error
		last           bool
	}{
		{"the release fails", cuapi.IllegalAddress, cuapi.IllegalAddress, nil, true},
		{"something is kept", cuapi.IllegalAddress, cuapi.Success, errors.New("kept"), true},
		{"the release tells the loss", cuapi.Success, cuapi.LaunchFailed, nil, true},
		{"the release succeeds", cuapi.IllegalAddress, cuapi.Success, nil, false},
		{"not lost", cuapi.Success, cuapi.Unknown, nil, false},
	} {
		var result cuapi.Result
		_, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if r := next(); c.ID != cuapi.IDDevicePrimaryCtxRelease || result == cuapi.Success {
				return r
			}
			return result
		})
		ctx := primary(t, d, 0)
		core := wire.ContextOf(ctx)
		cause := driver.Result(test.released)
		if test.lost != cuapi.Success {
			core.Fail(cuapi.IDEventQuery, test.lost, "")
			cause = driver.Result(test.lost)
		}
		core.OnShutdown(func() error { return test.closer })
		result = test.released
		err := ctx.Shutdown(within(t))
		if failed := test.released != cuapi.Success || test.closer != nil; (err != nil) != failed {
			t.Errorf("%s: Shutdown: %v", test.name, err)
		}
		result = cuapi.Success
		dev, err := d.Device(0)
		must(t, err)
		for range 2 {
			next, err := dev.Primary()
			if !test.last {
				must(t, err)
				must(t, next.Err())
				must(t, next.Shutdown(within(t)))
			} else if next != nil || !errors.Is(err, cause) {
				t.Errorf("%s: Primary: %v, %v", test.name, next, err)
			}
		}
		if test.closer != nil { // nothing was released
			wire.Table(d).DevicePrimaryCtxRelease(core.Device)
		}
	}
}

// What fails around a call is blamed, and not the call, which is not made.
func TestEachCallAroundACallFails(t *testing.T) {
	for _, id := range []cuapi.ID{cuapi.IDThreadExchangeStreamCaptureMode, cuapi.IDCtxPushCurrent} {
		for _, code := range []cuapi.Result{cuapi.OutOfMemory, cuapi.IllegalAddress} {
			fail, made := false, 0
			_, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
				if fail && c.ID == id {
					return code
				}
				if fail && c.ID == cuapi.IDModuleLoadDataEx {
					made++
				}
				return next()
			})
			ctx := primary(t, d, 0)
			fail = true
			_, err := kernel.Load(ctx, []byte(ptx))
			fail = false
			var e *driver.Error
			if !errors.As(err, &e) || e.Op != cuapi.Entries[id].Symbol() || !errors.Is(err, driver.Result(code)) || made != 0 {
				t.Errorf("%v, %d calls", err, made)
			}
			if (ctx.Err() != nil) != code.Sticky() {
				t.Errorf("after %v: %v", err, ctx.Err())
			}
			must(t, ctx.Shutdown(within(t)))
		}
	}
}
