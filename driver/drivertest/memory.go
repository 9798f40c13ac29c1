package drivertest

import (
	"bytes"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// tooMuch is more memory than a device has: 1 TiB. On 32-bit platforms, for which
// there is no driver, it only compiles.
const tooMuch = ^uintptr(0)>>24 + 1

var memoryCases = []Case{
	{Name: "CopyOfNothing", Evidence: "Results and edge cases: copy of 0 bytes 0", run: func(r *rig) {
		s, d := r.stream(), r.device(4096, 0)
		h, _ := r.pinned(4096)
		r.want(r.MemcpyDtoHAsync(h, d, 0, s), cuapi.Success, "copy of 0 bytes to the host")
		r.want(r.MemcpyHtoDAsync(d, h, 0, s), cuapi.Success, "copy of 0 bytes to the device")
		r.want(r.StreamSynchronize(s), cuapi.Success, "the stream after")
	}},
	{Name: "HostAllocOfNothing", Evidence: "Results and edge cases: cuMemHostAlloc of 0 bytes 0 (!)", run: func(r *rig) {
		p := new(cuapi.HostPtr)
		r.want(r.MemHostAlloc(p, 0, 0), cuapi.Success, "cuMemHostAlloc of 0 bytes")
		if *p != nil {
			r.onEnd(func() cuapi.Result { return r.MemFreeHost(*p) })
		}
	}},
	{Name: "AllocOfNothing", Evidence: "Results and edge cases: cuMemAlloc of 0 bytes 1", run: func(r *rig) {
		r.want(r.MemAlloc(new(cuapi.DevicePtr), 0), cuapi.InvalidValue, "cuMemAlloc of 0 bytes")
	}},
	{Name: "PoolAllocOfNothing", Evidence: onHardware, run: func(r *rig) {
		d := new(cuapi.DevicePtr)
		r.want(r.MemAllocFromPoolAsync(d, 0, r.pool(), r.stream()), cuapi.Success, "0 bytes from a pool")
		if *d != 0 {
			r.Errorf("0 bytes from a pool are at %#x", *d)
		}
	}},
	{Name: "Overrun", Evidence: "Results and edge cases: a copy past the allocation 1, and the stream is usable after", run: func(r *rig) {
		s, d := r.stream(), r.device(4096, 6)
		h, data := r.pinned(4096)
		r.want(r.MemcpyDtoHAsync(h, d, tooMuch, s), cuapi.InvalidValue, "copy of 1 TiB from 4 KiB")
		r.ok(r.MemcpyDtoHAsync(h, d, 4096, s))
		r.ok(r.StreamSynchronize(s))
		if data[0] != 6 || data[4095] != 6 {
			r.Error("the copy after is not there")
		}
	}},
	{Name: "Copies", Evidence: onHardware, run: copies},
	{Name: "TooMuch", Evidence: stalls + "1 TiB fails with 2", run: func(r *rig) {
		r.want(r.MemAlloc(new(cuapi.DevicePtr), tooMuch), cuapi.OutOfMemory, "cuMemAlloc of 1 TiB")
		s := r.stream()
		r.want(r.MemAllocFromPoolAsync(new(cuapi.DevicePtr), tooMuch, r.pool(), s), cuapi.OutOfMemory, "1 TiB from a pool")
		r.want(r.StreamSynchronize(s), cuapi.Success, "the stream after")
	}},
	{Name: "AttributesOfDeviceMemory", Evidence: onHardware, run: deviceFacts},
	{Name: "AttributesOfManagedMemory", Evidence: onHardware, run: managedFacts},
	{Name: "AttributesOfPoolMemory", Evidence: onHardware, run: poolFacts},
	{Name: "PoolAttributes", Evidence: onHardware, run: poolAttributes},
	{Name: "PoolGrowsWhileHeld", Evidence: stalls + "With a private pool (cuMemPoolCreate, release threshold at its maximum, internal dependencies off) and another stream held: the first allocation", run: poolGrows},
}

// copies moves a pattern to the device, within it, and back, in each way.
func copies(r *rig) {
	const n = 1 << 20
	s := r.stream()
	a, b, c := r.device(n, 0), r.device(n, 0), r.device(n, 0)
	from, src := r.pinned(n)
	to, dst := r.pinned(n)
	for i := range src {
		src[i] = byte(i*7 + i>>8)
	}
	r.ok(r.MemcpyHtoDAsync(a, from, n, s))
	r.ok(r.MemcpyDtoDAsync(b, a, n, s))
	r.ok(r.MemcpyAsync(c, b, n, s))
	r.ok(r.MemsetD8Async(c+100, 0xEE, 50, s))
	r.ok(r.MemcpyDtoHAsync(to, c, n, s))
	r.ok(r.StreamSynchronize(s))
	copy(src[100:150], bytes.Repeat([]byte{0xEE}, 50))
	if !bytes.Equal(src, dst) {
		r.Error("what came back differs")
	}
}

// A fact is an attribute of a pointer.
type fact struct {
	name string
	attr int32
	// Whether the driver's value, and its answer, are as they should be.
	want func(v uint64, res cuapi.Result) bool
}

func is(want uint64) func(uint64, cuapi.Result) bool {
	return func(v uint64, res cuapi.Result) bool { return res == cuapi.Success && v == want }
}

func atLeast(want uint64) func(uint64, cuapi.Result) bool {
	return func(v uint64, res cuapi.Result) bool { return res == cuapi.Success && v >= want }
}

// facts asks for attributes at the memory's address and inside it, and logs
// them, so that a run tells what is left open too. The word is cleared before:
// of what the driver writes as a boolean or as 32 bits the rest is 0.
func (r *rig) facts(d cuapi.DevicePtr, list []fact) {
	r.Helper()
	for _, at := range []cuapi.DevicePtr{d, d + 100} {
		for _, f := range list {
			v := new(uint64)
			res := r.PointerGetAttribute(cuapi.WordPtr(v), f.attr, at)
			r.Logf("%s of %#x at %#x: %#x, result %d", f.name, d, at, *v, res)
			if !f.want(*v, res) {
				r.Errorf("%s of %#x at %#x: %#x, result %d", f.name, d, at, *v, res)
			}
		}
	}
}

// plain are the facts of memory that a context allocated. What the reference
// leaves open is whether the size is the one asked for or a rounded one.
func (r *rig) plain(d cuapi.DevicePtr, n, managed uint64) []fact {
	return []fact{
		{"memory type", cuapi.PointerMemoryType, is(cuapi.MemoryTypeDevice)},
		{"is managed", cuapi.PointerIsManaged, is(managed)},
		{"device ordinal", cuapi.PointerOrdinal, is(uint64(r.dev))},
		{"context", cuapi.PointerContext, is(uint64(r.core.Raw))},
		{"range start", cuapi.PointerRangeStart, is(uint64(d))},
		{"range size", cuapi.PointerRangeSize, atLeast(n)},
	}
}

func deviceFacts(r *rig) {
	d := r.device(4096, 0)
	r.facts(d, r.plain(d, 4096, 0))
}

// managedFacts: managed memory looks like device memory but for one attribute,
// before and after the device wrote it. Its memory type is that of where it
// lies, says the reference, which is silent about memory that moves; what drivers
// answer was reported.
func managedFacts(r *rig) {
	if !r.Has(cuapi.IDMemAllocManaged) {
		r.Fatal("the driver lacks cuMemAllocManaged")
	}
	can := new(int32)
	r.ok(r.DeviceGetAttribute(can, cuapi.DeviceManagedMemory, r.dev))
	if *can != 1 {
		r.Fatalf("the device has no managed memory: %d", *can)
	}
	d, s := new(cuapi.DevicePtr), r.stream()
	r.want(r.MemAllocManaged(d, 0, cuapi.MemAttachGlobal), cuapi.InvalidValue, "cuMemAllocManaged of 0 bytes")
	r.ok(r.MemAllocManaged(d, 4096, cuapi.MemAttachGlobal))
	r.onEnd(func() cuapi.Result { return r.MemFree(*d) })
	r.facts(*d, r.plain(*d, 4096, 1))
	r.ok(r.MemsetD8Async(*d, 1, 4096, s))
	r.ok(r.StreamSynchronize(s))
	r.facts(*d, r.plain(*d, 4096, 1))
	base, size := new(cuapi.DevicePtr), new(uintptr)
	r.ok(r.MemGetAddressRange(base, size, *d+100))
	if *base != *d || *size < 4096 {
		r.Errorf("the range of %#x is %d bytes from %#x", *d, *size, *base)
	}
}

// poolFacts: memory of a pool looks like device memory, of no context: a null one
// as measured, and code 1 is allowed. Its range reaches as far as the allocation at
// least: the reference leaves open whether it is that or the pool's own.
func poolFacts(r *rig) {
	s := r.stream()
	pool := r.pool()
	for what, alloc := range map[string]func(*cuapi.DevicePtr) cuapi.Result{
		"a private":   func(d *cuapi.DevicePtr) cuapi.Result { return r.MemAllocFromPoolAsync(d, 4096, pool, s) },
		"the default": func(d *cuapi.DevicePtr) cuapi.Result { return r.MemAllocAsync(d, 4096, s) },
	} {
		d := new(cuapi.DevicePtr)
		r.ok(alloc(d))
		r.ok(r.StreamSynchronize(s))
		r.Logf("memory of %s pool", what)
		var start uint64
		r.facts(*d, []fact{
			{"memory type", cuapi.PointerMemoryType, is(cuapi.MemoryTypeDevice)},
			{"is managed", cuapi.PointerIsManaged, is(0)},
			{"device ordinal", cuapi.PointerOrdinal, is(uint64(r.dev))},
			{"context", cuapi.PointerContext, func(v uint64, res cuapi.Result) bool {
				return v == 0 && (res == cuapi.Success || res == cuapi.InvalidValue)
			}},
			{"range start", cuapi.PointerRangeStart, func(v uint64, res cuapi.Result) bool {
				start = v
				return res == cuapi.Success && v != 0 && v <= uint64(*d)
			}},
			{"range size", cuapi.PointerRangeSize, func(v uint64, res cuapi.Result) bool {
				return res == cuapi.Success && start+v >= uint64(*d)+4096
			}},
		})
		r.ok(r.MemFreeAsync(*d, s))
		r.ok(r.StreamSynchronize(s))
	}
}

func (r *rig) poolProps() *cuapi.MemPoolProps {
	return &cuapi.MemPoolProps{
		AllocType: cuapi.MemAllocationTypePinned,
		Location:  cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice, ID: int32(r.dev)},
	}
}

