package cudasim

import (
	"fmt"
	"slices"

	"github.com/purecuda/purecuda/internal/cuapi"
)

type event struct {
	h     cuapi.Event
	ctx   *context
	flags uint32
	last  *record // nil: never recorded
	made  stack
}

// A record is one recording of an event. A stream's wait keeps the record
// that it saw, whatever becomes of the event.
type record struct {
	ctx     *context
	done    bool
	timed   bool
	at      moment   // virtual time of completion, if timed
	capture *capture // recorded in a capturing stream
	before  clock    // with tick: what is ordered before it
	tick    tick
	blind   bool // of a blind stream
}

func (r *record) ready() bool {
	// A wait on a record of a context that is lost does not hang its stream.
	// Unverified on hardware.
	return r.done || r.ctx.fault != cuapi.Success
}

func (s *Sim) event(h cuapi.Event) (*event, cuapi.Result) {
	e, ok := find(s, s.events, h, "event")
	if !ok {
		return nil, cuapi.InvalidHandle
	}
	return e, e.ctx.usable()
}

func (s *Sim) eventCreate(p *cuapi.Event, flags uint32) cuapi.Result {
	if flags&^7 != 0 {
		return cuapi.InvalidValue
	}
	e := &event{h: cuapi.Event(s.newID()), ctx: s.cur.ctx, flags: flags, made: callers()}
	s.events[e.h] = e
	*p = e.h
	return cuapi.Success
}

func (s *Sim) eventDestroy(h cuapi.Event) cuapi.Result {
	_, r := s.event(h)
	if r == cuapi.Success {
		delete(s.events, h)
		s.gone.add(uintptr(h))
	}
	return r
}

func (s *Sim) eventRecord(h cuapi.Event, hs cuapi.Stream) cuapi.Result {
	e, r := s.event(h)
	if r != cuapi.Success {
		return r
	}
	st, r := s.stream(hs)
	if r != cuapi.Success {
		return r
	}
	if e.ctx != st.ctx {
		s.violate(WrongContext, fmt.Sprintf("event %#x of device %d is recorded in a stream of device %d", h, e.ctx.dev.ordinal, st.ctx.dev.ordinal), &e.made)
		return cuapi.InvalidHandle
	}
	rec := &record{ctx: st.ctx, capture: st.capture, tick: tick{st: st}}
	e.last = rec
	return s.enqueue(st, &op{rec: rec})
}

// eventQuery answers 0 for an event that was never recorded (docs/driver-facts:
// "Results and edge cases").
func (s *Sim) eventQuery(h cuapi.Event) cuapi.Result {
	e, r := s.event(h)
	switch {
	case r != cuapi.Success:
		return r
	case e.last == nil:
		return cuapi.Success
	case e.last.capture != nil:
		return s.capturedEvent(e)
	case !e.last.done:
		return cuapi.NotReady
	}
	s.sawRecord(e.last)
	return cuapi.Success
}

func (s *Sim) eventSynchronize(h cuapi.Event) cuapi.Result {
	e, r := s.event(h)
	switch {
	case r != cuapi.Success:
		return r
	case e.last == nil:
		return cuapi.Success
	case e.last.capture != nil:
		return s.capturedEvent(e)
	}
	rec := e.last
	if r := s.wait(nil, rec.ready); r != cuapi.Success {
		return r
	}
	s.observeFaults()
	if r := e.ctx.usable(); r != cuapi.Success {
		return r
	}
	s.sawRecord(rec)
	return cuapi.Success
}

func (s *Sim) eventElapsedTime(p *float32, from, to cuapi.Event) cuapi.Result {
	a, r := s.event(from)
	if r != cuapi.Success {
		return r
	}
	b, r := s.event(to)
	switch {
	case r != cuapi.Success:
		return r
	case a.ctx != b.ctx, a.last == nil, b.last == nil, (a.flags|b.flags)&cuapi.EventDisableTiming != 0:
		return cuapi.InvalidHandle
	case !a.last.done || !b.last.done:
		return cuapi.NotReady
	}
	s.sawRecord(a.last)
	s.sawRecord(b.last)
	*p = float32(float64(b.last.at-a.last.at) / 1e6)
	return cuapi.Success
}

func (s *Sim) streamWaitEvent(hs cuapi.Stream, h cuapi.Event, flags uint32) cuapi.Result {
	st, r := s.stream(hs)
	if r != cuapi.Success {
		return r
	}
	e, r := s.event(h)
	if r != cuapi.Success {
		return r
	}
	rec := e.last
	switch {
	case rec == nil:
		return cuapi.Success // waiting on it does nothing (documented)
	case rec.capture != nil && rec.capture == st.capture:
		return cuapi.Success
	case rec.capture != nil && st.capture == nil && !rec.capture.ended:
		st.capture = rec.capture // the stream joins the capture (documented)
		rec.capture.streams = append(rec.capture.streams, st)
		return cuapi.Success
	case rec.capture != nil:
		return s.capturedEvent(e)
	case st.capture != nil:
		st.capture.invalid = true
		return cuapi.StreamCaptureIsolation
	}
	if st.ctx.fault == cuapi.Success {
		st.follow(rec.before, rec.tick)
		st.blind = st.blind || rec.blind
	}
	return s.enqueue(st, &op{ready: rec.ready, span: span{kind: costWait, after: rec}})
}

