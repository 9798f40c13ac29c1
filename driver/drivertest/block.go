package drivertest

import (
	"github.com/purecuda/purecuda/internal/cuapi"
)

// blockCases make each call of blockCalls while a stream is held, and check
// what the manifest's column says of it: "held" calls must block until the
// stream moves, others must return. Calls of "setup" have no case: where one
// returned for a small kernel (cuModuleGetFunction, cuFuncLoad), that says
// nothing of a large one.
var blockCases = func() (cases []Case) {
	for _, c := range blockCalls {
		e := cuapi.Entries[c.id]
		cases = append(cases, Case{Name: "Block_" + e.Symbol(), Evidence: onHardware, Child: true, run: func(r *rig) {
			if !r.Has(c.id) {
				r.Fatalf("the driver lacks %s", e.Symbol())
			}
			f := c.prepare(r)
			held := r.stream()
			r.hold(held)
			call := r.start(e.Symbol(), f)
			if e.Block == cuapi.BlockHeld {
				r.mustBlock(call)
			} else {
				r.mustReturn(call, cuapi.Success)
			}
			r.want(r.StreamQuery(held), cuapi.NotReady, "the held stream")
			r.returned()
			r.mustReturn(call, cuapi.Success)
		}})
	}
	return cases
}()

// A blockCall prepares what a call needs, and returns the call.
type blockCall struct {
	id      cuapi.ID
	prepare func(*rig) func() cuapi.Result
}

