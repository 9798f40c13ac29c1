// Package kernel loads device code and describes its launches.
//
//	mod, err := kernel.Load(ctx, ptx)
//	blur, err := mod.Function("blur")
//	err = session.Launch(blur, kernel.Grid(w, h), publish.In(src), publish.Out(dst), kernel.I32(w))
//
// Loading is set-up: it stalls every driver call of the process while any
// stream has work pending (docs/driver-facts.md).
package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// LoadError tells why the driver refused device code. Log is what its just-in-time
// compiler said, with line numbers for PTX; it may be empty.
type LoadError struct {
	Err error // a *driver.Error
	Log string
}

func (e *LoadError) Error() string {
	if e.Err == nil {
		return "kernel: not loaded"
	}
	if e.Log == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + "\n" + e.Log
}

// Unwrap returns the driver's error.
func (e *LoadError) Unwrap() error { return e.Err }

// Module is device code loaded into one context. It stays loaded until the
// context's Shutdown, since unloading stalls the process.
type Module struct {
	core *wire.Context
	h    cuapi.Module

	mu        sync.Mutex
	functions map[string]*Function
}

type modulesKey struct{}

// modules of a context, to be unloaded by its shutdown.
type modules struct {
	core *wire.Context
	mu   sync.Mutex
	list []cuapi.Module
}

// Load loads PTX text or a cubin or fatbin image (cuModuleLoadDataEx). The
// error is a [*LoadError] with the compiler's log.
func Load(ctx *driver.Context, image []byte) (*Module, error) {
	core := wire.ContextOf(ctx)
	if core == nil {
		return nil, fmt.Errorf("kernel: no context: %w", driver.ErrClosed)
	}
	if err := core.Retain(); err != nil {
		return nil, err
	}
	defer core.Release()
	if err := core.Lost(); err != nil {
		return nil, fmt.Errorf("kernel: the context is lost: %w", err)
	}
	if len(image) == 0 {
		return nil, errors.New("kernel: the image is empty")
	}
	text := append(bytes.Clone(image), 0) // PTX is a C string; the copy is on the heap
	m := &Module{core: core, functions: map[string]*Function{}}
	jit := newJITLog()
	r := core.Current(func() cuapi.Result {
		return core.Table.ModuleLoadDataEx(&m.h, bytesPtr(text), uint32(len(jit.options)), &jit.options[0], &jit.values[0])
	})
	runtime.KeepAlive(text)
	if log := jit.log(); r != cuapi.Success {
		return nil, &LoadError{core.Fail(cuapi.IDModuleLoadDataEx, r, fmt.Sprintf("%d bytes", len(image))), log}
	}
	all := core.Shared(modulesKey{}, func() any {
		all := &modules{core: core}
		core.OnShutdown(all.unload)
		return all
	}).(*modules)
	all.mu.Lock()
	all.list = append(all.list, m.h)
	all.mu.Unlock()
	return m, nil
}

func (all *modules) unload() error {
	if all.core.Lost() != nil {
		return nil
	}
	all.mu.Lock()
	list := all.list
	all.list = nil
	all.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	// A kernel may be in flight that nothing was waited for.
	if r := all.core.Current(func() cuapi.Result { return all.core.Table.CtxSynchronize() }); r != cuapi.Success {
		return all.core.Fail(cuapi.IDCtxSynchronize, r, "")
	}
	var errs []error
	for _, h := range list {
		if r := all.core.Current(func() cuapi.Result { return all.core.Table.ModuleUnload(h) }); r != cuapi.Success {
			errs = append(errs, all.core.Fail(cuapi.IDModuleUnload, r, ""))
		}
	}
	return errors.Join(errs...)
}

// A Function is a kernel, loaded to the device, ready to launch.
type Function struct {
	core   *wire.Context
	h      cuapi.Function
	name   string
	params []int // sizes in bytes; nil where the driver can not tell
	limits limits

	allowed atomic.Int64 // dynamic shared memory, bytes
}

// limits are the bounds that a launch is checked against before anything is
// enqueued: those of the kernel and those of its device.
type limits struct {
	threads int // most threads of a block of this kernel
	static  int // static shared memory, bytes
	block   [3]int
	grid    [3]int
	shared  int // most shared memory of a block without AllowShared
}

func (f *Function) readLimits() error {
	t := f.core.Table
	v := new(int32)
	for _, a := range []struct {
		attr int32
		to   *int
	}{{cuapi.FuncMaxThreadsPerBlock, &f.limits.threads}, {cuapi.FuncSharedSize, &f.limits.static}} {
		if r := f.core.Current(func() cuapi.Result { return t.FuncGetAttribute(v, a.attr, f.h) }); r != cuapi.Success {
			return f.core.Fail(cuapi.IDFuncGetAttribute, r, fmt.Sprintf("kernel %q", f.name))
		}
		*a.to = int(*v)
	}
	for _, a := range []struct {
		attr int32
		to   *int
	}{
		{cuapi.DeviceMaxBlockDimX, &f.limits.block[0]}, {cuapi.DeviceMaxBlockDimY, &f.limits.block[1]}, {cuapi.DeviceMaxBlockDimZ, &f.limits.block[2]},
		{cuapi.DeviceMaxGridDimX, &f.limits.grid[0]}, {cuapi.DeviceMaxGridDimY, &f.limits.grid[1]}, {cuapi.DeviceMaxGridDimZ, &f.limits.grid[2]},
		{cuapi.DeviceMaxSharedPerBlock, &f.limits.shared},
	} {
		if r := t.DeviceGetAttribute(v, a.attr, f.core.Device); r != cuapi.Success {
			return f.core.Fail(cuapi.IDDeviceGetAttribute, r, fmt.Sprintf("attribute %d", a.attr))
		}
		*a.to = int(*v)
	}
	f.allowed.Store(int64(f.limits.shared - f.limits.static))
	return nil
}

