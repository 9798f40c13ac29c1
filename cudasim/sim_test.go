package cudasim

import (
	"bytes"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

func TestEveryEntryPointIsSimulated(t *testing.T) {
	table := reflect.ValueOf(New(Config{}).Table()).Elem()
	for _, e := range cuapi.Entries {
		if table.FieldByName(e.Name).IsNil() {
			t.Errorf("%s is missing", e.Symbol())
		}
	}
}

// At each version since 11.0 at which the driver gained something, and just
// before, exactly the newer entry points are absent.
func TestVersionRemovesNewerEntryPoints(t *testing.T) {
	versions := map[int]bool{11000: true}
	for _, e := range cuapi.Entries {
		if since := e.Since(); since > 11000 {
			versions[since], versions[since-1] = true, true
		}
	}
	for version := range versions {
		table := reflect.ValueOf(New(Config{Version: version}).Table()).Elem()
		absent := 0
		for _, e := range cuapi.Entries {
			got, want := !table.FieldByName(e.Name).IsNil(), e.Since() <= version
			if got != want {
				t.Errorf("CUDA %d: %s present: %v, want %v", version, e.Symbol(), got, want)
			}
			if !want {
				absent++
			}
		}
		if version == 11000 && absent == 0 {
			t.Error("CUDA 11.0 lacks nothing")
		}
	}
	if len(versions) < 5 {
		t.Errorf("only versions %v", versions)
	}
}

func TestDriver(t *testing.T) {
	d, err := New(Config{Devices: 2, Version: 12040}).Driver()
	if err != nil {
		t.Fatal(err)
	}
	if d.Version() != 12040 || d.DeviceCount() != 2 || d.Source() != "simulator" {
		t.Errorf("driver %d with %d devices from %s", d.Version(), d.DeviceCount(), d.Source())
	}
}

func TestNotInitialized(t *testing.T) {
	var n int32
	table := New(Config{}).Table()
	if got := table.DeviceGetCount(&n); got != cuapi.NotInitialized {
		t.Errorf("before cuInit: %d", got)
	}
	if got := table.DriverGetVersion(&n); got != cuapi.Success || n != 13000 {
		t.Errorf("version %d, result %d", n, got)
	}
}

// docs/driver-facts: Threads and contexts.
func TestCallsWithoutACurrentContext(t *testing.T) {
	r := newRig(t, Config{})
	st, ev, dev, mem := r.stream(), r.event(), r.device(8), r.device(8)
	host, _ := r.pinned(8)
	pl := r.pool()
	var popped, current cuapi.Context
	r.ok(r.CtxPopCurrent(&popped))
	if popped != r.ctx {
		t.Errorf("popped %#x", popped)
	}
	r.ok(r.CtxGetCurrent(&current))
	if current != 0 {
		t.Errorf("current %#x", current)
	}
	for _, got := range []cuapi.Result{
		r.EventRecord(ev, st), r.EventQuery(ev), r.EventSynchronize(ev), r.StreamQuery(st), r.StreamSynchronize(st),
		r.StreamWaitEvent(st, ev, 0), r.MemcpyHtoDAsync(dev, host, 8, st), r.MemcpyDtoHAsync(host, dev, 8, st),
		r.MemsetD8Async(dev, 1, 8, st), r.MemAllocFromPoolAsync(&mem, 8, pl, st), r.MemFreeAsync(mem, st),
		r.StreamSynchronize(st), r.MemFree(dev), r.MemFreeHost(host), r.EventDestroy(ev), r.StreamDestroy(st),
	} {
		r.ok(got)
	}
	for _, got := range []cuapi.Result{
		r.EventCreate(&ev, 0), r.StreamCreate(&st, 0), r.MemAlloc(&dev, 8), r.MemHostAlloc(&host, 8, 0), r.CtxSynchronize(),
		r.CtxPopCurrent(nil), r.StreamQuery(0),
	} {
		r.want(cuapi.InvalidContext, got)
	}
	r.clean()
}

// docs/driver-facts: Results and edge cases.
func TestOddResults(t *testing.T) {
	r := newRig(t, Config{})
	st, ev, dev := r.stream(), r.event(), r.device(8)
	host, _ := r.pinned(16)
	r.ok(r.EventQuery(ev))
	r.ok(r.EventSynchronize(ev))
	r.ok(r.MemcpyDtoHAsync(nil, 0, 0, st))
	var none cuapi.HostPtr
	r.ok(r.MemHostAlloc(&none, 0, 0))
	var p cuapi.DevicePtr
	r.want(cuapi.InvalidValue, r.MemAlloc(&p, 0))
	r.want(cuapi.InvalidValue, r.MemcpyDtoHAsync(host, dev, 9, st))
	r.ok(r.StreamSynchronize(st))
	var kind uint32
	data := cuapi.HostPtr(&kind)
	r.ok(r.PointerGetAttribute(data, cuapi.PointerMemoryType, dev))
	if kind != cuapi.MemoryTypeDevice {
		t.Errorf("device memory has type %d", kind)
	}
	r.ok(r.PointerGetAttribute(data, cuapi.PointerMemoryType, cuapi.DevicePtr(hostAddress(host))))
	if kind != cuapi.MemoryTypeHost {
		t.Errorf("pinned memory has type %d", kind)
	}
	r.want(cuapi.InvalidValue, r.PointerGetAttribute(data, cuapi.PointerMemoryType, 0x10))
	r.clean()
}

func TestCopiesMoveData(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	st, a, b := r.stream(), r.device(16), r.device(16)
	in, src := r.pinned(16)
	out, dst := r.pinned(16)
	copy(src, "0123456789abcdef")
	r.ok(r.MemcpyDtoHAsync(out, a, 16, st))
	if want := bytes.Repeat([]byte{freshByte}, 16); !bytes.Equal(dst, want) {
		t.Errorf("fresh memory holds %x", dst)
	}
	r.ok(r.MemcpyHtoDAsync(a, in, 16, st))
	r.ok(r.MemcpyDtoDAsync(b, a+4, 12, st))
	r.ok(r.MemsetD8Async(b+12, 'z', 4, st))
	var other cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&other, 1))
	r.ok(r.MemcpyPeerAsync(a, r.ctx, b, other, 16, st))
	r.ok(r.MemcpyAsync(cuapi.DevicePtr(hostAddress(out)), a, 16, st))
	if string(dst) != "456789abcdefzzzz" {
		t.Errorf("got %q", dst)
	}
	r.clean()
}

