package cudasim

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/osthread"
)

type device struct {
	ordinal  cuapi.Device
	primary  *context // nil: not active
	retained int
	fault    cuapi.Result    // of the primary context, for the life of the process
	live     uint64          // bytes in allocations
	streams  int             // streams made so far
	queues   int             // hardware queues
	filled   [numKinds][]int // operations pending in each

	copyQueues [2][]copyQueue // down, up
	engines    [2]engine      // of copies to the device and to the host
	pool       *pool          // the default pool, made when asked for
}

// A context is the primary context of a device, from its first retain to its
// last release.
type context struct {
	h        cuapi.Context
	dev      *device
	peers    map[*device]bool // enabled peers
	legacy   *stream
	departed clock        // what its destroyed streams were given
	ended    moment       // when the last of what ran in it ends
	ends     [2]moment    // of what the legacy stream and the blocking ones were given
	fault    cuapi.Result // what ended it; set when the fault happens
	lost     cuapi.Result // the same, once a call has reported it
	gone     bool         // destroyed
	made     stack
}

// usable answers a call on the context: the first fault for ever (docs/
// driver-facts: "Results and edge cases").
func (c *context) usable() cuapi.Result {
	if c.gone {
		return cuapi.ContextIsDestroyed
	}
	return c.lost
}

// lose ends a context. The fault is not reported by enqueues until another
// call has: measured, the record and the copy behind a faulting kernel
// return 0.
func (s *Sim) lose(ctx *context, code cuapi.Result) {
	if ctx.fault != cuapi.Success {
		return
	}
	ctx.fault = code
	ctx.dev.fault = code
	s.faults++
	s.drop(ctx)
}

// Lose has a device's context be lost from outside, as by a fault of its memory
// or when the device falls off its bus, with a result code such as 214, 700 or
// 719. What is pending in the context is gone, and calls answer the code, as
// after a fault of a kernel. A context retained later is lost too. It panics where
// there is no such device, and with the code 0.
func (s *Sim) Lose(device, code int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, r := s.device(cuapi.Device(device))
	switch {
	case r != cuapi.Success || code == 0:
		panic(fmt.Sprintf("cudasim: device %d cannot be lost with code %d", device, code))
	case d.primary != nil:
		s.lose(d.primary, cuapi.Result(code))
	case d.fault == cuapi.Success:
		d.fault = cuapi.Result(code)
	}
	s.drain() // streams of other devices may wait for what is gone
}

func (s *Sim) observeFaults() {
	if s.faults == 0 {
		return
	}
	s.faults = 0
	for _, c := range s.contexts {
		c.lost = c.fault
	}
}

// A thread is what the driver keeps for one OS thread.
type thread struct {
	current []*context // a stack; the last is current
	mode    int32      // of captures
}

func (s *Sim) thread() *thread {
	id := osthread.ID()
	t := s.threads[id]
	if t == nil {
		t = &thread{}
		s.threads[id] = t
	}
	return t
}

// current returns the calling thread's context.
func (s *Sim) current() (*context, cuapi.Result) {
	t := s.threads[osthread.ID()]
	if t == nil || len(t.current) == 0 || t.current[len(t.current)-1] == nil {
		return nil, cuapi.InvalidContext
	}
	ctx := t.current[len(t.current)-1]
	return ctx, ctx.usable()
}

// callbacks are the threads that run a user's function for the simulator.
type callbacks struct {
	n    atomic.Int32
	mu   sync.Mutex
	in   []int
	seen []Violation
}

func (c *callbacks) here() bool {
	if c.n.Load() == 0 {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.in, osthread.ID())
}

func (c *callbacks) enter() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in = append(c.in, osthread.ID())
	c.n.Add(1)
}

func (c *callbacks) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.in, osthread.ID())
	c.in = slices.Delete(c.in, i, i+1)
	c.n.Add(-1)
}

