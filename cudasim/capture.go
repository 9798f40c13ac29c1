package cudasim

import (
	"fmt"
	"maps"
	"slices"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/osthread"
)

// A capture collects what its streams would do into a graph. The graph keeps
// only the number of its nodes.
type capture struct {
	origin  *stream
	streams []*stream
	mode    int32
	thread  int
	nodes   map[*stream]int             // what each stream was given
	covers  map[*stream]map[*stream]int // of other streams' nodes, what is before a stream's next
	invalid bool
	ended   bool
}

// take puts an operation of a stream into the graph. The record of an event is no
// node of it: the event notes which nodes are before it.
func (c *capture) take(st *stream, o *op) {
	if o.rec == nil {
		c.nodes[st]++
		return
	}
	o.rec.covers = maps.Clone(c.covers[st])
	if o.rec.covers == nil {
		o.rec.covers = map[*stream]int{}
	}
	o.rec.covers[st] = c.nodes[st]
}

// joined tells whether all forks came back to the stream that began.
func (c *capture) joined() bool {
	for st, n := range c.nodes {
		if st != c.origin && c.covers[c.origin][st] < n {
			return false
		}
	}
	return true
}

// join has a stream wait for an event that was recorded in a capture: it takes part
// from then on.
func (s *Sim) join(st *stream, e *event) cuapi.Result {
	c := e.last.capture
	switch {
	case c.ended || c.invalid:
		if st.capture != nil {
			st.capture.invalid = true
		}
		return s.capturedEvent(e)
	case st.capture == nil:
		st.capture = c
		c.streams = append(c.streams, st)
	case st.capture != c:
		c.invalid, st.capture.invalid = true, true
		return cuapi.StreamCaptureMerge
	}
	if c.covers[st] == nil {
		c.covers[st] = map[*stream]int{}
	}
	for o, n := range e.last.covers {
		c.covers[st][o] = max(c.covers[st][o], n)
	}
	return cuapi.Success
}

// A graph is what a capture came to. It is not executed.
type graph struct {
	h     cuapi.Graph
	ctx   *context
	nodes int
	made  stack
}

// capturedEvent answers a query of an event that was recorded in a capture.
func (s *Sim) capturedEvent(e *event) cuapi.Result {
	r := s.aboutCaptured(e)
	e.last.capture.invalid = true
	return r
}

// aboutCaptured answers a question about such an event that leaves the capture
// alone.
func (s *Sim) aboutCaptured(e *event) cuapi.Result {
	s.violate(Captured, fmt.Sprintf("event %#x was recorded in a capture", e.h), &e.made)
	c := e.last.capture
	if c.ended || c.invalid {
		return cuapi.InvalidValue
	}
	return cuapi.CapturedEvent
}

// notCapturing answers a query of a stream, and a wait for it: one that captures is
// spoilt by either.
func (s *Sim) notCapturing(st *stream) cuapi.Result {
	if st.capture == nil {
		r := cuapi.Success
		if st.legacy {
			r = s.implicit(st)
		}
		return max(r, s.beside())
	}
	s.violate(Captured, fmt.Sprintf("%v is queried or synchronized while it captures", st), nil)
	st.capture.invalid = true
	return cuapi.StreamCaptureUnsupported
}

// beside answers a call that captures forbid, and spoils them: those that the
// thread began itself, unless in relaxed mode, and those of other threads in
// global mode; none for a thread in relaxed mode (documented at
// cuThreadExchangeStreamCaptureMode, docs/driver-facts: "Beside a capture").
func (s *Sim) beside() cuapi.Result {
	id, mode := osthread.ID(), int32(cuapi.CaptureModeGlobal)
	if t := s.threads[id]; t != nil {
		mode = t.mode
	}
	r := cuapi.Success
	for _, c := range s.captures {
		own := c.thread == id && c.mode != cuapi.CaptureModeRelaxed
		if mode != cuapi.CaptureModeRelaxed && (own || mode == cuapi.CaptureModeGlobal && c.mode == cuapi.CaptureModeGlobal) {
			c.invalid, r = true, cuapi.StreamCaptureUnsupported
		}
	}
	return r
}

func (s *Sim) streamIsCapturing(h cuapi.Stream, p *int32) cuapi.Result {
	st, r := s.stream(h)
	if r != cuapi.Success {
		return r
	}
	switch {
	case st.legacy && slices.ContainsFunc(s.captures, func(c *capture) bool { return c.blocks(st.ctx) }):
		return cuapi.StreamCaptureImplicit
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
		return max(cuapi.StreamCaptureUnsupported, s.implicit(st))
	case st.capture != nil:
		return cuapi.IllegalState
	}
	st.capture = &capture{origin: st, streams: []*stream{st}, mode: mode, thread: osthread.ID(), nodes: map[*stream]int{}, covers: map[*stream]map[*stream]int{}}
	s.captures = append(s.captures, st.capture)
	return cuapi.Success
}

// endCapture takes all streams that take part out of a capture.
func (s *Sim) endCapture(st *stream) *capture {
	c := st.capture
	for _, member := range c.streams {
		member.capture = nil
	}
	s.captures = slices.DeleteFunc(s.captures, func(o *capture) bool { return o == c })
	c.ended = true
	return c
}

func (s *Sim) streamEndCapture(h cuapi.Stream, p *cuapi.Graph) cuapi.Result {
	st, r := s.stream(h)
	if r == cuapi.Success && st.legacy {
		r = s.implicit(st)
	}
	switch {
	case r != cuapi.Success:
		return r
	case st.capture == nil:
		return cuapi.IllegalState
	case st.capture.origin != st:
		st.capture.invalid = true
		return cuapi.StreamCaptureUnmatched
	case st.capture.mode != cuapi.CaptureModeRelaxed && st.capture.thread != osthread.ID():
		return cuapi.StreamCaptureWrongThread
	}
	c := s.endCapture(st)
	if c.invalid {
		*p = 0
		return cuapi.StreamCaptureInvalidated
	}
	if !c.joined() {
		*p = 0
		return cuapi.StreamCaptureUnjoined
	}
	g := &graph{h: cuapi.Graph(s.newID()), ctx: st.ctx, made: callers()}
	for _, n := range c.nodes {
		g.nodes += n
	}
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
