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
	at      moment          // virtual time of completion, if timed
	capture *capture        // recorded in a capturing stream
	covers  map[*stream]int // of the capture's streams: the nodes that are before it
	before  clock           // with tick: what is ordered before it
	tick    tick
	blind   bool // of a blind stream
}

func (r *record) ready() bool {
	// A wait on a record of a context that is lost or destroyed does not hang its stream.
	// Unverified on hardware.
	return r.done || r.ctx.gone || r.ctx.fault != cuapi.Success
}

func (s *Sim) event(h cuapi.Event) (*event, cuapi.Result) {
	e, ok := find(s, s.events, h, "event")
	if !ok {
		return nil, cuapi.InvalidHandle
	}
	return e, e.ctx.usable()
}

// eventShared is CU_EVENT_INTERPROCESS: such an event may not time, nor be in a
// capture (measured).
const eventShared = 4

func (s *Sim) eventCreate(p *cuapi.Event, flags uint32) cuapi.Result {
	if flags&^7 != 0 || flags&(eventShared|cuapi.EventDisableTiming) == eventShared {
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
	st, r := s.target(hs)
	if r != cuapi.Success {
		return r
	}
	e, r := s.event(h)
	if r != cuapi.Success {
		return r
	}
	if e.ctx != st.ctx {
		s.violate(WrongContext, fmt.Sprintf("event %#x of device %d is recorded in a stream of device %d", h, e.ctx.dev.ordinal, st.ctx.dev.ordinal), &e.made)
		return cuapi.InvalidHandle
	}
	if st.capture != nil && e.flags&eventShared != 0 {
		st.capture.invalid = true
		return cuapi.StreamCaptureUnsupported
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
	case e.last != nil && e.last.capture != nil:
		return s.capturedEvent(e)
	}
	if r := s.beside(); r != cuapi.Success || e.last == nil {
		return r
	}
	if !e.last.done {
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
	case e.last != nil && e.last.capture != nil:
		return s.capturedEvent(e)
	}
	if r := s.beside(); r != cuapi.Success || e.last == nil {
		return r
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
	case a.ctx != b.ctx:
		return cuapi.InvalidHandle
	}
	for _, e := range [...]*event{a, b} {
		switch {
		case e.last == nil:
			return cuapi.InvalidHandle
		case e.last.capture != nil:
			return s.aboutCaptured(e)
		case e.flags&cuapi.EventDisableTiming != 0:
			return cuapi.InvalidHandle
		}
	}
	if !a.last.done || !b.last.done {
		return cuapi.NotReady
	}
	s.sawRecord(a.last)
	s.sawRecord(b.last)
	*p = float32(float64(b.last.at-a.last.at) / 1e6)
	return cuapi.Success
}

func (s *Sim) streamWaitEvent(hs cuapi.Stream, h cuapi.Event, flags uint32) cuapi.Result {
	st, r := s.target(hs)
	if r == cuapi.Success && flags&^1 != 0 {
		r = cuapi.InvalidValue
	}
	if r != cuapi.Success {
		return r
	}
	e, r := s.event(h)
	if r != cuapi.Success {
		if st.capture != nil {
			st.capture.invalid = true // measured
		}
		return r
	}
	rec := e.last
	switch {
	case st.capture != nil && e.flags&eventShared != 0:
		st.capture.invalid = true
		return cuapi.StreamCaptureUnsupported
	case rec == nil:
		return cuapi.Success // waiting on it does nothing (documented)
	case rec.capture != nil:
		return s.join(st, e)
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

func (s *Sim) threadExchangeStreamCaptureMode(p *int32) cuapi.Result {
	if !slices.Contains([]int32{cuapi.CaptureModeGlobal, cuapi.CaptureModeThreadLocal, cuapi.CaptureModeRelaxed}, *p) {
		return cuapi.InvalidValue
	}
	t := s.thread()
	t.mode, *p = *p, t.mode
	return cuapi.Success
}
