package difftest

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

func (p *player) beginCapture() {
	s := p.stream()
	if s.late || p.dead {
		return
	}
	// What it was given before is complete: memory in its hands is in nobody's.
	if s.h != 0 && !s.capture {
		if p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h)) != cuapi.Success {
			return
		}
		for _, b := range p.blocks {
			if b.last == s {
				b.last = nil
			}
		}
	}
	mode := oneOf[int32](p, 0, 1, 2, 2, mostly[int32](p, 1, -1, 3))
	p.call(cuapi.IDStreamBeginCapture, fmt.Sprint(s.name, " ", mode), p.StreamBeginCapture(s.h, mode))
	p.asked(s)
}

func (p *player) endCapture(s *seqStream) {
	g := new(cuapi.Graph)
	r := p.StreamEndCapture(s.h, g)
	if p.call(cuapi.IDStreamEndCapture, s.name, r, *g != 0) == cuapi.Success && *g != 0 {
		p.graphs = append(p.graphs, *g)
		p.name("graph", uint64(*g))
	}
	p.askedAll()
	p.asked(s)
}

// exchange sets the thread's capture mode.
func (p *player) exchange(mode int32) {
	v := new(int32)
	*v = mode
	r := p.ThreadExchangeStreamCaptureMode(v)
	p.call(cuapi.IDThreadExchangeStreamCaptureMode, fmt.Sprint(mode), r, *v)
}