var blockCalls = []blockCall{
	{cuapi.IDInit, func(r *rig) func() cuapi.Result { return func() cuapi.Result { return r.Init(0) } }},
	{cuapi.IDDevicePrimaryCtxRetain, func(r *rig) func() cuapi.Result {
		c := new(cuapi.Context)
		r.onEnd(func() cuapi.Result { return r.DevicePrimaryCtxRelease(r.dev) })
		return func() cuapi.Result { return r.DevicePrimaryCtxRetain(c, r.dev) }
	}},
	{cuapi.IDDevicePrimaryCtxRelease, func(r *rig) func() cuapi.Result {
		r.ok(r.DevicePrimaryCtxRetain(new(cuapi.Context), r.dev)) // not the last use
		return func() cuapi.Result { return r.DevicePrimaryCtxRelease(r.dev) }
	}},
	{cuapi.IDDevicePrimaryCtxGetState, func(r *rig) func() cuapi.Result {
		flags, active := new(uint32), new(int32)
		return func() cuapi.Result { return r.DevicePrimaryCtxGetState(r.dev, flags, active) }
	}},
	{cuapi.IDCtxGetId, func(r *rig) func() cuapi.Result {
		id := new(uint64)
		return func() cuapi.Result { return r.CtxGetId(r.core.Raw, id) }
	}},
	{cuapi.IDMemGetInfo, func(r *rig) func() cuapi.Result {
		free, total := new(uintptr), new(uintptr)
		return func() cuapi.Result { return r.MemGetInfo(free, total) }
	}},
	{cuapi.IDMemHostGetDevicePointer, func(r *rig) func() cuapi.Result {
		h := new(cuapi.HostPtr)
		r.ok(r.MemHostAlloc(h, 4096, cuapi.MemHostAllocDeviceMap))
		r.onEnd(func() cuapi.Result { return r.MemFreeHost(*h) })
		d := new(cuapi.DevicePtr)
		return func() cuapi.Result { return r.MemHostGetDevicePointer(d, *h, 0) }
	}},
	{cuapi.IDMemGetAddressRange, func(r *rig) func() cuapi.Result {
		d := r.device(4096, 0)
		base, size := new(cuapi.DevicePtr), new(uintptr)
		return func() cuapi.Result { return r.MemGetAddressRange(base, size, d) }
	}},
	{cuapi.IDPointerGetAttribute, func(r *rig) func() cuapi.Result {
		d := r.device(4096, 0)
		kind := new(uint32)
		return func() cuapi.Result { return r.PointerGetAttribute(out(kind), cuapi.PointerMemoryType, d) }
	}},
	{cuapi.IDDeviceGetDefaultMemPool, func(r *rig) func() cuapi.Result {
		p := new(cuapi.MemPool)
		return func() cuapi.Result { return r.DeviceGetDefaultMemPool(p, r.dev) }
	}},
	{cuapi.IDMemPoolCreate, func(r *rig) func() cuapi.Result {
		p := new(cuapi.MemPool)
		r.onEnd(func() cuapi.Result { return r.MemPoolDestroy(*p) })
		return func() cuapi.Result { return r.MemPoolCreate(p, r.poolProps()) }
	}},
	{cuapi.IDMemPoolDestroy, func(r *rig) func() cuapi.Result {
		p := new(cuapi.MemPool)
		r.ok(r.MemPoolCreate(p, r.poolProps()))
		return func() cuapi.Result { return r.MemPoolDestroy(*p) }
	}},
	{cuapi.IDMemPoolTrimTo, func(r *rig) func() cuapi.Result {
		p := r.usedPool()
		return func() cuapi.Result { return r.MemPoolTrimTo(p, 0) }
	}},
	{cuapi.IDMemPoolSetAttribute, func(r *rig) func() cuapi.Result {
		p := r.usedPool()
		return func() cuapi.Result {
			return r.MemPoolSetAttribute(p, cuapi.PoolReleaseThreshold, cuapi.Word(1<<20))
		}
	}},
	{cuapi.IDMemPoolGetAttribute, func(r *rig) func() cuapi.Result {
		p, v := r.usedPool(), cuapi.Word(0)
		return func() cuapi.Result { return r.MemPoolGetAttribute(p, cuapi.PoolReleaseThreshold, v) }
	}},
	{cuapi.IDStreamBeginCapture, func(r *rig) func() cuapi.Result {
		s := r.stream()
		return func() cuapi.Result { // its end and the graph's too
			if res := r.StreamBeginCapture(s, cuapi.CaptureModeRelaxed); res != cuapi.Success {
				return res
			}
			return r.endCapture(s)
		}
	}},
	{cuapi.IDStreamIsCapturing, func(r *rig) func() cuapi.Result {
		s, status := r.stream(), new(int32)
		return func() cuapi.Result { return r.StreamIsCapturing(s, status) }
	}},
	{cuapi.IDEventElapsedTime, func(r *rig) func() cuapi.Result {
		s := r.stream()
		a, b, ms := new(cuapi.Event), new(cuapi.Event), new(float32)
		for _, e := range []*cuapi.Event{a, b} {
			r.ok(r.EventCreate(e, cuapi.EventDefault))
			r.onEnd(func() cuapi.Result { return r.EventDestroy(*e) })
			r.ok(r.EventRecord(*e, s))
		}
		r.ok(r.StreamSynchronize(s))
		return func() cuapi.Result { return r.EventElapsedTime(ms, *a, *b) }
	}},
	{cuapi.IDModuleUnload, func(r *rig) func() cuapi.Result {
		m := r.loose()
		return func() cuapi.Result { return r.ModuleUnload(m) }
	}},
	{cuapi.IDFuncGetAttribute, func(r *rig) func() cuapi.Result {
		f, v := r.function("nop"), new(int32)
		r.ok(r.FuncLoad(f))
		return func() cuapi.Result { return r.FuncGetAttribute(v, cuapi.FuncNumRegs, f) }
	}},
	{cuapi.IDFuncSetAttribute, func(r *rig) func() cuapi.Result {
		f := r.function("nop")
		r.ok(r.FuncLoad(f))
		return func() cuapi.Result { return r.FuncSetAttribute(f, cuapi.FuncMaxDynamicShared, 1024) }
	}},
	{cuapi.IDFuncGetParamInfo, func(r *rig) func() cuapi.Result {
		f, at, size := r.function("fill"), new(uintptr), new(uintptr)
		r.ok(r.FuncLoad(f))
		return func() cuapi.Result { return r.FuncGetParamInfo(f, 0, at, size) }
	}},
	{cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor, func(r *rig) func() cuapi.Result {
		f, n := r.function("nop"), new(int32)
		r.ok(r.FuncLoad(f))
		return func() cuapi.Result { return r.OccupancyMaxActiveBlocksPerMultiprocessor(n, f, 128, 0) }
	}},
	{cuapi.IDOccupancyMaxPotentialBlockSize, func(r *rig) func() cuapi.Result {
		f, grid, block := r.function("nop"), new(int32), new(int32)
		r.ok(r.FuncLoad(f))
		return func() cuapi.Result { return r.OccupancyMaxPotentialBlockSize(grid, block, f, 0, 0, 0) }
	}},
	{cuapi.IDStreamWaitValue32, func(r *rig) func() cuapi.Result {
		s := r.stream()
		p, _ := r.pinned(4)
		return func() cuapi.Result { return r.StreamWaitValue32(s, address(p), 0, cuapi.StreamWaitValueGEQ) }
	}},
	{cuapi.IDStreamWriteValue32, func(r *rig) func() cuapi.Result {
		s := r.stream()
		p, _ := r.pinned(4)
		return func() cuapi.Result { return r.StreamWriteValue32(s, address(p), 1, 0) }
	}},
}

// usedPool is a pool that gave memory and got it back.
func (r *rig) usedPool() cuapi.MemPool {
	r.Helper()
	p, s, d := r.pool(), r.stream(), new(cuapi.DevicePtr)
	r.ok(r.MemAllocFromPoolAsync(d, 1<<20, p, s))
	r.ok(r.MemFreeAsync(*d, s))
	r.ok(r.StreamSynchronize(s))
	return p
}

// loose is a module that the case unloads.
func (r *rig) loose() cuapi.Module {
	r.Helper()
	m := new(cuapi.Module)
	_, res := r.load(m, []byte(PTX))
	r.ok(res)
	return *m
}

func (r *rig) endCapture(s cuapi.Stream) cuapi.Result {
	g := new(cuapi.Graph)
	if res := r.StreamEndCapture(s, g); res != cuapi.Success {
		return res
	}
	return r.GraphDestroy(*g)
}