func TestHoldAndRelease(t *testing.T) {
	r := newRig(t, Config{})
	st, other, before, after, crossed := r.stream(), r.stream(), r.event(), r.event(), r.event()
	r.ok(r.EventRecord(before, st))
	r.sim.Hold(uintptr(st))
	r.want(cuapi.NotReady, r.StreamQuery(st))
	r.ok(r.EventRecord(after, st))
	r.ok(r.StreamWaitEvent(other, after, 0))
	r.ok(r.EventRecord(crossed, other))
	r.ok(r.EventQuery(before))
	r.want(cuapi.NotReady, r.EventQuery(after))
	r.want(cuapi.NotReady, r.EventQuery(crossed))
	// What a wait saw stays what it waits for.
	r.ok(r.EventDestroy(after))
	r.want(cuapi.NotReady, r.StreamQuery(other))
	r.sim.Release(uintptr(st))
	r.ok(r.StreamQuery(st))
	r.ok(r.EventQuery(crossed))
	r.clean()
}

func TestDestroyedStreamCompletes(t *testing.T) {
	r := newRig(t, Config{})
	st, ev := r.stream(), r.event()
	r.sim.Hold(uintptr(st))
	r.ok(r.EventRecord(ev, st))
	r.ok(r.StreamDestroy(st))
	r.want(cuapi.NotReady, r.EventQuery(ev))
	r.sim.Release(uintptr(st))
	r.ok(r.EventQuery(ev))
	r.want(cuapi.InvalidHandle, r.StreamQuery(st))
}

