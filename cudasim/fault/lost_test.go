package fault_test

import (
	"maps"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

const ptx = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 4 .u32 word;\n.visible .entry wild() { ret; }\n"

// word is a C string, and room for what a call writes.
func word() *byte { return &append([]byte("word"), make([]byte, 100)...)[0] }

// arguments are the argument of each type that a call can be made with: the
// rig's handles, valid out-parameters, and numbers that the entry point takes.
func (r *rig) arguments() map[reflect.Type]func() any {
	var mod cuapi.Module
	var fn cuapi.Function
	var pool cuapi.MemPool
	image := append([]byte(ptx), 0)
	r.ok(r.ModuleLoadDataEx(&mod, cuapi.HostPtr(&image[0]), 0, nil, nil))
	r.ok(r.ModuleGetFunction(&fn, mod, &append([]byte("wild"), 0)[0]))
	r.ok(r.DeviceGetDefaultMemPool(&pool, 0))
	r.registered = cuapi.HostPtr(&make([]byte, size)[0])
	r.ok(r.MemHostRegister(r.registered, size, 0))
	m := map[reflect.Type]func() any{}
	r.ok(r.StreamBeginCapture(r.st, cuapi.CaptureModeRelaxed))
	var graph cuapi.Graph
	r.ok(r.StreamEndCapture(r.st, &graph))
	for _, v := range []any{graph, r.ctx, r.st, r.ev, mod, fn, pool, r.dev, r.host} {
		m[reflect.TypeOf(v)] = func() any { return v }
	}
	m[reflect.TypeFor[*byte]()] = func() any { return word() }
	m[reflect.TypeFor[*cuapi.MemPoolProps]()] = func() any {
		return &cuapi.MemPoolProps{AllocType: cuapi.MemAllocationTypePinned, Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice}}
	}
	m[reflect.TypeFor[*cuapi.MemLocation]()] = func() any { return &cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice} }
	m[reflect.TypeFor[*cuapi.MemAccessDesc]()] = func() any {
		one := cuapi.MemAccessDesc{Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice}, Flags: cuapi.MemAccessReadWrite}
		return &[]cuapi.MemAccessDesc{one, one, one, one, one, one, one, one}[0] // as many as every size says
	}
	return m
}

// numbers are the arguments that are numbers, where 8 for a size and 0 for the
// others is no valid call.
var numbers = map[cuapi.ID]int64{
	cuapi.IDMemPoolSetAttribute: cuapi.PoolReleaseThreshold, cuapi.IDMemPoolGetAttribute: cuapi.PoolReleaseThreshold,
	cuapi.IDPointerGetAttribute: cuapi.PointerMemoryType, cuapi.IDMemAllocManaged: cuapi.MemAttachGlobal,
	cuapi.IDDeviceGetAttribute: cuapi.DeviceWarpSize, cuapi.IDLaunchKernel: 1, cuapi.IDLaunchHostFunc: 1,
	cuapi.IDDeviceGetP2PAttribute: 1, cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor: 32, cuapi.IDFuncSetAttribute: cuapi.FuncMaxDynamicShared,
	cuapi.IDDeviceGetName: 64, cuapi.IDGetErrorName: 700, cuapi.IDGetErrorString: 700, cuapi.IDGetProcAddress: 12000, cuapi.IDGetProcAddressV2: 12000,
	cuapi.IDMemHostRegister: 0, cuapi.IDCtxEnablePeerAccess: 0,
}

