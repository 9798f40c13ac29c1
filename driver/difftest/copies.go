package difftest

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// part is a range of a block, or one that is none.
func (p *player) part(b *seqBlock, most uintptr) (at cuapi.DevicePtr, n uintptr, text string) {
	n = min(b.size, most, oneOf[uintptr](p, 0, 1, 3, 64, 4096, 1<<20))
	off := uintptr(0)
	if b.size > n {
		off = uintptr(p.rng.Uint64N(uint64(b.size-n) + 1))
	}
	return b.at + cuapi.DevicePtr(off), n, fmt.Sprintf("%s+%d", b.value, off)
}

// mayStandStill tells whether a copy to or from the host, in a stream that waits for
// nothing, may stand still all the same beside the held one: which streams share a
// queue is no matter of the sequence (docs/driver-facts.md, "A held copy holds copies
// of other streams").
func (p *player) mayStandStill(s *seqStream) bool { return p.held != nil && !s.late }

// transfer chooses a range of device memory, host memory and a stream for a copy
// between them, or tells that it makes no sense.
func (p *player) transfer() (d, h *seqBlock, s *seqStream, at cuapi.DevicePtr, n uintptr, text string, ok bool) {
	d, h, s = p.block(deviceBlock, poolBlock, managedBlock), p.block(hostBlock), p.stream()
	if d == nil || h == nil || p.mayStandStill(s) || !p.behind(d, s) || !p.behind(h, s) {
		return d, h, s, 0, 0, "", false
	}
	at, n, text = p.part(d, h.size)
	if p.rng.IntN(12) == 0 {
		n = tooMuch
	}
	at = mostly(p, at, 0, 16)
	return d, h, s, at, n, fmt.Sprintf("%s(%t)", text, at > 16), true
}

func (p *player) upload() {
	d, h, s, at, n, text, ok := p.transfer()
	if !ok {
		return
	}
	r := p.call(cuapi.IDMemcpyHtoDAsync, fmt.Sprintf("%s, %s, %d, %s", text, h.value, n, s.name), p.MemcpyHtoDAsync(at, h.host, n, s.h))
	p.used(s, r, d, h)
}

func (p *player) download() {
	d, h, s, at, n, text, ok := p.transfer()
	if !ok {
		return
	}
	r := p.call(cuapi.IDMemcpyDtoHAsync, fmt.Sprintf("%s, %s, %d, %s", h.value, text, n, s.name), p.MemcpyDtoHAsync(h.host, at, n, s.h))
	p.used(s, r, d, h)
	if r == cuapi.Success && !s.late && !s.capture {
		if p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h)) == cuapi.Success && !p.dead {
			p.note("%s holds %s", h.value, sum(bytesOf(h.host, int(h.size))))
		}
		p.askedAll()
	}
}

// copyAny copies between any two kinds of memory.
func (p *player) copyAny() {
	a, b, s := oneOf(p, p.blocks...), oneOf(p, p.blocks...), p.stream()
	host, hosts := a.kind == hostBlock || b.kind == hostBlock, a.kind == hostBlock && b.kind == hostBlock
	// From host to host the call waits for the stream, which behind may have wait for
	// what is held.
	if a == b || host && p.mayStandStill(s) || hosts && s.late || !p.behind(a, s) || !p.behind(b, s) || hosts && s.late {
		return
	}
	to, n, text := p.part(a, b.size)
	from := mostly(p, b.at, 0, 16)
	if p.rng.IntN(12) == 0 {
		n = tooMuch
	}
	asked := fmt.Sprintf("%s, %s(%t), %d, %s", text, b.value, from > 16, n, s.name)
	var r cuapi.Result
	switch p.rng.IntN(3) {
	case 0:
		if host {
			return // undefined where the addresses are the host's
		}
		r = p.call(cuapi.IDMemcpyDtoDAsync, asked, p.MemcpyDtoDAsync(to, from, n, s.h))
	case 1:
		if host {
			return
		}
		r = p.call(cuapi.IDMemcpyPeerAsync, asked, p.MemcpyPeerAsync(to, p.core.Raw, from, p.core.Raw, n, s.h))
	default:
		if from != b.at {
			return // an address that it does not know is the host's, and is followed
		}
		r = p.call(cuapi.IDMemcpyAsync, asked, p.MemcpyAsync(to, from, n, s.h))
	}
	p.used(s, r, a, b)
}

func (p *player) fill() {
	b, s := p.block(deviceBlock, poolBlock, managedBlock, hostBlock), p.stream()
	if b == nil || !p.behind(b, s) {
		return
	}
	at, n, text := p.part(b, b.size)
	if p.rng.IntN(12) == 0 {
		n = tooMuch
	}
	at = mostly(p, at, 0, 16)
	v := byte(p.rng.Uint32())
	r := p.call(cuapi.IDMemsetD8Async, fmt.Sprintf("%s(%t), %d, %d, %s", text, at > 16, v, n, s.name), p.MemsetD8Async(at, v, n, s.h))
	p.used(s, r, b)
}

// writeHost has the CPU write pinned memory that nothing uses.
func (p *player) writeHost() {
	b := p.block(hostBlock)
	if b == nil || p.dead {
		return
	}
	if s := b.last; s != nil {
		if s.late || s.capture || p.call(cuapi.IDStreamSynchronize, s.name, p.StreamSynchronize(s.h)) != cuapi.Success {
			return
		}
		b.last = nil
	}
	v := byte(p.rng.Uint32())
	for i, data := 0, bytesOf(b.host, int(b.size)); i < len(data); i++ {
		data[i] = v + byte(i)
	}
	p.note("%s is written", b.value)
}

// flag writes a word in a stream, and waits there until it is written.
func (p *player) flag() {
	b, s := p.block(deviceBlock, poolBlock, hostBlock), p.stream()
	if b == nil || b.size < 8 || !p.behind(b, s) {
		return
	}
	at, v := b.at, p.rng.Uint32()|1
	off := mostly[cuapi.DevicePtr](p, 0, 1, 2)
	flags := mostly[uint32](p, 0, 2, 9)
	r := p.call(cuapi.IDStreamWriteValue32, fmt.Sprintf("%s, %s+%d, %#x, %d", s.name, b.value, off, v, flags), p.StreamWriteValue32(s.h, at+off, v, flags))
	p.used(s, r, b)
	if s.capture {
		return
	}
	if r != cuapi.Success || off != 0 {
		p.call(cuapi.IDStreamWriteValue32, s.name+", 16", p.StreamWriteValue32(s.h, 16, v, 0))
		return
	}
	flags = oneOf[uint32](p, 0, 1, 2)
	r = p.call(cuapi.IDStreamWaitValue32, fmt.Sprintf("%s, %s, %#x, %d", s.name, b.value, v, flags), p.StreamWaitValue32(s.h, at, v, flags))
	p.used(s, r, b)
}