func TestWaitValueHoldsUntilTheHostWrites(t *testing.T) {
	r := newRig(t, Config{})
	st, ev := r.stream(), r.event()
	flag, word := r.pinned(4)
	storeFlag(word, 0)
	addr := cuapi.DevicePtr(hostAddress(flag))
	r.ok(r.StreamWaitValue32(st, addr, 1, cuapi.StreamWaitValueGEQ))
	r.ok(r.EventRecord(ev, st))
	r.want(cuapi.NotReady, r.EventQuery(ev))
	storeFlag(word, 1)
	r.ok(r.EventQuery(ev))

	// A blocked caller notices the write without any driver call.
	r.ok(r.StreamWaitValue32(st, addr, 2, cuapi.StreamWaitValueEQ))
	done := make(chan cuapi.Result)
	go func() { done <- r.StreamSynchronize(st) }()
	r.blocked(1)
	storeFlag(word, 2)
	r.ok(<-done)

	r.ok(r.StreamWriteValue32(st, addr, 7, 0))
	if got := loadFlag(word); got != 7 {
		t.Errorf("the stream wrote %d", got)
	}
	r.clean()
}

func TestKernels(t *testing.T) {
	r := newRig(t, Config{})
	st, dst := r.stream(), r.device(8)
	m, f := r.function(addPTX, "add")
	var missing cuapi.Function
	r.want(cuapi.NotFound, r.ModuleGetFunction(&missing, m, cText("sub")))
	r.sim.Kernel("add", func(l *Launch) {
		out := l.Bytes(0)
		for i := range l.U32(1) {
			out[i] = byte(l.F32(2))
		}
		if l.Grid != [3]uint32{1, 1, 1} || l.I32(1) != 4 || len(out) != 8 {
			panic("wrong launch")
		}
	})
	r.ok(r.launch(f, st, arg(dst), arg(uint32(4)), arg(float32(9))))
	out, got := r.pinned(8)
	r.ok(r.MemcpyDtoHAsync(out, dst, 8, st))
	if want := []byte{9, 9, 9, 9, freshByte, freshByte, freshByte, freshByte}; !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
	var p cuapi.DevicePtr
	var size, offset uintptr
	r.ok(r.ModuleGetGlobal(&p, &size, m, cText("counter")))
	if size != 4 {
		t.Errorf("the global has %d bytes", size)
	}
	r.ok(r.FuncGetParamInfo(f, 2, &offset, &size))
	if offset != 12 || size != 4 {
		t.Errorf("parameter 2 is %d bytes at %d", size, offset)
	}
	r.want(cuapi.InvalidValue, r.FuncGetParamInfo(f, 3, &offset, &size))
	r.want(cuapi.InvalidValue, r.LaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, st, nil, nil))
	r.clean()
}

// A run repeats, and so do the addresses of a module's variables.
func TestAddressesOfGlobalsRepeat(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	text := ".version 8.0\n.target sm_70\n.address_size 64\n"
	for _, n := range names {
		text += ".visible .global .align 4 .u32 " + n + ";\n"
	}
	text += ".visible .entry none { ret; }\n"
	addresses := func() (at []cuapi.DevicePtr) {
		r := newRig(t, Config{})
		m, _ := r.function(text, "none")
		for _, n := range names {
			var p cuapi.DevicePtr
			r.ok(r.ModuleGetGlobal(&p, nil, m, cText(n)))
			at = append(at, p)
		}
		return at
	}
	if a, b := addresses(), addresses(); !slices.Equal(a, b) {
		t.Errorf("%x, then %x", a, b)
	}
}

func TestModuleErrors(t *testing.T) {
	r := newRig(t, Config{})
	var m cuapi.Module
	r.want(cuapi.InvalidImage, r.ModuleLoadDataEx(&m, cuapi.HostPtr(cText("\x7fELF")), 0, nil, nil))
	log := make([]byte, 64)
	options := []int32{cuapi.JITErrorLogBuffer, cuapi.JITErrorLogBufferSize}
	values := []uintptr{uintptr(cuapi.HostPtr(&log[0])), uintptr(len(log))}
	r.want(cuapi.InvalidPTX, r.ModuleLoadDataEx(&m, cuapi.HostPtr(cText(".version 8.0\n.entry 5()")), 2, &options[0], &values[0]))
	text := string(log[:values[1]])
	if !strings.Contains(text, "line 2; error: syntax error near") || log[values[1]] != 0 || len(text) > 63 {
		t.Errorf("log %q", text)
	}
	values[1] = uintptr(len(log))
	r.want(cuapi.InvalidImage, r.ModuleLoadDataEx(&m, cuapi.HostPtr(cText(".target sm_70\n.entry k() {}")), 2, &options[0], &values[0]))
	if got := string(log[:values[1]]); !strings.Contains(got, "no .version directive") {
		t.Errorf("log of PTX without a version %q", got)
	}
	runtime.KeepAlive(log)
}

