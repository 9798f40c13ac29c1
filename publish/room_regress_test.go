package publish_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// A wait for room repeats refusals alone: what is unproven is told at once, though
// its code says that memory is short.
func TestRoomRepeatsNothingUnproven(t *testing.T) {
	for name, c := range map[string]struct {
		id cuapi.ID
		do func(r *rig, s *publish.Session, v *publish.Value) error
	}{
		"launch": {cuapi.IDLaunchKernel, func(r *rig, s *publish.Session, v *publish.Value) error {
			return s.LaunchContext(r.within(), r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
		}},
		"upload": {cuapi.IDMemcpyHtoDAsync, func(r *rig, s *publish.Session, v *publish.Value) error {
			_, err := s.UploadContext(r.within(), v, r.buffer(make([]byte, 64)))
			return err
		}},
		"download": {cuapi.IDMemcpyDtoHAsync, func(r *rig, s *publish.Session, v *publish.Value) error {
			p, err := s.Publish(v)
			must(r.t, err)
			_, err = p.DownloadIntoContext(r.within(), r.buffer(make([]byte, 64)))
			return err
		}},
	} {
		var n atomic.Int64
		r := newRig(t, options{around: func(call cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if call.ID == c.id && n.Add(1) == 1 {
				next()
				return cuapi.OutOfMemory
			}
			return next()
		}})
		r.keep = true
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		w, err := s.Alloc(publish.U8, 64) // which might give memory back
		must(t, err)
		err = c.do(r, s, v)
		var unproven *publish.UnprovenError
		if !errors.As(err, &unproven) || !errors.Is(err, driver.ErrOutOfMemory) || n.Load() != 1 {
			t.Errorf("%s: enqueued %d times: %v", name, n.Load(), err)
		}
		must(t, w.Close())
	}
}

// A wait for room is parked: its own refused tries do not wake it.
func TestRoomParks(t *testing.T) {
	var tries, looks atomic.Int64
	var trying atomic.Uint32 // the entry point that each try calls once
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		switch {
		case uint32(c.ID) == trying.Load():
			tries.Add(1)
		case c.ID == cuapi.IDEventQuery:
			looks.Add(1)
		}
		return next()
	}})
	s := r.session()
	big, err := s.Alloc(publish.U8, 40<<20)
	must(t, err)
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	w, err := s.Alloc(publish.U8, 64)
	must(t, err)
	p, _ := r.publication(s, 64)
	must(t, s.Synchronize(r.within()))
	watched := r.session()
	let := r.hold(watched)
	ticking, _ := r.publication(watched, 64)
	ticking.Done() // the watcher looks for it all along
	buf := r.buffer(make([]byte, 64))
	parks := func(name string, id cuapi.ID, f func(context.Context) error) {
		t.Helper()
		trying.Store(uint32(id))
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- f(ctx) }()
		for publish.Waiting(r.rt) == 0 {
			runtime.Gosched()
		}
		tries.Store(0)
		for from := looks.Load(); looks.Load() < from+100; {
			runtime.Gosched()
		}
		n := tries.Load()
		for i := range 100 { // what is waited with is nobody's in between
			if _, err := p.FrontierReady(); err != nil {
				t.Fatalf("%s: look %d: %v", name, i, err)
			}
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if n > 3 {
			t.Errorf("%s: %d tries while nothing came free", name, n)
		}
	}
	parks("memory", cuapi.IDMemAllocFromPoolAsync, func(ctx context.Context) error {
		_, err := s.AllocContext(ctx, publish.U8, 40<<20)
		return err
	})
	release := r.hold(s)
	for r.launch(s, v) == nil {
	}
	parks("launch", cuapi.IDStreamIsCapturing, func(ctx context.Context) error {
		return s.LaunchContext(ctx, r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
	})
	parks("upload", cuapi.IDStreamIsCapturing, func(ctx context.Context) error {
		_, err := s.UploadContext(ctx, w, buf)
		return err
	})
	parks("alloc", cuapi.IDStreamIsCapturing, func(ctx context.Context) error {
		_, err := s.AllocContext(ctx, publish.U8, 64)
		return err
	})
	parks("download", cuapi.IDStreamIsCapturing, func(ctx context.Context) error {
		_, err := p.DownloadIntoContext(ctx, buf)
		return err
	})
	release()
	let()
	for _, v := range []*publish.Value{big, v, w} {
		must(t, v.Close())
	}
	must(t, p.Close())
	must(t, ticking.Close())
	must(t, buf.Close())
	must(t, s.Close())
	must(t, watched.Close())
}

// Memory that comes back while a try is under way is not missed.
func TestRoomThatJustCame(t *testing.T) {
	var closing func()
	n := 0
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		res := next()
		if c.ID == cuapi.IDMemAllocFromPoolAsync && res == cuapi.OutOfMemory {
			if n++; n == 2 || n == 4 { // the last answer of a try
				closing()
			}
		}
		return res
	}})
	s, other := r.session(), r.session()
	for range 2 {
		v, err := other.Alloc(publish.U8, 40<<20)
		must(t, err)
		must(t, other.Synchronize(r.within()))
		closing = func() { must(t, v.Close()) }
		w, err := s.AllocContext(r.within(), publish.U8, 40<<20)
		must(t, err)
		must(t, w.Close())
		r.settle()
	}
	must(t, s.Close())
	must(t, other.Close())
}

