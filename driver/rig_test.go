package driver_test

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// around is what a test puts about every driver call.
type around = func(c cuapi.Call, next func() cuapi.Result) cuapi.Result

// open returns a driver over the simulator's table, which passes through f.
// At the test's end nothing may be left and no rule of the driver broken.
func open(t *testing.T, cfg cudasim.Config, f around) (*cudasim.Sim, *driver.Driver) {
	t.Helper()
	sim := cudasim.New(cfg)
	t.Cleanup(func() {
		if !t.Failed() {
			must(t, sim.Close())
		}
	})
	if r := sim.Table().Init(0); r != cuapi.Success {
		t.Fatal(r)
	}
	table := sim.Table()
	if f != nil {
		table = cuapi.Intercept(table, f)
	}
	return sim, over(t, table)
}

func over(t *testing.T, table *cuapi.Table) *driver.Driver {
	t.Helper()
	d, err := wire.NewDriver(table, "simulator")
	must(t, err)
	return d.(*driver.Driver)
}

func primary(t *testing.T, d *driver.Driver, ordinal int) *driver.Context {
	t.Helper()
	dev, err := d.Device(ordinal)
	must(t, err)
	ctx, err := dev.Primary()
	must(t, err)
	return ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within bounds a wait that must end: reaching the bound fails the test.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("never came true")
		}
	}
}

// roundTrip publishes bytes that were uploaded and downloads them again, with
// a runtime of its own.
func roundTrip(ctx *driver.Context, wait context.Context) (pools bool, err error) {
	rt, err := publish.New(ctx, publish.Config{})
	if err != nil {
		return false, err
	}
	pools = rt.Stats().Memory.Pools
	s, err := rt.OpenSession(nil)
	if err != nil {
		return pools, err
	}
	data := []byte("these bytes come back")
	in, err := rt.Pinned(len(data))
	if err != nil {
		return pools, err
	}
	copy(in.Bytes(), data)
	v, err := s.Alloc(publish.U8, len(data))
	if err != nil {
		return pools, err
	}
	up, err := s.Upload(v, in)
	if err != nil {
		return pools, err
	}
	pub, err := s.Publish(v)
	if err != nil {
		return pools, err
	}
	out, err := rt.Pinned(len(data))
	if err != nil {
		return pools, err
	}
	down, err := pub.DownloadInto(out)
	if err != nil {
		return pools, err
	}
	back, err := down.Wait(wait)
	if err != nil {
		return pools, err
	}
	if !bytes.Equal(back.Bytes(), data) {
		return pools, fmt.Errorf("%q came back", back.Bytes())
	}
	back.Close()
	up.Close()
	s.Close()
	return pools, rt.Shutdown(wait)
}
