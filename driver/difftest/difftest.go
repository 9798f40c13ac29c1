// Package difftest compares drivers: a seed gives a sequence of driver calls, right
// ones and wrong ones, the same on the simulator and on hardware, and what they
// answer is compared, line by line, with the bytes that memory holds in the end.
//
// What the reference leaves undefined, or what was seen to crash a real driver, is
// left out: destroyed handles, null host pointers, small overruns, addresses that
// nobody knows where the driver takes them for the host's, unknown attributes of
// functions that are set, memory that nothing wrote, unordered uses of memory, and
// questions whose answer is a matter of time.
package difftest

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/driver/drivertest"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
)

// Steps is how many random steps a sequence has.
const Steps = 48

// A Stage is a context, with device code, for sequences to play on.
type Stage struct {
	// Line, if not nil, is told of each line when it is there, so that a sequence
	// that never ends shows where it is.
	Line func(string)

	table *cuapi.Table
	ctx   *driver.Context
	core  *wire.Context
	code  cuapi.Module
}

// NewStage makes the primary context of the first device current on the calling
// thread, which must be locked, and loads the code.
func NewStage(drv *driver.Driver) (*Stage, error) {
	dev, err := drv.Device(0)
	if err != nil {
		return nil, err
	}
	ctx, err := dev.Primary()
	if err != nil {
		return nil, err
	}
	s := &Stage{table: wire.Table(drv), ctx: ctx, core: wire.ContextOf(ctx)}
	if r := s.table.CtxSetCurrent(s.core.Raw); r != cuapi.Success {
		return nil, s.core.Fail(cuapi.IDCtxSetCurrent, r, "")
	}
	m := new(cuapi.Module)
	if r := load(s.table, m, drivertest.PTX); r != cuapi.Success {
		return nil, s.core.Fail(cuapi.IDModuleLoadDataEx, r, "")
	}
	s.code = *m
	return s, nil
}

// Play runs the sequence of a seed, and returns a line for each driver call: what
// it was asked and how it answered, in terms that mean the same on each driver.
// It leaves nothing behind.
//
// With lose, a kernel ends the context in the midst, and the sequence goes on:
// the process has no use for the device afterwards.
func (s *Stage) Play(seed uint64, lose bool) []string {
	p := &player{
		Table: s.table, rng: rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15)),
		ctx: s.ctx, core: s.core, code: s.code, stack: 1,
		names: map[uint64]string{}, count: map[string]int{}, line: s.Line,
	}
	p.streams = append(p.streams, &seqStream{name: "legacy", blocking: true})
	p.open()
	at := -1
	if lose {
		at = p.rng.IntN(Steps)
	}
	for i := range Steps {
		if i == at {
			p.kill()
		}
		m := moves[p.pick(weights)]
		if p.held == nil || m.held {
			m.do(p)
		}
	}
	p.close()
	return p.lines
}

// A player plays one sequence. What it knows of streams, memory and captures
// decides which calls make sense, never how they are answered.
type player struct {
	*cuapi.Table
	rng  *rand.Rand
	ctx  *driver.Context
	core *wire.Context
	code cuapi.Module

	lines []string
	line  func(string)
	names map[uint64]string // of handles
	count map[string]int

	streams []*seqStream // the first is the legacy stream
	events  []*seqEvent
	blocks  []*seqBlock
	spare   []*seqBlock // that nothing could fill: their bytes are not defined
	pools   []cuapi.MemPool
	modules []cuapi.Module
	funcs   []cuapi.Function
	graphs  []cuapi.Graph
	stack   int  // contexts pushed on the thread
	mode    bool // the thread's capture mode was exchanged
	held    *seqStream
	free    func() // lets the held one go
	dead    bool   // the context is lost
}

type seqStream struct {
	h        cuapi.Stream
	name     string
	blocking bool
	late     bool // behind the held stream
	dirty    bool // something may be pending
	capture  bool // it captures, or did when it was asked last
}

type seqEvent struct {
	h    cuapi.Event
	late bool
}

// A seqBlock is memory: of the device, of a pool, or of the host.
type seqBlock struct {
	at    cuapi.DevicePtr
	host  cuapi.HostPtr
	size  uintptr
	kind  blockKind
	last  *seqStream // what used it last
	value string     // its name
}

type blockKind int

const (
	deviceBlock blockKind = iota
	poolBlock
	hostBlock
	managedBlock
)

// A move is a step of a sequence: one call, or some that make sense together.
type move struct {
	weight int
	held   bool // may be made while a stream is held: nothing in it waits for all work
	do     func(*player)
}

