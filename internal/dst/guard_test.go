package dst

import (
	"fmt"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// driverGuard stands between the library and the simulator. It sees every driver
// call, injects faults, lets other actors act in the midst of a call, and checks
// what the simulator can not: what the library may conclude from what it was told.
type driverGuard struct {
	w    *world
	on   bool // set-up is over
	calm bool // the faults have stopped

	dev  *device // for which the library is at work
	rate int     // faults in 65,536 calls
	dire int     // of 16 faults, those that lose the context
	nest int     // actions in the midst of a call, in 1,024 calls

	injected int
	failed   [2][cuapi.NumEntries]int // calls that failed, in the midst of others or not
	depth    int
	quiet    int // no action in the midst of a call
	within   uint64
	fresh    uint64 // the event of the last query, if it failed
	stream   uint64 // of the last call that has one
	hash     uint64

	events map[uint64]*eventOf
	freed  map[uint64]bool // a free of it failed

	worker chan func()
	done   chan any
	timer  *time.Timer
}

// eventOf is what the library was told of an event.
type eventOf struct {
	stream *streamOf
	at     uint64 // how many records its stream had with this one; 0: none
	late   bool   // it failed in the midst of a call, which may be a query of it, too
	bad    bool   // a record or a query of it failed: never to be used again
}

type streamOf struct{ records, seen uint64 }

// anyStream stands for a stream that is not known.
const anyStream = ^uint64(0)

func (g *driverGuard) init(w *world) {
	*g = driverGuard{w: w, events: map[uint64]*eventOf{}, freed: map[uint64]bool{}}
	if !w.chance(1, 4) {
		g.rate = 1 << w.rng.IntN(11) // to 1 in 64 calls
	}
	g.dire = w.rng.IntN(3)
	if !w.chance(1, 4) {
		g.nest = 1 << w.rng.IntN(7)
	}
}

func (g *driverGuard) begin() { g.on = true }

// streamArg is which argument of an entry point is the stream that it enqueues
// into, plus one.
var streamArg = func() (t [cuapi.NumEntries]int) {
	t[cuapi.IDMemcpyHtoDAsync] = 4
	t[cuapi.IDMemcpyDtoHAsync] = 4
	t[cuapi.IDMemAllocFromPoolAsync] = 4
	t[cuapi.IDMemFreeAsync] = 2
	t[cuapi.IDEventRecord] = 2
	t[cuapi.IDLaunchKernel] = 9
	t[cuapi.IDStreamQuery] = 1
	return t
}()

// note records a violation from wherever it is found.
func (g *driverGuard) note(text string) { g.w.fail("%s", text) }

func (g *driverGuard) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	w := g.w
	if !g.on || c.ID == cuapi.IDGetErrorName || c.ID == cuapi.IDGetErrorString {
		return next()
	}
	w.stats.calls++
	if at := streamArg[c.ID]; at > 0 {
		g.stream = c.Args[at-1]
	}
	if g.depth == 0 && c.ID != cuapi.IDThreadExchangeStreamCaptureMode {
		g.fresh = 0
	}
	g.before(&c)
	if g.nest > 0 && g.depth == 0 && g.quiet == 0 && !g.calm && w.rng.IntN(1024) < g.nest {
		g.amidst(&c)
	}
	r := g.call(&c, next)
	g.trace(&c, r)
	g.after(&c, r)
	return r
}

// codes are what faults are told by; those of dire lose the context.
var (
	codes = []cuapi.Result{cuapi.InvalidValue, cuapi.OutOfMemory, cuapi.InvalidHandle, cuapi.NotSupported, cuapi.LaunchOutOfResources, cuapi.Unknown}
	dire  = []cuapi.Result{cuapi.IllegalAddress, cuapi.LaunchFailed, cuapi.ECCUncorrectable}
)

// call makes the call, or injects a fault before or behind it.
func (g *driverGuard) call(c *cuapi.Call, next func() cuapi.Result) cuapi.Result {
	w := g.w
	if g.rate == 0 || g.calm || w.rng.IntN(65536) >= g.rate {
		return next()
	}
	g.injected++
	w.stats.faults++
	for _, r := range g.dev.runtimes {
		r.hurt = true
	}
	code := codes[w.rng.IntN(len(codes))]
	switch {
	case w.rng.IntN(16) < g.dire:
		code = dire[w.rng.IntN(len(dire))]
	case (c.ID == cuapi.IDEventQuery || c.ID == cuapi.IDStreamQuery) && w.chance(1, 2):
		code = cuapi.NotReady // a driver may tell late
	}
	w.log.add(entry{step: w.step, depth: g.depth + 1, what: "fault", name: c.Name(), a: int(code)})
	if w.chance(1, 2) {
		next()
	}
	return code
}

