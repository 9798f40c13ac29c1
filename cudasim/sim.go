package cudasim

import (
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// Config describes the simulated machine. The zero value is one device with
// 8 GiB of memory and a driver of CUDA 13.0.
type Config struct {
	Devices        int    // number of devices; 0 means 1
	Version        int    // CUDA version, 12040 for 12.4; 0 means 13000. Newer entry points are absent
	Memory         uint64 // bytes of each device; 0 means 8 GiB. Only touched allocations cost real memory
	PinnedMemory   uint64 // most bytes of pinned host memory; 0 means no limit
	NoPools        bool   // the devices have no memory pools
	HardwareQueues int    // queues that the streams of a device share; 0 means 8

	// Peers tells whether a device can access the memory of another, for each
	// ordered pair, and answers the same each time; nil: all can. Copies between
	// devices work all the same.
	Peers func(from, to int) bool

	// Stacks keeps where each operation was enqueued, so that violations tell it
	// also of those that ran already. It costs a microsecond an operation.
	Stacks bool

	// Report is called with each violation as it happens, under the simulator's
	// lock, but those of callbacks, which come at any time: it must call neither
	// the driver nor the simulator, and be safe for concurrent use.
	Report func(Violation)

	// Stepped leaves every operation that is enqueued pending until Sim.Step
	// runs it. Set-up waits for work of its own (driver.Device.Primary): with
	// Stepped from the start another goroutine must step. Most tests call
	// Sim.SetStepped(true) behind their set-up instead.
	Stepped bool

	// Cost tells how long an operation takes in virtual time; nil means
	// DefaultCost. It runs under the simulator's lock: it must call neither the
	// driver nor the simulator.
	Cost func(Operation) time.Duration

	// NoBlock is for tests that interleave everything on one goroutine: a call
	// that would block records a violation and returns NotReady instead.
	NoBlock bool
}

// A Sim is one simulated driver, with its devices. It is safe for concurrent
// use. Sims share nothing: handles and addresses of one mean nothing to
// another.
type Sim struct {
	cfg   Config
	table *cuapi.Table // every call takes the lock
	steps *cuapi.Table // the same under a lock already held: the steps of a list

	opening sync.Mutex // of opened, apart from mu: Driver makes calls
	opened  *driver.Driver

	callbacks callbacks // threads inside a user's function, which may not call the driver

	mu     sync.Mutex
	moved  sync.Cond // broadcast when a blocked call may go on
	inited bool
	closed bool
	cur    frame // the call that holds the lock

	devices  []*device
	contexts map[cuapi.Context]*context
	streams  map[cuapi.Stream]*stream
	events   map[cuapi.Event]*event
	modules  map[cuapi.Module]*module
	funcs    map[cuapi.Function]*function
	graphs   map[cuapi.Graph]*graph
	pools    map[cuapi.MemPool]*pool
	threads  map[int]*thread
	lastID   uintptr // handles are never reused
	gone     tombstones
	mem      memory

	active   []*stream  // streams with operations pending
	seq      uint64     // order of all operations
	now      moment     // of the host
	ended    moment     // when the last of what ran ends
	faults   int        // contexts whose fault no call has reported yet
	flags    int        // pending waits on memory values and semaphores
	captures []*capture // that have not ended
	polling  bool       // the flag poller runs

	stuck   int // callers inside a call that waits for all streams
	full    int // callers inside an enqueue into a full stream
	waiting atomic.Int64

	kernels   map[string]func(*Launch)
	hostFuncs map[uintptr]func()
	semWait   uintptr // the host function that waits for a semaphore

	violations []Violation
	found      *CloseError // what Close returned
	frames     []uintptr   // room for stacks of operations
	reason     string      // of the last call's result, if it did wrong
	lost       []leftover  // what a destroyed context took with it
	tracing    bool
	trace      []*Call
	crossings  int
}

// A frame is what is known about one driver call while it holds the lock.
type frame struct {
	id       cuapi.ID
	crossing int
	ctx      *context // the current context, for calls that need one
	asked    stack    // where the operation that runs was enqueued, if it was pending
}

// New returns a simulated driver. cuInit is still to be called, which Driver
// does.
func New(cfg Config) *Sim {
	def(&cfg.Devices, 1)
	def(&cfg.Version, 13000)
	def(&cfg.Memory, 8<<30)
	def(&cfg.HardwareQueues, 8)
	s := &Sim{
		cfg:       cfg,
		contexts:  map[cuapi.Context]*context{},
		streams:   map[cuapi.Stream]*stream{},
		events:    map[cuapi.Event]*event{},
		modules:   map[cuapi.Module]*module{},
		funcs:     map[cuapi.Function]*function{},
		graphs:    map[cuapi.Graph]*graph{},
		pools:     map[cuapi.MemPool]*pool{},
		threads:   map[int]*thread{},
		kernels:   map[string]func(*Launch){},
		hostFuncs: map[uintptr]func(){},
		lastID:    0x10000,
	}
	s.moved.L = &s.mu
	s.mem.next = deviceBase
	for i := range cfg.Devices {
		s.devices = append(s.devices, &device{ordinal: cuapi.Device(i), queues: cfg.HardwareQueues})
	}
	s.semWait = s.newID()
	raw := s.raw()
	for _, e := range cuapi.Entries {
		if e.Since() > cfg.Version {
			reflect.ValueOf(raw).Elem().FieldByName(e.Name).SetZero()
		}
	}
	s.steps = cuapi.Intercept(raw, s.listed)
	s.table = cuapi.Intercept(raw, s.cross)
	s.table.Run = s.runList
	return s
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Driver initializes the simulated driver and returns it as purecuda's, as
// driver.Open does with a real one: the same each time.
func (s *Sim) Driver() (*driver.Driver, error) {
	s.opening.Lock()
	defer s.opening.Unlock()
	if r := s.table.Init(0); r != cuapi.Success {
		return nil, fmt.Errorf("cudasim: cuInit: %w", driver.Result(r))
	}
	if s.opened == nil {
		d, err := wire.NewDriver(s.table, "simulator")
		if err != nil {
			return nil, err
		}
		s.opened = d.(*driver.Driver)
	}
	return s.opened, nil
}

// Table returns the driver's entry points. Those newer than Config.Version are
// nil.
func (s *Sim) Table() *cuapi.Table { return s.table }

// Blocked returns how many callers are inside a driver call that blocks now:
// a test that must see a call block polls it.
func (s *Sim) Blocked() int { return int(s.waiting.Load()) }

// cross makes one call in a crossing of its own.
func (s *Sim) cross(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if s.callbacks.here() {
		return s.refuseCallback(c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.crossings++
	s.cur = frame{crossing: s.crossings}
	return s.call(c, next)
}

// runList executes a list: several calls, one crossing.
func (s *Sim) runList(l *cuapi.List) (int, cuapi.Result) {
	if s.callbacks.here() {
		return 0, s.refuseCallback(cuapi.Call{ID: l.ID(0)})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.crossings++
	s.cur = frame{crossing: s.crossings}
	return cuapi.RunEach(s.steps, l)
}

// listed makes one call of a list.
func (s *Sim) listed(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	s.cur = frame{crossing: s.cur.crossing}
	return s.call(c, next)
}

// refuseCallback answers a call made from inside a host function or a kernel
// (docs/driver-facts: "cuLaunchHostFunc may not call CUDA"). The caller may
// hold the lock already, further up its stack.
func (s *Sim) refuseCallback(c cuapi.Call) cuapi.Result {
	v := Violation{Kind: FromCallback, Call: c.Name(), Text: "a host function or kernel calls the driver"}
	v.stack = callers()
	s.callbacks.mu.Lock()
	defer s.callbacks.mu.Unlock()
	s.callbacks.seen = append(s.callbacks.seen, v)
	if s.cfg.Report != nil {
		s.cfg.Report(v)
	}
	return cuapi.NotPermitted
}

// call makes one call under the lock: admits it, traces it, lets it run.
func (s *Sim) call(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	s.cur.id = c.ID
	if c.ID != cuapi.IDGetErrorName && c.ID != cuapi.IDGetErrorString {
		s.reason = ""
	}
	var rec *Call
	if s.tracing {
		rec = &Call{ID: c.ID, Name: c.Name(), Args: append([]uint64(nil), c.Args[:c.N]...), Crossing: s.cur.crossing}
		s.trace = append(s.trace, rec)
	}
	r := s.admit(&c)
	if r == cuapi.Success {
		r = next()
	}
	if rec != nil {
		rec.Result = r
	}
	return r
}

// admit answers what a call meets before it does anything: an uninitialized
// driver, no current context, a lost one, or a stall.
func (s *Sim) admit(c *cuapi.Call) cuapi.Result {
	rule := &rules[c.ID]
	switch {
	case s.closed:
		return cuapi.Deinitialized
	case !s.inited && !rule.early:
		return cuapi.NotInitialized
	case s.cfg.NoPools && rule.pool:
		return cuapi.NotSupported
	}
	if s.faults > 0 && !cuapi.Entries[c.ID].List {
		s.observeFaults()
	}
	if rule.current {
		ctx, r := s.current()
		if r != cuapi.Success {
			return r
		}
		s.cur.ctx = ctx
	}
	if rule.unsafe && len(s.captures) > 0 {
		if r := s.beside(); r != cuapi.Success {
			return r
		}
	}
	if s.flags > 0 {
		s.drain()
	}
	if rule.frees {
		s.suspectCall(c)
	}
	if r := s.stall(c.ID); r != cuapi.Success {
		return r
	}
	if s.cur.ctx != nil { // it may have been lost meanwhile
		return s.cur.ctx.usable()
	}
	return cuapi.Success
}

// stall makes a call wait as the manifest's column says (docs/driver-facts:
// "Stalls"). What is unmeasured there stalls here.
func (s *Sim) stall(id cuapi.ID) cuapi.Result {
	switch cuapi.Entries[id].Block {
	case cuapi.BlockHeld, cuapi.BlockSetup:
		r := s.wait(&s.stuck, func() bool { return len(s.active) == 0 })
		if r == cuapi.Success {
			s.sawAt(s.ended)
		}
		return r
	case cuapi.BlockLock, cuapi.BlockFull:
		return s.wait(nil, func() bool { return s.stuck == 0 && (s.full == 0 || !rules[id].behindFull) })
	}
	return cuapi.Success
}

// wait blocks the calling goroutine until the condition holds, counted in n.
func (s *Sim) wait(n *int, until func() bool) cuapi.Result {
	if until() {
		return cuapi.Success
	}
	if s.cfg.NoBlock {
		s.violate(Blocks, "the call would block", nil)
		return cuapi.NotReady
	}
	cur := s.cur
	if n != nil {
		*n++
	}
	s.waiting.Add(1)
	for !until() && !s.closed {
		s.pollFlags()
		s.moved.Wait()
	}
	s.waiting.Add(-1)
	if n != nil {
		*n--
		s.moved.Broadcast()
	}
	s.cur = cur
	if s.closed {
		return cuapi.Deinitialized
	}
	return cuapi.Success
}

// newID returns a handle that no object had before.
func (s *Sim) newID() uintptr {
	s.lastID += 0x10
	return s.lastID
}

// A rule is what admit must know of an entry point beyond the manifest.
type rule struct {
	early      bool // works before cuInit
	current    bool // needs a current context (docs/driver-facts: "Threads and contexts")
	pool       bool // absent without memory pools
	behindFull bool // blocks while an enqueue is stuck in a full stream (measured for two)
	frees      bool // ends what its first argument names
	unsafe     bool // forbidden beside some captures (docs/driver-facts: "Beside a capture")
}

var rules = func() (t [cuapi.NumEntries]rule) {
	for _, id := range []cuapi.ID{
		cuapi.IDInit, cuapi.IDDriverGetVersion, cuapi.IDGetErrorName, cuapi.IDGetErrorString,
		cuapi.IDGetProcAddress, cuapi.IDGetProcAddressV2, cuapi.IDLogsDumpToMemory,
	} {
		t[id].early = true
	}
	for _, id := range []cuapi.ID{
		cuapi.IDEventCreate,                                            // measured
		cuapi.IDMemAlloc, cuapi.IDMemHostAlloc, cuapi.IDCtxSynchronize, // measured
		cuapi.IDMemHostRegister, cuapi.IDMemHostGetDevicePointer, cuapi.IDMemGetInfo, // documented
		cuapi.IDCtxEnablePeerAccess, cuapi.IDCtxDisablePeerAccess, cuapi.IDModuleLoadDataEx, // documented
		cuapi.IDMemGetAddressRange, cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor, cuapi.IDOccupancyMaxPotentialBlockSize, // measured
	} {
		t[id].current = true
	}
	for id := cuapi.IDMemAllocAsync; id <= cuapi.IDMemPoolGetAccess; id++ {
		t[id].pool = true
	}
	for _, id := range []cuapi.ID{cuapi.IDEventCreate, cuapi.IDMemHostAlloc} {
		t[id].behindFull = true
	}
	for _, id := range []cuapi.ID{cuapi.IDMemFree, cuapi.IDMemFreeHost, cuapi.IDMemHostUnregister, cuapi.IDModuleUnload} {
		t[id].frees = true
	}
	for _, id := range []cuapi.ID{
		cuapi.IDMemAlloc, cuapi.IDMemFree, cuapi.IDMemHostAlloc, cuapi.IDMemFreeHost,
		cuapi.IDMemPoolCreate, cuapi.IDMemPoolDestroy, cuapi.IDMemPoolTrimTo, cuapi.IDMemPoolSetAttribute,
		cuapi.IDMemPoolGetAttribute, cuapi.IDMemPoolSetAccess, cuapi.IDMemPoolGetAccess, cuapi.IDModuleUnload,
	} {
		t[id].unsafe = true
	}
	return t
}()