func (r *rig) pool() cuapi.MemPool {
	r.Helper()
	p := new(cuapi.MemPool)
	r.ok(r.MemPoolCreate(p, r.poolProps()))
	r.onEnd(func() cuapi.Result { return r.MemPoolDestroy(*p) })
	r.ok(r.MemPoolSetAttribute(*p, cuapi.PoolReleaseThreshold, cuapi.Word(^uint64(0))))
	r.ok(r.MemPoolSetAttribute(*p, cuapi.PoolReuseAllowInternalDependencies, cuapi.Word(0)))
	return *p
}

func (r *rig) poolAttribute(p cuapi.MemPool, attr int32) uint64 {
	r.Helper()
	v := new(uint64)
	r.ok(r.MemPoolGetAttribute(p, attr, out(v)))
	return *v
}

func poolAttributes(r *rig) {
	p, s := r.pool(), r.stream()
	for _, a := range []struct {
		name string
		attr int32
		want uint64
	}{
		{"release threshold", cuapi.PoolReleaseThreshold, ^uint64(0)},
		{"internal dependencies", cuapi.PoolReuseAllowInternalDependencies, 0},
		{"event dependencies", cuapi.PoolReuseFollowEventDependencies, 1},
		{"used", cuapi.PoolUsedMemCurrent, 0},
	} {
		if got := r.poolAttribute(p, a.attr); got != a.want {
			r.Errorf("%s: %d, want %d", a.name, got, a.want)
		}
	}
	d := new(cuapi.DevicePtr)
	r.ok(r.MemAllocFromPoolAsync(d, 1<<20, p, s))
	r.ok(r.MemsetD8Async(*d, 1, 1<<20, s))
	r.ok(r.StreamSynchronize(s))
	if used := r.poolAttribute(p, cuapi.PoolUsedMemCurrent); used < 1<<20 {
		r.Errorf("%d bytes are used, want 1 MiB", used)
	}
	r.ok(r.MemFreeAsync(*d, s))
	r.ok(r.StreamSynchronize(s))
	if used := r.poolAttribute(p, cuapi.PoolUsedMemCurrent); used != 0 {
		r.Errorf("%d bytes are used after the free", used)
	}
	if kept := r.poolAttribute(p, cuapi.PoolReservedMemCurrent); kept < 1<<20 {
		r.Errorf("%d bytes are reserved after the free, below the threshold", kept)
	}
	r.ok(r.MemPoolTrimTo(p, 0))
	if kept := r.poolAttribute(p, cuapi.PoolReservedMemCurrent); kept != 0 {
		r.Errorf("%d bytes are reserved after the trim", kept)
	}
}

func poolGrows(r *rig) {
	p, held, s := r.pool(), r.stream(), r.stream()
	h, data := r.pinned(4096)
	r.hold(held)
	for _, size := range []uintptr{1 << 20, 64 << 20} {
		d := new(cuapi.DevicePtr)
		r.mustReturn(r.start("an allocation from a pool that must grow", func() cuapi.Result { return r.MemAllocFromPoolAsync(d, size, p, s) }), cuapi.Success)
		r.ok(r.MemsetD8Async(*d, 8, 4096, s))
		r.ok(r.MemcpyDtoHAsync(h, *d, 4096, s))
		r.mustReturn(r.start("a free to a pool", func() cuapi.Result { return r.MemFreeAsync(*d, s) }), cuapi.Success)
		r.mustReturn(r.start("the stream of the pool's user", func() cuapi.Result { return r.StreamSynchronize(s) }), cuapi.Success)
		if data[0] != 8 || data[4095] != 8 {
			r.Error("the pool's memory does not work")
		}
		clear(data)
	}
	r.want(r.StreamQuery(held), cuapi.NotReady, "the held stream")
}
