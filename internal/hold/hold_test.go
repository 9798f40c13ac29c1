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

func newRig(t *testing.T, cfg cudasim.Config) *rig {
	t.Helper()
	sim := cudasim.New(cfg)
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t, sim.Table(), ctx, wire.ContextOf(ctx)}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		if err := ctx.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return r
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
	r := newRig(t, cudasim.Config{})
	a, b := r.stream(), r.stream()
	free := r.hold(a)
	r.want(r.StreamQuery(a), cuapi.NotReady)
	r.want(r.StreamQuery(b), cuapi.Success)
	free()
	free()
	r.want(r.StreamSynchronize(a), cuapi.Success)
}

// Two holds of one stream are two operations, released apart, in any order.
func TestHoldTwice(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	s := r.stream()
	first, second := r.hold(s), r.hold(s)
	second()
	r.want(r.StreamQuery(s), cuapi.NotReady)
	first()
	r.want(r.StreamSynchronize(s), cuapi.Success)
}

// A released flag serves again before its stream saw the release: here the
// stream is held by another flag in front.
func TestFlagServesAgain(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	a, b := r.stream(), r.stream()
	front := r.hold(a)
	r.hold(a)()
	again := r.hold(b)
	r.want(r.StreamQuery(b), cuapi.NotReady)
	front()
	r.want(r.StreamSynchronize(a), cuapi.Success)
	r.want(r.StreamQuery(b), cuapi.NotReady)
	again()
	r.want(r.StreamSynchronize(b), cuapi.Success)
}

func TestMoreThanABlock(t *testing.T) {
	r := newRig(t, cudasim.Config{HardwareQueues: 256})
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
}

func TestManyGoroutines(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	var wg sync.WaitGroup
	for range 4 {
		s := r.stream()
		wg.Go(func() {
			for range 100 {
				free, err := hold.Stream(r.ctx, uintptr(s))
				if err != nil {
					t.Error(err)
					return
				}
				r.want(r.StreamQuery(s), cuapi.NotReady)
				free()
				r.want(r.StreamSynchronize(s), cuapi.Success)
			}
		})
	}
	wg.Wait()
}

func TestShutdownWhileHeld(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		t.Fatal(err)
	}
	h := new(cuapi.Stream)
	core := wire.ContextOf(ctx)
	if r := core.Current(func() cuapi.Result { return sim.Table().StreamCreate(h, cuapi.StreamNonBlocking) }); r != cuapi.Success {
		t.Fatal(r)
	}
	free, err := hold.Stream(ctx, uintptr(*h))
	if err != nil {
		t.Fatal(err)
	}
	if err := ctx.Shutdown(context.Background()); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("Shutdown while held: %v, want ErrBusy", err)
	}
	free()
}

func TestUnsupported(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	table := *sim.Table()
	table.Init(0)
	table.StreamWaitValue32 = nil
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
	defer ctx.Shutdown(context.Background())
	_, err = hold.Stream(ctx, 3)
	var missing *driver.UnsupportedError
	if !errors.As(err, &missing) || missing.Feature != "cuStreamWaitValue32_v2" || !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without cuStreamWaitValue32: %v", err)
	}
}

// A stream that the driver refuses to hold leaves nothing behind: Shutdown
// would fail.
func TestRefused(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hold.Stream(ctx, 0x12345); !errors.Is(err, driver.ErrInvalidHandle) {
		t.Errorf("no stream: %v, want ErrInvalidHandle", err)
	}
	if err := ctx.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
}