// Function finds a kernel by its entry name and loads it to the device now, so
// that its first launch does not stall the process (cuModuleGetFunction,
// cuFuncLoad). It is set-up. A name that the module lacks is a *driver.Error
// that matches driver.ErrNotFound.
func (m *Module) Function(name string) (*Function, error) {
	if m == nil || m.core == nil {
		return nil, fmt.Errorf("kernel: no module: %w", driver.ErrClosed)
	}
	if err := m.core.Retain(); err != nil {
		return nil, err
	}
	defer m.core.Release()
	m.mu.Lock()
	f := m.functions[name]
	m.mu.Unlock()
	if f != nil {
		return f, nil
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, fmt.Errorf("kernel: %q is no entry name", name)
	}
	if err := m.core.Lost(); err != nil {
		return nil, fmt.Errorf("kernel: the context is lost: %w", err)
	}
	t := m.core.Table
	f = &Function{core: m.core, name: name}
	cname := append([]byte(name), 0)
	if r := m.core.Current(func() cuapi.Result { return t.ModuleGetFunction(&f.h, m.h, &cname[0]) }); r != cuapi.Success {
		return nil, m.core.Fail(cuapi.IDModuleGetFunction, r, fmt.Sprintf("kernel %q", name))
	}
	if t.FuncLoad != nil {
		if r := m.core.Current(func() cuapi.Result { return t.FuncLoad(f.h) }); r != cuapi.Success {
			return nil, m.core.Fail(cuapi.IDFuncLoad, r, fmt.Sprintf("kernel %q", name))
		}
	}
	// Reading an attribute loads a kernel on drivers that lack cuFuncLoad.
	if err := f.readLimits(); err != nil {
		return nil, err
	}
	if err := f.readParams(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if other := m.functions[name]; other != nil {
		return other, nil
	}
	m.functions[name] = f
	return f, nil
}

// readParams asks for the sizes of the parameters (cuFuncGetParamInfo, CUDA
// 12.4), so that a wrong argument list is an error and not a wild read.
func (f *Function) readParams() error {
	t := f.core.Table
	if t.FuncGetParamInfo == nil {
		return nil
	}
	f.params = []int{}
	offset, size := new(uintptr), new(uintptr)
	for i := uintptr(0); ; i++ {
		r := f.core.Current(func() cuapi.Result { return t.FuncGetParamInfo(f.h, i, offset, size) })
		switch r {
		case cuapi.Success:
			f.params = append(f.params, int(*size))
		case cuapi.InvalidValue: // past the last one
			return nil
		default:
			return f.core.Fail(cuapi.IDFuncGetParamInfo, r, fmt.Sprintf("kernel %q, parameter %d", f.name, i))
		}
	}
}

// none tells that there is no function: a nil or a zero one.
func (f *Function) none() bool { return f == nil || f.core == nil }

// begin pins the context for one call.
func (f *Function) begin() error {
	if f.none() {
		return fmt.Errorf("kernel: no function: %w", driver.ErrClosed)
	}
	return f.core.Retain()
}

// Name returns the kernel's entry name.
func (f *Function) Name() string {
	if f == nil {
		return ""
	}
	return f.name
}

// MaxThreads returns how many threads a block of this kernel may have.
func (f *Function) MaxThreads() int {
	if f == nil {
		return 0
	}
	return f.limits.threads
}

// Occupancy returns how many blocks of that many threads and dynamic shared
// bytes one multiprocessor runs at once
// (cuOccupancyMaxActiveBlocksPerMultiprocessor).
func (f *Function) Occupancy(threads, shared int) (int, error) {
	if err := f.begin(); err != nil {
		return 0, err
	}
	defer f.core.Release()
	if threads < 0 || threads > math.MaxInt32 || shared < 0 {
		return 0, fmt.Errorf("kernel %s: occupancy with %d threads and %d bytes of shared memory: %w", f.name, threads, shared, ErrConfig)
	}
	n := new(int32)
	r := f.core.Current(func() cuapi.Result {
		return f.core.Table.OccupancyMaxActiveBlocksPerMultiprocessor(n, f.h, int32(threads), uintptr(shared))
	})
	if r != cuapi.Success {
		return 0, f.core.Fail(cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor, r, fmt.Sprintf("kernel %q, %d threads", f.name, threads))
	}
	return int(*n), nil
}

// AllowShared lets launches of the kernel ask for up to that many bytes of
// dynamic shared memory, above the default 48 KiB
// (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES). It is set-up.
func (f *Function) AllowShared(bytes int) error {
	if err := f.begin(); err != nil {
		return err
	}
	defer f.core.Release()
	if bytes < 0 || bytes > math.MaxInt32 {
		return fmt.Errorf("kernel %s: %d bytes of shared memory: %w", f.name, bytes, ErrConfig)
	}
	r := f.core.Current(func() cuapi.Result {
		return f.core.Table.FuncSetAttribute(f.h, cuapi.FuncMaxDynamicShared, int32(bytes))
	})
	if r != cuapi.Success {
		return f.core.Fail(cuapi.IDFuncSetAttribute, r, fmt.Sprintf("kernel %q, %d bytes of shared memory", f.name, bytes))
	}
	f.allowed.Store(int64(bytes))
	return nil
}