// call calls an entry point with those arguments.
func (r *rig) call(id cuapi.ID, args map[reflect.Type]func() any) cuapi.Result {
	f := reflect.ValueOf(r.Table).Elem().FieldByName(cuapi.Entries[id].Name)
	var in []reflect.Value
	if id == cuapi.IDMemHostUnregister {
		args = maps.Clone(args)
		args[reflect.TypeFor[cuapi.HostPtr]()] = func() any { return r.registered }
	}
	for i := range f.Type().NumIn() {
		typ := f.Type().In(i)
		v := reflect.New(typ).Elem()
		switch a := args[typ]; {
		case a != nil:
			v.Set(reflect.ValueOf(a()))
		case typ.Kind() == reflect.Pointer:
			v.Set(reflect.New(typ.Elem()))
		case typ == reflect.TypeFor[cuapi.Device]():
		case typ == reflect.TypeFor[uintptr]():
			v.SetUint(8)
		case v.CanInt():
			v.SetInt(numbers[id])
		case v.CanUint():
			v.SetUint(uint64(numbers[id]))
		}
		in = append(in, v)
	}
	return f.Call(in)[0].Interface().(cuapi.Result)
}

// On a context that the Injector lost, the calls of every entry point fail that
// fail on one that the simulator lost in a kernel's fault, and no others.
func TestLostAsTheSimulator(t *testing.T) {
	const code = cuapi.IllegalAddress
	told := 0
	for _, e := range cuapi.Entries {
		var got [2]cuapi.Result
		for k, lose := range []func(r *rig, args map[reflect.Type]func() any){
			func(r *rig, args map[reflect.Type]func() any) {
				fn := args[reflect.TypeFor[cuapi.Function]()]().(cuapi.Function)
				r.ok(r.LaunchKernel(fn, 1, 1, 1, 1, 1, 1, 0, r.st, nil, nil))
				r.want(code, r.StreamSynchronize(r.st))
			},
			func(r *rig, args map[reflect.Type]func() any) {
				r.arm("lose cuStreamSynchronize with 700")
				r.want(code, r.StreamSynchronize(r.st))
			},
		} {
			r := newRig(t)
			r.sim.Kernel("wild", func(l *cudasim.Launch) { l.Fault(int(code)) })
			args := r.arguments()
			lose(r, args)
			got[k] = r.call(e.ID, args)
		}
		if got[0] == code {
			told++
		}
		if (got[0] == code) != (got[1] == code) {
			t.Errorf("%s on a lost context: %d of the simulator, %d of the Injector", e.Symbol(), got[0], got[1])
		}
	}
	if told < 40 {
		t.Errorf("only %d entry points tell", told)
	}
}

// The call that loses the context fails, before its effect or after, and so do
// all behind it; a disarmed and a newly armed Injector is still lost, the first
// code stays, and the release of the context returns 0.
func TestLose(t *testing.T) {
	for _, after := range []bool{false, true} {
		r := newRig(t)
		text := "fail cuEventRecord #1 with 1; lose cuEventRecord #2 with 719; lose cuEventRecord #4 with 700"
		if after {
			text = "fail cuEventRecord #1 with 1; lose cuEventRecord #2 with 719 after; lose cuEventRecord #4 with 700"
		}
		r.arm(text)
		heard := r.heard(func() {
			r.ok(r.query())
			r.want(cuapi.InvalidValue, r.record())
			r.ok(r.query())
			r.want(cuapi.LaunchFailed, r.record())
			r.want(cuapi.LaunchFailed, r.query())
			r.want(cuapi.LaunchFailed, r.record())
			r.want(cuapi.LaunchFailed, r.record())
			c := new(cuapi.Context)
			r.ok(r.CtxGetCurrent(c))
			if *c != r.ctx {
				t.Error("another context is current")
			}
		})
		want := []string{"cuEventQuery", "cuEventQuery", "cuCtxGetCurrent"}
		if after {
			want = []string{"cuEventQuery", "cuEventQuery", "cuEventRecord", "cuCtxGetCurrent"}
		}
		if !slices.Equal(heard, want) {
			t.Errorf("after %v: the driver heard %v", after, heard)
		}
		if r.inj.Lost() != driver.ErrLaunchFailed {
			t.Error(r.inj.Lost())
		}
		log := r.inj.Injected()
		if len(log) != 5 || log[1].Lost || log[1].Code != 719 || log[1].After != after || !log[2].Lost || log[2].Code != 719 || log[2].Call != "cuEventQuery" || log[4].Position != 7 || log[4].Nth != 4 {
			t.Error(log)
		}
		if s := log[4].String(); s != "call 7, cuEventRecord #4: CUDA_ERROR_LAUNCH_FAILED (719), the context is lost" {
			t.Error(s)
		}
		r.inj.Disarm()
		r.want(cuapi.LaunchFailed, r.record())
		if r.inj.Times() != 5 {
			t.Error("what fails behind Disarm is logged")
		}
		r.arm("fail cuEventRecord with 1; fail cuDeviceGetCount with 100")
		r.want(cuapi.LaunchFailed, r.record())
		r.want(cuapi.NoDevice, r.DeviceGetCount(new(int32))) // touches no context
		r.ok(r.CtxSetCurrent(0))
		r.ok(r.DevicePrimaryCtxRelease(0))
		if v := r.sim.Violations(); len(v) != 0 {
			t.Error(v)
		}
	}
}