func TestPoolMemoryIsStreamOrdered(t *testing.T) {
	r := newRig(t, Config{Memory: 1000})
	st, pl := r.stream(), r.pool()
	var a, b cuapi.DevicePtr
	r.want(cuapi.OutOfMemory, r.MemAllocFromPoolAsync(&a, 1001, pl, st))
	r.ok(r.MemAllocFromPoolAsync(&a, 600, pl, st))
	r.sim.Hold(uintptr(st))
	r.ok(r.MemFreeAsync(a, st))
	r.want(cuapi.OutOfMemory, r.MemAllocFromPoolAsync(&b, 600, pl, st))
	r.sim.ReleaseAll()
	r.ok(r.MemAllocFromPoolAsync(&b, 600, pl, st))
	if a == b {
		t.Error("an address is reused")
	}
	var used uint64
	r.ok(r.MemPoolGetAttribute(pl, cuapi.PoolUsedMemCurrent, cuapi.HostPtr(&used)))
	if used != 600 {
		t.Errorf("%d bytes in use", used)
	}
	r.ok(r.MemFreeAsync(b, st))
	r.ok(r.MemPoolDestroy(pl))
	r.clean()
}

func TestNoPools(t *testing.T) {
	r := newRig(t, Config{NoPools: true})
	var n int32
	r.ok(r.DeviceGetAttribute(&n, cuapi.DeviceMemoryPools, 0))
	var h cuapi.MemPool
	r.want(cuapi.NotSupported, r.DeviceGetDefaultMemPool(&h, 0))
	if n != 0 {
		t.Errorf("attribute %d", n)
	}
}

func TestPinnedLimit(t *testing.T) {
	r := newRig(t, Config{PinnedMemory: 100})
	p, _ := r.pinned(80)
	var q cuapi.HostPtr
	r.want(cuapi.OutOfMemory, r.MemHostAlloc(&q, 21, 0))
	r.ok(r.MemFreeHost(p))
	r.ok(r.MemHostAlloc(&q, 100, 0))
}

func TestHostFunctions(t *testing.T) {
	r := newRig(t, Config{})
	st, ran := r.stream(), 0
	fn := r.sim.HostFunc(func() { ran++ })
	r.sim.Hold(uintptr(st))
	r.ok(r.LaunchHostFunc(st, fn, 0))
	if ran != 0 {
		t.Error("it ran while the stream is held")
	}
	r.sim.ReleaseAll()
	if ran != 1 {
		t.Errorf("it ran %d times", ran)
	}
	r.clean()
}

// A host function that waits for a semaphore takes one post, made before or after
// it is reached, and fills the stream as others do.
func TestSemaphores(t *testing.T) {
	r := newRig(t, Config{})
	w, err := r.HostWait()
	if err != nil {
		t.Fatal(err)
	}
	st, ev := r.stream(), r.event()
	sem, _ := r.pinned(cuapi.SemaphoreBytes)
	at := uintptr(hostAddress(sem))
	w.Init(sem)
	if !w.Taken(sem) {
		t.Error("a fresh semaphore has posts")
	}
	r.ok(r.LaunchHostFunc(st, w.Wait, at))
	r.ok(r.LaunchHostFunc(st, w.Wait, at))
	r.ok(r.EventRecord(ev, st))
	w.Post(sem)
	r.want(cuapi.NotReady, r.EventQuery(ev))
	if !w.Taken(sem) {
		t.Error("the first wait did not take the post")
	}
	w.Post(sem)
	r.ok(r.EventSynchronize(ev))
	w.Post(sem)
	if w.Taken(sem) {
		t.Error("the third post is taken, and there were two waits")
	}
	var g cuapi.Graph
	r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeRelaxed)) // which takes nothing
	r.ok(r.LaunchHostFunc(st, w.Wait, at))
	r.ok(r.StreamEndCapture(st, &g))
	if w.Taken(sem) || r.sim.flags != 0 {
		t.Errorf("a captured wait took the post, or is pending: %d", r.sim.flags)
	}
	for range queueDepth {
		r.ok(r.LaunchHostFunc(st, w.Wait, at))
	}
	if n := *r.sim.streams[st].queue(work); n != queueDepth-1 {
		t.Errorf("%d waits fill the stream, want all but the one that took the post", n)
	}
	r.clean()
}

