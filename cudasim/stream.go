package cudasim

import (
	"fmt"
	"slices"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A stream is a queue of operations that run in order. Legacy streams stand
// for the handles 0, 1 and 2: one for each context.
type stream struct {
	h        cuapi.Stream
	ctx      *context
	index    int // order of creation on its device
	id       uint64
	flags    uint32
	priority int32
	legacy   bool

	before clock  // of other streams, what is before all that is enqueued now
	newest uint64 // number of the newest operation
	seen   uint64 // number of the newest operation that the host knows complete
	blind  bool   // waited on a memory value or a host function, or for one that did: order unknown

	lastLine *copyQueue // that its newest operation took
	copied   [2]bool    // down, up

	end   moment // of the newest operation whose time is known
	ended moment // of the newest operation that ran
	late  int    // operations pending whose time is not known

	q       []op
	head    int
	busy    bool // its first operation runs with the lock released
	capture *capture
	made    stack
}

// An op is one operation of a stream. It runs when it is the first of its
// stream and ready.
type op struct {
	seq     uint64
	id      cuapi.ID
	ready   func() bool         // nil: always
	run     func() cuapi.Result // nil: nothing but a copy; other than Success: the context is lost
	uses    []*block
	fills   queueKind // of the device that it fills
	holds   bool      // occupies a hardware queue while it is not ready
	callout bool      // runs with the lock released
	shows   bool      // the host may learn of it by other means than a driver call
	hints   bool      // the host may learn by it of what is before it: a kernel that can write pinned memory
	before  clock     // for those that show
	rec     *record
	line    *copyQueue
	gate    *bool // of Hold; other operations that hold wait on a memory value
	span    span
	reads   extent // of copies and fills, as writes
	writes  extent
	watch   watch
	stack   stack // of one that is pending
}

func (st *stream) pending() int { return len(st.q) - st.head }

func (st *stream) first() *op { return &st.q[st.head] }

func (st *stream) pop() {
	o := st.first()
	if q := st.queue(o.fills); q != nil {
		*q--
	}
	for _, b := range o.uses {
		b.pending--
	}
	o.line.leave(o)
	*o = op{}
	st.head++
	switch {
	case st.head == len(st.q):
		st.q, st.head = st.q[:0], 0
	case st.head >= 1024 && st.head*2 >= len(st.q):
		n := copy(st.q, st.q[st.head:])
		clear(st.q[n:])
		st.q, st.head = st.q[:n], 0
	}
}

// stream returns the living stream of a handle.
func (s *Sim) stream(h cuapi.Stream) (*stream, cuapi.Result) {
	if h <= 2 {
		return s.legacyStream()
	}
	st, ok := find(s, s.streams, h, "stream")
	if !ok {
		return nil, cuapi.InvalidHandle
	}
	return st, st.ctx.usable()
}

// legacyStream returns the default stream of the current context. The handles
// 0, 1 and 2 all mean it; per-thread default streams are not simulated.
func (s *Sim) legacyStream() (*stream, cuapi.Result) {
	ctx, r := s.current()
	if r != cuapi.Success {
		return nil, r
	}
	if ctx.legacy == nil {
		ctx.legacy = s.newStream(ctx, 0, 0)
		ctx.legacy.legacy = true
	}
	return ctx.legacy, cuapi.Success
}

// target returns the stream of an operation. A capture that was spoilt takes
// none (901), and neither does the legacy stream beside a capture in a stream
// that it waits for (906), which spoils it.
func (s *Sim) target(h cuapi.Stream) (*stream, cuapi.Result) {
	st, r := s.stream(h)
	switch {
	case r != cuapi.Success:
		return nil, r
	case st.capture != nil && st.capture.invalid:
		return nil, cuapi.StreamCaptureInvalidated
	case st.legacy:
		return st, s.implicit(st)
	}
	return st, cuapi.Success
}

// implicit answers a use of the legacy stream, which all blocking streams of its
// context wait for, and it for them: it spoils their captures.
func (s *Sim) implicit(legacy *stream) cuapi.Result {
	r := cuapi.Success
	for _, c := range s.captures {
		if c.blocks(legacy.ctx) {
			c.invalid, r = true, cuapi.StreamCaptureImplicit
		}
	}
	return r
}

// blocks tells whether a blocking stream of the context takes part in a capture.
func (c *capture) blocks(ctx *context) bool {
	return slices.ContainsFunc(c.streams, func(st *stream) bool { return st.ctx == ctx && st.flags&cuapi.StreamNonBlocking == 0 })
}

// room returns the stream when its hardware queue takes one more operation of
// that kind, and blocks until it does (docs/driver-facts: "A full stream
// blocks").
func (s *Sim) room(h cuapi.Stream, kind queueKind) (*stream, cuapi.Result) {
	st, r := s.target(h)
	if r != cuapi.Success {
		return st, r
	}
	q := st.queue(kind)
	if *q < queueDepth {
		return st, r
	}
	if r := s.wait(&s.full, func() bool { return *q < queueDepth }); r != cuapi.Success {
		return nil, r
	}
	return s.target(h)
}

// enqueue puts an operation into a stream, where it runs at once if nothing
// holds it.
func (s *Sim) enqueue(st *stream, o *op) cuapi.Result {
	if st.ctx.fault != cuapi.Success {
		return cuapi.Success // dropped: the fault is not reported yet (docs/driver-facts: a kernel that stores to address 16)
	}
	if st.capture != nil {
		st.capture.take(st, o)
		return cuapi.Success
	}
	s.seq++
	o.seq, o.id = s.seq, s.cur.id
	s.followLegacy(st)
	st.newest = o.seq
	now := tick{st: st, seq: o.seq, id: o.id}
	if s.cfg.Stacks {
		o.stack = s.enqueuers()
		where := o.stack
		now.where = &where
	}
	for _, b := range o.uses {
		s.use(b, now)
	}
	s.touch(o.reads, false, 0, now)
	s.touch(o.writes, true, o.reads.from, now)
	if o.shows || o.hints {
		o.before = st.before
	}
	if o.rec != nil {
		o.rec.before, o.rec.tick = st.now()
		o.rec.blind = st.blind
	}
	s.plan(st, o)
	o.line = st.line(o)
	if len(s.active) == 0 && !s.cfg.Stepped && !o.callout && (o.ready == nil || o.ready()) {
		s.perform(st, o)
		return cuapi.Success
	}
	if o.stack == nil {
		o.stack = s.enqueuers()
	}
	s.startWatch(st, o)
	for _, b := range o.uses {
		b.pending++
	}
	if q := st.queue(o.fills); q != nil {
		*q++
	}
	if o.line != nil {
		*o.line = append(*o.line, o.seq)
	}
	if st.pending() == 0 {
		s.active = append(s.active, st)
	}
	st.q = append(st.q, *o)
	s.drain()
	return cuapi.Success
}

// perform runs one operation and takes the context's loss from it.
func (s *Sim) perform(st *stream, o *op) {
	s.finish(st, o)
	if o.rec != nil {
		o.rec.done = true
	}
	for _, b := range o.uses {
		if b.host != nil && o.mayWrite(b) {
			b.stirred++
		}
	}
	if o.hints {
		s.saw(o.before, tick{st: st, seq: o.seq - 1})
	}
	if o.shows {
		s.saw(o.before, tick{st: st, seq: o.seq})
	}
	if o.run == nil {
		if o.reads.b != nil {
			copy(o.writes.bytes(), o.reads.bytes())
		}
		return
	}
	if code := o.run(); code != cuapi.Success {
		s.lose(st.ctx, code)
	}
}

// drain runs every operation that is ready, in the order of the streams'
// becoming active, until none is. In stepped mode it leaves them to Step.
func (s *Sim) drain() {
	if s.cfg.Stepped {
		return
	}
	ran := false
	for again := true; again && len(s.active) > 0; {
		again = false
		for _, st := range slices.Clone(s.active) {
			for st.pending() > 0 && s.runnable(st) {
				s.step(st)
				again, ran = true, true
			}
		}
	}
	if ran {
		s.moved.Broadcast()
	}
}

// step runs the first operation of a stream. A host function leaves the lock,
// so the stream is marked busy meanwhile.
func (s *Sim) step(st *stream) {
	o := *st.first()
	cur := s.cur
	s.cur = frame{id: o.id, crossing: cur.crossing, asked: o.stack}
	s.endWatch(&o)
	st.busy = true
	ended := false
	defer func() {
		if !ended { // a function of the user ended its goroutine, as t.FailNow does, or Cost panicked
			s.stepped(st, cur)
			s.unfinished()
		}
	}()
	s.perform(st, &o)
	ended = true
	s.stepped(st, cur)
}

// stepped ends a step.
func (s *Sim) stepped(st *stream, cur frame) {
	st.busy = false
	s.cur = cur
	if st.pending() == 0 {
		return // the context was lost, and its queues emptied
	}
	st.pop()
	if st.pending() == 0 {
		s.idle(st)
	}
}

// unfinished has another goroutine run what the one that is about to end leaves.
func (s *Sim) unfinished() {
	s.moved.Broadcast()
	go func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.drain()
	}()
}

