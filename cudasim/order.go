package cudasim

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// What is ordered behind what, apart from when the simulator happens to run
// it. Operations of one stream are in order; a stream's wait for an event puts
// it behind what the event's stream had before the record; and what the host
// has seen complete is before all that it enqueues from then on. Two
// operations without such a chain are unordered, whatever the timing. Where
// the chain goes through memory (a stream or the host that reads a flag), the
// simulator assumes the order, so it reports no ordered program.

// A tick is one operation, by its stream and number.
type tick struct {
	st  *stream
	seq uint64
	id  cuapi.ID

	where *stack // of its enqueue, if Config.Stacks
}

// seen tells whether the host knows that the operation is complete.
func (t tick) seen() bool { return t.seq <= t.st.seen }

// A clock is a set of operations: for each stream, one and all before it.
// Clocks are not modified, so records share them.
type clock []tick

// with returns the clock that covers more besides, without what the host has
// seen, since that is covered anyway.
func (c clock) with(more ...tick) clock {
	out := make(clock, 0, len(c)+len(more))
	for _, t := range c { // each of another stream: a clock may be long
		if !t.seen() {
			out = append(out, t)
		}
	}
	for _, t := range more {
		if !t.seen() {
			out = out.add(t)
		}
	}
	return out
}

// add covers one operation more, in place.
func (c clock) add(t tick) clock {
	for i := range c {
		if c[i].st == t.st {
			if t.seq > c[i].seq {
				c[i] = t
			}
			return c
		}
	}
	return append(c, t)
}

// behind tells whether what is enqueued into the stream now is ordered behind
// an operation. A nil stream is the host itself.
func (st *stream) behind(t tick) bool {
	if t.seen() || st != nil && (st == t.st || st.blind) {
		return true
	}
	if st != nil {
		for _, k := range st.before {
			if k.st == t.st {
				return k.seq >= t.seq
			}
		}
	}
	return false
}

// now is the clock of all that the stream was given so far.
func (st *stream) now() (clock, tick) { return st.before, tick{st: st, seq: st.newest} }

// follow orders the stream behind a point of another.
func (st *stream) follow(c clock, t tick) { st.before = st.before.with(c...).with(t) }

// saw notes that the host knows a point of a stream to be complete.
func (s *Sim) saw(c clock, t tick) {
	for _, k := range c {
		k.st.seen = max(k.st.seen, k.seq)
	}
	t.st.seen = max(t.st.seen, t.seq)
}

// sawBlind notes that the host knows a point of a stream complete that may have
// waited for anything, by way of memory or the host: all that ran may be known.
func (s *Sim) sawBlind(blind bool) {
	if !blind {
		return
	}
	for _, st := range s.streams {
		if st.pending() == 0 {
			st.seen = st.newest
		} else {
			st.seen = max(st.seen, st.first().seq-1)
		}
		for _, t := range st.ctx.departed {
			if t.st.pending() == 0 {
				t.st.seen = t.st.newest
			}
		}
	}
}

func (s *Sim) sawStream(st *stream) {
	s.saw(st.now())
	s.sawBlind(st.blind)
}

func (s *Sim) sawRecord(r *record) {
	s.saw(r.before, r.tick)
	s.sawBlind(r.blind)
	s.sawAt(r.at)
}

// followLegacy orders a blocking stream and the legacy stream of its context.
func (s *Sim) followLegacy(st *stream) {
	switch {
	case st.flags&cuapi.StreamNonBlocking != 0:
	case !st.legacy:
		if l := st.ctx.legacy; l != nil {
			st.follow(l.now())
			st.blind = st.blind || l.blind
		}
	default:
		st.before = st.before.with(st.ctx.departed...)
		for _, o := range s.streams {
			if o != st && o.ctx == st.ctx && o.flags&cuapi.StreamNonBlocking == 0 {
				st.follow(o.now())
				st.blind = st.blind || o.blind
			}
		}
	}
}

// use notes that an operation uses a block, and reports it when it is not
// ordered behind the block's allocation.
func (s *Sim) use(b *block, t tick) {
	if b.born.st != nil && !t.st.behind(b.born) {
		s.violate(UseBeforeAlloc, fmt.Sprintf("%v is used in a stream that is not ordered behind its allocation", b), &b.made)
	}
	if len(b.last) > 4 {
		b.last = b.last.with()
	}
	b.last = b.last.add(t)
}

