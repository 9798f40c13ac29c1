package drivertest

import (
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// stalls is the section of docs/driver-facts.md that most cases here rest on.
const stalls = "Stalls (measured). The finding that shapes this library: "

var stallCases = []Case{
	{Name: "ProceedWhileHeld", Evidence: stalls + "while a stream is held", Child: true, run: proceedWhileHeld},
	{Name: "MemFreeBlocks", Evidence: stalls + "block until the stream moves", Child: true, run: func(r *rig) {
		d := new(cuapi.DevicePtr)
		r.ok(r.MemAlloc(d, 1<<20))
		blocksWhileHeld(r, "cuMemFree", func() cuapi.Result { return r.MemFree(*d) })
	}},
	{Name: "MemFreeHostBlocks", Evidence: stalls + "block until the stream moves", Child: true, run: func(r *rig) {
		h := r.pinnedLoose(4096)
		blocksWhileHeld(r, "cuMemFreeHost", func() cuapi.Result { return r.MemFreeHost(h) })
	}},
	{Name: "ModuleLoadBlocks", Evidence: stalls + "block until the stream moves", Child: true, run: func(r *rig) {
		m := new(cuapi.Module)
		blocksWhileHeld(r, "cuModuleLoadData", func() cuapi.Result {
			_, res := r.load(m, []byte(PTX))
			return res
		})
		r.onEnd(func() cuapi.Result { return r.ModuleUnload(*m) })
	}},
	{Name: "StallSpreads", Evidence: stalls + "while, besides, one thread is stuck in", Child: true, run: stallSpreads},
	{Name: "FullStream", Evidence: stalls + "until about 1,021 of them were pending in that stream; the next one blocked until the stream moved", Child: true, run: fullStream},
	{Name: "StreamsShareAQueue_Launch", Evidence: onHardware, Child: true, run: func(r *rig) {
		fn := r.function("nop")
		streamsShareAQueue(r, "launches", func(s cuapi.Stream) cuapi.Result { return r.launch(fn, s, 1) })
	}},
	{Name: "StreamsShareAQueue_Download", Evidence: onHardware, Child: true, run: func(r *rig) {
		d := r.device(64, 0)
		h, _ := r.pinned(64)
		streamsShareAQueue(r, "downloads", func(s cuapi.Stream) cuapi.Result { return r.MemcpyDtoHAsync(h, d, 64, s) })
	}},
	{Name: "HostToHostCopyWaits", Evidence: onHardware, Child: true, run: func(r *rig) {
		held := r.stream()
		from, src := r.pinned(64)
		to, dst := r.pinned(64)
		src[0] = 7
		r.hold(held)
		c := r.start("cuMemcpyAsync from host to host", func() cuapi.Result { return r.MemcpyAsync(address(to), address(from), 64, held) })
		r.mustBlock(c)
		r.returned()
		r.mustReturn(c, cuapi.Success)
		r.ok(r.StreamSynchronize(held))
		if dst[0] != 7 {
			r.Error("the copy is not there")
		}
	}},
	{Name: "RecordsFillNothing", Evidence: stalls + "Event records, stream waits and pool allocate-free pairs did not count", Child: true, run: recordsFillNothing},
}

// proceedWhileHeld makes each call that was measured to return while another
// stream is held.
func proceedWhileHeld(r *rig) {
	fn := r.function("nop")
	held, s, e := r.stream(), r.stream(), r.event()
	d := r.device(4096, 0)
	h, _ := r.pinned(4096)
	var (
		ev   = new(cuapi.Event)
		st   = new(cuapi.Stream)
		p    = new(cuapi.DevicePtr)
		p2   = new(cuapi.DevicePtr)
		host = new(cuapi.HostPtr)
	)
	r.ok(r.launch(fn, s, 1)) // loads it
	r.ok(r.MemAllocAsync(p, 4096, s))
	r.ok(r.EventRecord(e, s))
	r.ok(r.StreamSynchronize(s))
	r.hold(held)
	for _, c := range []struct {
		id   cuapi.ID
		call func() cuapi.Result
	}{
		{cuapi.IDEventQuery, func() cuapi.Result { return r.EventQuery(e) }},
		{cuapi.IDStreamQuery, func() cuapi.Result { return r.StreamQuery(s) }},
		{cuapi.IDEventSynchronize, func() cuapi.Result { return r.EventSynchronize(e) }},
		{cuapi.IDMemFreeAsync, func() cuapi.Result { return r.MemFreeAsync(*p, s) }},
		{cuapi.IDMemAllocAsync, func() cuapi.Result { return r.MemAllocAsync(p, 4096, s) }},
		{cuapi.IDMemFreeAsync, func() cuapi.Result { return r.MemFreeAsync(*p, s) }},
		{cuapi.IDEventRecord, func() cuapi.Result { return r.EventRecord(e, s) }},
		{cuapi.IDMemcpyDtoHAsync, func() cuapi.Result { return r.MemcpyDtoHAsync(h, d, 4096, s) }},
		{cuapi.IDLaunchKernel, func() cuapi.Result { return r.launch(fn, s, 1) }},
		{cuapi.IDEventCreate, func() cuapi.Result { return r.EventCreate(ev, cuapi.EventDisableTiming) }},
		{cuapi.IDEventDestroy, func() cuapi.Result { return r.EventDestroy(*ev) }},
		{cuapi.IDStreamCreate, func() cuapi.Result { return r.StreamCreate(st, cuapi.StreamNonBlocking) }},
		{cuapi.IDStreamDestroy, func() cuapi.Result { return r.StreamDestroy(*st) }},
		{cuapi.IDMemHostAlloc, func() cuapi.Result { return r.MemHostAlloc(host, 4096, 0) }},
		{cuapi.IDMemAlloc, func() cuapi.Result { return r.MemAlloc(p2, 1<<20) }},
		{cuapi.IDStreamSynchronize, func() cuapi.Result { return r.StreamSynchronize(s) }},
	} {
		r.mustReturn(r.start(cuapi.Entries[c.id].Symbol(), c.call), cuapi.Success)
	}
	r.want(r.StreamQuery(held), cuapi.NotReady, "the held stream")
	r.onEnd(func() cuapi.Result { return r.MemFreeHost(*host) })
	r.onEnd(func() cuapi.Result { return r.MemFree(*p2) })
}

func blocksWhileHeld(r *rig, what string, f func() cuapi.Result) {
	held := r.stream()
	r.hold(held)
	c := r.start(what, f)
	r.mustBlock(c)
	r.want(r.StreamQuery(held), cuapi.NotReady, "the held stream")
	r.returned()
	r.mustReturn(c, cuapi.Success)
}

// stallSpreads has one thread stuck in cuMemFreeHost: what else blocks then,
// and what does not.
func stallSpreads(r *rig) {
	held, s, e := r.stream(), r.stream(), r.event()
	h, ev := r.pinnedLoose(4096), new(cuapi.Event)
	d := new(cuapi.DevicePtr)
	r.ok(r.MemAllocAsync(d, 4096, s)) // makes the pool
	r.ok(r.EventRecord(e, s))
	r.ok(r.StreamSynchronize(s))
	r.hold(held)
	stuck := r.start("cuMemFreeHost", func() cuapi.Result { return r.MemFreeHost(h) })
	r.mustBlock(stuck)
	for what, f := range map[string]func() cuapi.Result{
		"cuEventQuery":       func() cuapi.Result { return r.EventQuery(e) },
		"cuStreamQuery":      func() cuapi.Result { return r.StreamQuery(s) },
		"cuEventSynchronize": func() cuapi.Result { return r.EventSynchronize(e) },
		"cuMemAllocAsync and cuMemFreeAsync": func() cuapi.Result {
			p := new(cuapi.DevicePtr)
			if res := r.MemAllocAsync(p, 4096, s); res != cuapi.Success {
				return res
			}
			return r.MemFreeAsync(*p, s)
		},
	} {
		r.mustReturn(r.start(what+" beside a stall", f), cuapi.Success)
	}
	create := r.start("cuEventCreate beside a stall", func() cuapi.Result { return r.EventCreate(ev, cuapi.EventDisableTiming) })
	r.mustBlock(create)
	record := r.start("cuEventRecord beside a stall", func() cuapi.Result { return r.EventRecord(e, s) })
	r.mustBlock(record)
	r.returned()
	for _, c := range []*call{stuck, create, record} {
		r.mustReturn(c, cuapi.Success)
	}
	r.ok(r.MemFreeAsync(*d, s))
	r.onEnd(func() cuapi.Result { return r.EventDestroy(*ev) })
}

// What a stream takes at least, and where it must have blocked.
const (
	fullAtLeast = 1000
	fullAtMost  = 1100
)

func fullStream(r *rig) {
	held, s, e := r.stream(), r.stream(), r.event()
	d := r.device(64, 0)
	h, _ := r.pinned(64)
	r.hold(held)
	var n atomic.Int64
	filling := r.start("the enqueue into a full stream", func() cuapi.Result {
		for range fullAtMost + 1 {
			if res := r.MemsetD8Async(d, 1, 64, held); res != cuapi.Success {
				return res
			}
			n.Add(1)
		}
		return cuapi.Success
	})
	r.mustBlock(filling)
	before := n.Load()
	r.Logf("the stream blocked the enqueue behind %d pending operations", before)
	if before < fullAtLeast || before > fullAtMost {
		r.Errorf("a stream is full at %d operations, want %d to %d", before, fullAtLeast, fullAtMost)
	}
	// Other streams go on meanwhile.
	r.mustReturn(r.start("work on another stream", func() cuapi.Result {
		r.want(r.MemcpyDtoHAsync(h, d+0, 64, s), cuapi.Success, "copy")
		r.want(r.EventRecord(e, s), cuapi.Success, "record")
		return r.EventSynchronize(e)
	}), cuapi.Success)
	if got := n.Load(); got != before {
		r.Errorf("the full stream took %d more", got-before)
	}
	r.returned()
	r.mustReturn(filling, cuapi.Success)
	r.ok(r.StreamSynchronize(held))
}

// streamsShareAQueue fills many streams evenly behind a held one, none with
// half of what a stream takes alone: an enqueue blocks all the same, since
// streams share the device's queues.
func streamsShareAQueue(r *rig, what string, op func(cuapi.Stream) cuapi.Result) {
	const streams, each = 64, 400
	held, e := r.stream(), r.event()
	all := make([]cuapi.Stream, streams)
	for i := range all {
		all[i] = r.stream()
		r.ok(op(all[i])) // loads a kernel
	}
	r.ok(r.CtxSynchronize())
	r.hold(held)
	r.ok(r.EventRecord(e, held))
	var n atomic.Int64
	filling := r.start(what, func() cuapi.Result {
		for i := range each {
			for _, s := range all {
				res := cuapi.Result(cuapi.Success)
				if i == 0 {
					res = r.StreamWaitEvent(s, e, 0)
				}
				if res == cuapi.Success {
					res = op(s)
				}
				if res != cuapi.Success {
					return res
				}
				n.Add(1)
			}
		}
		return cuapi.Success
	})
	r.mustBlock(filling)
	before := int64(-1)
	for before != n.Load() { // it took no more for a while
		before = n.Load()
		r.stuck--
		r.mustBlock(filling)
	}
	r.Logf("%s into %d streams blocked behind %d pending operations, %d a stream", what, streams, before, before/streams)
	if before < fullAtLeast {
		r.Errorf("a context is full at %d operations, want %d at least", before, fullAtLeast)
	}
	r.returned()
	r.mustReturn(filling, cuapi.Success)
	r.ok(r.CtxSynchronize())
}

func recordsFillNothing(r *rig) {
	held, e := r.stream(), r.event()
	other := r.event()
	r.hold(held)
	d, pool := new(cuapi.DevicePtr), r.MemAllocAsync
	r.mustReturn(r.start("records, waits and pairs of allocate and free in a held stream", func() cuapi.Result {
		for range 4000 {
			for _, res := range []cuapi.Result{
				r.EventRecord(e, held), r.StreamWaitEvent(held, other, 0), pool(d, 4096, held), r.MemFreeAsync(*d, held),
			} {
				if res != cuapi.Success {
					return res
				}
			}
		}
		return cuapi.Success
	}), cuapi.Success)
	r.want(r.EventQuery(e), cuapi.NotReady, "the event in the held stream")
	r.release()
	r.ok(r.StreamSynchronize(held))
}
