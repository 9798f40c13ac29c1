package drivertest

import (
	"bytes"
	"context"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
)

var orderCases = []Case{
	{Name: "NeverRecorded", Evidence: "Results and edge cases: an event never recorded answers 0 to query and synchronize", run: func(r *rig) {
		e := r.event()
		r.want(r.EventQuery(e), cuapi.Success, "query")
		r.want(r.EventSynchronize(e), cuapi.Success, "synchronize")
		s := r.stream()
		r.want(r.StreamWaitEvent(s, e, 0), cuapi.Success, "cuStreamWaitEvent")
		r.want(r.StreamSynchronize(s), cuapi.Success, "the stream that waits for it")
	}},
	{Name: "HeldStream", Evidence: "Results and edge cases: 600 is returned by queries of a held stream and of events behind it", run: heldStream},
	{Name: "HoldByHostFunction", Evidence: onHardware, run: holdByHostFunction},
	{Name: "OthersProceed", Evidence: stalls + "cuEventRecord, copies, cuLaunchKernel on another stream", run: othersProceed},
	{Name: "WaitEvent", Evidence: "Results and edge cases: takes the state recorded at the call", run: waitEvent},
	{Name: "Run", Evidence: "design: Table.Run stops at the first failure and tells which", run: runList},
	{Name: "RunStops", Evidence: "design: Table.Run stops at the first failure and tells which", run: runStops},
	{Name: "DestroyPending", Evidence: stalls + "Destroying an event that is pending", run: destroyPending},
	{Name: "ManyHeldStreams", Evidence: stalls + "With CUDA_DEVICE_MAX_CONNECTIONS=32 set before the driver starts, 16 held streams held nobody",
		Child: true, Env: []string{"CUDA_DEVICE_MAX_CONNECTIONS=32"}, run: manyHeld},
	{Name: "ElapsedTime", Evidence: onHardware, run: elapsed},
}

func heldStream(r *rig) {
	s, before, behind := r.stream(), r.event(), r.event()
	d := r.device(4096, 7)
	h, data := r.pinned(4096)
	r.ok(r.EventRecord(before, s))
	r.ok(r.EventSynchronize(before))
	r.hold(s)
	r.ok(r.MemcpyDtoHAsync(h, d, 4096, s))
	r.ok(r.EventRecord(behind, s))
	for range 100 {
		r.want(r.StreamQuery(s), cuapi.NotReady, "query of the held stream")
		r.want(r.EventQuery(behind), cuapi.NotReady, "query of the event behind")
		r.want(r.EventQuery(before), cuapi.Success, "query of the event before")
	}
	if data[0] != 0 {
		r.Error("the copy behind a held stream was made")
	}
	r.release()
	r.ok(r.EventSynchronize(behind))
	r.want(r.EventQuery(behind), cuapi.Success, "query after the release")
	if !bytes.Equal(data, bytes.Repeat([]byte{7}, 4096)) {
		r.Error("the copy before a complete event is not there")
	}
	r.ok(r.StreamSynchronize(s))
	r.want(r.StreamQuery(s), cuapi.Success, "query of the stream after")
}

func othersProceed(r *rig) {
	fn := r.function("fill")
	held, s, e := r.stream(), r.stream(), r.event()
	d := r.device(4096, 0)
	h, data := r.pinned(4096)
	r.ok(r.launch(fn, s, 1, cuapi.Word(uint64(d)), cuapi.Word(0), cuapi.Word(0))) // loads it
	r.ok(r.StreamSynchronize(s))
	r.hold(held)
	r.ok(r.launch(fn, s, 4, cuapi.Word(uint64(d)), cuapi.Word(0x01020304), cuapi.Word(1024)))
	r.ok(r.MemcpyDtoHAsync(h, d, 4096, s))
	r.ok(r.EventRecord(e, s))
	r.mustReturn(r.start("cuEventSynchronize on another stream", func() cuapi.Result { return r.EventSynchronize(e) }), cuapi.Success)
	r.want(r.StreamQuery(held), cuapi.NotReady, "query of the held stream")
	if !bytes.Equal(data, bytes.Repeat([]byte{4, 3, 2, 1}, 1024)) {
		r.Errorf("the kernel's result is wrong: %x …", data[:16])
	}
}

