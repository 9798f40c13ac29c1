package cudasim

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// blocked waits until n callers are blocked in the driver.
func (r *rig) blocked(n int) {
	for r.sim.Blocked() != n {
		runtime.Gosched()
	}
}

// start makes a call on another goroutine, whose thread has the context
// current, and returns when it blocks as the n-th.
func (r *rig) start(n int, call func() cuapi.Result) <-chan cuapi.Result {
	done := make(chan cuapi.Result, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if got := r.CtxPushCurrent(r.ctx); got != cuapi.Success {
			done <- got
			return
		}
		got := call()
		r.CtxPopCurrent(nil)
		done <- got
	}()
	r.blocked(n)
	return done
}

// docs/driver-facts: Stalls, the second column.
func TestStallsWhileAStreamIsHeld(t *testing.T) {
	r := newRig(t, Config{})
	held, other, ev, pl := r.stream(), r.stream(), r.event(), r.pool()
	dev, spare := r.device(8), r.device(8)
	host, _ := r.pinned(8)
	m, _ := r.function(addPTX, "none")
	r.sim.Hold(uintptr(held))

	var e2 cuapi.Event
	var st2 cuapi.Stream
	var p cuapi.DevicePtr
	var h cuapi.HostPtr
	var f cuapi.Function
	for _, got := range []cuapi.Result{ // none of these blocks
		r.EventCreate(&e2, 0), r.EventRecord(ev, other), r.EventQuery(ev), r.EventSynchronize(ev), r.StreamQuery(other),
		r.MemsetD8Async(dev, 0, 8, other), r.StreamCreate(&st2, 1), r.StreamDestroy(st2), r.MemAlloc(&p, 8), r.MemHostAlloc(&h, 8, 0),
		r.MemAllocFromPoolAsync(&p, 8, pl, other), r.MemFreeAsync(p, other), r.EventDestroy(e2),
	} {
		r.ok(got)
	}

	waiting := 0
	var done []<-chan cuapi.Result
	for _, call := range []func() cuapi.Result{
		func() cuapi.Result { return r.MemFree(spare) },
		func() cuapi.Result { return r.MemFreeHost(h) },
		func() cuapi.Result {
			return r.ModuleLoadDataEx(new(cuapi.Module), cuapi.HostPtr(cText(addPTX)), 0, nil, nil)
		},
		func() cuapi.Result { return r.ModuleGetFunction(&f, m, cText("add")) },
		func() cuapi.Result { return r.MemPoolDestroy(pl) },
	} {
		waiting++
		done = append(done, r.start(waiting, call))
	}

	// The third column: while those are stuck, so are these.
	var e3 cuapi.Event
	var st3 cuapi.Stream
	var p3 cuapi.DevicePtr
	var h3 cuapi.HostPtr
	for _, call := range []func() cuapi.Result{
		func() cuapi.Result { return r.EventRecord(ev, other) },
		func() cuapi.Result { return r.MemcpyHtoDAsync(dev, host, 8, other) },
		func() cuapi.Result { return r.EventCreate(&e3, 0) },
		func() cuapi.Result { return r.StreamCreate(&st3, 1) },
		func() cuapi.Result { return r.MemAlloc(&p3, 8) },
		func() cuapi.Result { return r.MemHostAlloc(&h3, 8, 0) },
	} {
		waiting++
		done = append(done, r.start(waiting, call))
	}
	var status int32
	for _, got := range []cuapi.Result{
		r.EventQuery(ev), r.EventSynchronize(ev), r.StreamQuery(other), r.StreamIsCapturing(other, &status),
		r.MemAllocFromPoolAsync(&p, 8, pl, other), r.MemFreeAsync(p, other),
	} {
		r.ok(got)
	}
	r.want(cuapi.NotReady, r.StreamQuery(held))
	r.blocked(waiting)
	r.sim.ReleaseAll()
	for _, d := range done {
		r.ok(<-d)
	}
	r.clean()
}

