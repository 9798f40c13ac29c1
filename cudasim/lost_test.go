package cudasim

import (
	"errors"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// docs/driver-facts: a kernel that stores to address 16.
func TestLostContext(t *testing.T) {
	r := newRig(t, Config{})
	st, done, late, dev := r.stream(), r.event(), r.event(), r.device(8)
	host, _ := r.pinned(8)
	_, f := r.function(addPTX, "add")
	r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0] = 1 })
	r.ok(r.EventRecord(done, st))
	r.ok(r.launch(f, st, arg(uint64(16)), arg(uint32(4)), arg(float32(9))))
	r.ok(r.EventRecord(late, st))
	r.ok(r.MemcpyDtoHAsync(host, dev, 8, st))
	const lost = cuapi.IllegalAddress
	r.want(lost, r.EventSynchronize(late))
	for _, got := range []cuapi.Result{
		r.EventQuery(done), r.EventCreate(&late, 0), r.EventDestroy(done), r.EventRecord(done, st),
		r.MemcpyDtoHAsync(host, dev, 8, st), r.MemAlloc(&dev, 8), r.MemFree(dev), r.MemFreeHost(host), r.CtxSynchronize(),
		r.StreamQuery(st), r.StreamSynchronize(st),
	} {
		r.want(lost, got)
	}
	r.ok(r.DevicePrimaryCtxRelease(0))
	var closed *CloseError
	if err := r.sim.Close(); !errors.As(err, &closed) || len(closed.Left) > 0 || len(closed.Violations) != 1 || closed.Violations[0].Kind != WildAddress {
		t.Errorf("want the wild address alone, and nothing of a lost context as left alive: %v", err)
	}
}

// A context lost from outside, with work pending.
func TestLose(t *testing.T) {
	r := newRig(t, Config{Devices: 3, Stepped: true})
	st, dev, ev := r.stream(), r.device(8), r.event()
	r.ok(r.MemsetD8Async(dev, 0, 8, st))
	r.ok(r.EventRecord(ev, st))
	waits := r.start(1, func() cuapi.Result { return r.EventSynchronize(ev) })
	const ecc = 214
	r.sim.Lose(0, ecc)
	r.want(ecc, <-waits)
	r.sim.Lose(0, 719) // the first stays
	for _, got := range []cuapi.Result{r.EventQuery(ev), r.MemsetD8Async(dev, 0, 8, st), r.MemFree(dev), r.CtxSynchronize()} {
		r.want(ecc, got)
	}
	if r.sim.Step() {
		t.Error("something ran on a lost device")
	}
	// Another device goes on, and one that nobody used is lost all the same.
	other := r.newContextStream()
	r.ok(r.EventRecord(r.event(), other))
	r.steps()
	r.ok(r.StreamSynchronize(other))
	r.sim.Lose(2, ecc)
	var third cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&third, 2))
	r.ok(r.CtxSetCurrent(third))
	r.want(ecc, r.MemAlloc(&dev, 8))
	for _, bad := range [][2]int{{3, ecc}, {-1, ecc}, {1, 0}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("device %d and code %d are taken", bad[0], bad[1])
				}
			}()
			r.sim.Lose(bad[0], bad[1])
		}()
	}
	r.clean()
}

// A size beyond all bounds is refused, also where an offset is added to it.
func TestSizesBeyondBounds(t *testing.T) {
	r := newRig(t, Config{PinnedMemory: 1 << 20})
	st, d, most := r.stream(), r.device(64), ^uintptr(0)
	h, data := r.pinned(64)
	_, f := r.function(addPTX, "none")
	r2 := newRig(t, Config{}) // with no limit
	r.want(cuapi.InvalidValue, r.MemsetD8Async(d+1, 0, most, st))
	r.want(cuapi.InvalidValue, r.MemcpyAsync(d+1, d+8, most, st))
	r.want(cuapi.InvalidValue, r.MemcpyHtoDAsync(d+1, h, most, st))
	r.want(cuapi.InvalidValue, r.MemcpyDtoHAsync(h, d+1, most, st))
	r.want(cuapi.InvalidValue, r.MemHostRegister(hostPtr(make([]byte, 64)), most, 0))
	var p cuapi.HostPtr
	for _, n := range []uintptr{most, most - 3, 1 << 62} {
		r.want(cuapi.OutOfMemory, r.MemHostAlloc(&p, n, 0))
		r2.ok(r2.CtxSetCurrent(r2.ctx))
		r2.want(cuapi.OutOfMemory, r2.MemHostAlloc(&p, n, 0))
	}
	var grid, n int32
	for _, shared := range []uintptr{most - 1023, most} {
		r.ok(r.OccupancyMaxActiveBlocksPerMultiprocessor(&n, f, 32, shared))
		r.ok(r.OccupancyMaxPotentialBlockSize(&grid, &n, f, 0, shared, 0))
		if grid != 0 || n != 0 {
			t.Errorf("%d blocks of %d threads with %d bytes of shared memory", grid, n, shared)
		}
	}
	if data[0] != freshByte {
		t.Error("something was written")
	}
	r.clean()
}

