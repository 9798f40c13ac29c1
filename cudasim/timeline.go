package cudasim

import (
	"slices"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Virtual time. Each stream has a timeline: an operation starts when it has been
// enqueued, the one before it has ended, the events it waits for have, and the
// copy engine it needs is free; it ends its cost later. That is known at the
// enqueue, unless something holds the stream: then it is when the operation's turn
// comes. The same model serves both modes. They differ in when the effect of an
// operation shows: at once, or when its step comes.

// A moment is virtual time, in nanoseconds since New.
type moment int64

// An Operation is what Config.Cost is asked about.
type Operation struct {
	Call             string // C name of the call that enqueued it
	Bytes            uint64 // of a copy or fill
	FromHost, ToHost bool   // a copy from or to host memory
	Peer             bool   // a copy between devices
	Kernel           string // entry name, of a launch
	Grid, Block      [3]uint32
	Stream           uintptr
	Device           int
}

// DefaultCost is the cost of an operation where Config.Cost does not say
// otherwise. Copies between host and device run at 55 GB/s, as measured; each
// copy takes 1.5 µs besides, since 16 threads made 569,000 small ones a second
// (docs/driver-facts: "Costs"). Fills run at 2.4 TB/s: with one of 64 MiB a cycle
// took 28 µs longer. Not measured, and rough: 1.2 TB/s for copies inside a
// device, 5 µs for a kernel, 1 µs for everything else but waits.
func DefaultCost(o Operation) time.Duration {
	kind := costOther
	switch {
	case o.Kernel != "":
		kind = costKernel
	case o.Call == cuapi.Entries[cuapi.IDStreamWaitEvent].Symbol(), o.Call == cuapi.Entries[cuapi.IDStreamWaitValue32].Symbol():
		kind = costWait
	case o.Call == cuapi.Entries[cuapi.IDMemsetD8Async].Symbol():
		kind = costFill
	case o.FromHost != o.ToHost, o.Peer:
		kind = costLink
	case o.Bytes > 0:
		kind = costInside
	}
	return time.Duration(kind.of(o.Bytes))
}

// A costKind is a kind of operation, by what it costs.
type costKind uint8

const (
	costOther  costKind = iota
	costWait            // for an event or a word
	costKernel          // a launch
	costFill            // of memory
	costLink            // a copy to or from a device, or between two
	costInside          // a copy inside one
)

func (k costKind) of(bytes uint64) moment {
	switch k {
	case costWait:
		return 0
	case costKernel:
		return 5000
	case costFill:
		return 1000 + moment(bytes/2400)
	case costLink:
		return 1500 + moment(bytes/55)
	case costInside:
		return 1500 + moment(bytes/1200)
	}
	return 1000
}

// A span is what is known of an operation's time.
type span struct {
	kind             costKind
	bytes            uint64
	fromHost, toHost bool
	peer             bool
	kernel           *Launch
	engine           *engine
	after            *record // a wait: what for
	word             uint64  // a wait for a word, or a write of it: its address
	in               *block  // the word's

	asked moment // when the host asked for it
	end   moment // if timed
	timed bool
	late  bool // not timed when it was enqueued
}

// copySpan describes a copy: of those to the device one runs at a time on each
// device, and likewise of those to the host. A copy between devices occupies
// the engine of its source that copies away from the device.
func copySpan(dst, src place, n uintptr) span {
	sp := span{kind: costLink, bytes: uint64(n), fromHost: src.onHost(), toHost: dst.onHost()}
	switch {
	case sp.fromHost && !sp.toHost:
		sp.engine = &dst.b.ctx.dev.engines[0]
	case sp.toHost && !sp.fromHost:
		sp.engine = &src.b.ctx.dev.engines[1]
	case !sp.toHost && src.b.ctx.dev != dst.b.ctx.dev:
		sp.peer, sp.engine = true, &src.b.ctx.dev.engines[1]
	default:
		sp.kind = costInside
	}
	return sp
}

func (p place) onHost() bool { return p.b == nil || p.b.host != nil }

// plan gives an operation that is being enqueued its time, if it can be known.
func (s *Sim) plan(st *stream, o *op) {
	sp := &o.span
	sp.asked = s.now
	switch {
	case st.late > 0, o.holds, sp.after != nil && !sp.after.timed && !sp.after.done,
		len(s.active) > 0 && st.ctx.legacy != nil && st.flags&cuapi.StreamNonBlocking == 0:
		sp.late = true
		st.late++
	default:
		s.time(st, o)
	}
}

// time puts an operation on its stream's timeline, behind all that is there.
func (s *Sim) time(st *stream, o *op) {
	sp := &o.span
	start := max(sp.asked, st.end)
	if sp.after != nil {
		start = max(start, sp.after.at)
	}
	if o.holds && o.gate == nil {
		at, ok := sp.in.words[sp.word]
		if !ok { // the host wrote it, and that was seen now
			at = s.now
		}
		start = max(start, at)
	}
	blocking := st.flags&cuapi.StreamNonBlocking == 0
	mine, others := &st.ctx.ends[1], st.ctx.ends[0]
	if st.legacy {
		mine, others = &st.ctx.ends[0], st.ctx.ends[1]
	}
	if blocking {
		start = max(start, others)
	}
	cost := s.cost(st, o)
	if sp.engine != nil {
		start = sp.engine.fit(start, cost)
	}
	sp.end, sp.timed = start+cost, true
	st.end = sp.end
	if blocking {
		*mine = max(*mine, sp.end)
	}
	if o.rec != nil {
		o.rec.at, o.rec.timed = sp.end, true
	}
	if sp.late {
		st.late--
	}
}

func (s *Sim) cost(st *stream, o *op) moment {
	switch {
	case o.gate != nil:
		return 0
	case s.cfg.Cost == nil:
		return o.span.kind.of(o.span.bytes)
	}
	w := Operation{
		Call: cuapi.Entries[o.id].Symbol(), Bytes: o.span.bytes, FromHost: o.span.fromHost, ToHost: o.span.toHost, Peer: o.span.peer,
		Stream: uintptr(st.h), Device: int(st.ctx.dev.ordinal),
	}
	if l := o.span.kernel; l != nil {
		w.Kernel, w.Grid, w.Block = l.name, l.Grid, l.Block
	}
	return max(0, moment(s.cfg.Cost(w)))
}

// finish notes that an operation ends. In stepped mode the host's time moves on
// with it: one that is stepped out of its turn took until now.
func (s *Sim) finish(st *stream, o *op) {
	sp := &o.span
	if !sp.timed {
		s.time(st, o)
	}
	if s.cfg.Stepped {
		sp.end = max(sp.end, s.now)
		s.now = sp.end
		st.end = max(st.end, sp.end)
		if o.rec != nil {
			o.rec.at = sp.end
		}
	}
	if sp.in != nil && !o.holds {
		if sp.in.words == nil {
			sp.in.words = map[uint64]moment{}
		}
		sp.in.words[sp.word] = sp.end
	}
	st.ended = max(st.ended, sp.end)
	st.ctx.ended = max(st.ctx.ended, sp.end)
	s.ended = max(s.ended, sp.end)
}

// sawAt moves the host's time to a moment at which something was complete that
// the host sees complete.
func (s *Sim) sawAt(at moment) { s.now = max(s.now, at) }

// An engine copies one range at a time. It keeps when it is busy, in order; what
// is too long ago is forgotten, and taken for busy.
type engine struct {
	busy  []period
	floor moment
}

type period struct{ from, to moment }

const maxPeriods = 64

// fit takes the first time of that length, from a moment on, in which the engine
// is free, and returns when it begins.
func (e *engine) fit(from, length moment) moment {
	from = max(from, e.floor)
	i := len(e.busy)
	for i > 0 && e.busy[i-1].to > from {
		i--
	}
	for ; i < len(e.busy) && e.busy[i].from < from+length; i++ {
		from = max(from, e.busy[i].to)
	}
	switch {
	case i > 0 && e.busy[i-1].to == from:
		e.busy[i-1].to = from + length
	case i == len(e.busy):
		e.busy = append(e.busy, period{from, from + length})
	default:
		e.busy = slices.Insert(e.busy, i, period{from, from + length})
	}
	if len(e.busy) == 2*maxPeriods {
		e.floor = e.busy[maxPeriods-1].to
		e.busy = append(e.busy[:0], e.busy[maxPeriods:]...)
	}
	return from
}