// docs/driver-facts: A full stream blocks.
func TestFullStreamBlocks(t *testing.T) {
	r := newRig(t, Config{})
	held, other, ev, dev, pl := r.stream(), r.stream(), r.event(), r.device(8), r.pool()
	r.sim.Hold(uintptr(held))
	for range 5000 { // records, waits and pool allocations do not count
		r.ok(r.EventRecord(ev, held))
		r.ok(r.StreamWaitEvent(held, ev, 0))
		var p cuapi.DevicePtr
		r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, held))
		r.ok(r.MemFreeAsync(p, held))
	}
	for range 1021 {
		r.ok(r.MemsetD8Async(dev, 0, 8, held))
	}
	full := r.start(1, func() cuapi.Result { return r.MemsetD8Async(dev, 0, 8, held) })
	var e cuapi.Event
	var h cuapi.HostPtr
	create := r.start(2, func() cuapi.Result { return r.EventCreate(&e, 0) })
	host := r.start(3, func() cuapi.Result { return r.MemHostAlloc(&h, 8, 0) })
	for _, got := range []cuapi.Result{
		r.StreamQuery(other), r.EventRecord(ev, other), r.EventQuery(ev), r.MemsetD8Async(dev, 0, 8, other), r.MemFreeAsync(0, other),
	}[:4] {
		r.ok(got)
	}
	r.sim.ReleaseAll()
	r.ok(<-full)
	r.ok(<-create)
	r.ok(<-host)
}

// docs/driver-facts: Held streams hold others.
func TestHeldStreamsHoldOthers(t *testing.T) {
	for held, want := range map[int]int{1: 16, 5: 16, 6: 12, 7: 7, 8: 0, 12: 0} {
		r := newRig(t, Config{})
		for range held {
			r.sim.Hold(uintptr(r.stream()))
		}
		ran := 0
		for range 16 {
			st, ev := r.stream(), r.event()
			r.ok(r.EventRecord(ev, st))
			if r.EventQuery(ev) == cuapi.Success {
				ran++
			}
		}
		if ran != want {
			t.Errorf("%d held: work on %d of 16 other streams completed, want %d", held, ran, want)
		}
		r.sim.ReleaseAll()
		r.ok(r.CtxSynchronize())
		r.clean()
	}
}

func TestMoreHardwareQueues(t *testing.T) {
	r := newRig(t, Config{HardwareQueues: 32})
	for range 16 {
		r.sim.Hold(uintptr(r.stream()))
	}
	r.ok(r.EventRecord(r.event(), r.stream()))
	st, ev := r.stream(), r.event()
	r.ok(r.EventRecord(ev, st))
	r.ok(r.EventQuery(ev))
}

func TestWaitsBlockUntilTheWorkIsDone(t *testing.T) {
	r := newRig(t, Config{})
	st, ev := r.stream(), r.event()
	r.sim.Hold(uintptr(st))
	r.ok(r.EventRecord(ev, st))
	waits := []<-chan cuapi.Result{
		r.start(1, func() cuapi.Result { return r.EventSynchronize(ev) }),
		r.start(2, func() cuapi.Result { return r.StreamSynchronize(st) }),
		r.start(3, r.CtxSynchronize),
	}
	r.sim.Release(uintptr(st))
	for _, w := range waits {
		r.ok(<-w)
	}
	r.clean()
}

func TestCloseEndsWhoBlocks(t *testing.T) {
	r := newRig(t, Config{})
	st := r.stream()
	r.sim.Hold(uintptr(st))
	w := r.start(1, func() cuapi.Result { return r.StreamSynchronize(st) })
	if r.sim.Close() == nil {
		t.Error("Close reports nothing")
	}
	r.want(cuapi.Deinitialized, <-w)
	r.want(cuapi.Deinitialized, r.StreamQuery(st))
}

func TestNoBlock(t *testing.T) {
	r := newRig(t, Config{NoBlock: true})
	st, p := r.stream(), r.device(8)
	r.sim.Hold(uintptr(st))
	r.want(cuapi.NotReady, r.MemFree(p))
	r.want(cuapi.NotReady, r.StreamSynchronize(st))
	if got := r.kinds(); len(got) != 2 || got[0] != Blocks || got[1] != Blocks {
		t.Errorf("violations %v", got)
	}
}

// A blocked call is durably blocked in a testing/synctest bubble, so tests may
// wait for it to block, and virtual time passes meanwhile.
func TestBlocksDurably(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		st := r.stream()
		flag, word := r.pinned(4)
		storeFlag(word, 0)
		r.sim.Hold(uintptr(st))
		var got cuapi.Result = -1
		go func() { got = r.StreamSynchronize(st) }()
		synctest.Wait()
		if got != -1 || r.sim.Blocked() != 1 {
			t.Fatalf("result %d, %d blocked", got, r.sim.Blocked())
		}
		r.sim.Release(uintptr(st))
		synctest.Wait()
		r.ok(got)

		r.ok(r.StreamWaitValue32(st, cuapi.DevicePtr(hostAddress(flag)), 1, 0))
		time.AfterFunc(time.Second, func() { storeFlag(word, 1) })
		r.ok(r.StreamSynchronize(st))
		r.clean()
	})
}
