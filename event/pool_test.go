package event_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

func newPool(t *testing.T, around func(c cuapi.Call, next func() cuapi.Result) cuapi.Result) (*cudasim.Sim, *driver.Context, *event.Pool) {
	t.Helper()
	sim := cudasim.New(cudasim.Config{})
	sim.Table().Init(0)
	d, err := wire.NewDriver(cuapi.Intercept(sim.Table(), around), "simulator")
	must(t, err)
	dev, err := d.(*driver.Driver).Device(0)
	must(t, err)
	ctx, err := dev.Primary()
	must(t, err)
	t.Cleanup(func() {
		if !t.Failed() {
			must(t, ctx.Shutdown(context.Background()))
			must(t, sim.Close())
		}
	})
	return sim, ctx, event.PoolOf(wire.ContextOf(ctx))
}

func pass(_ cuapi.Call, next func() cuapi.Result) cuapi.Result { return next() }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func count(sim *cudasim.Sim, id cuapi.ID) (n int) {
	for _, c := range sim.Trace() {
		if c.ID == id {
			n++
		}
	}
	return n
}

func TestEventsAreReused(t *testing.T) {
	sim, _, p := newPool(t, pass)
	must(t, p.Reserve(3))
	if s := p.Stats(); s != (event.Stats{Created: 3, Idle: 3}) {
		t.Fatalf("%+v", s)
	}
	sim.StartTrace()
	for range 100 {
		seen := map[*event.Event]bool{}
		for range 3 {
			e, err := p.Get()
			must(t, err)
			if seen[e] || e.Handle() == 0 {
				t.Fatalf("event %#x was given out twice", e.Handle())
			}
			seen[e] = true
		}
		if s := p.Stats(); s != (event.Stats{Created: 3, InUse: 3}) {
			t.Fatalf("%+v", s)
		}
		for e := range seen {
			p.Put(e)
		}
	}
	if n := len(sim.Trace()); n != 0 {
		t.Errorf("%d driver calls in steady state", n)
	}
	must(t, p.Reserve(5))
	must(t, p.Reserve(2))
	if s := p.Stats(); s != (event.Stats{Created: 5, Idle: 5}) {
		t.Errorf("%+v", s)
	}
}

func TestEventsComeWithoutTiming(t *testing.T) {
	sim, _, p := newPool(t, pass)
	sim.StartTrace()
	e, err := p.Get()
	must(t, err)
	p.Put(e)
	for _, c := range sim.Trace() {
		if c.ID == cuapi.IDEventCreate && c.Args[1] != cuapi.EventDisableTiming {
			t.Errorf("flags %d", c.Args[1])
		}
	}
	if count(sim, cuapi.IDEventCreate) != 1 {
		t.Error("no event was created")
	}
}

// A failed creation is counted nowhere.
func TestAFailedCreationCountsNothing(t *testing.T) {
	fail := false
	_, _, p := newPool(t, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if fail && c.ID == cuapi.IDEventCreate {
			return cuapi.OutOfMemory
		}
		return next()
	})
	must(t, p.Reserve(1))
	fail = true
	if err := p.Reserve(3); !errors.Is(err, driver.ErrOutOfMemory) {
		t.Error(err)
	}
	e, err := p.Get()
	must(t, err)
	if _, err := p.Get(); !errors.Is(err, driver.ErrOutOfMemory) {
		t.Error(err)
	}
	p.Put(e)
	if s := p.Stats(); s != (event.Stats{Created: 1, Idle: 1}) {
		t.Errorf("%+v", s)
	}
}

// Shutdown destroys the idle events, after the streams that they were recorded
// in and before the context.
func TestShutdownDestroysEventsBehindTheirStreams(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	d, err := sim.Driver()
	must(t, err)
	dev, err := d.Device(0)
	must(t, err)
	for _, first := range []string{"event", "stream"} {
		ctx, err := dev.Primary()
		must(t, err)
		if first == "event" {
			must(t, event.PoolOf(wire.ContextOf(ctx)).Reserve(2))
		}
		st, err := stream.New(ctx)
		must(t, err)
		must(t, st.Synchronize(context.Background()))
		must(t, st.Close())
		must(t, event.PoolOf(wire.ContextOf(ctx)).Reserve(3))
		sim.StartTrace()
		must(t, ctx.Shutdown(context.Background()))
		var order []cuapi.ID
		for _, c := range sim.Trace() {
			switch c.ID {
			case cuapi.IDEventDestroy, cuapi.IDStreamDestroy, cuapi.IDDevicePrimaryCtxRelease:
				order = append(order, c.ID)
			}
		}
		want := []cuapi.ID{cuapi.IDStreamDestroy, cuapi.IDEventDestroy, cuapi.IDEventDestroy, cuapi.IDEventDestroy, cuapi.IDDevicePrimaryCtxRelease}
		if len(order) != len(want) {
			t.Fatalf("%s first: %v, want %v", first, order, want)
		}
		for i := range want {
			if order[i] != want[i] {
				t.Fatalf("%s first: %v, want %v", first, order, want)
			}
		}
	}
	must(t, sim.Close())
}

// An event whose destruction fails keeps the context retained, and says so.
func TestAFailedDestructionIsTold(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	sim.Table().Init(0)
	opened := false // the probe of a context destroys an event of its own
	d, err := wire.NewDriver(cuapi.Intercept(sim.Table(), func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if r := next(); c.ID != cuapi.IDEventDestroy || !opened {
			return r
		}
		return cuapi.InvalidHandle
	}), "simulator")
	must(t, err)
	dev, err := d.(*driver.Driver).Device(0)
	must(t, err)
	ctx, err := dev.Primary()
	must(t, err)
	must(t, event.PoolOf(wire.ContextOf(ctx)).Reserve(1))
	opened = true
	sim.StartTrace()
	if err := ctx.Shutdown(context.Background()); !errors.Is(err, driver.ErrInvalidHandle) {
		t.Error(err)
	}
	if count(sim, cuapi.IDDevicePrimaryCtxRelease) != 0 {
		t.Error("the context was released all the same")
	}
}

func TestPoolHammer(t *testing.T) {
	_, _, p := newPool(t, pass)
	var mu sync.Mutex
	out := map[*event.Event]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 300 {
				e, err := p.Get()
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if out[e] {
					t.Error("one event, two users")
				}
				out[e] = true
				mu.Unlock()
				mu.Lock()
				delete(out, e)
				mu.Unlock()
				p.Put(e)
			}
		})
	}
	wg.Wait()
	if s := p.Stats(); s.InUse != 0 || s.Idle != s.Created || s.Created > 8 {
		t.Errorf("%+v", s)
	}
}

// An event is used again behind the last call that borrows it, and once.
func TestAnEventIsReusedBehindItsBorrows(t *testing.T) {
	_, _, p := newPool(t, pass)
	e, err := p.Get()
	must(t, err)
	must(t, e.Borrow())
	p.Put(e)
	p.Put(e)
	if s := p.Stats(); s.Idle != 0 || s.InUse != 1 {
		t.Errorf("idle while borrowed: %+v", s)
	}
	if err := e.Borrow(); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
	e.Return()
	p.Put(e)
	if s := p.Stats(); s.Idle != 1 || s.InUse != 0 {
		t.Errorf("%+v", s)
	}
}
