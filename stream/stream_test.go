package stream_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// other makes a stream as other code would.
func (r *rig) other(core *wire.Context) cuapi.Stream {
	r.t.Helper()
	h := new(cuapi.Stream)
	r.ok(core.Current(func() cuapi.Result { return core.Table.StreamCreate(h, cuapi.StreamNonBlocking) }))
	return *h
}

func (r *rig) open(st *stream.Stream, err error) (*stream.Stream, *stream.Lane) {
	r.t.Helper()
	must(r.t, err)
	l, err := wire.PinLane(st)
	must(r.t, err)
	r.t.Cleanup(func() { st.Close() })
	return st, l.(*stream.Lane)
}

func TestAdoptRefusesDefaultStreams(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.sim.StartTrace()
	for _, raw := range []uintptr{0, 1, 2} {
		if st, err := stream.Adopt(r.ctx, raw); !errors.Is(err, driver.ErrInvalidHandle) || st != nil {
			t.Errorf("stream %d: %v", raw, err)
		}
	}
	if n := len(r.sim.Trace()); n != 0 {
		t.Errorf("%d driver calls", n)
	}
}

// A stream of another device's context is refused before anything is recorded
// in it: the events here are of this context.
func TestFault15AForeignStreamIsRefused(t *testing.T) {
	r := newRig(t, cudasim.Config{Devices: 2})
	second := r.context(1)
	core := wire.ContextOf(second)
	foreign, own := r.other(core), r.other(r.core)
	r.sim.StartTrace()
	if st, err := stream.Adopt(r.ctx, uintptr(foreign)); !errors.Is(err, driver.ErrInvalidContext) || st != nil {
		t.Errorf("adopted: %v", err)
	}
	if st, err := stream.Adopt(second, uintptr(own)); !errors.Is(err, driver.ErrInvalidContext) || st != nil {
		t.Errorf("adopted: %v", err)
	}
	if n := r.calls(cuapi.IDEventRecord); n != 0 {
		t.Errorf("%d records", n)
	}
	// Refusals pin nothing.
	r.ok(core.Table.StreamDestroy(foreign))
	r.ok(core.Table.StreamDestroy(own))
	must(t, second.Shutdown(r.within()))
}

// An adopted stream works like another, and is never destroyed here, nor taken
// for new work.
func TestAdoptedStreams(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	raw := r.other(r.core)
	r.sim.StartTrace()
	for range 3 {
		st, err := stream.Adopt(r.ctx, uintptr(raw))
		must(t, err)
		if got, err := st.Raw(); got != uintptr(raw) || err != nil {
			t.Fatal(got, err)
		}
		must(t, st.Synchronize(r.within()))
		must(t, st.Close())
		if l := r.lane(); l.Handle() == raw {
			t.Fatal("another's stream was taken for new work")
		}
	}
	if n := r.calls(cuapi.IDStreamDestroy); n != 0 {
		t.Errorf("%d streams were destroyed", n)
	}
	r.ok(r.core.Table.StreamDestroy(raw))
	for range 20 { // nothing asks about it any more
		r.lane()
	}
}

// One stream is one lane, however often and by whatever way it comes in: two
// sessions never hold it.
func TestOneLaneForEachStream(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	raw := r.other(r.core)
	_, a := r.open(stream.Adopt(r.ctx, uintptr(raw)))
	_, b := r.open(stream.Adopt(r.ctx, uintptr(raw)))
	if !a.Hold() || b.Hold() {
		t.Error("two adoptions of one stream are held at one time")
	}
	own, l := r.open(stream.New(r.ctx))
	h, err := own.Raw()
	must(t, err)
	again, m := r.open(stream.Adopt(r.ctx, h))
	if !l.Hold() || m.Hold() {
		t.Error("an own stream that was adopted is held twice")
	}
	must(t, own.Close())
	must(t, again.Synchronize(r.within()))
	must(t, again.Close())
	for _, l := range []*stream.Lane{a, b, l, m} {
		l.Drop()
	}
	if _, err := stream.Adopt(r.ctx, h); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("adopted an own stream that was closed: %v", err)
	}
	r.ok(r.core.Table.StreamDestroy(raw))
}

// On a capturing stream everything is refused before any enqueue or query, and
// the capture ends well.
func TestFault16ACapturingStreamIsRefused(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	st, l := r.open(stream.New(r.ctx))
	raw, err := st.Raw()
	must(t, err)
	before, waited := r.upload(l), r.upload(l)
	waited.Want() // the watcher looks for it
	r.ok(r.core.Table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed))
	r.sim.StartTrace()
	m := new(stream.Mark)
	for what, f := range map[string]func() error{
		"upload":      func() error { return l.Upload(r.dev, r.host, size, m) },
		"download":    func() error { return l.Download(r.host, r.dev, size, m) },
		"fill":        func() error { return r.fill(l) },
		"record":      func() error { return l.Record(m) },
		"fence":       func() error { return l.Fence(m, l.Issued()+1) },
		"submit":      l.Submit,
		"synchronize": func() error { return st.Synchronize(r.within()) },
	} {
		if err := f(); !errors.Is(err, stream.ErrCapturing) || isEnqueued(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Marks from before the capture are no part of it.
	if done, err := before.Poll(); !done || err != nil {
		t.Error(done, err)
	}
	must(t, waited.Wait(r.within()))
	for _, c := range r.sim.Trace() {
		if c.ID != cuapi.IDStreamIsCapturing && c.ID != cuapi.IDEventQuery && c.ID != cuapi.IDThreadExchangeStreamCaptureMode {
			t.Errorf("%s on a capturing stream", c.Name)
		}
	}
	if m.Recorded() || l.InFlight() != 0 || l.Failed() != nil {
		t.Errorf("recorded %v, %d in flight, %v", m.Recorded(), l.InFlight(), l.Failed())
	}
	graph := new(cuapi.Graph)
	r.ok(r.core.Table.StreamEndCapture(cuapi.Stream(raw), graph))
	r.ok(r.core.Table.GraphDestroy(*graph))
	must(t, st.Synchronize(r.within()))
	// A lane that captures while idle is not taken.
	must(t, st.Close())
	r.ok(r.core.Table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed))
	l.Drop()
	r.ok(r.core.Table.StreamEndCapture(cuapi.Stream(raw), graph))
	r.ok(r.core.Table.GraphDestroy(*graph))
}