// trace adds a call to what must repeat. Addresses of the host do not.
func (g *driverGuard) trace(c *cuapi.Call, r cuapi.Result) {
	h := g.hash
	mix := func(v uint64) { h = (h ^ v) * 0x9E3779B97F4A7C15; h ^= h >> 29 }
	mix(uint64(c.ID)<<32 | uint64(uint32(r)))
	for _, a := range c.Args[:c.N] {
		if a < 1<<20 || a >= 1<<52 {
			mix(a)
		}
	}
	g.hash = h
}

// before checks what the library is about to do against what it was told.
func (g *driverGuard) before(c *cuapi.Call) {
	switch c.ID {
	case cuapi.IDEventQuery:
		e := g.event(c.Args[0])
		switch {
		case e.bad && e.late && g.depth == 0:
			e.late = false
		case e.bad && g.depth > 0 && g.fresh == c.Args[0]: // who was told has not come to note it
		case e.bad:
			g.note("an event is queried again that failed: " + hex(c.Args[0]))
		case e.at == 0:
			g.note("an event is queried that was never recorded: " + hex(c.Args[0]))
		}
	case cuapi.IDEventRecord:
		e := g.event(c.Args[0])
		switch {
		case e.bad:
			g.note("an event is recorded again that failed: " + hex(c.Args[0]))
		case e.at > 0 && e.at > e.stream.seen && !g.dev.sticky:
			g.note("an event is recorded again, and nobody saw it complete: " + hex(c.Args[0]))
		}
	case cuapi.IDMemFreeAsync:
		if g.freed[c.Args[0]] {
			g.note("memory is freed again after a free of it failed: " + hex(c.Args[0]))
		}
	}
	if g.dev.cause != nil && (streamArg[c.ID] > 0 && c.ID != cuapi.IDStreamQuery) && g.depth == 0 {
		g.note(c.Name() + " on a context that is known to be lost")
	}
}

// after takes in what the library was told.
func (g *driverGuard) after(c *cuapi.Call, r cuapi.Result) {
	if r.Sticky() && !g.dev.sticky {
		g.dev.sticky = true
		g.w.stats.losses++
		for _, rt := range g.dev.runtimes {
			rt.hurt = true
		}
	}
	if r != cuapi.Success {
		g.failed[g.depth][c.ID]++
	}
	if r != cuapi.Success && r != cuapi.NotReady && streamArg[c.ID] > 0 {
		g.w.lane(c.Args[streamArg[c.ID]-1]).hurt = true
	}
	switch c.ID {
	case cuapi.IDEventRecord:
		e := g.event(c.Args[0])
		l := g.w.lane(c.Args[1])
		l.records++
		e.stream, e.at, e.bad = &l.streamOf, l.records, r != cuapi.Success
	case cuapi.IDEventQuery:
		e := g.event(c.Args[0])
		switch {
		case e.stream == nil:
		case r == cuapi.Success:
			e.stream.seen = max(e.stream.seen, e.at)
			e.bad = false
		case r != cuapi.NotReady && e.at > e.stream.seen: // unless another look was faster, and saw it complete
			e.bad, e.late = true, g.depth > 0
			if g.depth == 0 {
				g.fresh = c.Args[0]
			}
		}
	case cuapi.IDMemFreeAsync:
		if r != cuapi.Success {
			g.freed[c.Args[0]] = true
		}
	}
}

func (g *driverGuard) event(h uint64) *eventOf {
	e := g.events[h]
	if e == nil {
		e = &eventOf{}
		g.events[h] = e
	}
	return e
}

// amidst has another actor act on another goroutine, which this call waits for.
// If the action does not return, the library holds a lock over this call.
func (g *driverGuard) amidst(c *cuapi.Call) {
	w := g.w
	if at := streamArg[c.ID]; at > 0 {
		g.within = c.Args[at-1]
	} else if c.ID == cuapi.IDThreadExchangeStreamCaptureMode {
		g.within = anyStream // the first of a list, which may be an enqueue
	}
	dev, stream := g.dev, g.stream
	g.depth++
	w.stats.nested++
	if g.worker == nil {
		g.worker, g.done = make(chan func()), make(chan any)
		g.timer = time.NewTimer(*hangFlag)
		go func(work chan func(), done chan any) {
			for f := range work {
				func() {
					defer func() { done <- recover() }()
					f()
				}()
			}
		}(g.worker, g.done)
	}
	g.timer.Reset(*hangFlag / 2)
	g.worker <- w.nested
	select {
	case p := <-g.done:
		if p != nil {
			panic(p)
		}
	case <-g.timer.C:
		g.note(fmt.Sprintf("an action in the midst of %s does not return: a lock is held over the call", c.Name()))
		panic(stop{})
	}
	g.depth--
	g.dev, g.stream, g.within = dev, stream, 0
}

// end lets the goroutine for actions in the midst go.
func (g *driverGuard) end() {
	if g.worker != nil {
		close(g.worker)
	}
}

func hex(v uint64) string { return fmt.Sprintf("%#x", v) }