// holdByHostFunction holds a stream as internal/hold does on a driver without
// cuStreamWaitValue32: twice, released the other way around. Host functions may be
// called one after another, so that only one stream has any.
func holdByHostFunction(r *rig) {
	if !r.Has(cuapi.IDLaunchHostFunc) {
		r.Fatal("the driver lacks cuLaunchHostFunc")
	}
	table := *r.Table
	table.Remove(cuapi.IDStreamWaitValue32)
	launches := 0
	table.LaunchHostFunc = func(s cuapi.Stream, fn, data uintptr) cuapi.Result {
		launches++
		return r.LaunchHostFunc(s, fn, data)
	}
	made, err := wire.NewDriver(&table, "without cuStreamWaitValue32")
	if err != nil {
		r.Fatal(err)
	}
	dev, err := made.(*driver.Driver).Device(0)
	if err != nil {
		r.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		r.Fatal(err)
	}

	held, s, behind, beside := r.stream(), r.stream(), r.event(), r.event()
	src, dst := r.device(4096, 1), r.device(4096, 2)
	h, data := r.pinned(4096)
	h2, data2 := r.pinned(4096)
	var free []func()
	for range 2 {
		f, err := hold.Stream(ctx, uintptr(held))
		if err != nil {
			r.Fatal(err)
		}
		free = append(free, f)
		r.holds = append(r.holds, f) // again at the end, should the case fail
	}
	if launches != 2 {
		r.Errorf("two holds made %d calls of cuLaunchHostFunc", launches)
	}
	r.ok(r.MemsetD8Async(src, 9, 4096, held))
	r.ok(r.MemcpyDtoHAsync(h, src, 4096, held))
	r.ok(r.EventRecord(behind, held))
	pending := func(when string) {
		for range 100 {
			r.want(r.StreamQuery(held), cuapi.NotReady, "query of the held stream "+when)
			r.want(r.EventQuery(behind), cuapi.NotReady, "query of the event behind "+when)
		}
		if data[0] != 0 || data[4095] != 0 {
			r.Errorf("the copy behind was made %s", when)
		}
	}
	pending("at first")

	r.ok(r.MemsetD8Async(dst, 7, 4096, s))
	r.ok(r.MemcpyDtoHAsync(h2, dst, 4096, s))
	r.ok(r.EventRecord(beside, s))
	r.mustReturn(r.start("cuEventSynchronize on another stream", func() cuapi.Result { return r.EventSynchronize(beside) }), cuapi.Success)
	if !bytes.Equal(data2, bytes.Repeat([]byte{7}, 4096)) {
		r.Errorf("the copy on another stream is not there: %x …", data2[:16])
	}
	pending("while another stream went on")

	free[1]()
	free[1]()
	pending("after the release of the second hold alone")
	free[0]()
	r.mustReturn(r.start("cuEventSynchronize after the release", func() cuapi.Result { return r.EventSynchronize(behind) }), cuapi.Success)
	if !bytes.Equal(data, bytes.Repeat([]byte{9}, 4096)) {
		r.Errorf("the copy behind is not there: %x …", data[:16])
	}
	r.want(r.StreamSynchronize(held), cuapi.Success, "the stream after")
	r.want(r.StreamQuery(held), cuapi.Success, "query of the stream after")

	wait, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := ctx.Shutdown(wait); err != nil { // frees the semaphores
		r.Errorf("Shutdown: %v", err)
	}
}

func waitEvent(r *rig) {
	a, b, first, last := r.stream(), r.stream(), r.event(), r.event()
	src, dst := r.device(4096, 1), r.device(4096, 2)
	h, data := r.pinned(4096)
	r.hold(a)
	r.ok(r.MemsetD8Async(src, 9, 4096, a))
	r.ok(r.EventRecord(first, a))
	r.ok(r.StreamWaitEvent(b, first, 0))
	// What happens to the event from here on does not matter to b.
	other := r.stream()
	r.ok(r.EventRecord(first, other))
	r.ok(r.MemcpyDtoDAsync(dst, src, 4096, b))
	r.ok(r.MemcpyDtoHAsync(h, dst, 4096, b))
	r.ok(r.EventRecord(last, b))
	r.ok(r.EventSynchronize(first))
	for range 100 {
		r.want(r.EventQuery(last), cuapi.NotReady, "query behind a wait for a held stream")
	}
	r.release()
	r.ok(r.EventSynchronize(last))
	if !bytes.Equal(data, bytes.Repeat([]byte{9}, 4096)) {
		r.Errorf("the copy did not wait: %x …", data[:16])
	}
}

