package difftest

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

func (p *player) newStream(flags uint32) {
	h := new(cuapi.Stream)
	r := p.StreamCreate(h, flags)
	p.keepStream(cuapi.IDStreamCreate, fmt.Sprint(flags), r, *h, flags)
}

func (p *player) newPriority() {
	h := new(cuapi.Stream)
	flags, prio := oneOf[uint32](p, 0, 1, mostly[uint32](p, 1, 2, 0xFF)), oneOf[int32](p, 0, -1, -5, -100, 3)
	r := p.StreamCreateWithPriority(h, flags, prio)
	p.keepStream(cuapi.IDStreamCreateWithPriority, fmt.Sprint(flags, prio), r, *h, flags)
}

func (p *player) keepStream(id cuapi.ID, asked string, r cuapi.Result, h cuapi.Stream, flags uint32) {
	if p.call(id, asked, r) == cuapi.Success {
		p.streams = append(p.streams, &seqStream{h: h, name: p.name("s", uint64(h)), blocking: flags&cuapi.StreamNonBlocking == 0})
	}
}

func (p *player) askStream() {
	s := p.stream()
	switch p.rng.IntN(4) {
	case 0:
		v := new(uint32)
		r := p.StreamGetFlags(s.h, v)
		p.call(cuapi.IDStreamGetFlags, s.name, r, *v)
	case 1:
		v := new(int32)
		r := p.StreamGetPriority(s.h, v)
		p.call(cuapi.IDStreamGetPriority, s.name, r, *v)
	case 2:
		c := new(cuapi.Context)
		r := p.StreamGetCtx(s.h, c)
		p.call(cuapi.IDStreamGetCtx, s.name, r, *c == p.core.Raw)
	default:
		id := new(uint64)
		r := p.StreamGetId(s.h, id)
		p.call(cuapi.IDStreamGetId, s.name, r)
	}
}

// polls bounds how often a question is asked whose answer is a matter of time.
const polls = 10_000_000

// settle asks until the answer is another than "not ready", unless the work is held.
func (p *player) settle(late bool, ask func() cuapi.Result) cuapi.Result {
	r := ask()
	for i := 0; !late && r == cuapi.NotReady && i < polls; i++ {
		r = ask()
	}
	return r
}

func (p *player) waitStream() {
	s := p.stream()
	if p.rng.IntN(2) == 0 {
		p.call(cuapi.IDStreamQuery, s.name, p.settle(s.late, func() cuapi.Result { return p.StreamQuery(s.h) }))
	} else if !s.late {
		p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h))
	}
	p.askedAll()
}

// askedAll asks every stream whether it captures: a call may have ended or
// spoilt captures of others.
func (p *player) askedAll() {
	for _, s := range p.streams {
		if s.capture {
			p.asked(s)
		}
	}
}

func (p *player) dropStream() {
	if len(p.streams) < 4 {
		return
	}
	i := 2 + p.rng.IntN(len(p.streams)-2)
	s := p.streams[i]
	if s.late || s.capture {
		return
	}
	if !p.dead && p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h)) != cuapi.Success {
		return
	}
	p.call(cuapi.IDStreamDestroy, s.name, p.StreamDestroy(s.h))
	p.streams = append(p.streams[:i], p.streams[i+1:]...)
	for _, b := range p.blocks {
		if b.last == s {
			b.last = nil
		}
	}
}

func (p *player) newEvent(flags uint32) {
	h := new(cuapi.Event)
	if p.call(cuapi.IDEventCreate, fmt.Sprint(flags), p.EventCreate(h, flags)) == cuapi.Success {
		p.events = append(p.events, &seqEvent{h: *h})
		p.name("e", uint64(*h))
	}
}

func (p *player) record() {
	e, s := p.event(), p.stream()
	if p.rng.IntN(12) == 0 {
		p.call(cuapi.IDEventRecord, "0, "+s.name, p.EventRecord(0, s.h))
		return
	}
	if p.call(cuapi.IDEventRecord, p.names[uint64(e.h)]+", "+s.name, p.EventRecord(e.h, s.h)) == cuapi.Success {
		e.late = s.late
		s.dirty = true
	}
}

func (p *player) waitEvent() {
	e, s := p.event(), p.stream()
	if wouldSpread(s, e.late) {
		return
	}
	if p.rng.IntN(12) == 0 {
		p.call(cuapi.IDStreamWaitEvent, s.name+", 0", p.StreamWaitEvent(s.h, 0, 0))
		return
	}
	flags := mostly[uint32](p, 0, 2, 7)
	if p.call(cuapi.IDStreamWaitEvent, fmt.Sprintf("%s, %s, %d", s.name, p.names[uint64(e.h)], flags), p.StreamWaitEvent(s.h, e.h, flags)) == cuapi.Success {
		s.late = s.late || e.late
		s.dirty = true
	}
	p.asked(s)
}

func (p *player) askEvent() {
	e := p.event()
	switch n := p.rng.IntN(16); {
	case n == 0:
		p.call(cuapi.IDEventQuery, "0", p.EventQuery(0))
	case n == 1:
		p.call(cuapi.IDEventSynchronize, "0", p.EventSynchronize(0))
	case n < 9:
		p.call(cuapi.IDEventQuery, p.names[uint64(e.h)], p.settle(e.late, func() cuapi.Result { return p.EventQuery(e.h) }))
	case !e.late:
		p.call(cuapi.IDEventSynchronize, p.names[uint64(e.h)], p.EventSynchronize(e.h))
	}
	p.askedAll()
}

func (p *player) elapsed() {
	a, b := p.event(), p.event()
	ms := new(float32)
	r := p.settle(a.late || b.late, func() cuapi.Result { return p.EventElapsedTime(ms, a.h, b.h) })
	p.call(cuapi.IDEventElapsedTime, p.names[uint64(a.h)]+", "+p.names[uint64(b.h)], r)
}

func (p *player) dropEvent() {
	if len(p.events) < 4 {
		return
	}
	i := 3 + p.rng.IntN(len(p.events)-3)
	e := p.events[i]
	p.call(cuapi.IDEventDestroy, p.names[uint64(e.h)], p.EventDestroy(e.h))
	p.events = append(p.events[:i], p.events[i+1:]...)
}