var weights = func() (w []int) {
	for _, m := range moves {
		w = append(w, m.weight)
	}
	return w
}()

// pick draws an index by weight.
func (p *player) pick(weights []int) int {
	total := 0
	for _, w := range weights {
		total += w
	}
	n := p.rng.IntN(total)
	for i, w := range weights {
		if n -= w; n < 0 {
			return i
		}
	}
	return 0
}

func oneOf[T any](p *player, list ...T) T { return list[p.rng.IntN(len(list))] }

// mostly is the right thing in seven of eight cases, else one of the others.
func mostly[T any](p *player, right T, wrong ...T) T {
	if p.rng.IntN(8) > 0 {
		return right
	}
	return oneOf(p, wrong...)
}

// call notes a call. What it gave stands behind the result where it succeeded.
func (p *player) call(id cuapi.ID, asked string, r cuapi.Result, gave ...any) cuapi.Result {
	line := fmt.Sprintf("%s(%s) = %d", cuapi.Entries[id].Symbol(), asked, r)
	if r == cuapi.Success && len(gave) > 0 {
		line += " " + strings.TrimSpace(fmt.Sprintln(gave...))
	}
	p.add(line)
	return r
}

func (p *player) note(format string, args ...any) {
	p.add(fmt.Sprintf(format, args...))
}

func (p *player) add(line string) {
	p.lines = append(p.lines, line)
	if p.line != nil {
		p.line(line)
	}
}

// name gives a handle the name that it has in the lines.
func (p *player) name(kind string, h uint64) string {
	p.count[kind]++
	n := fmt.Sprintf("%s%d", kind, p.count[kind])
	p.names[h] = n
	return n
}

func (p *player) stream() *seqStream {
	// Beside a held stream the legacy stream was seen to stand still.
	if len(p.streams) > 1 && (p.rng.IntN(12) > 0 || p.held != nil) {
		return p.streams[1+p.rng.IntN(len(p.streams)-1)]
	}
	return p.streams[0]
}

func (p *player) event() *seqEvent { return oneOf(p, p.events...) }

func (p *player) block(kinds ...blockKind) *seqBlock {
	var list []*seqBlock
	for _, b := range p.blocks {
		for _, k := range kinds {
			if b.kind == k {
				list = append(list, b)
			}
		}
	}
	if len(list) == 0 {
		return nil
	}
	return oneOf(p, list...)
}

// open makes what most moves need.
func (p *player) open() {
	for range 2 {
		p.newStream(cuapi.StreamNonBlocking)
		p.newEvent(cuapi.EventDisableTiming)
	}
	p.newEvent(0)
	for _, name := range []string{"fill", "scale", "nop"} {
		f := new(cuapi.Function)
		if p.call(cuapi.IDModuleGetFunction, "code, "+name, p.ModuleGetFunction(f, p.code, cstring(name))) == cuapi.Success {
			p.funcs = append(p.funcs, *f)
			p.names[uint64(*f)] = name
		}
	}
	p.newDevice(4096)
	p.newHost(4096)
}

// kill runs the kernel that ends the context, and waits until that is known.
func (p *player) kill() {
	p.release()
	p.endCaptures()
	s := p.streams[1]
	f := new(cuapi.Function)
	if p.ModuleGetFunction(f, p.code, cstring("wild")) != cuapi.Success {
		return
	}
	p.call(cuapi.IDLaunchKernel, "wild, "+s.name, p.LaunchKernel(*f, 1, 1, 1, 1, 1, 1, 0, s.h, nil, nil))
	p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h))
	p.dead = true
}

// close lets go of what is held, looks at all memory, and frees everything.
func (p *player) close() {
	p.release()
	p.endCaptures()
	if p.mode {
		p.exchange(cuapi.CaptureModeGlobal)
	}
	for ; p.stack > 1; p.stack-- {
		p.call(cuapi.IDCtxPopCurrent, "", p.CtxPopCurrent(new(cuapi.Context)))
	}
	p.call(cuapi.IDCtxSetCurrent, "ctx", p.CtxSetCurrent(p.core.Raw))
	p.call(cuapi.IDCtxSynchronize, "", p.CtxSynchronize())
	for _, b := range p.blocks {
		if !p.dead {
			p.note("%s holds %s", b.value, p.contents(b))
		}
	}
	p.blocks = append(p.blocks, p.spare...)
	for len(p.blocks) > 0 {
		p.freeBlock(p.blocks[0])
	}
	for _, g := range p.graphs {
		p.call(cuapi.IDGraphDestroy, p.names[uint64(g)], p.GraphDestroy(g))
	}
	for _, m := range p.modules {
		p.call(cuapi.IDModuleUnload, p.names[uint64(m)], p.ModuleUnload(m))
	}
	for _, s := range p.streams[1:] {
		p.call(cuapi.IDStreamDestroy, s.name, p.StreamDestroy(s.h))
	}
	for _, e := range p.events {
		p.call(cuapi.IDEventDestroy, p.names[uint64(e.h)], p.EventDestroy(e.h))
	}
	for _, h := range p.pools {
		p.call(cuapi.IDMemPoolDestroy, p.names[uint64(h)], p.MemPoolDestroy(h))
	}
}