func (s *Sim) idle(st *stream) {
	s.active = slices.DeleteFunc(s.active, func(a *stream) bool { return a == st })
}

// runnable tells whether the first operation of a stream may run now.
func (s *Sim) runnable(st *stream) bool {
	o := st.first()
	return !st.busy && (o.ready == nil || o.ready()) && o.line.first(o) && !s.behindLegacy(st, o) && s.hasQueue(st)
}

// behindLegacy: the legacy stream waits for what came before it in the
// blocking streams of its context, and they wait for it (documented).
func (s *Sim) behindLegacy(st *stream, o *op) bool {
	if st.flags&cuapi.StreamNonBlocking != 0 {
		return false
	}
	for _, a := range s.active {
		if a != st && a.ctx == st.ctx && (a.legacy || st.legacy) &&
			a.flags&cuapi.StreamNonBlocking == 0 && a.first().seq < o.seq {
			return true
		}
	}
	return false
}

// drop empties the queues of a context that is lost or destroyed, and ends the
// captures of its streams: nobody can end them any more, and beside them calls are
// forbidden in other contexts too.
func (s *Sim) drop(ctx *context) {
	for _, st := range s.streams {
		if st.ctx == ctx && st.capture != nil {
			s.endCapture(st)
		}
	}
	for _, st := range slices.Clone(s.active) {
		if st.ctx == ctx {
			for st.pending() > 0 {
				o := st.first()
				if o.holds && o.gate == nil {
					s.flags--
				}
				st.pop()
			}
			st.late = 0
			s.idle(st)
		}
	}
	s.moved.Broadcast()
}