func TestManagedMemory(t *testing.T) {
	r := newRig(t, Config{Memory: 1 << 20})
	p := r.managed(100)
	d := r.device(100)
	for _, c := range []struct {
		at   cuapi.DevicePtr
		attr int32
		want uint64
	}{
		{p, cuapi.PointerMemoryType, cuapi.MemoryTypeDevice}, {p + 99, cuapi.PointerIsManaged, 1}, {p, cuapi.PointerContext, uint64(r.ctx)},
		{p, cuapi.PointerOrdinal, 0}, {p + 99, cuapi.PointerRangeStart, uint64(p)}, {p, cuapi.PointerRangeSize, 100},
		{d, cuapi.PointerIsManaged, 0}, {d, cuapi.PointerContext, uint64(r.ctx)},
	} {
		v := new(uint64)
		r.ok(r.PointerGetAttribute(cuapi.WordPtr(v), c.attr, c.at))
		if *v != c.want {
			t.Errorf("attribute %d of %#x: %#x, want %#x", c.attr, c.at, *v, c.want)
		}
	}
	var q cuapi.DevicePtr
	r.want(cuapi.InvalidValue, r.MemAllocManaged(&q, 8, 0))
	r.want(cuapi.InvalidValue, r.MemAllocManaged(&q, 8, 3))
	r.want(cuapi.InvalidValue, r.MemAllocManaged(&q, 0, cuapi.MemAttachHost))
	r.want(cuapi.OutOfMemory, r.MemAllocManaged(&q, 1<<21, cuapi.MemAttachHost))
	r.ok(r.MemFree(p))
	r.want(cuapi.InvalidValue, r.PointerGetAttribute(cuapi.WordPtr(new(uint64)), cuapi.PointerIsManaged, p))
	r.ok(r.CtxSetCurrent(0))
	r.want(cuapi.InvalidContext, r.MemAllocManaged(&q, 8, cuapi.MemAttachGlobal))
	r.clean()
}

func TestLegacyStreamWaitsForBlockingStreams(t *testing.T) {
	r := newRig(t, Config{})
	var blocking cuapi.Stream
	r.ok(r.StreamCreate(&blocking, 0))
	free, ev := r.stream(), r.event()
	r.sim.Hold(uintptr(blocking))
	r.ok(r.EventRecord(ev, 0))
	r.want(cuapi.NotReady, r.EventQuery(ev))
	r.ok(r.StreamQuery(free))
	r.sim.ReleaseAll()
	r.ok(r.EventQuery(ev))
	r.clean()
}

func TestPeers(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	_, f := r.function(addPTX, "add")
	r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0] = 1 })
	var can int32
	r.ok(r.DeviceCanAccessPeer(&can, 0, 1))
	var other cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&other, 1))
	r.ok(r.CtxPushCurrent(other))
	far := r.device(8)
	r.ok(r.CtxPopCurrent(nil))
	r.want(cuapi.PeerAccessNotEnabled, r.CtxDisablePeerAccess(other))
	r.ok(r.CtxEnablePeerAccess(other, 0))
	r.want(cuapi.PeerAccessAlreadyEnabled, r.CtxEnablePeerAccess(other, 0))
	st := r.stream()
	r.ok(r.launch(f, st, arg(far), arg(uint32(1)), arg(float32(1))))
	r.ok(r.StreamSynchronize(st))
	r.ok(r.CtxDisablePeerAccess(other))
	r.ok(r.launch(f, st, arg(far), arg(uint32(1)), arg(float32(1))))
	r.want(cuapi.IllegalAddress, r.StreamSynchronize(st))
	if can != 1 {
		t.Error("no peer access")
	}
}