// All the time that there is runs everything.
func TestAdvanceForEver(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	r.sim.Advance(time.Second)
	r.ok(r.EventRecord(r.event(), r.stream()))
	if n := r.sim.Advance(math.MaxInt64); n != 1 {
		t.Errorf("%d operations ran, not 1", n)
	}
}

// Where nothing is held every stream runs, however few queues there are.
func TestFewQueues(t *testing.T) {
	for n := 1; n < 4; n++ {
		r := newRig(t, Config{HardwareQueues: n})
		ran := 0
		fn := r.sim.HostFunc(func() { ran++ })
		for range 20 {
			r.ok(r.LaunchHostFunc(r.stream(), fn, 0))
		}
		if ran != 20 {
			t.Errorf("with %d queues %d of 20 streams ran", n, ran)
		}
	}
}

// A caller that blocked in stepped mode sees what the host writes afterwards.
func TestSteppedOffUnderAWait(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st := r.stream()
	p, word := r.pinned(4)
	storeFlag(word, 0)
	r.ok(r.StreamWaitValue32(st, cuapi.DevicePtr(hostAddress(p)), 1, cuapi.StreamWaitValueEQ))
	done := r.blocks(func() cuapi.Result { return r.StreamSynchronize(st) })
	r.sim.SetStepped(false)
	storeFlag(word, 1)
	r.goesOn(done, cuapi.Success)
}

// blocks starts a call and returns once it blocks.
func (r *rig) blocks(call func() cuapi.Result) <-chan cuapi.Result {
	done, before := make(chan cuapi.Result, 1), r.sim.Blocked()
	go func() { done <- call() }()
	for r.sim.Blocked() == before {
		runtime.Gosched()
	}
	return done
}

func (r *rig) goesOn(done <-chan cuapi.Result, want cuapi.Result) {
	r.Helper()
	select {
	case got := <-done:
		r.want(want, got)
	case <-time.After(10 * time.Second):
		r.Fatal("the call blocks for ever")
	}
}

// What waits for a context that is lost or destroyed goes on: callers, and streams
// of other devices.
func TestWaitsForWhatIsGone(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(*rig)
		code cuapi.Result
	}{
		"lost":      {func(r *rig) { r.sim.Lose(0, int(cuapi.IllegalAddress)) }, cuapi.IllegalAddress},
		"destroyed": {func(r *rig) { r.ok(r.DevicePrimaryCtxRelease(0)) }, cuapi.ContextIsDestroyed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 2})
			st, e := r.stream(), r.event()
			r.sim.Hold(uintptr(st))
			r.ok(r.EventRecord(e, st))
			var other cuapi.Context
			r.ok(r.DevicePrimaryCtxRetain(&other, 1))
			r.ok(r.CtxSetCurrent(other))
			behind := r.stream()
			r.ok(r.StreamWaitEvent(behind, e, 0))
			host := r.blocks(func() cuapi.Result { return r.EventSynchronize(e) })
			device := r.blocks(func() cuapi.Result { return r.StreamSynchronize(behind) })
			c.end(r)
			r.goesOn(host, c.code)
			r.goesOn(device, cuapi.Success)
		})
	}
}

// A kernel or a host function that ends its goroutine, as t.FailNow does, ends as an
// operation all the same: what is behind it runs.
func TestFunctionsThatEndTheirGoroutine(t *testing.T) {
	for name, enqueue := range map[string]func(r *rig, f cuapi.Function, st cuapi.Stream) cuapi.Result{
		"kernel": func(r *rig, f cuapi.Function, st cuapi.Stream) cuapi.Result { return r.launch(f, st) },
		"host function": func(r *rig, _ cuapi.Function, st cuapi.Stream) cuapi.Result {
			return r.LaunchHostFunc(st, r.sim.HostFunc(runtime.Goexit), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{})
			_, f := r.function(addPTX, "none")
			r.sim.Kernel("none", func(*Launch) { runtime.Goexit() })
			st := r.stream()
			r.sim.Hold(uintptr(st))
			r.ok(enqueue(r, f, st))
			r.ok(r.EventRecord(r.event(), st))
			done := r.blocks(func() cuapi.Result { return r.StreamSynchronize(st) })
			end := make(chan bool)
			go func() {
				defer close(end)
				r.sim.Release(uintptr(st))
			}()
			<-end
			r.goesOn(done, cuapi.Success)
		})
	}
}

// ForTest tells what was found also where the test closed the simulator itself, and
// dropped the error.
func TestForTestBehindAClose(t *testing.T) {
	rec := new(fakeT)
	s := ForTest(rec, Config{})
	s.Table().Init(0)
	s.Table().StreamDestroy(0x4711)
	s.Close()
	rec.cleanup()
	if len(rec.failures) != 1 {
		t.Errorf("%q, not one violation", rec.failures)
	}
}