// pollFlags starts looking at the memory that streams wait on, since a write
// of the host is no driver call. It stops when nobody is blocked.
func (s *Sim) pollFlags() {
	if s.flags == 0 || s.polling || s.cfg.Stepped {
		return
	}
	s.polling = true
	go func() {
		for {
			time.Sleep(50 * time.Microsecond)
			s.mu.Lock()
			s.drain()
			if s.flags == 0 || s.closed || s.waiting.Load() == 0 {
				s.polling = false
				s.mu.Unlock()
				return
			}
			s.mu.Unlock()
		}
	}()
}

func (s *Sim) newStream(ctx *context, flags uint32, priority int32) *stream {
	st := &stream{h: cuapi.Stream(s.newID()), ctx: ctx, index: ctx.dev.streams, flags: flags, priority: priority, made: callers()}
	st.id = uint64(st.h)
	ctx.dev.streams++
	s.streams[st.h] = st
	return st
}

func (s *Sim) streamCreate(p *cuapi.Stream, flags uint32) cuapi.Result {
	return s.streamCreateWithPriority(p, flags, 0)
}

func (s *Sim) streamCreateWithPriority(p *cuapi.Stream, flags uint32, priority int32) cuapi.Result {
	if flags&^cuapi.StreamNonBlocking != 0 {
		return cuapi.InvalidValue // before it looks at the context (measured)
	}
	ctx, r := s.current()
	if r != cuapi.Success {
		return r
	}
	*p = s.newStream(ctx, flags, max(-5, min(0, priority))).h
	return cuapi.Success
}

