package cudasim

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// steps runs what can run, and returns how many operations that were.
func (r *rig) steps() (n int) {
	for r.sim.Step() {
		n++
	}
	return n
}

func TestNothingRunsBeforeItsStep(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st, ev, dev := r.stream(), r.event(), r.device(4)
	host, mem := r.pinned(4)
	r.ok(r.MemsetD8Async(dev, 7, 4, st))
	r.ok(r.MemcpyDtoHAsync(host, dev, 4, st))
	r.ok(r.EventRecord(ev, st))
	for _, want := range []byte{flightByte, 7} {
		if !r.sim.Step() {
			t.Fatal("nothing to run")
		}
		if mem[0] != want {
			t.Fatalf("the host sees %#x, want %#x", mem[0], want)
		}
		r.want(cuapi.NotReady, r.EventQuery(ev))
		r.want(cuapi.NotReady, r.StreamQuery(st))
	}
	if !r.sim.Step() || r.sim.Step() {
		t.Error("want one more operation, and no other")
	}
	r.ok(r.EventQuery(ev))
	r.ok(r.StreamQuery(st))
	r.clean()
}

// Of the streams named the operation enqueued first runs, whatever the order of
// the names, and what is not named stays.
func TestStepChoosesAStream(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	a, b, ea, eb := r.stream(), r.stream(), r.event(), r.event()
	r.ok(r.EventRecord(ea, a))
	r.ok(r.EventRecord(eb, b))
	if !r.sim.Step(uintptr(b)) || r.sim.Step(uintptr(b)) {
		t.Error("want one operation in b, and no other")
	}
	r.ok(r.EventQuery(eb))
	r.want(cuapi.NotReady, r.EventQuery(ea))
	r.ok(r.EventRecord(eb, b))
	if !r.sim.Step(uintptr(b), uintptr(a)) {
		t.Error("nothing to run")
	}
	r.ok(r.EventQuery(ea)) // the older one
	r.want(cuapi.NotReady, r.EventQuery(eb))
	if n := r.steps(); n != 1 {
		t.Errorf("%d more operations", n)
	}
	r.clean()
}

func TestStepSkipsWhatIsHeldOrWaits(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	held, waits, flagged, sems := r.stream(), r.stream(), r.stream(), r.stream()
	ev, dev := r.event(), r.device(4)
	flag, word := r.pinned(4)
	storeFlag(word, 0)
	w, _ := r.HostWait()
	sem, _ := r.pinned(cuapi.SemaphoreBytes)
	w.Init(sem)

	r.sim.Hold(uintptr(held))
	r.ok(r.EventRecord(ev, held))
	r.ok(r.StreamWaitEvent(waits, ev, 0))
	r.ok(r.MemsetD8Async(dev, 1, 4, waits))
	r.ok(r.StreamWaitValue32(flagged, cuapi.DevicePtr(hostAddress(flag)), 1, cuapi.StreamWaitValueEQ))
	r.ok(r.LaunchHostFunc(sems, w.Wait, uintptr(hostAddress(sem))))
	if n := r.steps(); n != 0 {
		t.Fatalf("%d operations ran, and all are held or wait", n)
	}
	r.sim.Release(uintptr(held))
	if n := r.steps(); n != 3 { // record, wait, fill: a hold is no operation
		t.Errorf("%d operations ran behind the hold, want 3", n)
	}
	storeFlag(word, 1)
	r.want(cuapi.NotReady, r.StreamQuery(flagged))
	if n := r.steps(); n != 1 {
		t.Errorf("%d operations ran behind the word, want 1", n)
	}
	w.Post(sem)
	if n := r.steps(); n != 1 || !w.Taken(sem) {
		t.Errorf("%d operations ran behind the semaphore, want 1", n)
	}
	r.ok(r.CtxSynchronize())
	r.clean()
}

func TestAHoldAloneIsNoStep(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st := r.stream()
	r.sim.Hold(uintptr(st))
	r.want(cuapi.NotReady, r.StreamQuery(st))
	r.sim.ReleaseAll()
	r.ok(r.StreamQuery(st))
	if r.sim.Step() {
		t.Error("an operation ran, and none was enqueued")
	}
}

func TestStepsInTheLegacyStreamsOrder(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	var blocking cuapi.Stream
	r.ok(r.StreamCreate(&blocking, 0))
	first, second, third := r.event(), r.event(), r.event()
	r.ok(r.EventRecord(first, blocking))
	r.ok(r.EventRecord(second, 0))
	r.ok(r.EventRecord(third, blocking))
	legacy := uintptr(r.sim.contexts[r.ctx].legacy.h)
	if r.sim.Step(legacy) {
		t.Error("the legacy stream overtook a blocking stream")
	}
	for i, ev := range []cuapi.Event{first, second, third} {
		r.want(cuapi.NotReady, r.EventQuery(ev))
		if !r.sim.Step() {
			t.Fatalf("step %d: nothing to run", i)
		}
		r.ok(r.EventQuery(ev))
	}
	r.clean()
}

func TestStepsOfADestroyedStream(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	a, b, ea, eb := r.stream(), r.stream(), r.event(), r.event()
	r.ok(r.EventRecord(ea, a))
	r.ok(r.EventRecord(eb, b))
	r.ok(r.StreamDestroy(a))
	r.ok(r.StreamDestroy(b))
	if !r.sim.Step(uintptr(b)) {
		t.Error("the handle no longer names the stream")
	}
	r.ok(r.EventQuery(eb))
	if !r.sim.Step() {
		t.Error("the other stream has nothing to run")
	}
	r.ok(r.EventQuery(ea))
	r.clean()
}