// suspectFree reports the free of a block that is not ordered behind its
// uses, by a stream or (nil) by the host.
func (s *Sim) suspectFree(b *block, by *stream) {
	if b.ctx.fault != cuapi.Success {
		return
	}
	for _, t := range b.last {
		if !by.behind(t) {
			text := fmt.Sprintf("%v is freed, and a %s in stream %#x uses it that is not known to be complete", b, cuapi.Entries[t.id].Symbol(), t.st.h)
			s.violate(FreeInFlight, text, t.stack())
			return
		}
	}
}

// suspectCall does so for a call of the host, before it blocks as the real
// one would: that it blocks is no contract.
func (s *Sim) suspectCall(c *cuapi.Call) {
	if c.ID == cuapi.IDModuleUnload {
		if m := s.modules[cuapi.Module(c.Args[0])]; m != nil {
			s.suspectFree(m.code, nil)
		}
		return
	}
	if b := s.mem.at(c.Args[0]); b != nil && !b.freed {
		s.suspectFree(b, nil)
	}
}

// stack returns where the operation was enqueued, if that was kept.
func (t tick) stack() *stack {
	if t.where != nil {
		return t.where
	}
	for i := t.st.head; i < len(t.st.q); i++ {
		if o := &t.st.q[i]; o.seq == t.seq {
			return &o.stack
		}
	}
	return nil
}

// An extent is a range of a block that a copy or a fill certainly reads or writes.
type extent struct {
	b        *block // nil: none, or memory that is not pinned
	from, to uint64
}

func (p place) extent(n uintptr) extent {
	return extent{b: p.b, from: p.addr, to: p.addr + uint64(n)}
}

func (e extent) bytes() []byte { return e.b.at(e.from, uintptr(e.to-e.from)) }

// A touch is what an operation does to an extent of its block.
type touch struct {
	from, to uint64
	write    bool
	source   uint64 // of a write that is a copy: where it reads
	by       tick
}

// races tells whether it matters in which order two operations run. Two writes of
// device memory show when something reads it, which races with one of them then.
// Of host memory nothing tells when it is read: there two copies into the same
// bytes race, unless they come from the same place.
func (t touch) races(o touch, host bool) bool {
	switch {
	case t.from >= o.to || o.from >= t.to:
		return false
	case t.write && o.write:
		return host && t.source != 0 && o.source != 0 && t.source-t.from != o.source-o.from
	}
	return t.write || o.write
}

// maxTouches bounds what is remembered of a block. What is forgotten is no
// longer reported.
const maxTouches = 16

// touch reports an operation that races with another that it is not ordered
// behind. Kernels do not count:
// what they touch of the memory they were given is unknown. Nor do streams that
// waited for a word or a host function, since their order is.
func (s *Sim) touch(e extent, write bool, source uint64, by tick) {
	if e.b == nil || by.st.blind {
		return
	}
	t := touch{e.from, e.to, write, source, by}
	kept := e.b.touches[:0]
	for _, o := range e.b.touches {
		if o.by.seen() {
			continue
		}
		if t.races(o, e.b.host != nil) && o.by.seq != by.seq && !by.st.behind(o.by) {
			s.violate(Race, fmt.Sprintf("%v: bytes %d to %d are %s, and %s by a %s in stream %#x that nothing orders with it",
				e.b, t.from-e.b.base, t.to-e.b.base, t.mode(), o.mode(), cuapi.Entries[o.by.id].Symbol(), o.by.st.h), o.by.stack())
		}
		// What is ordered behind this one is behind what it covers in its stream.
		if o.by.st != by.st || o.write && !t.write || o.from < t.from || o.to > t.to {
			kept = append(kept, o)
		}
	}
	if len(kept) == maxTouches {
		kept = append(kept[:0], kept[1:]...)
	}
	e.b.touches = append(kept, t)
}

func (t touch) mode() string {
	if t.write {
		return "written"
	}
	return "read"
}