// streamDestroy returns at once: what is pending completes, the handle is
// dead (documented).
func (s *Sim) streamDestroy(h cuapi.Stream) cuapi.Result {
	if h <= 2 {
		return cuapi.InvalidHandle
	}
	st, r := s.stream(h)
	if r != cuapi.Success {
		return r
	}
	if st.capture != nil {
		s.endCapture(st)
	}
	before, newest := st.now()
	st.ctx.departed = st.ctx.departed.with(before...).with(newest)
	delete(s.streams, h)
	s.gone.add(uintptr(h))
	return cuapi.Success
}

func (s *Sim) streamQuery(h cuapi.Stream) cuapi.Result {
	st, r := s.stream(h)
	if r == cuapi.Success {
		r = s.notCapturing(st)
	}
	switch {
	case r != cuapi.Success:
		return r
	case st.pending() > 0:
		return cuapi.NotReady
	}
	s.sawStream(st)
	s.sawAt(st.ended)
	return cuapi.Success
}

func (s *Sim) streamSynchronize(h cuapi.Stream) cuapi.Result {
	st, r := s.stream(h)
	if r == cuapi.Success {
		r = s.notCapturing(st)
	}
	if r != cuapi.Success {
		return r
	}
	before, last := st.now()
	if r := s.wait(nil, func() bool { return st.pending() == 0 || st.first().seq > last.seq }); r != cuapi.Success {
		return r
	}
	s.observeFaults()
	if r := st.ctx.usable(); r != cuapi.Success {
		return r
	}
	s.saw(before, last)
	s.sawBlind(st.blind)
	s.sawAt(st.ended)
	return cuapi.Success
}

func (s *Sim) ctxSynchronize() cuapi.Result {
	ctx, last, all, blind := s.cur.ctx, s.seq, s.cur.ctx.departed, false
	for _, st := range s.streams {
		if st.ctx == ctx {
			blind = blind || st.blind
			before, newest := st.now()
			all = all.with(before...).with(newest)
		}
	}
	r := s.wait(nil, func() bool {
		return !slices.ContainsFunc(s.active, func(st *stream) bool { return st.ctx == ctx && st.first().seq <= last })
	})
	if r != cuapi.Success {
		return r
	}
	s.observeFaults()
	if r := ctx.usable(); r != cuapi.Success {
		return r
	}
	for _, t := range all {
		s.saw(nil, t)
	}
	s.sawBlind(blind)
	s.sawAt(ctx.ended)
	return cuapi.Success
}

func (s *Sim) streamGetCtx(h cuapi.Stream, p *cuapi.Context) cuapi.Result {
	st, r := s.stream(h)
	if r == cuapi.Success && st.capture != nil && st.capture.invalid {
		r = cuapi.StreamCaptureInvalidated
	}
	if r == cuapi.Success {
		*p = st.ctx.h
	}
	return r
}

// described returns a stream that tells of itself. One that captures tells its
// context and priority alone, unless the capture is spoilt, which a question for
// more does (measured).
func (s *Sim) described(h cuapi.Stream, more bool) (*stream, cuapi.Result) {
	st, r := s.stream(h)
	switch {
	case r == cuapi.Success && st.legacy:
		r = s.implicit(st)
	case r != cuapi.Success || st.capture == nil:
	case more:
		st.capture.invalid = true
		r = cuapi.StreamCaptureUnsupported
	case st.capture.invalid:
		r = cuapi.StreamCaptureInvalidated
	}
	return st, r
}

func (s *Sim) streamGetFlags(h cuapi.Stream, p *uint32) cuapi.Result {
	st, r := s.described(h, true)
	if r == cuapi.Success {
		*p = st.flags
	}
	return r
}

func (s *Sim) streamGetPriority(h cuapi.Stream, p *int32) cuapi.Result {
	st, r := s.described(h, false)
	if r == cuapi.Success {
		*p = st.priority
	}
	return r
}

func (s *Sim) streamGetID(h cuapi.Stream, p *uint64) cuapi.Result {
	st, r := s.described(h, true)
	if r == cuapi.Success {
		*p = st.id
	}
	return r
}

func (st *stream) String() string { return fmt.Sprintf("stream %#x", st.h) }
