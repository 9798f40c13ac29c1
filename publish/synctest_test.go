package publish_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// In a bubble of testing/synctest a wait for the device is no durable blocking:
// the tests release a stream and wait for who waits, and never synctest.Wait.

// watched starts the watcher, outside every bubble, and keeps it running.
func watched(r *rig) (end func()) {
	r.t.Helper()
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	done := p.Done()
	return func() {
		release()
		<-done
		must(r.t, p.Close())
		must(r.t, s.Close())
	}
}

// waits goes through every wait of a runtime, each begun before its stream goes
// on, and ends the runtime.
func waits(t *testing.T, r *rig) {
	t.Helper()
	rt, err := publish.New(r.ctx, publish.Config{})
	must(t, err)
	all := *r // the same machine, another runtime
	all.t, all.rt = t, rt
	r = &all
	s := r.session()
	during := func(what string, wait func() error) {
		t.Helper()
		release := r.hold(s)
		done := make(chan error)
		go func() { done <- wait() }()
		runtime.Gosched()
		release()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	var p *publish.Publication
	var want []byte
	again := func() {
		t.Helper()
		if p != nil {
			must(t, p.Close())
		}
		p, want = r.publication(s, 64)
	}
	for range 3 {
		again()
		during("AwaitFrontier of what is done, or not", func() error { return p.AwaitFrontier(r.within()) })
		release := r.hold(s)
		again()
		done := make(chan error)
		for range 2 { // one of them spins
			go func() { done <- p.AwaitFrontier(r.within()) }()
		}
		ch := p.Done()
		release()
		<-ch
		must(t, <-done)
		must(t, <-done)

		release = r.hold(s)
		again()
		tr, err := p.DownloadInto(r.buffer(make([]byte, len(want))))
		must(t, err)
		p = nil
		ch = tr.Done()
		go func() {
			<-ch
			done <- nil
		}()
		go func() {
			out, err := tr.Wait(r.within())
			if err == nil && !bytes.Equal(out.Bytes(), want) {
				err = errors.New("other bytes")
			}
			if err == nil {
				err = out.Close()
			}
			done <- err
		}()
		release()
		must(t, <-done)
		must(t, <-done)
		during("Synchronize", func() error { return s.Synchronize(r.within()) })
	}
	release := r.hold(s)
	again()
	must(t, p.Close())
	must(t, s.Close())
	done := make(chan error)
	go func() { done <- rt.Shutdown(r.within()) }()
	runtime.Gosched()
	release()
	must(t, <-done)
}

func TestSynctestInsideABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { waits(t, newRig(t, options{})) })
}

// The simulator and the watcher are older than the bubble.
func TestSynctestWatcherOutside(t *testing.T) {
	r := newRig(t, options{})
	end := watched(r)
	synctest.Test(t, func(t *testing.T) { waits(t, r) })
	waits(t, r)
	end()
	synctest.Test(t, func(t *testing.T) { waits(t, r) })
}

// A bubble starts the watcher; what waits is outside, while the bubble lasts and
// after it.
func TestSynctestStartedInside(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	outside := make(chan error)
	started := make(chan struct{})
	go func() {
		<-started
		outside <- p.AwaitFrontier(r.within())
	}()
	synctest.Test(t, func(t *testing.T) {
		p.Done()
		close(started)
		waits(t, r)
	})
	release()
	must(t, <-outside)
	must(t, p.Close())
	must(t, s.Close())
}

// Bubbles beside each other and code in none share a context.
func TestSynctestManyBubbles(t *testing.T) {
	r := newRig(t, options{})
	t.Run("group", func(t *testing.T) {
		for range 4 {
			t.Run("bubble", func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { waits(t, r) })
			})
			t.Run("none", func(t *testing.T) {
				t.Parallel()
				waits(t, r)
			})
		}
	})
}

// A cleanup wakes the watcher while a bubble waits for it.
func TestSynctestCleanup(t *testing.T) {
	var outer *rig
	run := func(t *testing.T) {
		var r *rig
		if outer != nil {
			all := *outer
			all.t, r = t, &all
		} else {
			r = newRig(t, options{})
			r.keep = true
		}
		before := r.rt.Stats().Abandoned
		s := r.session()
		release := r.hold(s)
		func() {
			p, _ := r.publication(s, 64)
			_ = p.Bytes()
		}()
		p, _ := r.publication(s, 64)
		done := make(chan error)
		go func() { done <- p.AwaitFrontier(context.Background()) }()
		collect(t, func() bool { return r.rt.Stats().Abandoned > before })
		release()
		must(t, <-done)
		must(t, p.Close())
		must(t, s.Close())
		must(t, r.rt.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within()))
		must(t, r.sim.Close())
	}
	synctest.Test(t, run)
	outer = newRig(t, options{})
	outer.keep = true
	synctest.Test(t, run)
}

