package drivertest

import (
	"bytes"
	"encoding/binary"
	"math"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// PTX is the device code of the cases; Kernels are the same in Go. fill(dst, value
// u32, n u32) stores n words; scale(dst, src, by f32, n u64) stores src[i]*by; wild
// stores to address 16; nop does nothing.
const PTX = `.version 7.0
.target sm_70
.address_size 64

.visible .global .align 4 .u32 answer = 42;

.visible .entry fill(.param .u64 dst, .param .u32 value, .param .u32 n)
{
	.reg .pred %p;
	.reg .u32 %i, %b, %t, %v, %n;
	.reg .u64 %a, %o;
	mov.u32 %b, %ctaid.x;
	mov.u32 %t, %ntid.x;
	mov.u32 %i, %tid.x;
	mad.lo.u32 %i, %b, %t, %i;
	ld.param.u32 %n, [n];
	setp.ge.u32 %p, %i, %n;
	@%p bra END;
	ld.param.u64 %a, [dst];
	cvta.to.global.u64 %a, %a;
	mul.wide.u32 %o, %i, 4;
	add.u64 %a, %a, %o;
	ld.param.u32 %v, [value];
	st.global.u32 [%a], %v;
END:
	ret;
}

.visible .entry scale(.param .u64 dst, .param .u64 src, .param .f32 by, .param .u64 n)
{
	.reg .pred %p;
	.reg .u32 %i, %b, %t;
	.reg .u64 %a, %o, %n, %w;
	.reg .f32 %x, %y;
	mov.u32 %b, %ctaid.x;
	mov.u32 %t, %ntid.x;
	mov.u32 %i, %tid.x;
	mad.lo.u32 %i, %b, %t, %i;
	cvt.u64.u32 %w, %i;
	ld.param.u64 %n, [n];
	setp.ge.u64 %p, %w, %n;
	@%p bra END;
	mul.wide.u32 %o, %i, 4;
	ld.param.u64 %a, [src];
	cvta.to.global.u64 %a, %a;
	add.u64 %a, %a, %o;
	ld.global.f32 %x, [%a];
	ld.param.f32 %y, [by];
	mul.f32 %x, %x, %y;
	ld.param.u64 %a, [dst];
	cvta.to.global.u64 %a, %a;
	add.u64 %a, %a, %o;
	st.global.f32 [%a], %x;
END:
	ret;
}

.visible .entry wild()
{
	.reg .u64 %a;
	.reg .u32 %x;
	mov.u64 %a, 16;
	mov.u32 %x, 7;
	st.global.u32 [%a], %x;
	ret;
}

.visible .entry nop()
{
	ret;
}
`

// Arguments are those of one launch of a kernel that a Go function plays.
type Arguments interface {
	Bytes(i int) []byte // the memory that a pointer leads to
	U32(i int) uint32
	U64(i int) uint64
	F32(i int) float32
	Fault(code int) // ends the kernel and its context, and does not return
}

// Kernels are what PTX says, in Go and by entry name, for a simulator.
var Kernels = map[string]func(Arguments){
	"fill": func(l Arguments) {
		dst := l.Bytes(0)
		for i := range int(l.U32(2)) {
			binary.NativeEndian.PutUint32(dst[4*i:], l.U32(1))
		}
	},
	"scale": func(l Arguments) {
		dst, src := l.Bytes(0), l.Bytes(1)
		for i := range int(l.U64(3)) {
			v := math.Float32frombits(binary.NativeEndian.Uint32(src[4*i:])) * l.F32(2)
			if v != v {
				v = math.Float32frombits(0x7FFFFFFF) // the one NaN that devices compute
			}
			binary.NativeEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	},
	"wild": func(l Arguments) { l.Fault(int(cuapi.IllegalAddress)) },
	"nop":  func(Arguments) {},
}

var moduleCases = []Case{
	{Name: "Functions", Evidence: onHardware, run: functions},
	{Name: "BadImages", Evidence: onHardware, run: badImages},
	{Name: "ParamInfo", Evidence: onHardware, run: paramInfo},
	{Name: "FunctionAttributes", Evidence: onHardware, run: functionAttributes},
	{Name: "Launch", Evidence: onHardware, run: launch},
	{Name: "LaunchRefused", Evidence: onHardware, run: launchRefused},
}

// module loads the cases' device code.
func (r *rig) module() cuapi.Module {
	r.Helper()
	m := new(cuapi.Module)
	if log, res := r.load(m, []byte(PTX)); res != cuapi.Success {
		r.Fatalf("load: %v\n%s", res, log)
	}
	r.onEnd(func() cuapi.Result { return r.ModuleUnload(*m) })
	return *m
}

func (r *rig) function(name string) cuapi.Function {
	r.Helper()
	f := new(cuapi.Function)
	r.ok(r.ModuleGetFunction(f, r.module(), cstring(name)))
	return *f
}

// launch starts blocks of 256 threads.
func (r *rig) launch(f cuapi.Function, s cuapi.Stream, blocks uint32, args ...cuapi.HostPtr) cuapi.Result {
	args = append(args, nil)
	return r.LaunchKernel(f, blocks, 1, 1, 256, 1, 1, 0, s, &args[0], nil)
}

func functions(r *rig) {
	m, f := r.module(), new(cuapi.Function)
	for _, name := range []string{"fill", "scale", "wild", "nop"} {
		r.want(r.ModuleGetFunction(f, m, cstring(name)), cuapi.Success, name)
		if r.Has(cuapi.IDFuncLoad) {
			r.want(r.FuncLoad(*f), cuapi.Success, "cuFuncLoad of "+name)
		}
	}
	r.want(r.ModuleGetFunction(f, m, cstring("missing")), cuapi.NotFound, "a function that is not there")
	d, n := new(cuapi.DevicePtr), new(uintptr)
	r.want(r.ModuleGetGlobal(d, n, m, cstring("missing")), cuapi.NotFound, "a variable that is not there")
	r.ok(r.ModuleGetGlobal(d, n, m, cstring("answer")))
	if *n != 4 {
		r.Errorf("a u32 has %d bytes", *n)
	}
}

func badImages(r *rig) {
	for _, c := range []struct {
		name  string
		image string
		want  cuapi.Result
		log   bool
	}{
		{"text", "this is no device code", cuapi.InvalidImage, false},
		{"bad PTX", PTX[:len(PTX)-10] + "\n\tnonsense;\n}\n", cuapi.InvalidPTX, true},
	} {
		log, res := r.load(new(cuapi.Module), []byte(c.image))
		r.want(res, c.want, c.name)
		if c.log && log == "" {
			r.Errorf("%s: the compiler says nothing", c.name)
		}
	}
	r.module() // and a good one loads after
}

func paramInfo(r *rig) {
	if !r.Has(cuapi.IDFuncGetParamInfo) {
		r.Log("the driver is older than CUDA 12.4")
		return
	}
	f, offset, size := r.function("scale"), new(uintptr), new(uintptr)
	for i, want := range [][2]uintptr{{0, 8}, {8, 8}, {16, 4}, {24, 8}} {
		r.ok(r.FuncGetParamInfo(f, uintptr(i), offset, size))
		if *offset != want[0] || *size != want[1] {
			r.Errorf("parameter %d: %d bytes at %d, want %d at %d", i, *size, *offset, want[1], want[0])
		}
	}
	r.want(r.FuncGetParamInfo(f, 4, offset, size), cuapi.InvalidValue, "a parameter past the end")
}

func functionAttributes(r *rig) {
	f, n, block := r.function("fill"), new(int32), new(int32)
	r.ok(r.FuncGetAttribute(n, cuapi.FuncMaxThreadsPerBlock, f))
	if *n < 256 || *n > 4096 {
		r.Errorf("%d threads a block at most", *n)
	}
	r.ok(r.FuncGetAttribute(n, cuapi.FuncSharedSize, f))
	if *n != 0 {
		r.Errorf("%d bytes of static shared memory", *n)
	}
	r.ok(r.FuncSetAttribute(f, cuapi.FuncMaxDynamicShared, 48<<10))
	r.ok(r.FuncGetAttribute(n, cuapi.FuncMaxDynamicShared, f))
	if *n != 48<<10 {
		r.Errorf("%d bytes of dynamic shared memory, want 48 KiB", *n)
	}
	r.ok(r.OccupancyMaxActiveBlocksPerMultiprocessor(n, f, 256, 0))
	if *n < 1 || *n > 64 {
		r.Errorf("%d blocks a multiprocessor", *n)
	}
	r.ok(r.OccupancyMaxPotentialBlockSize(n, block, f, 0, 0, 0))
	if *n < 1 || *block < 32 {
		r.Errorf("%d blocks of %d threads", *n, *block)
	}
}

func launch(r *rig) {
	const n = 10_000
	fill, scale := r.function("fill"), r.function("scale")
	s := r.stream()
	ints, floats, scaled := r.device(4*n+4, 0xAA), r.device(4*n, 0), r.device(4*n, 0)
	from, src := r.pinned(4 * n)
	to, dst := r.pinned(4*n + 4)
	for i := range n {
		binary.NativeEndian.PutUint32(src[4*i:], math.Float32bits(float32(i)))
	}
	r.ok(r.launch(fill, s, 40, cuapi.Word(uint64(ints)), cuapi.Word(0xDEADBEEF), cuapi.Word(n)))
	r.ok(r.MemcpyDtoHAsync(to, ints, 4*n+4, s))
	r.ok(r.StreamSynchronize(s))
	want := bytes.Repeat(binary.NativeEndian.AppendUint32(nil, 0xDEADBEEF), n)
	if !bytes.Equal(dst, append(want, 0xAA, 0xAA, 0xAA, 0xAA)) {
		r.Errorf("fill: %x …", dst[:16])
	}
	r.ok(r.MemcpyHtoDAsync(floats, from, 4*n, s))
	r.ok(r.launch(scale, s, 40, cuapi.Word(uint64(scaled)), cuapi.Word(uint64(floats)), cuapi.Word(uint64(math.Float32bits(0.5))), cuapi.Word(n)))
	r.ok(r.MemcpyDtoHAsync(to, scaled, 4*n, s))
	r.ok(r.StreamSynchronize(s))
	for i := range n {
		if got := math.Float32frombits(binary.NativeEndian.Uint32(dst[4*i:])); got != float32(i)/2 {
			r.Fatalf("scale: element %d is %v", i, got)
		}
	}
}

func launchRefused(r *rig) {
	f, s := r.function("nop"), r.stream()
	for _, c := range []struct {
		name            string
		blocks, threads uint32
	}{{"no blocks", 0, 1}, {"no threads", 1, 0}, {"too many threads", 1, 1 << 20}} {
		r.want(r.LaunchKernel(f, c.blocks, 1, 1, c.threads, 1, 1, 0, s, nil, nil), cuapi.InvalidValue, c.name)
	}
	r.want(r.LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, nil, nil), cuapi.Success, "a launch after")
	r.ok(r.StreamSynchronize(s))
}
