package cudasim

import (
	"runtime"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A rig is a simulated driver with one context current on the test's thread.
type rig struct {
	*testing.T
	*cuapi.Table
	sim *Sim
	ctx cuapi.Context
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	s := New(cfg)
	r := &rig{T: t, Table: s.Table(), sim: s}
	r.ok(r.Init(0))
	r.ok(r.DevicePrimaryCtxRetain(&r.ctx, 0))
	r.ok(r.CtxSetCurrent(r.ctx))
	return r
}

func (r *rig) ok(got cuapi.Result) { r.Helper(); r.want(cuapi.Success, got) }

func (r *rig) want(want, got cuapi.Result) {
	r.Helper()
	if got != want {
		r.Fatalf("got %d, want %d", got, want)
	}
}

func (r *rig) stream() (h cuapi.Stream) {
	r.Helper()
	r.ok(r.StreamCreate(&h, cuapi.StreamNonBlocking))
	return h
}

func (r *rig) event() (h cuapi.Event) {
	r.Helper()
	r.ok(r.EventCreate(&h, cuapi.EventDisableTiming))
	return h
}

func (r *rig) device(n int) (p cuapi.DevicePtr) {
	r.Helper()
	r.ok(r.MemAlloc(&p, uintptr(n)))
	return p
}

func (r *rig) managed(n int) (p cuapi.DevicePtr) {
	r.Helper()
	r.ok(r.MemAllocManaged(&p, uintptr(n), cuapi.MemAttachGlobal))
	return p
}

func (r *rig) pinned(n int) (cuapi.HostPtr, []byte) {
	r.Helper()
	var p cuapi.HostPtr
	r.ok(r.MemHostAlloc(&p, uintptr(n), 0))
	return p, hostBytes(p, uintptr(n))
}

func (r *rig) pool() (h cuapi.MemPool) {
	r.Helper()
	r.ok(r.MemPoolCreate(&h, &cuapi.MemPoolProps{AllocType: cuapi.MemAllocationTypePinned, Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice}}))
	return h
}

func (r *rig) function(ptx, name string) (m cuapi.Module, f cuapi.Function) {
	r.Helper()
	r.ok(r.ModuleLoadDataEx(&m, cuapi.HostPtr(cText(ptx)), 0, nil, nil))
	r.ok(r.ModuleGetFunction(&f, m, cText(name)))
	return m, f
}

// launch starts a kernel whose arguments are pointers to values.
func (r *rig) launch(f cuapi.Function, st cuapi.Stream, args ...cuapi.HostPtr) cuapi.Result {
	var params *cuapi.HostPtr
	if len(args) > 0 {
		params = &args[0]
	}
	return r.LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, st, params, nil)
}

func arg[T any](v T) cuapi.HostPtr { return cuapi.HostPtr(&v) }

// kinds returns the kinds of the violations so far.
func (r *rig) kinds() (out []Kind) {
	for _, v := range r.sim.Violations() {
		out = append(out, v.Kind)
	}
	return out
}

func (r *rig) clean() {
	r.Helper()
	for _, v := range r.sim.Violations() {
		r.Errorf("violation: %v\n%s", v, v.Stack())
	}
}

const (
	addPTX = `
.version 8.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter;
.visible .entry add(.param .u64 dst, .param .u32 n, .param .f32 by) { ret; }
.visible .entry none { ret; }
`
)