// Calls that wait block until somebody steps.
func TestCallsBlockUntilSomebodySteps(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st, ev, dev, spare := r.stream(), r.event(), r.device(4), r.device(4)
	r.ok(r.MemsetD8Async(dev, 1, 4, st))
	r.ok(r.EventRecord(ev, st))
	done := []<-chan cuapi.Result{
		r.start(1, func() cuapi.Result { return r.EventSynchronize(ev) }),
		r.start(2, func() cuapi.Result { return r.StreamSynchronize(st) }),
		r.start(3, r.CtxSynchronize),
		r.start(4, func() cuapi.Result { return r.MemFree(spare) }),
	}
	r.sim.Step()
	r.blocked(4)
	r.sim.Step()
	for _, d := range done {
		r.ok(<-d)
	}
	r.clean()
}

func TestSteppedWithoutBlocking(t *testing.T) {
	r := newRig(t, Config{Stepped: true, NoBlock: true})
	st, dev, spare := r.stream(), r.device(4), r.device(4)
	for range queueDepth {
		r.ok(r.MemsetD8Async(dev, 1, 4, st))
	}
	for _, got := range []cuapi.Result{r.StreamSynchronize(st), r.CtxSynchronize(), r.MemFree(spare), r.MemsetD8Async(dev, 1, 4, st)} {
		r.want(cuapi.NotReady, got)
	}
	if got := r.kinds(); len(got) != 4 || got[0] != Blocks || got[3] != Blocks {
		t.Errorf("violations %v", got)
	}
	if n := r.steps(); n != queueDepth {
		t.Errorf("%d steps, want %d", n, queueDepth)
	}
	r.ok(r.StreamSynchronize(st))
	r.ok(r.MemFree(spare))
}

// A host function runs on the goroutine that steps, and may step others itself.
func TestStepsAndHostFunctions(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st, other, ev, after := r.stream(), r.stream(), r.event(), r.event()
	ran := 0
	r.ok(r.LaunchHostFunc(st, r.sim.HostFunc(func() {
		ran++
		if r.sim.Step(uintptr(st)) {
			t.Error("the operation behind a host function ran before its end")
		}
		if !r.sim.Step() {
			t.Error("a host function stopped the other stream")
		}
	}), 0))
	r.ok(r.EventRecord(after, st))
	r.ok(r.EventRecord(ev, other))
	if !r.sim.Step() || ran != 1 {
		t.Errorf("it ran %d times", ran)
	}
	r.ok(r.EventQuery(ev))
	r.want(cuapi.NotReady, r.EventQuery(after))
	if n := r.steps(); n != 1 {
		t.Errorf("%d more steps, want 1", n)
	}
	r.clean()
}

func TestStepsAndCaptures(t *testing.T) {
	r := newRig(t, Config{Stepped: true})
	st, dev := r.stream(), r.device(4)
	var g cuapi.Graph
	r.ok(r.MemsetD8Async(dev, 1, 4, st))
	r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeRelaxed))
	r.ok(r.MemsetD8Async(dev, 2, 4, st))
	r.ok(r.StreamEndCapture(st, &g))
	if n := r.steps(); n != 1 || r.sim.graphs[g].nodes != 1 {
		t.Errorf("%d steps and %d nodes, want 1 and 1", n, r.sim.graphs[g].nodes)
	}
	r.clean()
}

// A fault happens when the kernel's step comes, and takes what is pending in its
// context with it.
func TestAStepLosesTheContext(t *testing.T) {
	r := newRig(t, Config{Stepped: true, Devices: 2})
	st, late := r.stream(), r.event()
	_, f := r.function(addPTX, "none")
	r.sim.Kernel("none", func(l *Launch) { l.Fault(int(cuapi.IllegalAddress)) })
	var other cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&other, 1))
	r.ok(r.CtxPushCurrent(other))
	far, farEvent := r.stream(), r.event()
	r.ok(r.launch(f, st))
	r.ok(r.EventRecord(late, st))
	r.ok(r.EventRecord(farEvent, far))
	r.want(cuapi.NotReady, r.EventQuery(late))
	waits := r.start(1, func() cuapi.Result { return r.EventSynchronize(late) })
	if !r.sim.Step(uintptr(st)) {
		t.Fatal("nothing to run")
	}
	r.want(cuapi.IllegalAddress, <-waits)
	r.want(cuapi.IllegalAddress, r.EventQuery(late))
	if n := r.steps(); n != 1 {
		t.Errorf("%d more steps, want that of the other device", n)
	}
	r.ok(r.EventQuery(farEvent))
	r.clean()
}

// What runs at once otherwise can be stepped too, while something holds it.
func TestStepFindsNothingOtherwise(t *testing.T) {
	r := newRig(t, Config{})
	st, ev := r.stream(), r.event()
	r.ok(r.EventRecord(ev, st))
	r.sim.Hold(uintptr(st))
	r.ok(r.EventRecord(ev, st))
	if r.sim.Step() {
		t.Error("an operation was left to run, or a held one ran")
	}
	r.sim.ReleaseAll()
	r.ok(r.EventQuery(ev))
}

func TestSetStepped(t *testing.T) {
	r := newRig(t, Config{})
	st, ev := r.stream(), r.event()
	r.ok(r.EventRecord(ev, st))
	r.ok(r.EventSynchronize(ev))
	r.sim.SetStepped(true)
	r.ok(r.EventRecord(ev, st))
	waits := r.start(1, func() cuapi.Result { return r.EventSynchronize(ev) })
	r.sim.SetStepped(false)
	r.ok(<-waits)
	r.clean()
}
