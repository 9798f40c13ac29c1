package cudasim

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/ptx"
)

type module struct {
	h       cuapi.Module
	ctx     *context
	image   *ptx.Image
	globals map[string]*block
	code    *block // stands for the module in what its kernels use
	funcs   map[string]*function
	made    stack
}

type function struct {
	h         cuapi.Function
	module    *module
	name      string
	params    []ptx.Param
	maxShared int32 // dynamic
	carveout  int32
}

// maxImage bounds the search for the end of PTX text.
const maxImage = 64 << 20

// moduleLoadDataEx takes PTX text alone.
func (s *Sim) moduleLoadDataEx(p *cuapi.Module, img cuapi.HostPtr, n uint32, options *int32, values *uintptr) cuapi.Result {
	text, ok := cString((*byte)(img), maxImage)
	if !ok || !strings.Contains(text, ".version") {
		if strings.Contains(text, ".entry") || strings.Contains(text, ".target") {
			jitLog(n, options, values, "no .version directive: this is taken for no PTX text")
		}
		return cuapi.InvalidImage
	}
	parsed, err := ptx.Parse(text)
	if err != nil {
		jitLog(n, options, values, err.Error())
		return cuapi.InvalidPTX
	}
	jitLog(n, options, values, "")
	m := &module{h: cuapi.Module(s.newID()), ctx: s.cur.ctx, image: parsed, globals: map[string]*block{}, funcs: map[string]*function{}, made: callers()}
	m.code = &block{ctx: m.ctx, module: m}
	for _, name := range slices.Sorted(maps.Keys(parsed.Globals)) { // so that addresses repeat
		size := parsed.Globals[name]
		b := s.newDeviceBlock(m.ctx, uintptr(size))
		if b == nil {
			s.unload(m)
			return cuapi.OutOfMemory
		}
		b.module, b.data = m, make([]byte, size)
		m.globals[name] = b
	}
	s.modules[m.h] = m
	*p = m.h
	return cuapi.Success
}

// jitLog writes the compiler's text into the error buffer of the options, and
// the lengths written into the sizes.
func jitLog(n uint32, options *int32, values *uintptr, text string) {
	logs := map[int32]struct {
		sizeOption int32
		text       string
	}{
		cuapi.JITErrorLogBuffer: {cuapi.JITErrorLogBufferSize, text},
		cuapi.JITInfoLogBuffer:  {cuapi.JITInfoLogBufferSize, ""},
	}
	at := map[int32]int{}
	for i := range int(n) {
		at[*index(options, i)] = i
	}
	for option, log := range logs {
		i, ok := at[option]
		j, sized := at[log.sizeOption]
		if !ok || !sized {
			continue
		}
		size := index(values, j)
		buf, room := pointerIn(values, i), int(*size)
		if buf == nil || room == 0 {
			continue
		}
		out := bytesAt(buf, room)
		written := copy(out[:room-1], log.text)
		out[written] = 0
		*size = uintptr(written)
	}
}

func (s *Sim) module(h cuapi.Module) (*module, cuapi.Result) {
	m, ok := find(s, s.modules, h, "module")
	if !ok {
		return nil, cuapi.InvalidHandle
	}
	return m, m.ctx.usable()
}

func (s *Sim) moduleUnload(h cuapi.Module) cuapi.Result {
	m, r := s.module(h)
	if r == cuapi.Success {
		s.unload(m)
	}
	return r
}

func (s *Sim) unload(m *module) {
	for _, f := range m.funcs {
		delete(s.funcs, f.h)
		s.gone.add(uintptr(f.h))
	}
	for _, b := range m.globals {
		s.free(b)
	}
	delete(s.modules, m.h)
	s.gone.add(uintptr(m.h))
}

