package kernel_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/stream"
)

const ptx = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry none() { ret; }
.visible .entry scalars(.param .u32 a, .param .s32 b, .param .u64 c, .param .s64 d, .param .f32 e, .param .f64 f) { ret; }
.visible .entry struct(.param .align 8 .b8 s[24], .param .u32 n) { ret; }
.visible .entry odd(.param .align 1 .b8 s[3]) { ret; }
.visible .entry big(.param .align 8 .b8 s[4096]) { ret; }
.visible .entry three(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }
`

type rig struct {
	t    *testing.T
	sim  *cudasim.Sim
	drv  *driver.Driver
	ctx  *driver.Context
	lane *stream.Lane
	mod  *kernel.Module
	args map[string][][]byte // of the last launch of each kernel
	last cudasim.Launch
}

func newRig(t *testing.T, cfg cudasim.Config, f func(c cuapi.Call, next func() cuapi.Result) cuapi.Result) *rig {
	t.Helper()
	r := &rig{t: t, sim: cudasim.New(cfg), args: map[string][][]byte{}}
	for name, n := range map[string]int{"none": 0, "scalars": 6, "struct": 2, "odd": 1, "big": 1, "three": 3} {
		r.sim.Kernel(name, func(l *cudasim.Launch) {
			r.args[name] = [][]byte{}
			for i := range n {
				r.args[name] = append(r.args[name], l.Raw(i))
			}
			r.last = *l
		})
	}
	table := r.sim.Table()
	table.Init(0)
	if f != nil {
		table = cuapi.Intercept(table, f)
	}
	d, err := wire.NewDriver(table, "simulator")
	must(t, err)
	r.drv = d.(*driver.Driver)
	r.ctx = r.context(0)
	r.lane, err = stream.Take(wire.ContextOf(r.ctx))
	must(t, err)
	r.mod, err = kernel.Load(r.ctx, []byte(ptx))
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		r.lane.Drop()
		must(t, r.ctx.Shutdown(context.Background()))
		must(t, r.sim.Close())
	})
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) context(ordinal int) *driver.Context {
	r.t.Helper()
	dev, err := r.drv.Device(ordinal)
	must(r.t, err)
	ctx, err := dev.Primary()
	must(r.t, err)
	return ctx
}

func (r *rig) function(name string) *kernel.Function {
	r.t.Helper()
	f, err := r.mod.Function(name)
	must(r.t, err)
	return f
}

// launch does as a session does.
func (r *rig) launch(f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	return wire.Launch(f, r.lane, c, args, []uint64(nil))
}

// rejected tells whether the launch was refused before anything was enqueued.
func (r *rig) rejected(what string, reason error, f *kernel.Function, c kernel.Config, args ...kernel.Arg) error {
	r.t.Helper()
	r.sim.StartTrace()
	issued := r.lane.Issued()
	err := r.launch(f, c, args...)
	var enqueued *stream.Enqueued
	if !errors.Is(err, reason) || errors.As(err, &enqueued) {
		r.t.Errorf("%s: %v", what, err)
	}
	if len(r.sim.Trace()) != 0 || r.lane.Issued() != issued || r.lane.Failed() != nil {
		r.t.Errorf("%s: something was enqueued", what)
	}
	return err
}

// The error of code that does not compile has the compiler's log, with lines.
func TestLoadErrorHasTheLog(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	bad := ".version 7.0\n.target sm_70\n.visible .entry k(.param .nonsense x) { ret; }\n"
	mod, err := kernel.Load(r.ctx, []byte(bad))
	var load *kernel.LoadError
	if mod != nil || !errors.As(err, &load) || !errors.Is(err, driver.ErrInvalidPTX) {
		t.Fatal(err)
	}
	for _, want := range []string{"line 3", ".nonsense", "cuModuleLoadDataEx", fmt.Sprintf("%d bytes", len(bad))} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
	if !strings.Contains(load.Log, "line 3") {
		t.Errorf("log %q", load.Log)
	}
	_, err = kernel.Load(r.ctx, []byte("no code at all"))
	if !errors.As(err, &load) || !errors.Is(err, driver.ErrInvalidImage) || load.Log != "" || strings.Contains(err.Error(), "\n") {
		t.Errorf("%q", err)
	}
	for _, empty := range [][]byte{nil, {}} {
		r.sim.StartTrace()
		if mod, err := kernel.Load(r.ctx, empty); err == nil || mod != nil || len(r.sim.Trace()) != 0 {
			t.Errorf("an empty image: %v", err)
		}
	}
}

// A code that is newer than the library has the name that the driver gives it,
// and its number alone where the driver does not say.
func TestANewCodeHasTheDriversName(t *testing.T) {
	const code = 12345
	r := newRig(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDModuleGetFunction {
			return code
		}
		return next()
	})
	table := wire.Table(r.drv)
	named := func(_ cuapi.Result, name **byte) cuapi.Result {
		*name = &[]byte("CUDA_ERROR_OF_TOMORROW\x00")[0]
		return cuapi.Success
	}
	unknown := func(cuapi.Result, **byte) cuapi.Result { return cuapi.InvalidValue }
	for _, c := range []struct {
		ask  func(cuapi.Result, **byte) cuapi.Result
		want string
	}{
		{named, "cuModuleGetFunction: CUDA_ERROR_OF_TOMORROW (12345)"},
		{unknown, "cuModuleGetFunction: CUDA error 12345"},
		{nil, "cuModuleGetFunction: CUDA error 12345"},
	} {
		table.GetErrorName = c.ask
		_, err := r.mod.Function("none")
		if !errors.Is(err, driver.Result(code)) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%q, want %q", err, c.want)
		}
	}
	if got := driver.Result(0).Error(); got != "CUDA_SUCCESS (0)" {
		t.Errorf("success is %q", got)
	}
}

func TestFunctionLookup(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	f, err := r.mod.Function("missing")
	if f != nil || !errors.Is(err, driver.ErrNotFound) || !strings.Contains(err.Error(), `kernel "missing"`) {
		t.Error(err)
	}
	for _, name := range []string{"", "none\x00scalars"} {
		if f, err := r.mod.Function(name); err == nil || f != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	f = r.function("none")
	r.sim.StartTrace()
	if again := r.function("none"); again != f || len(r.sim.Trace()) != 0 {
		t.Error("a known function is asked for again")
	}
	n, err := f.Occupancy(256, 0)
	if f.Name() != "none" || f.MaxThreads() != 1024 || n != 8 || err != nil {
		t.Errorf("%s, %d, %d, %v", f.Name(), f.MaxThreads(), n, err)
	}
	for _, bad := range [][2]int{{-1, 0}, {1 << 33, 0}, {256, -1}} {
		if _, err := f.Occupancy(bad[0], bad[1]); !errors.Is(err, kernel.ErrConfig) {
			t.Errorf("occupancy of %v: %v", bad, err)
		}
	}
}

// A function that is found was loaded to the device before, so that its first
// launch does not stall the process.
func TestFunctionsAreLoadedEagerly(t *testing.T) {
	for version, want := range map[int]cuapi.ID{13000: cuapi.IDFuncLoad, 12000: cuapi.IDFuncGetAttribute} {
		r := newRig(t, cudasim.Config{Version: version}, nil)
		r.sim.StartTrace()
		r.function("none")
		found := false
		for _, c := range r.sim.Trace() {
			found = found || c.ID == want
		}
		if !found {
			t.Errorf("CUDA %d: no %s", version, cuapi.Entries[want].Symbol())
		}
	}
}

func TestConcurrentLookups(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	names := []string{"none", "scalars", "struct", "missing"}
	var found sync.Map
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			name := names[i%len(names)]
			f, err := r.mod.Function(name)
			if name == "missing" {
				if !errors.Is(err, driver.ErrNotFound) {
					t.Error(err)
				}
				return
			}
			if first, _ := found.LoadOrStore(name, f); first != f || err != nil {
				t.Errorf("%s: two functions, %v", name, err)
			}
		})
	}
	wg.Wait()
}

// Each call of a lookup fails, with nothing kept: the next lookup succeeds.
func TestEachCallOfALookupFails(t *testing.T) {
	for i := 0; ; i++ {
		n, hit, armed := 0, "", false
		r := newRig(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if !armed || c.ID == cuapi.IDGetErrorString || c.ID == cuapi.IDCtxPushCurrent || c.ID == cuapi.IDCtxPopCurrent || c.ID == cuapi.IDThreadExchangeStreamCaptureMode {
				return next()
			}
			if n++; n == i+1 {
				hit = c.Name()
				return cuapi.Unknown
			}
			return next()
		})
		armed = true
		f, err := r.mod.Function("scalars")
		armed = false
		if hit == "" {
			must(t, err)
			if i < 10 {
				t.Errorf("only %d calls", i)
			}
			return
		}
		if f != nil || !errors.Is(err, driver.Result(cuapi.Unknown)) || !strings.Contains(err.Error(), hit) {
			t.Errorf("call %d, %s: %v", i, hit, err)
		}
		r.function("scalars")
	}
}

func TestScalarsArriveAsTheyAre(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	must(t, r.launch(r.function("scalars"), kernel.Grid(1), kernel.U32(math.MaxUint32), kernel.I32(-2), kernel.U64(math.MaxUint64),
		kernel.I64(math.MinInt64), kernel.F32(-1.5), kernel.F64(math.Pi)))
	a, ne := r.args["scalars"], binary.NativeEndian
	if ne.Uint32(a[0]) != math.MaxUint32 || int32(ne.Uint32(a[1])) != -2 || ne.Uint64(a[2]) != math.MaxUint64 ||
		int64(ne.Uint64(a[3])) != math.MinInt64 || math.Float32frombits(ne.Uint32(a[4])) != -1.5 || math.Float64frombits(ne.Uint64(a[5])) != math.Pi {
		t.Errorf("%x", a)
	}
}

func TestStructsArriveAsTheyAre(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	for name, n := range map[string]int{"struct": 24, "odd": 3, "big": 4096} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(i*7 + 1)
		}
		args := []kernel.Arg{kernel.Struct(data)}
		if name == "struct" {
			args = append(args, kernel.U32(99))
		}
		must(t, r.launch(r.function(name), kernel.Grid(1), args...))
		if got := r.args[name]; string(got[0]) != string(data) {
			t.Errorf("%s: %x", name, got[0])
		}
	}
	if got := binary.NativeEndian.Uint32(r.args["struct"][1]); got != 99 {
		t.Errorf("behind a struct came %d", got)
	}
}

func TestArgumentsThatDoNotFit(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	one := kernel.Grid(1)
	six := []kernel.Arg{kernel.U32(1), kernel.I32(1), kernel.U64(1), kernel.I64(1), kernel.F32(1), kernel.F64(1)}
	f := r.function("scalars")
	err := r.rejected("too few", kernel.ErrArguments, f, one, six[:5]...)
	if !strings.Contains(err.Error(), "kernel scalars: 5 arguments, it takes 6") {
		t.Errorf("%q", err)
	}
	r.rejected("none", kernel.ErrArguments, f, one)
	r.rejected("too many", kernel.ErrArguments, f, one, append(six[:6:6], kernel.U32(1))...)
	r.rejected("for none", kernel.ErrArguments, r.function("none"), one, kernel.U32(1))
	for i := range six {
		bad := append([]kernel.Arg(nil), six...)
		bad[i] = kernel.Struct(make([]byte, 5))
		err := r.rejected("a size", kernel.ErrArguments, f, one, bad...)
		if !strings.Contains(err.Error(), fmt.Sprintf("argument %d has 5 bytes", i)) {
			t.Errorf("%q", err)
		}
		bad[i] = kernel.Arg{}
		r.rejected("a zero Arg", kernel.ErrArguments, f, one, bad...)
		bad[i] = kernel.Struct(nil)
		r.rejected("an empty struct", kernel.ErrArguments, f, one, bad...)
	}
	must(t, r.launch(f, one, six...))
	must(t, r.launch(r.function("none"), one))
}

// On a driver that can not tell a kernel's parameters, the bounds of an
// argument list hold, and what is missing reads as zero.
func TestArgumentsOnADriverThatCanNotTell(t *testing.T) {
	r := newRig(t, cudasim.Config{Version: 12000}, nil)
	one, f := kernel.Grid(1), r.function("three")
	many := make([]kernel.Arg, 65)
	for i := range many {
		many[i] = kernel.U64(math.MaxUint64)
	}
	r.rejected("65 arguments", kernel.ErrArguments, f, one, many...)
	must(t, r.launch(f, one, many[:64]...))
	full := make([]byte, 4096)
	for i := range full {
		full[i] = 0xFF
	}
	r.rejected("4,097 bytes", kernel.ErrArguments, f, one, kernel.Struct(append(full, 1)))
	r.rejected("4,096 bytes and a word", kernel.ErrArguments, f, one, kernel.Struct(full), kernel.U32(1))
	r.rejected("a word and 4,096 bytes", kernel.ErrArguments, f, one, kernel.U32(1), kernel.Struct(full))
	must(t, r.launch(r.function("big"), one, kernel.Struct(full)))
	for range 50 { // whatever block of the pool serves, and what was in it
		r.rejected("too long", kernel.ErrArguments, f, one, kernel.Struct(full[:4000]), kernel.Struct(full[:200]))
		must(t, r.launch(f, one, kernel.U64(5)))
		for i, want := range []uint64{5, 0, 0} {
			if got := binary.NativeEndian.Uint64(r.args["three"][i]); got != want {
				t.Fatalf("argument %d is %#x, want %d", i, got, want)
			}
		}
	}
	r.rejected("a zero Arg", kernel.ErrArguments, f, one, kernel.Arg{})
}

func TestGridCoversTheElements(t *testing.T) {
	for _, c := range []struct {
		n               []int
		blocks, threads [3]uint32
	}{
		{[]int{1}, [3]uint32{1, 1, 1}, [3]uint32{256, 1, 1}},
		{[]int{256}, [3]uint32{1, 1, 1}, [3]uint32{256, 1, 1}},
		{[]int{257}, [3]uint32{2, 1, 1}, [3]uint32{256, 1, 1}},
		{[]int{math.MaxInt32}, [3]uint32{1 << 23, 1, 1}, [3]uint32{256, 1, 1}},
		{[]int{17, 16}, [3]uint32{2, 1, 1}, [3]uint32{16, 16, 1}},
		{[]int{8, 9, 5}, [3]uint32{1, 2, 2}, [3]uint32{8, 8, 4}},
	} {
		if got := kernel.Grid(c.n...); got != (kernel.Config{Blocks: c.blocks, Threads: c.threads}) {
			t.Errorf("Grid(%v) is %+v", c.n, got)
		}
	}
	r := newRig(t, cudasim.Config{}, nil)
	f := r.function("none")
	for _, n := range [][]int{{}, {0}, {-1}, {math.MinInt}, {math.MaxInt32 + 1}, {5, 0}, {0, 5}, {1, 2, -3}, {1, 1, 1, 1}} {
		r.rejected(fmt.Sprintf("Grid(%v)", n), kernel.ErrConfig, f, kernel.Grid(n...))
	}
	must(t, r.launch(f, kernel.Grid(100, 100, 10)))
	if r.last.Grid != [3]uint32{13, 13, 3} || r.last.Block != [3]uint32{8, 8, 4} {
		t.Errorf("launched %v of %v", r.last.Grid, r.last.Block)
	}
}

// A launch that kernel or device can not run is refused: it does not break the
// stream.
func TestConfigsOutOfBounds(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	f := r.function("none")
	dims := func(x, y, z uint32) [3]uint32 { return [3]uint32{x, y, z} }
	one := dims(1, 1, 1)
	for what, c := range map[string]kernel.Config{
		"no threads": {Blocks: one}, "no blocks": {Threads: one}, "block x": {Blocks: one, Threads: dims(1025, 1, 1)},
		"block y": {Blocks: one, Threads: dims(1, 1025, 1)}, "block z": {Blocks: one, Threads: dims(1, 1, 65)},
		"a block too large": {Blocks: one, Threads: dims(32, 32, 2)}, "grid x": {Blocks: dims(1<<31, 1, 1), Threads: one},
		"grid y": {Blocks: dims(1, 65536, 1), Threads: one}, "grid z": {Blocks: dims(1, 1, 65536), Threads: one},
		"a product that wraps": {Blocks: one, Threads: dims(1<<31, 1<<31, 4)},
		"shared memory":        {Blocks: one, Threads: one, Shared: 48<<10 + 1},
	} {
		r.rejected(what, kernel.ErrConfig, f, c)
	}
	must(t, r.launch(f, kernel.Config{Blocks: one, Threads: dims(32, 32, 1), Shared: 48 << 10}))
	must(t, f.AllowShared(100<<10))
	must(t, r.launch(f, kernel.Config{Blocks: one, Threads: one, Shared: 100 << 10}))
	if r.last.Shared != 100<<10 {
		t.Errorf("%d bytes of shared memory", r.last.Shared)
	}
	if err := f.AllowShared(1 << 20); !errors.Is(err, driver.ErrInvalidValue) || !strings.Contains(err.Error(), "1048576 bytes") {
		t.Error(err)
	}
	for _, n := range []int{-1, 1 << 32} { // which would be 0
		if err := f.AllowShared(n); !errors.Is(err, kernel.ErrConfig) {
			t.Errorf("AllowShared(%d): %v", n, err)
		}
	}
	r.rejected("more than was allowed", kernel.ErrConfig, f, kernel.Config{Blocks: one, Threads: one, Shared: 100<<10 + 1})
}

func TestFault15AFunctionOfAnotherContextIsRefused(t *testing.T) {
	r := newRig(t, cudasim.Config{Devices: 2}, nil)
	second := r.context(1)
	mod, err := kernel.Load(second, []byte(ptx))
	must(t, err)
	f, err := mod.Function("none")
	must(t, err)
	r.rejected("another device's function", own.ErrForeign, f, kernel.Grid(1))
	r.rejected("no function", driver.ErrClosed, nil, kernel.Grid(1))
	r.rejected("a zero function", driver.ErrClosed, new(kernel.Function), kernel.Grid(1))
	must(t, second.Shutdown(context.Background()))
}

// Shutdown unloads code only once no kernel of it can be running, also one
// that nothing waited for.
func TestShutdownWaitsForKernels(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	sim.Kernel("none", func(*cudasim.Launch) {})
	d, err := sim.Driver()
	must(t, err)
	dev, err := d.Device(0)
	must(t, err)
	ctx, err := dev.Primary()
	must(t, err)
	lane, err := stream.Take(wire.ContextOf(ctx))
	must(t, err)
	mod, err := kernel.Load(ctx, []byte(ptx))
	must(t, err)
	f, err := mod.Function("none")
	must(t, err)
	must(t, wire.Launch(f, lane, kernel.Grid(1), []kernel.Arg(nil), []uint64(nil)))
	sim.Hold(uintptr(lane.Handle()))
	must(t, wire.Launch(f, lane, kernel.Grid(1), []kernel.Arg(nil), []uint64(nil)))
	lane.Drop()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := ctx.Shutdown(ended); err != context.Canceled {
		t.Fatal(err)
	}
	sim.ReleaseAll()
	must(t, ctx.Shutdown(context.Background()))
	must(t, sim.Close())
}

// Where the wait for kernels fails, their code stays loaded.
func TestCodeStaysWhereKernelsMayRun(t *testing.T) {
	fail := false
	sim := cudasim.New(cudasim.Config{})
	sim.Table().Init(0)
	made, err := wire.NewDriver(cuapi.Intercept(sim.Table(), func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if fail && c.ID == cuapi.IDCtxSynchronize {
			return cuapi.StreamCaptureUnsupported
		}
		return next()
	}), "simulator")
	must(t, err)
	dev, err := made.(*driver.Driver).Device(0)
	must(t, err)
	ctx, err := dev.Primary()
	must(t, err)
	_, err = kernel.Load(ctx, []byte(ptx))
	must(t, err)
	fail = true
	sim.StartTrace()
	if err := ctx.Shutdown(context.Background()); !errors.Is(err, driver.Result(cuapi.StreamCaptureUnsupported)) {
		t.Error(err)
	}
	for _, c := range sim.Trace() {
		if c.ID == cuapi.IDModuleUnload || c.ID == cuapi.IDDevicePrimaryCtxRelease {
			t.Errorf("%s all the same", c.Name)
		}
	}
}
