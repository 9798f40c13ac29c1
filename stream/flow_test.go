package stream_test

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// Streams share the device's queues, so that what stands in many of them fills
// the driver though none is full. The library refuses in time, whatever the
// order, and a stream that moves has room all along.
func TestAFullContextIsRefused(t *testing.T) {
	for _, queues := range []int{8, 128} { // where 8 are held, nothing else moves
		fullContext(t, queues)
	}
}

func fullContext(t *testing.T, queues int) {
	r := newRig(t, cudasim.Config{HardwareQueues: queues})
	moving := r.lane()
	var held []*stream.Lane
	var releases []func()
	for range 64 {
		l := r.lane()
		held = append(held, l)
		releases = append(releases, r.hold(l))
	}
	total := 0
	share := stream.Credits
	for i, l := range held {
		n := 0
		var err error
		for ; err == nil; n++ {
			err = r.fill(l)
		}
		n--
		if !errors.Is(err, stream.ErrFull) && !errors.Is(err, stream.ErrContextFull) || isEnqueued(err) {
			t.Fatalf("stream %d: %v", i, err)
		}
		if i < 4 && n != share {
			t.Errorf("stream %d beside %d others took %d, want %d", i, i, n, share)
		}
		share /= 2
		total += n
	}
	if total > stream.Bound || total != r.inFlight(held...) {
		t.Errorf("%d operations are in flight, the bound is %d", total, stream.Bound)
	}
	if n := r.sim.Blocked(); n > 0 {
		t.Errorf("%d enqueues blocked", n)
	}
	if err := r.fill(moving); !errors.Is(err, stream.ErrContextFull) {
		t.Errorf("with everything in flight: %v", err)
	}
	if queues < len(held) {
		for _, release := range releases {
			release()
		}
	}
	releases[0]()
	for range 3 * stream.Bound {
		must(t, r.fill(moving))
	}
	for _, release := range releases {
		release()
	}
	for _, l := range held {
		must(t, r.fill(l))
	}
}

func (r *rig) inFlight(lanes ...*stream.Lane) (n int) {
	for _, l := range lanes {
		n += l.InFlight()
	}
	return n
}

// Operations that no mark is behind are asked for when their credits are
// needed, in lanes that nobody uses too.
func TestForgottenCreditsReturn(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	var lanes []*stream.Lane
	for range 40 {
		l, err := stream.Take(r.core)
		must(t, err)
		release := r.hold(l) // or the next one is the same again
		for range 20 {
			must(t, r.fill(l))
		}
		lanes = append(lanes, l)
		defer l.Drop()
		release()
	}
	if n := r.inFlight(lanes...); n > stream.Bound {
		t.Errorf("%d in flight", n)
	}
}

// Where other code knows a stream it may capture: it is never queried on behalf
// of another one.
func TestNoQueryOfAnExposedStream(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	exposed, busy := r.lane(), r.lane()
	must(t, r.fill(exposed))
	r.sim.StartTrace()
	exposed.Expose()
	if r.calls(cuapi.IDEventRecord) != 1 {
		t.Error("what was enqueued before has no mark")
	}
	must(t, r.fill(exposed))
	release := r.hold(busy)
	for r.fill(busy) == nil {
	}
	for _, c := range r.sim.Trace() {
		if c.ID == cuapi.IDStreamQuery && c.Args[0] == uint64(exposed.Handle()) {
			t.Fatal("a stream that other code knows was queried")
		}
	}
	if exposed.InFlight() != 0 {
		t.Errorf("%d in flight", exposed.InFlight())
	}
	release()
}

// An adopted stream that was let go gives back what it took.
func TestAdoptedStreamsGiveTheirCreditsBack(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	for range 3 * stream.Bound {
		h := new(cuapi.Stream)
		r.current(func() cuapi.Result { return r.core.Table.StreamCreate(h, cuapi.StreamNonBlocking) })
		st, err := stream.Adopt(r.ctx, uintptr(*h))
		must(t, err)
		l := r.pin(st)
		must(t, r.fill(l))
		l.Drop()
		must(t, st.Close())
		r.ok(r.core.Table.StreamDestroy(*h))
		r.lane().Drop() // looks at idle lanes
		r.used = nil
	}
}

// Many goroutines wait for room behind held streams; all of them get it.
func TestAwaitRoom(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	held := r.lane()
	release := r.hold(held)
	for r.fill(held) == nil {
	}
	var wg sync.WaitGroup
	var refused atomic.Int64
	for range 50 {
		wg.Go(func() {
			for {
				freed, stop := stream.AwaitCredits(r.core)
				err := r.fill(held)
				if err == nil {
					stop()
					return
				}
				refused.Add(1)
				<-freed
				stop()
			}
		})
	}
	until(t, func() bool { return refused.Load() == 50 })
	release()
	wg.Wait()
	until(t, func() bool { runtime.Gosched(); return !stream.WatcherOf(r.core).Running() })
}

func (r *rig) pin(st *stream.Stream) *stream.Lane {
	r.t.Helper()
	l, err := wire.PinLane(st)
	must(r.t, err)
	return l.(*stream.Lane)
}