func (s *Sim) moduleGetFunction(p *cuapi.Function, h cuapi.Module, name *byte) cuapi.Result {
	m, r := s.module(h)
	if r != cuapi.Success {
		return r
	}
	text, _ := cString(name, 4096)
	if text == "" {
		return cuapi.InvalidValue
	}
	params, ok := m.image.Entries[text]
	if !ok {
		return cuapi.NotFound
	}
	f := m.funcs[text]
	if f == nil {
		f = &function{h: cuapi.Function(s.newID()), module: m, name: text, params: params, maxShared: 48 << 10, carveout: -1}
		m.funcs[text] = f
		s.funcs[f.h] = f
	}
	*p = f.h
	return cuapi.Success
}

func (s *Sim) moduleGetGlobal(p *cuapi.DevicePtr, size *uintptr, h cuapi.Module, name *byte) cuapi.Result {
	m, r := s.module(h)
	if r != cuapi.Success {
		return r
	}
	text, _ := cString(name, 4096)
	b, ok := m.globals[text]
	if _, kernel := m.image.Entries[text]; kernel || text == "" {
		return cuapi.InvalidValue
	}
	if !ok {
		return cuapi.NotFound
	}
	if p != nil {
		*p = cuapi.DevicePtr(b.base)
	}
	if size != nil {
		*size = uintptr(b.size)
	}
	return cuapi.Success
}

func (s *Sim) function(h cuapi.Function) (*function, cuapi.Result) {
	f, ok := find(s, s.funcs, h, "function")
	if !ok {
		return nil, cuapi.InvalidHandle
	}
	return f, f.module.ctx.usable()
}

// funcCarveout is CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, a hint in
// percent.
const funcCarveout = 9

func (s *Sim) funcGetAttribute(p *int32, attrib int32, h cuapi.Function) cuapi.Result {
	f, r := s.function(h)
	if r != cuapi.Success {
		return r
	}
	switch attrib {
	case cuapi.FuncMaxThreadsPerBlock:
		*p = 1024
	case cuapi.FuncNumRegs:
		*p = 32
	case cuapi.FuncMaxDynamicShared:
		*p = f.maxShared
	case funcCarveout:
		*p = f.carveout
	case 5, 6: // CU_FUNC_ATTRIBUTE_PTX_VERSION, CU_FUNC_ATTRIBUTE_BINARY_VERSION
		*p = 90
	default:
		*p = 0
		if attrib < 0 || attrib > 15 {
			return cuapi.InvalidValue
		}
	}
	return cuapi.Success
}

func (s *Sim) funcSetAttribute(h cuapi.Function, attrib, v int32) cuapi.Result {
	f, r := s.function(h)
	switch {
	case r != cuapi.Success:
		return r
	case attrib < 0 || attrib > 15:
		s.violate(Misuse, fmt.Sprintf("attribute %d of a function is set: a real driver crashed", attrib), nil) // measured
		return cuapi.InvalidValue
	case attrib == funcCarveout && v >= -1 && v <= 100:
		f.carveout = v
		return cuapi.Success
	case attrib != cuapi.FuncMaxDynamicShared || v < 0 || v > deviceAttributes[cuapi.DeviceMaxSharedPerBlockOptin]:
		return cuapi.InvalidValue
	}
	f.maxShared = v
	return cuapi.Success
}

func (s *Sim) funcLoad(h cuapi.Function) cuapi.Result {
	_, r := s.function(h)
	return r
}

func (s *Sim) funcGetParamInfo(h cuapi.Function, i uintptr, offset, size *uintptr) cuapi.Result {
	f, r := s.function(h)
	if r != cuapi.Success {
		return r
	}
	if i >= uintptr(len(f.params)) {
		return cuapi.InvalidValue
	}
	*offset = f.params[i].Offset
	if size != nil {
		*size = f.params[i].Size
	}
	return cuapi.Success
}

// blocksPerSM is the occupancy of a kernel that only threads and shared
// memory limit.
func blocksPerSM(threads int32, shared uintptr) int32 {
	if shared > 228<<10 {
		return 0
	}
	n := min(2048/((threads+31)/32*32), 32)
	return min(n, int32((228<<10)/(shared+1024)))
}