// A capture collects what its streams would do into a graph. The graph keeps
// only the number of its nodes.
type capture struct {
	origin  *stream
	streams []*stream
	mode    int32
	thread  int
	nodes   int
	invalid bool
	ended   bool
}

type graph struct {
	h     cuapi.Graph
	ctx   *context
	nodes int
	made  stack
}

// capturedEvent answers a query of an event that was recorded in a capture.
func (s *Sim) capturedEvent(e *event) cuapi.Result {
	s.violate(Captured, fmt.Sprintf("event %#x was recorded in a capture", e.h), &e.made)
	e.last.capture.invalid = true
	return cuapi.CapturedEvent
}

func (s *Sim) notCapturing(st *stream) cuapi.Result {
	if st.capture == nil {
		return cuapi.Success
	}
	s.violate(Captured, fmt.Sprintf("%v is queried or synchronized while it captures", st), nil)
	st.capture.invalid = true
	return cuapi.StreamCaptureUnsupported
}

// invalidateCaptures answers a call that a capture in global mode forbids to
// threads that did not exchange their mode for the relaxed one (documented at
// cuThreadExchangeStreamCaptureMode).
func (s *Sim) invalidateCaptures() cuapi.Result {
	if s.thread().mode == cuapi.CaptureModeRelaxed {
		return cuapi.Success
	}
	for _, st := range s.streams {
		if st.capture != nil && st.capture.mode == cuapi.CaptureModeGlobal {
			st.capture.invalid = true
		}
	}
	return cuapi.StreamCaptureUnsupported
}

func (s *Sim) streamIsCapturing(h cuapi.Stream, p *int32) cuapi.Result {
	st, r := s.stream(h)
	if r != cuapi.Success {
		return r
	}
	switch {
	case st.capture == nil:
		*p = cuapi.CaptureStatusNone
	case st.capture.invalid:
		*p = cuapi.CaptureStatusInvalidated
	default:
		*p = cuapi.CaptureStatusActive
	}
	return cuapi.Success
}

func (s *Sim) streamBeginCapture(h cuapi.Stream, mode int32) cuapi.Result {
	st, r := s.stream(h)
	switch {
	case r != cuapi.Success:
		return r
	case mode < cuapi.CaptureModeGlobal || mode > cuapi.CaptureModeRelaxed:
		return cuapi.InvalidValue
	case st.legacy:
		return cuapi.StreamCaptureUnsupported
	case st.capture != nil:
		return cuapi.IllegalState
	}
	st.capture = &capture{origin: st, streams: []*stream{st}, mode: mode, thread: threadID()}
	if mode == cuapi.CaptureModeGlobal {
		s.global++
	}
	return cuapi.Success
}

func (s *Sim) endCapture(st *stream) *capture {
	c := st.capture
	for _, member := range c.streams {
		member.capture = nil
	}
	if c.mode == cuapi.CaptureModeGlobal {
		s.global--
	}
	c.ended = true
	return c
}

func (s *Sim) streamEndCapture(h cuapi.Stream, p *cuapi.Graph) cuapi.Result {
	st, r := s.stream(h)
	switch {
	case r != cuapi.Success:
		return r
	case st.capture == nil:
		return cuapi.IllegalState
	case st.capture.origin != st:
		return cuapi.StreamCaptureUnmatched
	case st.capture.mode != cuapi.CaptureModeRelaxed && st.capture.thread != threadID():
		return cuapi.StreamCaptureWrongThread
	}
	c := s.endCapture(st)
	if c.invalid {
		*p = 0
		return cuapi.StreamCaptureInvalidated
	}
	g := &graph{h: cuapi.Graph(s.newID()), ctx: st.ctx, nodes: c.nodes, made: callers()}
	s.graphs[g.h] = g
	*p = g.h
	return cuapi.Success
}

func (s *Sim) graphDestroy(h cuapi.Graph) cuapi.Result {
	if _, ok := find(s, s.graphs, h, "graph"); !ok {
		return cuapi.InvalidValue
	}
	delete(s.graphs, h)
	s.gone.add(uintptr(h))
	return cuapi.Success
}

func (s *Sim) threadExchangeStreamCaptureMode(p *int32) cuapi.Result {
	if !slices.Contains([]int32{cuapi.CaptureModeGlobal, cuapi.CaptureModeThreadLocal, cuapi.CaptureModeRelaxed}, *p) {
		return cuapi.InvalidValue
	}
	t := s.thread()
	t.mode, *p = *p, t.mode
	return cuapi.Success
}