func (s *Sim) init(flags uint32) cuapi.Result {
	if flags != 0 {
		return cuapi.InvalidValue
	}
	s.inited = true
	return cuapi.Success
}

func (s *Sim) driverGetVersion(p *int32) cuapi.Result {
	*p = int32(s.cfg.Version)
	return cuapi.Success
}

func (s *Sim) device(d cuapi.Device) (*device, cuapi.Result) {
	if d < 0 || int(d) >= len(s.devices) {
		return nil, cuapi.InvalidDevice
	}
	return s.devices[d], cuapi.Success
}

func (s *Sim) deviceGetCount(p *int32) cuapi.Result {
	*p = int32(len(s.devices))
	return cuapi.Success
}

func (s *Sim) deviceGet(p *cuapi.Device, ordinal int32) cuapi.Result {
	d, r := s.device(cuapi.Device(ordinal))
	if r == cuapi.Success {
		*p = d.ordinal
	}
	return r
}

func (s *Sim) deviceGetName(p *byte, n int32, dev cuapi.Device) cuapi.Result {
	d, r := s.device(dev)
	if r != cuapi.Success {
		return r
	}
	if n <= 0 {
		return cuapi.InvalidValue
	}
	name := fmt.Sprintf("purecuda simulated device %d", d.ordinal)
	out := bytesAt(p, int(n))
	out[copy(out[:n-1], name)] = 0
	return cuapi.Success
}

func (s *Sim) deviceGetUUID(p *cuapi.UUID, dev cuapi.Device) cuapi.Result {
	d, r := s.device(dev)
	if r == cuapi.Success {
		*p = cuapi.UUID{'p', 'u', 'r', 'e', 'c', 'u', 'd', 'a', 's', 'i', 'm', 0, 0, 0, byte(d.ordinal >> 8), byte(d.ordinal)}
	}
	return r
}

func (s *Sim) deviceTotalMem(p *uintptr, dev cuapi.Device) cuapi.Result {
	_, r := s.device(dev)
	if r == cuapi.Success {
		*p = uintptr(s.cfg.Memory)
	}
	return r
}

// deviceAttributes are those of a data-centre device of capability 9.0.
var deviceAttributes = map[int32]int32{
	cuapi.DeviceMaxThreadsPerBlock:     1024,
	cuapi.DeviceMaxBlockDimX:           1024,
	cuapi.DeviceMaxBlockDimY:           1024,
	cuapi.DeviceMaxBlockDimZ:           64,
	cuapi.DeviceMaxGridDimX:            1<<31 - 1,
	cuapi.DeviceMaxGridDimY:            65535,
	cuapi.DeviceMaxGridDimZ:            65535,
	cuapi.DeviceMaxSharedPerBlock:      48 << 10,
	cuapi.DeviceWarpSize:               32,
	cuapi.DeviceMultiprocessors:        132,
	cuapi.DeviceIntegrated:             0,
	cuapi.DeviceCanMapHostMemory:       1,
	cuapi.DeviceComputeMode:            0,
	cuapi.DeviceAsyncEngines:           3,
	cuapi.DeviceUnifiedAddressing:      1,
	cuapi.DeviceCapabilityMajor:        9,
	cuapi.DeviceCapabilityMinor:        0,
	cuapi.DeviceMaxSharedPerBlockOptin: 227 << 10,
	cuapi.DeviceManagedMemory:          1,
	cuapi.DeviceMemoryPools:            1,
	31:                                 1,    // CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
	39:                                 2048, // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR
}

func (s *Sim) deviceGetAttribute(p *int32, attrib int32, dev cuapi.Device) cuapi.Result {
	_, r := s.device(dev)
	switch {
	case r != cuapi.Success:
		return r
	case attrib <= 0 || attrib > 200:
		return cuapi.InvalidValue
	}
	*p = deviceAttributes[attrib]
	if attrib == cuapi.DeviceMemoryPools && (s.cfg.NoPools || s.cfg.Version < 11020) {
		*p = 0
	}
	return cuapi.Success
}