func (s *Sim) occupancyMaxActiveBlocks(p *int32, h cuapi.Function, threads int32, shared uintptr) cuapi.Result {
	_, r := s.function(h)
	switch {
	case r != cuapi.Success:
		return r
	case threads <= 0:
		return cuapi.InvalidValue
	}
	*p = 0
	if threads <= 1024 {
		*p = blocksPerSM(threads, shared)
	}
	return cuapi.Success
}

func (s *Sim) occupancyMaxPotentialBlockSize(grid, block *int32, h cuapi.Function, sizer, shared uintptr, limit int32) cuapi.Result {
	_, r := s.function(h)
	switch {
	case r != cuapi.Success:
		return r
	case sizer != 0: // a C function: it cannot be called
		return cuapi.NotSupported
	case limit < 0:
		return cuapi.InvalidValue
	}
	*grid, *block = 0, 0
	threads := int32(1024)
	if limit > 0 {
		threads = min(limit, 1024)
	}
	if n := blocksPerSM(threads, shared); n > 0 {
		*grid, *block = 132*n, threads
	}
	return cuapi.Success
}

// Kernel registers the Go function that stands for every kernel of that entry
// name. It runs when a launch executes, under the simulator's lock: it must
// neither call the driver nor wait for anyone. A panic in it loses the
// context, as a fault of a real kernel does.
func (s *Sim) Kernel(name string, f func(*Launch)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kernels[name] = f
}

// A Launch is one execution of a kernel, for the Go function that plays it.
// Arguments are numbered as in the PTX.
type Launch struct {
	Grid, Block [3]uint32
	Shared      uint32 // bytes of dynamic shared memory

	s    *Sim
	ctx  *context
	name string
	args [][]byte
}

// A faultCode is what Fault panics with.
type faultCode cuapi.Result

// Fault ends the kernel and loses the context with the result code given,
// such as 700. It does not return.
func (l *Launch) Fault(code int) { panic(faultCode(code)) }

// Raw returns the bytes of an argument.
func (l *Launch) Raw(i int) []byte {
	if i < 0 || i >= len(l.args) {
		panic(fmt.Sprintf("kernel %s has no argument %d", l.name, i))
	}
	return l.args[i]
}

func (l *Launch) sized(i, size int) []byte {
	b := l.Raw(i)
	if len(b) != size {
		panic(fmt.Sprintf("argument %d of kernel %s has %d bytes, not %d", i, l.name, len(b), size))
	}
	return b
}

// I32 returns an argument of 4 bytes.
func (l *Launch) I32(i int) int32 { return int32(l.U32(i)) }

// U32 returns an argument of 4 bytes.
func (l *Launch) U32(i int) uint32 { return binary.NativeEndian.Uint32(l.sized(i, 4)) }

// I64 returns an argument of 8 bytes.
func (l *Launch) I64(i int) int64 { return int64(l.U64(i)) }

// U64 returns an argument of 8 bytes.
func (l *Launch) U64(i int) uint64 { return binary.NativeEndian.Uint64(l.sized(i, 8)) }

// F32 returns an argument of 4 bytes.
func (l *Launch) F32(i int) float32 { return math.Float32frombits(l.U32(i)) }

// F64 returns an argument of 8 bytes.
func (l *Launch) F64(i int) float64 { return math.Float64frombits(l.U64(i)) }

// Bytes returns the memory that a pointer argument points to, up to the end of
// its allocation. A pointer into nothing, into freed memory or into memory of
// another device that this one may not access is an illegal address: the
// kernel ends and the context is lost. The bytes are the memory itself, valid
// until the function returns.
func (l *Launch) Bytes(i int) []byte {
	addr := l.U64(i)
	b := l.s.mem.at(addr)
	if b == nil || b.freed || !l.s.reachable(l.ctx, b) {
		if b == nil || !b.freed { // a use after free was reported at the launch
			l.s.violate(WildAddress, fmt.Sprintf("kernel %s: argument %d, %#x, is no memory that it may touch", l.name, i, addr), nil)
		}
		l.Fault(int(cuapi.IllegalAddress))
	}
	return b.at(addr, uintptr(b.base+b.size-addr))
}