func TestTraceAndCrossings(t *testing.T) {
	r := newRig(t, Config{})
	st, ev, dev := r.stream(), r.event(), r.device(8)
	r.sim.StartTrace()
	l := cuapi.NewList()
	l.MemsetD8Async(dev, 0, 8, st)
	l.EventRecord(ev, st)
	n, res := r.Table.Run(l)
	l.Free()
	r.ok(res)
	r.ok(r.EventQuery(ev))
	r.sim.StopTrace()
	r.ok(r.EventQuery(ev))
	got := r.sim.Trace()
	if n != 2 || len(got) != 3 {
		t.Fatalf("%d calls made, traced %v", n, got)
	}
	if got[0].Name != "cuMemsetD8Async" || got[1].Args[0] != uint64(ev) || got[2].Name != "cuEventQuery" {
		t.Errorf("trace %v", got)
	}
	if got[0].Crossing != got[1].Crossing || got[2].Crossing <= got[1].Crossing {
		t.Errorf("crossings %d %d %d", got[0].Crossing, got[1].Crossing, got[2].Crossing)
	}
}

func TestListStopsAtTheFirstFailure(t *testing.T) {
	r := newRig(t, Config{})
	st, dev, ev := r.stream(), r.device(8), r.event()
	l := cuapi.NewList()
	defer l.Free()
	l.MemsetD8Async(dev, 0, 9, st)
	l.EventRecord(ev, st)
	if n, res := r.Table.Run(l); n != 0 || res != cuapi.InvalidValue {
		t.Errorf("%d calls, result %d", n, res)
	}
}

func TestElapsedTimeGrows(t *testing.T) {
	r := newRig(t, Config{})
	st := r.stream()
	var a, b cuapi.Event
	var ms float32
	r.ok(r.EventCreate(&a, 0))
	r.ok(r.EventCreate(&b, 0))
	r.want(cuapi.InvalidHandle, r.EventElapsedTime(&ms, a, b))
	r.ok(r.EventRecord(a, st))
	r.ok(r.EventRecord(b, st))
	r.ok(r.EventElapsedTime(&ms, a, b))
	if ms <= 0 {
		t.Errorf("%v ms", ms)
	}
}

func TestProcAddress(t *testing.T) {
	r := newRig(t, Config{Version: 12000})
	var a, b uintptr
	var status int32
	r.ok(r.GetProcAddressV2(cText("cuEventRecord"), &a, 12000, 0, &status))
	r.ok(r.GetProcAddress(cText("cuMemAlloc"), &b, 12000, 0))
	if a == 0 || a == b {
		t.Errorf("addresses %#x %#x", a, b)
	}
	r.want(cuapi.NotFound, r.GetProcAddressV2(cText("cuNothing"), &a, 12000, 0, &status))
	if status != 1 || a != 0 {
		t.Errorf("status %d, address %#x", status, a)
	}
	r.want(cuapi.NotFound, r.GetProcAddressV2(cText("cuFuncLoad"), &a, 13000, 0, &status))
	if status != 2 {
		t.Errorf("status %d", status)
	}
}

func TestErrorTexts(t *testing.T) {
	r := newRig(t, Config{})
	var p *byte
	r.ok(r.GetErrorName(700, &p))
	if s, _ := cString(p, 64); s != "CUDA_ERROR_ILLEGAL_ADDRESS" {
		t.Errorf("name %q", s)
	}
	r.want(cuapi.InvalidValue, r.GetErrorString(12345, &p))
}

func TestOnlyTouchedMemoryIsReal(t *testing.T) {
	r := newRig(t, Config{Memory: 1 << 31})
	p := r.device(1 << 30)
	if r.sim.mem.at(uint64(p)).data != nil {
		t.Error("an untouched allocation has memory")
	}
	r.ok(r.MemFree(p))
}