func (s *Sim) twoDevices(a, b cuapi.Device) cuapi.Result {
	if _, r := s.device(a); r != cuapi.Success {
		return r
	}
	_, r := s.device(b)
	return r
}

// canAccess tells whether one device can access the memory of another.
func (s *Sim) canAccess(from, to cuapi.Device) bool {
	return from != to && (s.cfg.Peers == nil || s.cfg.Peers(int(from), int(to)))
}

// p2pAttributes: performance rank, access, native atomics, array access.
var p2pAttributes = map[int32]int32{1: 0, 2: 1, 3: 1, 4: 1}

// deviceGetP2PAttribute answers 0 throughout for a pair without access. That is
// documented for the access itself, and unverified for the others.
func (s *Sim) deviceGetP2PAttribute(p *int32, attrib int32, a, b cuapi.Device) cuapi.Result {
	if r := s.twoDevices(a, b); r != cuapi.Success {
		return r
	}
	v, ok := p2pAttributes[attrib]
	if !ok {
		return cuapi.InvalidValue
	}
	if a == b {
		return cuapi.InvalidDevice
	}
	if *p = v; !s.canAccess(a, b) {
		*p = 0
	}
	return cuapi.Success
}

func (s *Sim) deviceCanAccessPeer(p *int32, a, b cuapi.Device) cuapi.Result {
	r := s.twoDevices(a, b)
	if r == cuapi.Success {
		if *p = 0; s.canAccess(a, b) {
			*p = 1
		}
	}
	return r
}

func (s *Sim) devicePrimaryCtxRetain(p *cuapi.Context, dev cuapi.Device) cuapi.Result {
	d, r := s.device(dev)
	if r != cuapi.Success {
		return r
	}
	if d.primary == nil {
		d.primary = &context{h: cuapi.Context(s.newID()), dev: d, peers: map[*device]bool{}, fault: d.fault, lost: d.fault, made: callers()}
		s.contexts[d.primary.h] = d.primary
	}
	d.retained++
	*p = d.primary.h
	return cuapi.Success
}

// devicePrimaryCtxRelease succeeds on a lost context too (measured). The last
// release destroys the context with all that is left in it.
func (s *Sim) devicePrimaryCtxRelease(dev cuapi.Device) cuapi.Result {
	d, r := s.device(dev)
	if r != cuapi.Success {
		return r
	}
	if d.retained == 0 {
		s.violate(Misuse, fmt.Sprintf("the primary context of device %d is released more often than retained", dev), nil)
		return cuapi.InvalidContext
	}
	if d.retained--; d.retained > 0 {
		return cuapi.Success
	}
	ctx := d.primary
	d.primary = nil
	delete(s.contexts, ctx.h)
	s.gone.add(uintptr(ctx.h))
	for _, l := range s.left(func(c *context) bool { return c == ctx }) {
		l.what += ", destroyed with its context"
		s.lost = append(s.lost, l)
	}
	s.drop(ctx)
	ctx.gone = true
	removeOf(s, s.streams, func(v *stream) bool { return v.ctx == ctx })
	removeOf(s, s.events, func(v *event) bool { return v.ctx == ctx })
	removeOf(s, s.funcs, func(v *function) bool { return v.module.ctx == ctx })
	removeOf(s, s.modules, func(v *module) bool { return v.ctx == ctx })
	removeOf(s, s.graphs, func(v *graph) bool { return v.ctx == ctx })
	for _, b := range s.mem.blocks() {
		if b.ctx == ctx && !b.freed {
			s.free(b)
		}
	}
	s.drain() // streams of other contexts may wait for what is gone
	return cuapi.Success
}

// removeOf removes what belongs to a destroyed context.
func removeOf[H ~uintptr, T any](s *Sim, m map[H]T, match func(T) bool) {
	for h, v := range m {
		if match(v) {
			delete(m, h)
			s.gone.add(uintptr(h))
		}
	}
}