// reachable tells whether a kernel of the context may access a block.
func (s *Sim) reachable(ctx *context, b *block) bool {
	switch {
	case b.host != nil || b.ctx.dev == ctx.dev:
		return true
	case b.pool != nil:
		return b.pool.access[ctx.dev.ordinal] != 0
	}
	return ctx.peers[b.ctx.dev]
}

func (s *Sim) launchKernel(h cuapi.Function, gx, gy, gz, bx, by, bz, shared uint32, hs cuapi.Stream, params, extra *cuapi.HostPtr) cuapi.Result {
	st, r := s.room(hs, work)
	if r != cuapi.Success {
		return r
	}
	f, r := s.function(h)
	switch {
	case r != cuapi.Success:
		return r
	case extra != nil:
		return cuapi.NotSupported
	case f.module.ctx != st.ctx:
		s.violate(WrongContext, fmt.Sprintf("kernel %s of device %d is launched in a stream of device %d", f.name, f.module.ctx.dev.ordinal, st.ctx.dev.ordinal), &f.module.made)
		return cuapi.InvalidHandle
	case !fits(gx, gy, gz, bx, by, bz) || int64(shared) > int64(f.maxShared):
		if st.capture != nil {
			st.capture.invalid = true // measured
		}
		return cuapi.InvalidValue
	case params == nil && len(f.params) > 0:
		return cuapi.InvalidValue
	}
	run := s.kernels[f.name]
	if run == nil {
		s.violate(NoFunction, fmt.Sprintf("kernel %s has no Go function: register it with Sim.Kernel", f.name), nil)
		return cuapi.NotSupported
	}
	l := &Launch{Grid: [3]uint32{gx, gy, gz}, Block: [3]uint32{bx, by, bz}, Shared: shared, s: s, ctx: st.ctx, name: f.name}
	o := op{fills: work, span: span{kind: costKernel, kernel: l}, uses: []*block{f.module.code}, run: func() cuapi.Result { return s.play(run, l) }}
	for i, p := range f.params {
		arg := append([]byte(nil), hostBytes(*index(params, i), p.Size)...)
		l.args = append(l.args, arg)
		// Every aligned word that is an address may be used by the kernel.
		for ; len(arg) >= 8; arg = arg[8:] {
			b := s.mem.at(binary.NativeEndian.Uint64(arg))
			if b == nil {
				continue
			}
			if b.freed || b.freeing {
				s.violate(UseAfterFree, fmt.Sprintf("kernel %s is launched on %v, which was freed", f.name, b), &b.gone)
			}
			o.uses = append(o.uses, uses(b)...)
			o.hints = o.hints || b.host != nil
		}
	}
	return s.enqueue(st, &o)
}

// fits checks a launch's dimensions against the device's limits, whose
// attributes follow one another.
func fits(gx, gy, gz, bx, by, bz uint32) bool {
	for i, v := range [...]uint32{bx, by, bz, gx, gy, gz} {
		if v == 0 || v > uint32(deviceAttributes[cuapi.DeviceMaxBlockDimX+int32(i)]) {
			return false
		}
	}
	return uint64(bx)*uint64(by)*uint64(bz) <= uint64(deviceAttributes[cuapi.DeviceMaxThreadsPerBlock])
}

// play runs a kernel's Go function and turns a fault or a panic into the code
// that the context is lost with.
func (s *Sim) play(f func(*Launch), l *Launch) cuapi.Result {
	cause, text, at := s.callback(func() { f(l) })
	switch code, fault := cause.(faultCode); {
	case fault:
		return cuapi.Result(code)
	case cause != nil:
		s.violateAt(Panicked, fmt.Sprintf("kernel %s: %s", l.name, text), at, nil)
		return cuapi.LaunchFailed
	}
	return cuapi.Success
}