func TestStreamHandles(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	st, err := stream.New(r.ctx)
	must(t, err)
	raw, err := st.Raw()
	must(t, err)
	r.sim.Hold(raw)
	got := make(chan error)
	go func() { got <- st.Synchronize(r.within()) }()
	until(t, stream.WatcherOf(r.core).Running)
	must(t, st.Close()) // the call goes on
	must(t, st.Close())
	if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("Shutdown under a call: %v", err)
	}
	r.sim.Release(raw)
	must(t, <-got)
	if _, err := st.Raw(); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
	if err := st.Synchronize(r.within()); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
}

// A stream that was dropped without Close goes back by a collection, without a
// driver call, and no longer pins the context.
func TestFault11ADroppedStreamGoesBack(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	var raw uintptr
	func() {
		st, err := stream.New(r.ctx)
		must(t, err)
		raw, err = st.Raw()
		must(t, err)
	}()
	inCleanup := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		t.Errorf("%s while nothing is called", c.Name())
		return next()
	})
	r.hook.Store(&inCleanup)
	until(t, func() bool { runtime.GC(); return stream.Idle(r.core) == 1 })
	r.hook.Store(nil)
	if l := r.lane(); uintptr(l.Handle()) != raw {
		t.Error("the dropped stream is not idle")
	}
}

// Shutdown comes after all work and every look under way: a wait that was
// cancelled leaves a watched mark behind, whose event must not be destroyed
// under a query.
func TestShutdownWaitsForWorkAndLooks(t *testing.T) {
	for _, adopted := range []bool{false, true} {
		r := newRig(t, cudasim.Config{})
		r.keep = true // shut down by the test
		var st *stream.Stream
		var raw cuapi.Stream
		if adopted {
			raw = r.other(r.core)
			st, _ = stream.Adopt(r.ctx, uintptr(raw))
		} else {
			st, _ = stream.New(r.ctx)
			h, err := st.Raw()
			must(t, err)
			raw = cuapi.Stream(h)
		}
		r.sim.Hold(uintptr(raw))
		ctx, cancel := context.WithCancel(context.Background())
		got := make(chan error)
		go func() { got <- st.Synchronize(ctx) }()
		until(t, stream.WatcherOf(r.core).Running)
		// The watcher's next query is stopped on its way into the driver.
		inside, goOn := make(chan struct{}), make(chan struct{})
		var once sync.Once
		h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if c.ID == cuapi.IDEventQuery {
				once.Do(func() { close(inside); <-goOn })
			}
			return next()
		})
		r.hook.Store(&h)
		<-inside
		cancel()
		if err := <-got; err != context.Canceled {
			t.Fatal(err)
		}
		must(t, st.Close())
		r.sim.Release(uintptr(raw))
		if adopted {
			r.ok(r.core.Table.StreamDestroy(raw))
		}
		r.current(func() cuapi.Result { return r.core.Table.CtxSynchronize() })
		r.current(func() cuapi.Result { return r.core.Table.MemFree(r.dev) })
		r.current(func() cuapi.Result { return r.core.Table.MemFreeHost(r.host) })
		done := make(chan error, 1)
		go func() { done <- r.ctx.Shutdown(r.within()) }()
		for range 20000 {
			select {
			case err := <-done:
				t.Fatalf("Shutdown did not wait for a query under way: %v", err)
			default:
				runtime.Gosched()
			}
		}
		close(goOn)
		must(t, <-done)
		until(t, func() bool { return !stream.WatcherOf(r.core).Running() })
		must(t, r.sim.Close())
	}
}

// Shutdown is refused while work of an open stream is pending, and waits for
// work of a closed one.
func TestShutdownWaitsForPendingWork(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true
	st, err := stream.New(r.ctx)
	must(t, err)
	pinned, err := wire.PinLane(st)
	must(t, err)
	l := pinned.(*stream.Lane)
	release := r.hold(l)
	must(t, r.fill(l))
	l.Drop()
	must(t, st.Close())
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.ctx.Shutdown(ended); err != context.Canceled {
		t.Fatal(err)
	}
	until(t, func() bool { return r.sim.Blocked() == 1 })
	release()
	must(t, r.ctx.Shutdown(r.within()))
	if v := r.sim.Violations(); len(v) != 0 {
		t.Error(v)
	}
}