// Memory that was given back, and that a stuck reclaim stream has yet to free, is
// waited for.
func TestRoomThatIsOnItsWay(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, trace: true})
	s := r.session()
	a, err := s.Alloc(publish.U8, 64)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	var reclaim uintptr
	for _, c := range r.trace(func() { must(t, a.Close()) }) {
		if c.ID == cuapi.IDMemFreeAsync {
			reclaim = uintptr(c.Args[1])
		}
	}
	v, err := s.Alloc(publish.U8, 40<<20)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	r.sim.Hold(reclaim)
	must(t, v.Close())
	r.waiting("what is being freed", func(ctx context.Context) error {
		w, err := s.AllocContext(ctx, publish.U8, 40<<20)
		return errors.Join(err, w.Close())
	}, func() { r.sim.Release(reclaim) })
	must(t, s.Close())
}

// Nobody waits for more than there is.
func TestRoomThatNoDeviceHas(t *testing.T) {
	for _, noPools := range []bool{false, true} {
		r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20, NoPools: noPools}})
		s := r.session()
		v, err := s.Alloc(publish.U8, 1)
		must(t, err)
		for _, n := range []int{65 << 20, 1 << 40} {
			if _, err := s.AllocContext(r.within(), publish.U8, n); !errors.Is(err, driver.ErrOutOfMemory) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("without pools %v, %d bytes: %v", noPools, n, err)
			}
		}
		must(t, v.Close())
		must(t, s.Close())
	}
}

// The end of what would get the room ends the wait for it.
func TestRoomForWhatEnds(t *testing.T) {
	for what, end := range map[string]func(r *rig, s *publish.Session, p *publish.Publication) error{
		"session":     func(_ *rig, s *publish.Session, _ *publish.Publication) error { return s.Close() },
		"runtime":     func(r *rig, _ *publish.Session, _ *publish.Publication) error { return r.rt.Close() },
		"publication": func(_ *rig, _ *publish.Session, p *publish.Publication) error { return p.Close() },
	} {
		r := newRig(t, options{cfg: publish.Config{Slots: 1, Bytes: 64}})
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		p, err := s.Publish(v)
		must(t, err)
		buf := r.buffer(make([]byte, 64))
		wait := func() error {
			_, err := s.AllocContext(context.Background(), publish.U8, 64)
			return err
		}
		var full func()
		if what == "publication" { // its own stream is full
			r2, err := publish.New(r.ctx, publish.Config{})
			must(t, err)
			other, err := r2.OpenSession(nil)
			must(t, err)
			w, err := other.Alloc(publish.U8, 64)
			must(t, err)
			release := r.hold(other)
			q, err := other.Publish(w)
			must(t, err)
			x, err := other.Alloc(publish.U8, 64)
			must(t, err)
			for other.Launch(r.inc, kernel.Grid(1), publish.In(x), publish.Out(x), kernel.U32(1)) == nil {
			}
			must(t, p.Close())
			p = q
			wait = func() error {
				_, err := q.DownloadIntoContext(context.Background(), buf)
				return err
			}
			full = func() {
				release()
				must(t, x.Close())
				must(t, other.Close())
				must(t, r2.Shutdown(r.within()))
			}
		}
		done := make(chan error, 1)
		go func() { done <- wait() }()
		for publish.Waiting(r.rt) == 0 {
			runtime.Gosched()
		}
		must(t, end(r, s, p))
		var rejected *publish.RejectedError
		if err := <-done; !errors.Is(err, driver.ErrClosed) || !errors.As(err, &rejected) {
			t.Errorf("%s: %v", what, err)
		}
		if full != nil {
			full()
		}
		must(t, buf.Close())
		must(t, p.Close())
		must(t, s.Close())
	}
}

// A frontier that is complete is told so, though the download that consumed the
// publication meanwhile is unproven.
func TestAwaitTellsOfTheFrontierAlone(t *testing.T) {
	var looks atomic.Int64
	f := &trip{}
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		var pcs [64]uintptr
		frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs[:])])
		for more := c.ID == cuapi.IDEventQuery; more; {
			var at runtime.Frame
			if at, more = frames.Next(); strings.HasSuffix(at.Function, "publish.(*Publication).AwaitFrontier") {
				looks.Add(1)
			}
		}
		return f.around(c, next)
	}})
	r.keep = true
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	buf := r.buffer(make([]byte, 64))
	before := looks.Load()
	done := make(chan error, 1)
	go func() { done <- p.AwaitFrontier(r.within()) }()
	for looks.Load() == before { // it has begun
		runtime.Gosched()
	}
	f.next(cuapi.IDMemcpyDtoHAsync, cuapi.InvalidValue, false)
	_, err := p.DownloadInto(buf)
	var unproven *publish.UnprovenError
	if !errors.As(err, &unproven) {
		t.Fatal(err)
	}
	release()
	must(t, <-done)
	must(t, s.Close())
}

// A value that waits for its stream's capture to end is not open: it was closed.
func TestOriginOfAPostponedClose(t *testing.T) {
	r := newRig(t, options{cfg: publish.Config{Stacks: true}})
	s := r.session()
	addr, free := r.foreign(64)
	v, err := s.Adopt(addr, publish.U8, []int{64}, free)
	must(t, err)
	raw, err := s.Raw()
	must(t, err)
	table, g := r.sim.Table(), new(cuapi.Graph)
	table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
	must(t, v.Close())
	for _, o := range r.rt.Stats().Origins {
		if o.What == "value" {
			t.Errorf("%v", o)
		}
	}
	table.StreamEndCapture(cuapi.Stream(raw), g)
	table.GraphDestroy(*g)
	must(t, s.Close())
}