func runList(r *rig) {
	s, e := r.stream(), r.event()
	d := r.device(4096, 5)
	h, data := r.pinned(4096)
	r.hold(s)
	l := cuapi.NewList()
	defer l.Free()
	l.MemcpyDtoHAsync(h, d, 4096, s)
	l.EventRecord(e, s)
	if n, res := r.Table.Run(l); n != 2 || res != cuapi.Success {
		r.Errorf("the list ends at %d with %v", n, res)
	}
	r.want(r.EventQuery(e), cuapi.NotReady, "the event that the list recorded")
	r.release()
	r.ok(r.EventSynchronize(e))
	if data[0] != 5 || data[4095] != 5 {
		r.Error("the list's copy is not there")
	}
}

func runStops(r *rig) {
	s, e := r.stream(), r.event()
	d := r.device(4096, 5)
	h, data := r.pinned(4096)
	r.hold(s)
	l := cuapi.NewList()
	defer l.Free()
	l.MemcpyDtoHAsync(h, d, 4096, s)
	l.MemcpyDtoHAsync(h, d, tooMuch, s) // past the allocation
	l.EventRecord(e, s)
	if n, res := r.Table.Run(l); n != 1 || res != cuapi.InvalidValue {
		r.Errorf("the list ends at %d with %v, want 1 with 1", n, res)
	}
	r.want(r.EventQuery(e), cuapi.Success, "the event behind the failure, which was never recorded")
	r.release()
	r.ok(r.StreamSynchronize(s))
	if data[0] != 5 || data[4095] != 5 {
		r.Error("the copy before the failure is not there")
	}
}

// destroyPending destroys an event and a stream with work pending: both return
// at once, and the work completes.
func destroyPending(r *rig) {
	s, e, last := new(cuapi.Stream), new(cuapi.Event), r.event()
	r.ok(r.StreamCreate(s, cuapi.StreamNonBlocking))
	r.ok(r.EventCreate(e, cuapi.EventDisableTiming))
	d := r.device(4096, 3)
	h, data := r.pinned(4096)
	r.hold(*s)
	r.ok(r.EventRecord(*e, *s))
	r.ok(r.MemcpyDtoHAsync(h, d, 4096, *s))
	r.ok(r.EventRecord(last, *s))
	r.mustReturn(r.start("cuEventDestroy of a pending event", func() cuapi.Result { return r.EventDestroy(*e) }), cuapi.Success)
	r.mustReturn(r.start("cuStreamDestroy of a held stream", func() cuapi.Result { return r.StreamDestroy(*s) }), cuapi.Success)
	r.want(r.EventQuery(last), cuapi.NotReady, "the last event")
	r.release()
	r.ok(r.EventSynchronize(last))
	if data[0] != 3 || data[4095] != 3 {
		r.Error("the copy of a destroyed stream is not there")
	}
}

func manyHeld(r *rig) {
	for range 16 {
		r.hold(r.stream())
	}
	d := r.device(64, 1)
	h, _ := r.pinned(64)
	for range 8 {
		s, e := r.stream(), r.event()
		r.ok(r.MemcpyDtoHAsync(h, d, 64, s))
		r.ok(r.EventRecord(e, s))
		r.mustReturn(r.start("cuEventSynchronize beside 16 held streams", func() cuapi.Result { return r.EventSynchronize(e) }), cuapi.Success)
	}
}

func elapsed(r *rig) {
	s, a, b := r.stream(), new(cuapi.Event), new(cuapi.Event)
	for _, e := range []*cuapi.Event{a, b} {
		r.ok(r.EventCreate(e, cuapi.EventDefault))
		r.onEnd(func() cuapi.Result { return r.EventDestroy(*e) })
	}
	d := r.device(1<<20, 0)
	r.ok(r.EventRecord(*a, s))
	r.ok(r.MemsetD8Async(d, 1, 1<<20, s))
	r.ok(r.EventRecord(*b, s))
	r.ok(r.EventSynchronize(*b))
	ms := new(float32)
	r.ok(r.EventElapsedTime(ms, *a, *b))
	if *ms < 0 {
		r.Errorf("%v ms", *ms)
	}
	r.want(r.EventElapsedTime(ms, r.witness, *b), cuapi.InvalidHandle, "elapsed time from an event without timing")
}