// contents is a hash of all bytes of a block. Everything is complete.
func (p *player) contents(b *seqBlock) string {
	if b.host == nil {
		h := new(cuapi.HostPtr)
		if r := p.MemHostAlloc(h, b.size, 0); r != cuapi.Success {
			return fmt.Sprint("no memory: ", r)
		}
		defer p.MemFreeHost(*h)
		clear(bytesOf(*h, int(b.size)))
		s := p.streams[1].h
		if r := max(p.MemcpyDtoHAsync(*h, b.at, b.size, s), p.StreamSynchronize(s)); r != cuapi.Success {
			return fmt.Sprint("no copy: ", r)
		}
		return sum(bytesOf(*h, int(b.size)))
	}
	return sum(bytesOf(b.host, int(b.size)))
}

func sum(b []byte) string {
	h := fnv.New64a()
	h.Write(b)
	return fmt.Sprintf("%016x", h.Sum64())
}

// hold holds a stream: at most one at a time.
func (p *player) hold() {
	s := p.streams[1+p.rng.IntN(len(p.streams)-1)]
	if p.held != nil || s.blocking || s.capture || p.dead {
		return
	}
	free, err := hold.Stream(p.ctx, uintptr(s.h))
	p.note("hold %s: %v", s.name, err)
	if err == nil {
		p.held, p.free = s, free
		s.late, s.dirty = true, true
	}
}

// release lets the held stream go, and waits until nothing is late.
func (p *player) release() {
	if p.held == nil {
		return
	}
	p.free()
	p.note("release %s", p.held.name)
	p.held = nil
	for _, s := range p.streams {
		if s.late && !s.capture {
			p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h))
			s.dirty = false
		}
		s.late = false
	}
	for _, e := range p.events {
		e.late = false
	}
}

// wouldSpread tells whether a blocking stream, or the legacy one, would wait for
// what is held: whatever the legacy stream waits for, all blocking streams do.
func wouldSpread(s *seqStream, late bool) bool { return late && s.blocking }

// behind orders a stream behind the last use of a block. It tells whether the
// use makes sense.
func (p *player) behind(b *seqBlock, s *seqStream) bool {
	if s.capture { // nothing runs
		return true
	}
	from := b.last
	if from == nil || from == s || from.capture {
		return from == nil || from == s
	}
	if wouldSpread(s, from.late) {
		return false
	}
	e := p.events[0]
	if p.call(cuapi.IDEventRecord, p.names[uint64(e.h)]+", "+from.name, p.EventRecord(e.h, from.h)) != cuapi.Success {
		return false
	}
	e.late = from.late
	if p.call(cuapi.IDStreamWaitEvent, s.name+", "+p.names[uint64(e.h)], p.StreamWaitEvent(s.h, e.h, 0)) != cuapi.Success {
		return false
	}
	s.late = s.late || e.late
	s.dirty = true
	return true
}

// used notes the outcome of an operation on blocks.
func (p *player) used(s *seqStream, r cuapi.Result, blocks ...*seqBlock) {
	p.asked(s)
	if r != cuapi.Success || s.capture {
		return
	}
	s.dirty = true
	for _, b := range blocks {
		if b != nil {
			b.last = s
		}
	}
}

// asked asks a stream whether it captures.
func (p *player) asked(s *seqStream) {
	status := new(int32)
	r := p.StreamIsCapturing(s.h, status)
	p.call(cuapi.IDStreamIsCapturing, s.name, r, *status)
	s.capture = r == cuapi.Success && *status != cuapi.CaptureStatusNone
}

// endCaptures ends each stream's capture, whether it has one or not.
func (p *player) endCaptures() {
	for _, s := range p.streams[1:] {
		if s.capture {
			p.endCapture(s)
		}
	}
	for _, s := range p.streams[1:] {
		p.asked(s)
	}
}
