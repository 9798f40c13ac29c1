package dst

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/watch"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A world is one simulated machine with all that its actors own, from set-up to
// shutdown. Everything in it follows from its seed.
type world struct {
	seed, index uint64
	rng         *rand.Rand
	sim         *cudasim.Sim
	devs        []*device
	lanes       map[uint64]*lane // by the driver's stream
	laneList    []*lane
	tight       bool // memory is short enough to be hit

	sessions []*session
	lives    []*life   // that the actors own
	bufs     []*buffer // of these, the pinned ones
	past     []any     // handles that were moved or closed, to use once more
	keep     []any     // all handles: the collector does not take part

	step  int // actions so far
	log   ring
	ids   int
	guard driverGuard
	found *failure
	stats tally
}

// tally counts what happened, for the report.
type tally struct {
	steps, nested, faults, losses, calls, worlds int
	actions                                      [numActions]int
	ends                                         [3]int // by outcome
}

func (t *tally) add(o *tally) {
	t.steps += o.steps
	t.nested += o.nested
	t.faults += o.faults
	t.losses += o.losses
	t.calls += o.calls
	t.worlds += o.worlds
	for i, n := range o.actions {
		t.actions[i] += n
	}
	for i, n := range o.ends {
		t.ends[i] += n
	}
}

// A device has one context, and the runtimes on it.
type device struct {
	ctx      *driver.Context
	core     *wire.Context
	watcher  *watch.Watcher
	mix      *kernel.Function // dst = f(src)
	fill     *kernel.Function // dst = pattern
	bad      *kernel.Function // loses the context
	runtimes []*runtimeOf
	sticky   bool  // a call told of the context's loss
	cause    error // the first cause that the library latched
	kept     int   // pinned buffers that must be retained by now, at least
	stranded int   // pinned buffers that were dropped with a slice out
	memory   []*foreign
}

// A runtimeOf is a runtime and what the model knows of it.
type runtimeOf struct {
	rt      *publish.Runtime
	dev     *device
	cfg     publish.Config
	closed  bool
	dropped int // owners that were abandoned and may not be ended yet
	leaks   int
	keeps   int  // owners that must be on the permanent side by now, at least
	hurt    bool // a fault was injected into a call for it, or it was lost
}

// foreign is device memory of other code, to be adopted.
type foreign struct {
	addr cuapi.DevicePtr
	size int
	life *life // who has it
}

