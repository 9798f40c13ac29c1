package publish_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// endBeside shuts the context down beside a look at stream h that is held up,
// which the shutdown waits for in function quiesce.
func (r *rig) endBeside(g *gate, quiesce string, destroyed *atomic.Bool) {
	r.t.Helper()
	end := make(chan error, 1)
	go func() {
		err := r.ctx.Shutdown(r.within())
		for errors.Is(err, driver.ErrBusy) { // the last handle is being let go
			err = r.ctx.Shutdown(r.within())
		}
		end <- err
	}()
	for !running(quiesce) && !destroyed.Load() && len(end) == 0 {
		runtime.Gosched()
	}
	if destroyed.Load() || len(end) > 0 {
		r.t.Error("the stream was destroyed beside a look at it")
	}
	close(g.let)
	must(r.t, <-end)
}

// A shutdown waits for the watcher's look at what is being freed.
func TestShutdownBesideALookForMemory(t *testing.T) {
	g := newGate()
	var reclaim atomic.Uint64
	var destroyed atomic.Bool
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		switch {
		case c.ID == cuapi.IDMemFreeAsync:
			reclaim.Store(c.Args[1])
		case c.ID == cuapi.IDStreamDestroy && c.Args[0] == reclaim.Load():
			destroyed.Store(true)
		case c.ID == cuapi.IDStreamQuery && c.Args[0] == reclaim.Load() && g.armed.Load() && watching():
			g.pass()
		}
		return next()
	}})
	r.keep = true
	s := r.session()
	v, err := s.Alloc(publish.U8, 40<<20)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	h := uintptr(reclaim.Load())
	r.sim.Hold(h)
	must(t, v.Close())
	g.armed.Store(true)
	w := r.wait(allocContext(s, 40<<20))
	<-g.held
	w.cancel()
	w.refused(t, context.Canceled)
	r.sim.Release(h)
	must(t, s.Close())
	must(t, r.rt.Close())
	r.endBeside(g, "memory.(*Pool).quiesce", &destroyed)
}

// A shutdown waits for the question whether an idle stream captures.
func TestShutdownBesideALookForACapture(t *testing.T) {
	g := newGate()
	var idle atomic.Uint64
	var destroyed atomic.Bool
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		switch {
		case c.ID == cuapi.IDEventRecord && c.Args[1] == idle.Load():
			return cuapi.InvalidValue // so that no mark is behind the launch
		case c.Args[0] != idle.Load():
		case c.ID == cuapi.IDStreamDestroy:
			destroyed.Store(true)
		case c.ID == cuapi.IDStreamIsCapturing && g.armed.Load() && watching():
			g.pass()
		}
		return next()
	}})
	r.keep = true
	full := r.session()
	v, err := full.Alloc(publish.U8, 64)
	must(t, err)
	must(t, full.Synchronize(r.within()))
	r.sim.Kernel("inc", func(*cudasim.Launch) {})
	s := r.session()
	let := r.hold(s) // which makes it foreign
	raw, err := s.Raw()
	must(t, err)
	idle.Store(uint64(raw))
	must(t, s.Launch(r.inc, kernel.Grid(1), kernel.U64(0), kernel.U64(0), kernel.U32(0)))
	must(t, s.Close()) // no value keeps its stream
	release := r.hold(full)
	r.fill(full, v)
	g.armed.Store(true)
	w := r.wait(r.launchContext(full, v))
	<-g.held
	w.cancel()
	w.refused(t, context.Canceled)
	let()
	release()
	must(t, full.Synchronize(r.within()))
	must(t, v.Close())
	must(t, full.Close())
	must(t, r.rt.Close())
	r.endBeside(g, "stream.(*Lane).quiesce", &destroyed)
}

// drained runs f beside two that drain all along.
func drained(rt *publish.Runtime, f func()) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				rt.Drain()
			}
		})
	}
	f()
	stop.Store(true)
	wg.Wait()
}

// A shutdown ends, however many drain beside it: what they look at is not lost.
func TestShutdownBesideDrains(t *testing.T) {
	r := newRig(t, options{})
	for i := range 60 {
		rt, err := publish.New(r.ctx, publish.Config{})
		must(t, err)
		s, err := rt.OpenSession(nil)
		must(t, err)
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		raw, err := s.Raw()
		must(t, err)
		r.sim.Hold(raw)
		must(t, v.Close())
		if i%2 == 0 { // a release function runs all the while
			addr, free := r.foreign(64)
			a, err := s.Adopt(addr, publish.U8, []int{64}, free)
			must(t, err)
			must(t, a.Close())
		}
		must(t, s.Close())
		drained(rt, func() {
			go r.sim.Release(raw)
			must(t, rt.Shutdown(r.within()))
		})
	}
}

// Memory that is on its way is not missed beside those that drain.
func TestRoomOnItsWayBesideDrains(t *testing.T) {
	var reclaim atomic.Uint64
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDMemFreeAsync {
			reclaim.Store(c.Args[1])
		}
		return next()
	}})
	s := r.session()
	drained(r.rt, func() {
		for range 16 {
			v, err := s.Alloc(publish.U8, 40<<20)
			must(t, err)
			must(t, s.Synchronize(r.within()))
			h := uintptr(reclaim.Load())
			r.sim.Hold(h)
			must(t, v.Close())
			w := r.wait(allocContext(s, 40<<20))
			r.sim.Release(h)
			must(t, <-w.done)
			r.settle()
		}
	})
	must(t, s.Close())
}

// watching tells whether the watcher calls.
func watching() bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs[:])])
	for more := true; more; {
		var at runtime.Frame
		if at, more = frames.Next(); strings.HasSuffix(at.Function, "watch.(*Watcher).run") {
			return true
		}
	}
	return false
}
