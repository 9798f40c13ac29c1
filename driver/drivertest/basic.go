package drivertest

import (
	"runtime"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

var basicCases = []Case{
	{Name: "InitAgain", Evidence: onHardware, run: func(r *rig) {
		r.want(r.Init(0), cuapi.Success, "cuInit(0) again")
		r.want(r.Init(1), cuapi.InvalidValue, "cuInit(1)")
	}},
	{Name: "Version", Evidence: "First version of each entry point: Drivers: 11.x at least 450", run: func(r *rig) {
		v := new(int32)
		r.ok(r.DriverGetVersion(v))
		if *v < 11000 || *v%10 != 0 {
			r.Errorf("CUDA version %d", *v)
		}
	}},
	{Name: "ErrorTexts", Evidence: onHardware, run: func(r *rig) {
		p := new(*byte)
		r.ok(r.GetErrorName(cuapi.IllegalAddress, p))
		if got := cuapi.CString(*p); got != "CUDA_ERROR_ILLEGAL_ADDRESS" {
			r.Errorf("name of 700: %q", got)
		}
		r.ok(r.GetErrorString(cuapi.IllegalAddress, p))
		if cuapi.CString(*p) == "" {
			r.Error("700 has no description")
		}
		r.want(r.GetErrorName(-5, p), cuapi.InvalidValue, "cuGetErrorName(-5)")
	}},
	{Name: "DeviceQueries", Evidence: onHardware, run: deviceQueries},
	{Name: "PrimaryContext", Evidence: onHardware, run: primaryContext},
	{Name: "PushPop", Evidence: onHardware, run: func(r *rig) {
		c := new(cuapi.Context)
		r.ok(r.CtxSetCurrent(0))
		r.ok(r.CtxPushCurrent(r.core.Raw))
		r.ok(r.CtxGetCurrent(c))
		if *c != r.core.Raw {
			r.Errorf("current after push: %#x, want %#x", *c, r.core.Raw)
		}
		r.ok(r.CtxPopCurrent(c))
		r.ok(r.CtxGetCurrent(c))
		if *c != 0 {
			r.Errorf("current after pop: %#x, want none", *c)
		}
		r.ok(r.CtxSetCurrent(r.core.Raw))
	}},
	{Name: "WithoutContext", Evidence: "Threads and contexts (measured): On a thread that never had a current context these succeed", run: withoutContext},
	{Name: "PointerAttributes", Evidence: "Results and edge cases: memory type 2 for device, 1 for pinned host; 1 (invalid value) for an address that CUDA does not know", run: pointerAttributes},
	{Name: "Ids", Evidence: "Results and edge cases: compare ids (cuStreamGetId, cuCtxGetId, 12.0), not pointers", run: ids},
	{Name: "Peers", Evidence: onHardware, run: func(r *rig) {
		can := new(int32)
		r.want(r.DeviceCanAccessPeer(can, 0, 99), cuapi.InvalidDevice, "cuDeviceCanAccessPeer of no device")
	}},
}

func deviceQueries(r *rig) {
	n, d := new(int32), new(cuapi.Device)
	r.ok(r.DeviceGetCount(n))
	if *n < 1 {
		r.Fatalf("%d devices", *n)
	}
	r.ok(r.DeviceGet(d, 0))
	r.want(r.DeviceGet(d, *n), cuapi.InvalidDevice, "cuDeviceGet past the end")
	r.want(r.DeviceGet(d, -1), cuapi.InvalidDevice, "cuDeviceGet(-1)")

	name := make([]byte, 100)
	r.ok(r.DeviceGetName(&name[0], int32(len(name)), 0))
	if text, _, ended := strings.Cut(string(name), "\x00"); text == "" || !ended {
		r.Errorf("name %q", text)
	}
	id, total := new(cuapi.UUID), new(uintptr)
	r.ok(r.DeviceGetUuid(id, 0))
	if *id == (cuapi.UUID{}) {
		r.Error("no UUID")
	}
	r.ok(r.DeviceTotalMem(total, 0))
	free, all := new(uintptr), new(uintptr)
	r.ok(r.MemGetInfo(free, all))
	if *total == 0 || *free == 0 || *free > *all || *all > *total {
		r.Errorf("memory: %d in all, %d free of %d", *total, *free, *all)
	}
	for _, a := range []struct {
		attr     int32
		from, to int32
	}{
		{cuapi.DeviceWarpSize, 32, 32},
		{cuapi.DeviceMaxThreadsPerBlock, 512, 4096},
		{cuapi.DeviceMultiprocessors, 1, 1024},
		{cuapi.DeviceCapabilityMajor, 5, 20},
		{cuapi.DeviceCapabilityMinor, 0, 9},
		{cuapi.DeviceUnifiedAddressing, 1, 1},
		{cuapi.DeviceMemoryPools, 1, 1},
		{cuapi.DeviceCanMapHostMemory, 1, 1},
	} {
		r.ok(r.DeviceGetAttribute(n, a.attr, 0))
		if *n < a.from || *n > a.to {
			r.Errorf("attribute %d: %d, want %d to %d", a.attr, *n, a.from, a.to)
		}
	}
	r.want(r.DeviceGetAttribute(n, 100000, 0), cuapi.InvalidValue, "attribute 100000")
}

func primaryContext(r *rig) {
	flags, active := new(uint32), new(int32)
	r.ok(r.DevicePrimaryCtxGetState(0, flags, active))
	if *active != 1 {
		r.Error("the retained context is not active")
	}
	again := new(cuapi.Context)
	r.ok(r.DevicePrimaryCtxRetain(again, 0))
	if *again != r.core.Raw {
		r.Errorf("retained again: %#x, want %#x", *again, r.core.Raw)
	}
	r.ok(r.DevicePrimaryCtxRelease(0))
	r.ok(r.DevicePrimaryCtxGetState(0, flags, active))
	if *active != 1 {
		r.Error("the context is not active after the first of two releases")
	}
}

// withoutContext makes each call of the measured list on a thread that never
// had a current context.
func withoutContext(r *rig) {
	s, s2, e := r.stream(), new(cuapi.Stream), new(cuapi.Event)
	r.ok(r.StreamCreate(s2, cuapi.StreamNonBlocking))
	r.ok(r.EventCreate(e, cuapi.EventDisableTiming))
	d, d2 := r.device(8192, 0), new(cuapi.DevicePtr)
	r.ok(r.MemAlloc(d2, 4096))
	h, _ := r.pinned(8192)
	h2 := r.pinnedLoose(4096)
	r.ok(r.EventRecord(*e, s))

	var (
		c    = new(cuapi.Context)
		u    = new(uint32)
		i    = new(int32)
		id   = new(uint64)
		p    = new(cuapi.DevicePtr)
		host = new(cuapi.HostPtr)
		ev   = new(cuapi.Event)
		st   = new(cuapi.Stream)
	)
	const no = cuapi.InvalidContext
	list := []struct {
		id   cuapi.ID
		want cuapi.Result
		call func() cuapi.Result
	}{
		{cuapi.IDEventQuery, 0, func() cuapi.Result { r.EventSynchronize(*e); return r.EventQuery(*e) }},
		{cuapi.IDEventSynchronize, 0, func() cuapi.Result { return r.EventSynchronize(*e) }},
		{cuapi.IDEventRecord, 0, func() cuapi.Result { return r.EventRecord(*e, s) }},
		{cuapi.IDStreamSynchronize, 0, func() cuapi.Result { return r.StreamSynchronize(s) }},
		{cuapi.IDStreamQuery, 0, func() cuapi.Result { return r.StreamQuery(s) }},
		{cuapi.IDStreamWaitEvent, 0, func() cuapi.Result { return r.StreamWaitEvent(*s2, *e, 0) }},
		{cuapi.IDMemcpyDtoHAsync, 0, func() cuapi.Result { return r.MemcpyDtoHAsync(h, d, 4096, s) }},
		{cuapi.IDMemcpyHtoDAsync, 0, func() cuapi.Result { return r.MemcpyHtoDAsync(d, h, 4096, s) }},
		{cuapi.IDMemcpyDtoDAsync, 0, func() cuapi.Result { return r.MemcpyDtoDAsync(d, d+4096, 4096, s) }},
		{cuapi.IDMemcpyAsync, 0, func() cuapi.Result { return r.MemcpyAsync(address(h), d, 4096, s) }},
		{cuapi.IDMemsetD8Async, 0, func() cuapi.Result { return r.MemsetD8Async(d, 1, 4096, s) }},
		{cuapi.IDStreamWriteValue32, 0, func() cuapi.Result { return r.StreamWriteValue32(s, d, 1, 0) }},
		{cuapi.IDStreamGetCtx, 0, func() cuapi.Result { return r.StreamGetCtx(s, c) }},
		{cuapi.IDStreamGetFlags, 0, func() cuapi.Result { return r.StreamGetFlags(s, u) }},
		{cuapi.IDStreamGetPriority, 0, func() cuapi.Result { return r.StreamGetPriority(s, i) }},
		{cuapi.IDStreamGetId, 0, func() cuapi.Result { return r.StreamGetId(s, id) }},
		{cuapi.IDMemAllocAsync, 0, func() cuapi.Result { return r.MemAllocAsync(p, 4096, s) }},
		{cuapi.IDMemFreeAsync, 0, func() cuapi.Result { return r.MemFreeAsync(*p, s) }},
		{cuapi.IDMemFree, 0, func() cuapi.Result { return r.MemFree(*d2) }},
		{cuapi.IDMemFreeHost, 0, func() cuapi.Result { return r.MemFreeHost(h2) }},
		{cuapi.IDMemHostAlloc, no, func() cuapi.Result { return r.MemHostAlloc(host, 4096, 0) }},
		{cuapi.IDEventCreate, no, func() cuapi.Result { return r.EventCreate(ev, cuapi.EventDisableTiming) }},
		{cuapi.IDStreamCreate, no, func() cuapi.Result { return r.StreamCreate(st, cuapi.StreamNonBlocking) }},
		{cuapi.IDMemAlloc, no, func() cuapi.Result { return r.MemAlloc(p, 4096) }},
		{cuapi.IDCtxSynchronize, no, func() cuapi.Result { return r.CtxSynchronize() }},
		{cuapi.IDEventDestroy, 0, func() cuapi.Result { return r.EventDestroy(*e) }},
		{cuapi.IDStreamDestroy, 0, func() cuapi.Result { return r.StreamDestroy(*s2) }},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends here
		r.want(r.CtxSetCurrent(0), cuapi.Success, "cuCtxSetCurrent(0)")
		for _, l := range list {
			if r.Has(l.id) {
				r.want(l.call(), l.want, cuapi.Entries[l.id].Symbol())
			}
		}
	}()
	<-done
	if *c != r.core.Raw || *u != cuapi.StreamNonBlocking {
		r.Errorf("the stream's context is %#x and its flags %d, want %#x and %d", *c, *u, r.core.Raw, cuapi.StreamNonBlocking)
	}
}

func pointerAttributes(r *rig) {
	d := r.device(4096, 0)
	h, _ := r.pinned(4096)
	done := make(chan struct{})
	go func() { // it needs no current context
		defer close(done)
		runtime.LockOSThread()
		r.want(r.CtxSetCurrent(0), cuapi.Success, "cuCtxSetCurrent(0)")
		for _, a := range []struct {
			what string
			at   cuapi.DevicePtr
			kind uint32
		}{{"device memory", d, cuapi.MemoryTypeDevice}, {"its inside", d + 100, cuapi.MemoryTypeDevice}, {"pinned memory", address(h), cuapi.MemoryTypeHost}} {
			kind := new(uint32)
			r.want(r.PointerGetAttribute(out(kind), cuapi.PointerMemoryType, a.at), cuapi.Success, a.what)
			if *kind != a.kind {
				r.Errorf("memory type of %s: %d, want %d", a.what, *kind, a.kind)
			}
		}
		r.want(r.PointerGetAttribute(out(new(uint32)), cuapi.PointerMemoryType, goAddress()), cuapi.InvalidValue, "memory type of Go memory")
	}()
	<-done
	base, size := new(cuapi.DevicePtr), new(uintptr)
	r.ok(r.MemGetAddressRange(base, size, d+100))
	if *base != d || *size < 4096 {
		r.Errorf("the range of %#x is %d bytes from %#x", d, *size, *base)
	}
	mapped := new(cuapi.DevicePtr)
	r.ok(r.MemHostGetDevicePointer(mapped, h, 0))
	if *mapped != address(h) {
		r.Errorf("pinned memory at %#x has the device address %#x", address(h), *mapped)
	}
}

func ids(r *rig) {
	a, b := new(uint64), new(uint64)
	if r.Has(cuapi.IDStreamGetId) {
		r.ok(r.StreamGetId(r.stream(), a))
		r.ok(r.StreamGetId(r.stream(), b))
		if *a == *b {
			r.Errorf("two streams have the id %d", *a)
		}
	}
	if r.Has(cuapi.IDCtxGetId) {
		r.ok(r.CtxGetId(r.core.Raw, a))
		r.ok(r.CtxGetId(r.core.Raw, b))
		if *a != *b || *a == 0 {
			r.Errorf("a context has the ids %d and %d", *a, *b)
		}
	}
}