// The kernels. The simulator reads the declarations alone. Each launch has the
// number of its lane and its own, so that the world knows what has run.
const ptx = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 dst, .param .u32 n, .param .u32 tag, .param .u32 lane, .param .u32 seq) { ret; }
.visible .entry mix(.param .u64 src, .param .u64 dst, .param .u32 n, .param .u32 tag, .param .u32 lane, .param .u32 seq) { ret; }
.visible .entry bad(.param .u64 dst) { ret; }
`

func fillBytes(dst []byte, tag uint32) {
	for i := range dst {
		dst[i] = byte(tag>>(8*(i&3))) + byte(i>>2)*7
	}
}

func mixBytes(dst, src []byte, tag uint32) {
	for i := range dst {
		dst[i] = src[i]*5 + byte(tag) + byte(i)
	}
}

// newWorld sets a machine up. No fault is injected into set-up.
func newWorld(seed, index uint64) *world {
	w := &world{seed: seed, index: index, rng: rand.New(rand.NewPCG(seed, index)), lanes: map[uint64]*lane{}}
	w.guard.init(w)
	cfg := cudasim.Config{Devices: 1 + w.rng.IntN(2), NoBlock: true}
	if w.tight = w.chance(1, 3); w.tight {
		cfg.Memory = 3 << 20
	}
	if w.chance(1, 3) {
		cfg.PinnedMemory = uint64(cfg.Devices) << 17
	}
	switch w.rng.IntN(6) {
	case 0:
		cfg.NoPools = true
	case 1:
		cfg.Version = 11000
	case 2:
		cfg.Version = 12000
	}
	w.sim = cudasim.New(cfg)
	w.register()
	table := w.sim.Table()
	w.must(result(table.Init(0)))
	d, err := wire.NewDriver(cuapi.Intercept(table, w.guard.around), "simulation")
	w.must(err)
	for i := range cfg.Devices {
		w.addDevice(d.(*driver.Driver), i)
	}
	w.sim.SetStepped(true)
	w.guard.begin()
	return w
}

func result(r cuapi.Result) error {
	if r == cuapi.Success {
		return nil
	}
	return driver.Result(r)
}

func (w *world) must(err error) {
	if err != nil {
		panic(fmt.Sprintf("set-up: %v", err))
	}
}

func (w *world) register() {
	ran := func(n, seq uint32) {
		l := w.laneList[n]
		if uint64(seq) <= l.ran {
			w.guard.note(fmt.Sprintf("launch %d of a lane ran behind launch %d", seq, l.ran))
		}
		l.ran = uint64(seq)
	}
	w.sim.Kernel("fill", func(l *cudasim.Launch) {
		fillBytes(l.Bytes(0)[:l.U32(1)], l.U32(2))
		ran(l.U32(3), l.U32(4))
	})
	w.sim.Kernel("mix", func(l *cudasim.Launch) {
		n := l.U32(2)
		mixBytes(l.Bytes(1)[:n], l.Bytes(0)[:n], l.U32(3))
		ran(l.U32(4), l.U32(5))
	})
	w.sim.Kernel("bad", func(l *cudasim.Launch) { l.Fault(int(cuapi.IllegalAddress)) })
}

func (w *world) addDevice(drv *driver.Driver, i int) {
	dev, err := drv.Device(i)
	w.must(err)
	d := &device{}
	w.guard.dev = d
	d.ctx, err = dev.Primary()
	w.must(err)
	d.core = wire.ContextOf(d.ctx)
	d.watcher = stream.WatcherOf(d.core)
	d.watcher.ByHand()
	w.devs = append(w.devs, d)
	w.addRuntime(d)
	mod, err := kernel.Load(d.ctx, []byte(ptx))
	w.must(err)
	d.mix, err = mod.Function("mix")
	w.must(err)
	d.fill, err = mod.Function("fill")
	w.must(err)
	d.bad, err = mod.Function("bad")
	w.must(err)
	for range 2 {
		m := &foreign{size: 1 + w.rng.IntN(300)}
		out := new(cuapi.DevicePtr)
		w.must(result(d.core.Current(func() cuapi.Result { return w.sim.Table().MemAlloc(out, uintptr(m.size)) })))
		m.addr = *out
		d.memory = append(d.memory, m)
	}
}

// addRuntime makes one more runtime on a device, with bounds that are met.
func (w *world) addRuntime(d *device) *runtimeOf {
	cfg := publish.Config{Slots: 3 + w.rng.IntN(40), Stacks: w.chance(1, 16)}
	if w.chance(1, 3) {
		cfg.Bytes = int64(256 << w.rng.IntN(8))
	}
	if w.chance(1, 2) {
		cfg.PinnedBytes = int64(4096 * (2 + w.rng.IntN(30)))
	}
	rt, err := publish.New(d.ctx, cfg)
	if err != nil {
		if !d.sticky && w.guard.injected == 0 {
			w.fail("a runtime can not be made: %v", err)
		}
		return nil
	}
	r := &runtimeOf{rt: rt, dev: d, cfg: cfg}
	d.runtimes = append(d.runtimes, r)
	w.keep = append(w.keep, rt)
	return r
}

func (w *world) chance(n, of int) bool { return w.rng.IntN(of) < n }

// settle lets the devices do all that they were given.
func (w *world) settle() {
	w.sim.ReleaseAll()
	for w.sim.Step() {
	}
}

// advance lets a device go on, a little: one operation of one stream, or several.
func (w *world) advance() {
	if len(w.laneList) == 0 {
		return
	}
	l := w.laneList[w.rng.IntN(len(w.laneList))]
	switch w.rng.IntN(16) {
	case 0:
		w.sim.Hold(uintptr(l.h))
	case 1, 2:
		w.sim.Release(uintptr(l.h))
	case 3, 4:
		for range w.rng.IntN(64) {
			w.sim.Step()
		}
	case 5, 6, 7:
		for range w.rng.IntN(16) {
			w.sim.Step(uintptr(l.h))
		}
	default:
		w.sim.Step()
	}
}

// A lane is a stream, as the driver knows it.
type lane struct {
	h      uint64
	n      uint32 // its number, which launches have
	issued uint64 // launches
	sure   uint64 // of these, the newest that was enqueued for certain
	ran    uint64 // of these, those that ran
	hurt   bool   // an enqueue may have failed
	broken bool   // one did
	streamOf
}

// lane returns the model of a stream.
func (w *world) lane(h uint64) *lane {
	l := w.lanes[h]
	if l == nil {
		l = &lane{h: h, n: uint32(len(w.laneList))}
		w.lanes[h] = l
		w.laneList = append(w.laneList, l)
	}
	return l
}

// hash returns what all driver calls and results so far come to.
func (w *world) hash() uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, w.guard.hash, w.step, w.stats)
	return h.Sum64()
}