// A call that waits for work while the context is lost tells it when its wait
// ends; one at a gate does too, and is not made.
func TestLostMeanwhile(t *testing.T) {
	r := newRig(t)
	r.sim.Hold(uintptr(r.st))
	r.ok(r.record())
	r.arm("delay cuMemAlloc at front; delay cuMemHostAlloc after at behind; delay cuDeviceGetCount at aside; lose cuStreamQuery with 715")
	var wait, before, behind, aside cuapi.Result
	var wg sync.WaitGroup
	p, h := new(cuapi.DevicePtr), new(cuapi.HostPtr)
	current := func(f func() cuapi.Result) cuapi.Result {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		r.CtxSetCurrent(r.ctx)
		defer r.CtxSetCurrent(0)
		return f()
	}
	wg.Go(func() { wait = r.EventSynchronize(r.ev) })
	wg.Go(func() { before = current(func() cuapi.Result { return r.MemAlloc(p, size) }) })
	wg.Go(func() { behind = current(func() cuapi.Result { return r.MemHostAlloc(h, size, 0) }) })
	wg.Go(func() { aside = r.DeviceGetCount(new(int32)) })
	for r.sim.Blocked() == 0 {
		runtime.Gosched()
	}
	for _, g := range []string{"front", "behind", "aside"} {
		<-r.at(g).Reached()
	}
	r.want(cuapi.IllegalInstruction, r.StreamQuery(r.st))
	r.sim.ReleaseAll()
	for _, g := range []string{"front", "behind", "aside"} {
		r.at(g).Open()
	}
	wg.Wait()
	for what, got := range map[string]cuapi.Result{"EventSynchronize": wait, "at a gate before": before, "at a gate behind": behind} {
		if got != cuapi.IllegalInstruction {
			t.Errorf("%s: %d", what, got)
		}
	}
	if aside != cuapi.Success {
		t.Errorf("a call that touches no context: %d", aside)
	}
	if *p != 0 || *h == nil {
		t.Error("the call at the gate was made, or the other was not")
	}
}

// The first loss stays, also of two that are under way at once.
func TestLosesOnce(t *testing.T) {
	r := newRig(t)
	other := r.dev
	r.ok(r.MemAlloc(&other, size))
	r.sim.Hold(uintptr(r.st))
	r.ok(r.record())
	r.arm("lose cuMemFree after with 719; lose cuStreamQuery with 700")
	done := make(chan cuapi.Result)
	go func() { done <- r.MemFree(other) }()
	for r.sim.Blocked() == 0 { // inside the driver, until the stream moves
		runtime.Gosched()
	}
	r.want(cuapi.IllegalAddress, r.StreamQuery(r.st))
	r.sim.ReleaseAll()
	r.want(cuapi.IllegalAddress, <-done)
	if r.inj.Lost() != driver.ErrIllegalAddress {
		t.Error(r.inj.Lost())
	}
}
