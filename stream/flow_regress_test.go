package stream_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/stream"
)

// over ends the context with all that the rig made.
func (r *rig) over() {
	r.t.Helper()
	r.current(func() cuapi.Result { return r.core.Table.CtxSynchronize() })
	r.current(func() cuapi.Result { return r.core.Table.MemFree(r.dev) })
	r.current(func() cuapi.Result { return r.core.Table.MemFreeHost(r.host) })
	must(r.t, r.ctx.Shutdown(r.within()))
}

// A look for room that is under way while the context shuts down asks for no
// stream that is destroyed.
func TestALookForRoomBesideShutdown(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true
	var lanes []*stream.Lane
	for range 2 {
		l, err := stream.Take(r.core)
		must(t, err)
		must(t, r.fill(l))
		lanes = append(lanes, l)
	}
	asked, end := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDStreamQuery && first.CompareAndSwap(false, true) {
			close(asked)
			<-end
		}
		if c.ID == cuapi.IDCtxSynchronize {
			defer close(end) // the look goes on beside what follows
			r.hook.Store(nil)
		}
		return next()
	})
	r.hook.Store(&h)
	_, stop := stream.AwaitCredits(r.core)
	<-asked
	stop()
	for _, l := range lanes {
		l.Drop()
	}
	r.over()
	until(t, func() bool { return !stream.WatcherOf(r.core).Running() })
}

// A stream is exposed, and captures, beside a look for room.
func TestALookForRoomBesideACapture(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	must(t, r.upload(l).Wait(r.within()))
	must(t, r.fill(l))
	var first atomic.Bool
	captures := make(chan struct{})
	h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDStreamQuery && first.CompareAndSwap(false, true) {
			begun := make(chan struct{})
			go func() {
				close(begun)
				raw := l.Expose()
				r.current(func() cuapi.Result {
					return r.core.Table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
				})
				close(captures)
			}()
			<-begun
		}
		return next()
	})
	r.hook.Store(&h)
	stream.LookForRoom(r.core)
	<-captures
	r.hook.Store(nil)
	stream.LookForRoom(r.core)
	g := new(cuapi.Graph)
	r.ok(r.core.Table.StreamEndCapture(l.Handle(), g))
	r.ok(r.core.Table.GraphDestroy(*g))
}

// Operations that failed are in flight until they are known not to be, in
// streams that other code knows as well.
func TestCreditsOfFailedOperationsReturn(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	for range 3 {
		for range 40 {
			l, err := stream.Take(r.core)
			must(t, err)
			l.Expose()
			for range 30 {
				r.fail(cuapi.IDMemsetD8Async, 0, cuapi.InvalidValue, false)
				if err := r.fill(l); !isEnqueued(err) {
					t.Fatal(err)
				}
			}
			l.Drop()
		}
	}
	r.hook.Store(nil)
	l := r.lane()
	l.Expose()
	m := r.upload(l)
	r.fail(cuapi.IDEventQuery, 0, cuapi.InvalidValue, false)
	if _, err := m.Poll(); err == nil {
		t.Fatal("a failed query is no error")
	}
	r.hook.Store(nil)
	must(t, r.fill(l))
	l.Poll()
	if n := l.InFlight(); n != 0 {
		t.Errorf("%d in flight", n)
	}
	r.keep = true // events were lost with what failed
}

// Adopted streams that were let go are forgotten once their work is done.
func TestAdoptedStreamsDoNotPileUp(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	h := new(cuapi.Stream)
	r.current(func() cuapi.Result { return r.core.Table.StreamCreate(h, cuapi.StreamNonBlocking) })
	before := stream.Idle(r.core)
	for range 1000 {
		st, err := stream.Adopt(r.ctx, uintptr(*h))
		must(t, err)
		l := r.pin(st)
		must(t, r.fill(l))
		l.Drop()
		must(t, st.Close())
	}
	until(t, func() bool { return !stream.WatcherOf(r.core).Running() })
	st, err := stream.Adopt(r.ctx, uintptr(*h))
	must(t, err)
	must(t, st.Close())
	if n := stream.Idle(r.core) - before; n > 1 {
		t.Errorf("%d lanes are kept of one adopted stream", n)
	}
	r.ok(r.core.Table.StreamDestroy(*h))
}

// What is pending in an adopted stream counts, though nothing tells when it is
// done.
func TestAdoptedStreamsKeepTheirCredits(t *testing.T) {
	r := newRig(t, cudasim.Config{NoBlock: true})
	r.keep = true
	h := new(cuapi.Stream)
	r.current(func() cuapi.Result { return r.core.Table.StreamCreate(h, cuapi.StreamNonBlocking) })
	r.sim.Hold(uintptr(*h))
	none := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventRecord {
			return cuapi.OutOfMemory
		}
		return next()
	})
	r.hook.Store(&none)
	n := 0
	for ; ; n++ {
		st, err := stream.Adopt(r.ctx, uintptr(*h))
		must(t, err)
		l := r.pin(st)
		err = r.fill(l)
		l.Drop()
		must(t, st.Close())
		if err != nil {
			break
		}
		x, err := stream.Take(r.core)
		must(t, err)
		x.Drop()
	}
	if n > stream.Bound {
		t.Errorf("%d operations are pending in one stream", n)
	}
}

// Credits are conserved whatever fails beside whatever looks.
func TestCreditsHammer(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true // events are lost with what fails
	var lanes []*stream.Lane
	for range 6 {
		lanes = append(lanes, r.lane())
	}
	h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		switch {
		case c.ID == cuapi.IDEventRecord && rand.IntN(50) == 0:
			return cuapi.InvalidValue
		case c.ID == cuapi.IDMemsetD8Async && rand.IntN(50) == 0:
			next()
			return cuapi.InvalidValue
		}
		return next()
	})
	r.hook.Store(&h)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for range 1000 {
				l := lanes[rand.IntN(len(lanes))]
				switch rand.IntN(7) {
				case 0, 1, 2:
					r.fill(l)
				case 3:
					m := new(stream.Mark)
					if l.Upload(r.dev, r.host, size, m) == nil && rand.IntN(2) == 0 {
						m.Want()
					}
				case 4:
					l.Fence(new(stream.Mark), l.Issued())
				case 5:
					stream.LookForRoom(r.core)
				case 6:
					lanes[0].Expose()
					_, stop := stream.AwaitCredits(r.core)
					stop()
				}
				if n := l.InFlight(); n < 0 || n > stream.Bound {
					t.Errorf("%d in flight", n)
				}
			}
		})
	}
	wg.Wait()
	r.hook.Store(nil)
	for _, l := range lanes {
		must(t, l.Synchronize(r.within()))
	}
	stream.LookForRoom(r.core)
	if n := r.inFlight(lanes...); n != 0 {
		t.Errorf("%d in flight, with nothing enqueued", n)
	}
	release := r.hold(lanes[1])
	n := 0
	for r.fill(lanes[1]) == nil {
		n++
	}
	if n != stream.Credits {
		t.Errorf("%d credits, want %d", n, stream.Credits)
	}
	release()
}