// A bubble's cancellation ends a wait, and so does its clock where the deadline
// has passed. While somebody waits for the device that clock stands still.
func TestSynctestContext(t *testing.T) {
	r := newRig(t, options{})
	end := watched(r)
	test := func(t *testing.T, r *rig) {
		s := r.session()
		release := r.hold(s)
		p, want := r.publication(s, 64)
		tr, err := p.DownloadInto(r.buffer(make([]byte, len(want))))
		must(t, err)
		p, _ = r.publication(s, 64)
		all := map[string]func(context.Context) error{
			"AwaitFrontier": p.AwaitFrontier,
			"Wait":          func(ctx context.Context) error { _, err := tr.Wait(ctx); return err },
			"Synchronize":   s.Synchronize,
		}
		for what, wait := range all {
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error)
			go func() { done <- wait(ctx) }()
			for range 100 {
				runtime.Gosched() // into the parked wait, most of the time
			}
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", what, err)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		<-time.After(2 * time.Hour) // nobody waits for the device
		for what, wait := range all {
			if err := wait(ctx); err != context.DeadlineExceeded {
				t.Errorf("%s: %v", what, err)
			}
		}

		// Here somebody does, and the hour does not come.
		ctx, cancel = context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		began := time.Now()
		done := make(chan error)
		go func() { done <- p.AwaitFrontier(ctx) }()
		runtime.GC() // in real time
		release()
		must(t, <-done)
		if d := time.Since(began); d != 0 {
			t.Errorf("the wait took %v of the bubble's time", d)
		}
		must(t, p.Close())
		r.finish(tr, want)
		must(t, s.Close())
	}
	synctest.Test(t, func(t *testing.T) {
		inner := *r
		inner.t = t
		test(t, &inner)
	})
	end()
	synctest.Test(t, func(t *testing.T) { test(t, newRig(t, options{})) })
}

// A context is made, lost and shut down in one bubble, and that is seen in
// another and in none.
func TestSynctestContextOfAnotherBubble(t *testing.T) {
	var bad atomic.Bool
	sim := cudasim.New(cudasim.Config{})
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if bad.Load() && c.ID == cuapi.IDEventQuery {
			return cuapi.IllegalAddress
		}
		return next()
	}
	if res := sim.Table().Init(0); res != cuapi.Success {
		t.Fatal(res)
	}
	drv, err := wire.NewDriver(cuapi.Intercept(sim.Table(), around), "simulator")
	must(t, err)
	dev, err := drv.(*driver.Driver).Device(0)
	must(t, err)
	bubble := func(f func(t *testing.T)) { synctest.Test(t, f) }
	none := func(f func(t *testing.T)) { f(t) }
	for _, where := range [][3]func(func(*testing.T)){{bubble, none, bubble}, {none, bubble, none}, {bubble, bubble, none}} {
		var ctx *driver.Context
		where[0](func(t *testing.T) {
			var err error
			ctx, err = dev.Primary()
			must(t, err)
		})
		where[1](func(t *testing.T) {
			same, err := dev.Primary()
			must(t, err)
			if same != ctx {
				t.Error("another context")
			}
			must(t, same.Shutdown(context.Background()))
		})
		where[2](func(t *testing.T) { must(t, ctx.Shutdown(context.Background())) })
		where[0](func(t *testing.T) { must(t, ctx.Shutdown(context.Background())) })
	}

	r := newRig(t, options{around: around})
	r.keep = true
	s := r.session()
	release := r.hold(s)
	lost := make(chan struct{})
	go func() { <-r.rt.Lost(); close(lost) }()
	synctest.Test(t, func(t *testing.T) {
		p, _ := r.publication(s, 64)
		done := make(chan error)
		go func() { done <- p.AwaitFrontier(context.Background()) }()
		go func() { <-r.rt.Lost(); done <- r.rt.Err() }()
		bad.Store(true)
		for range 2 {
			if err := <-done; !errors.Is(err, driver.ErrIllegalAddress) {
				t.Error(err)
			}
		}
	})
	<-lost
	bad.Store(false)
	release()
}