func (s *Sim) devicePrimaryCtxGetState(dev cuapi.Device, flags *uint32, active *int32) cuapi.Result {
	d, r := s.device(dev)
	if r == cuapi.Success {
		*flags, *active = 0, 0
		if d.primary != nil {
			*active = 1
		}
	}
	return r
}

// context returns the living context of a handle, lost or not.
func (s *Sim) context(h cuapi.Context) (*context, cuapi.Result) {
	c, ok := find(s, s.contexts, h, "context")
	if !ok {
		return nil, cuapi.InvalidContext
	}
	return c, cuapi.Success
}

func (s *Sim) ctxGetCurrent(p *cuapi.Context) cuapi.Result {
	*p = 0
	if t := s.threads[osthread.ID()]; t != nil && len(t.current) > 0 {
		if c := t.current[len(t.current)-1]; c != nil {
			*p = c.h
		}
	}
	return cuapi.Success
}

func (s *Sim) ctxSetCurrent(h cuapi.Context) cuapi.Result {
	var ctx *context
	if h != 0 {
		var r cuapi.Result
		if ctx, r = s.context(h); r != cuapi.Success {
			return r
		}
	}
	t := s.thread()
	if len(t.current) == 0 {
		t.current = append(t.current, nil)
	}
	t.current[len(t.current)-1] = ctx
	if ctx == nil {
		s.popCurrent(t)
	}
	return cuapi.Success
}

func (s *Sim) ctxPushCurrent(h cuapi.Context) cuapi.Result {
	if h == 0 {
		return cuapi.InvalidValue
	}
	ctx, r := s.context(h)
	if r == cuapi.Success {
		t := s.thread()
		t.current = append(t.current, ctx)
	}
	return r
}

func (s *Sim) ctxPopCurrent(p *cuapi.Context) cuapi.Result {
	t := s.threads[osthread.ID()]
	if t == nil || len(t.current) == 0 {
		return cuapi.InvalidContext
	}
	if p != nil {
		*p = t.current[len(t.current)-1].h
	}
	s.popCurrent(t)
	return cuapi.Success
}

// popCurrent forgets a thread that has nothing left to remember.
func (s *Sim) popCurrent(t *thread) {
	t.current = t.current[:len(t.current)-1]
	if len(t.current) == 0 && t.mode == cuapi.CaptureModeGlobal {
		delete(s.threads, osthread.ID())
	}
}

func (s *Sim) ctxGetID(h cuapi.Context, p *uint64) cuapi.Result {
	if h == 0 {
		ctx, r := s.current()
		if r == cuapi.Success {
			*p = uint64(ctx.h)
		}
		return r
	}
	ctx, r := s.context(h)
	if r == cuapi.Success {
		*p = uint64(ctx.h)
	}
	return r
}

func (s *Sim) ctxEnablePeerAccess(h cuapi.Context, flags uint32) cuapi.Result {
	peer, r := s.context(h)
	switch ctx := s.cur.ctx; {
	case r != cuapi.Success:
		return r
	case flags != 0:
		return cuapi.InvalidValue
	case peer.dev == ctx.dev || !s.canAccess(ctx.dev.ordinal, peer.dev.ordinal):
		return cuapi.PeerAccessUnsupported // measured for a device and itself, documented for the others
	case ctx.peers[peer.dev]:
		return cuapi.PeerAccessAlreadyEnabled
	default:
		ctx.peers[peer.dev] = true
	}
	return cuapi.Success
}

func (s *Sim) ctxDisablePeerAccess(h cuapi.Context) cuapi.Result {
	peer, r := s.context(h)
	if r != cuapi.Success {
		return r
	}
	if r := s.beside(); r != cuapi.Success {
		return r
	}
	if !s.cur.ctx.peers[peer.dev] {
		return cuapi.PeerAccessNotEnabled
	}
	delete(s.cur.ctx.peers, peer.dev)
	return cuapi.Success
}
