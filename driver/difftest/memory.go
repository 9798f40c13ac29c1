package difftest

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// keep takes a block and gives it a name. Its bytes are not defined yet.
func (p *player) keep(b *seqBlock, kind string) {
	b.value = p.name(kind, uint64(b.at))
	p.blocks = append(p.blocks, b)
}

// most is more memory than there is: a call that does not get it waits for all work.
func (p *player) most() uintptr {
	if p.held != nil {
		return 1
	}
	return tooMuch
}

func (p *player) newDevice(size uintptr) {
	d := new(cuapi.DevicePtr)
	if p.call(cuapi.IDMemAlloc, fmt.Sprint(size), p.MemAlloc(d, size)) == cuapi.Success {
		p.fresh(&seqBlock{at: *d, size: size, kind: deviceBlock}, "d")
	}
}

func (p *player) newManaged() {
	d := new(cuapi.DevicePtr)
	size, flags := oneOf[uintptr](p, 1, 4096, mostly[uintptr](p, 512, 0)), oneOf[uint32](p, 1, 1, 1, mostly[uint32](p, 1, 0, 3, 8))
	if p.call(cuapi.IDMemAllocManaged, fmt.Sprint(size, flags), p.MemAllocManaged(d, size, flags)) == cuapi.Success {
		p.fresh(&seqBlock{at: *d, size: size, kind: managedBlock}, "g")
	}
}

// fresh takes new memory and fills it, in a stream that captures nothing if there is
// one, so that its bytes are defined.
func (p *player) fresh(b *seqBlock, kind string) {
	p.keep(b, kind)
	s := p.streams[1]
	for _, o := range p.streams[1:] {
		if !o.capture && !o.late {
			s = o
		}
	}
	v := byte(p.rng.Uint32())
	p.first(b, s, v)
}

// first fills new memory, or puts it aside where that does not happen.
func (p *player) first(b *seqBlock, s *seqStream, v byte) {
	r := p.call(cuapi.IDMemsetD8Async, fmt.Sprintf("%s, %d, %d, %s", b.value, v, b.size, s.name), p.MemsetD8Async(b.at, v, b.size, s.h))
	p.used(s, r, b)
	if r != cuapi.Success || s.capture {
		p.forget(b)
		p.spare = append(p.spare, b)
	}
}

func (p *player) newHost(size uintptr) {
	h := new(cuapi.HostPtr)
	flags := oneOf[uint32](p, 0, 1, 2, 3, 4, 7, mostly[uint32](p, 1, 8, 16, 0xFF))
	if p.call(cuapi.IDMemHostAlloc, fmt.Sprint(size, flags), p.MemHostAlloc(h, size, flags)) == cuapi.Success {
		clear(bytesOf(*h, int(size)))
		p.keep(&seqBlock{at: address(*h), host: *h, size: size, kind: hostBlock}, "h")
	}
}

func (p *player) newFromPool() {
	d, s := new(cuapi.DevicePtr), p.stream()
	size := oneOf[uintptr](p, 1, 7, 4096, 70000, mostly[uintptr](p, 512, 0, tooMuch))
	if s.capture {
		return // memory of a graph is another matter
	}
	var r cuapi.Result
	if len(p.pools) > 0 && p.rng.IntN(2) == 0 {
		h := oneOf(p, p.pools...)
		r = p.call(cuapi.IDMemAllocFromPoolAsync, fmt.Sprint(size, " ", p.names[uint64(h)], " ", s.name), p.MemAllocFromPoolAsync(d, size, h, s.h))
	} else {
		r = p.call(cuapi.IDMemAllocAsync, fmt.Sprint(size, " ", s.name), p.MemAllocAsync(d, size, s.h))
	}
	if r == cuapi.Success && size == 0 {
		p.note("at %d", *d)
	} else if r == cuapi.Success {
		b := &seqBlock{at: *d, size: size, kind: poolBlock}
		p.keep(b, "p")
		p.first(b, s, byte(p.rng.Uint32()))
	}
}

func (p *player) forget(b *seqBlock) {
	for i := range p.blocks {
		if p.blocks[i] == b {
			p.blocks = append(p.blocks[:i], p.blocks[i+1:]...)
			return
		}
	}
}

func (p *player) freeAsync() {
	b, s := p.block(poolBlock), p.stream()
	if b == nil || s.capture || !p.behind(b, s) {
		return
	}
	if p.call(cuapi.IDMemFreeAsync, b.value+", "+s.name, p.MemFreeAsync(b.at, s.h)) == cuapi.Success {
		p.forget(b)
	}
}

// freeAny frees a block that is idle. Nothing is held.
func (p *player) freeAny() {
	b := p.block(deviceBlock, hostBlock, managedBlock, poolBlock)
	if b == nil || len(p.blocks) < 3 || b.last != nil && (b.last.capture || p.call(cuapi.IDStreamSynchronize, b.last.name, p.StreamSynchronize(b.last.h)) != cuapi.Success) {
		return
	}
	p.freeBlock(b)
}

func (p *player) freeBlock(b *seqBlock) {
	if b.kind == hostBlock {
		p.call(cuapi.IDMemFreeHost, b.value, p.MemFreeHost(b.host))
	} else {
		p.call(cuapi.IDMemFree, b.value, p.MemFree(b.at))
	}
	p.forget(b)
}

// freeWrong frees what is no allocation.
func (p *player) freeWrong() {
	b := oneOf(p, p.blocks...)
	switch p.rng.IntN(5) {
	case 0:
		p.call(cuapi.IDMemFree, "0", p.MemFree(0))
	case 1:
		if b.kind != hostBlock && b.size > 16 {
			p.call(cuapi.IDMemFree, b.value+"+16", p.MemFree(b.at+16))
		}
	case 2:
		p.call(cuapi.IDMemFree, "16", p.MemFree(16))
	case 3:
		s := p.stream()
		if !s.capture {
			p.call(cuapi.IDMemFreeAsync, "16, "+s.name, p.MemFreeAsync(16, s.h))
		}
	default:
		p.call(cuapi.IDMemFreeHost, "0", p.MemFreeHost(nil))
	}
}

func (p *player) pool() {
	h := new(cuapi.MemPool)
	switch p.rng.IntN(4) {
	case 0:
		dev := mostly[cuapi.Device](p, 0, -1, 99)
		p.call(cuapi.IDDeviceGetDefaultMemPool, fmt.Sprint(dev), p.DeviceGetDefaultMemPool(h, dev))
	case 1:
		if len(p.pools) > 1 {
			last := p.pools[len(p.pools)-1]
			p.pools = p.pools[:len(p.pools)-1]
			p.call(cuapi.IDMemPoolDestroy, p.names[uint64(last)], p.MemPoolDestroy(last))
		}
	default:
		if len(p.pools) > 2 {
			return
		}
		props := &cuapi.MemPoolProps{
			AllocType: mostly[int32](p, 1, 0, 7),
			Location:  cuapi.MemLocation{Type: mostly[int32](p, 1, 0, 99), ID: mostly[int32](p, 0, -1, 99)},
		}
		r := p.MemPoolCreate(h, props)
		if p.call(cuapi.IDMemPoolCreate, fmt.Sprint(props.AllocType, props.Location), r) == cuapi.Success {
			p.pools = append(p.pools, *h)
			p.name("pool", uint64(*h))
		}
	}
}

func (p *player) poolAttributes() {
	if len(p.pools) == 0 {
		return
	}
	h := oneOf(p, p.pools...)
	v := new(uint64)
	switch p.rng.IntN(3) {
	case 0:
		attr := oneOf[int32](p, 1, 2, 3, 4, mostly[int32](p, 4, 0, 99, -1))
		r := p.MemPoolGetAttribute(h, attr, out(v))
		p.call(cuapi.IDMemPoolGetAttribute, fmt.Sprint(p.names[uint64(h)], " ", attr), r, *v)
	case 1:
		attr := oneOf[int32](p, 1, 2, 3, 4, 5, 6, 7, 8, mostly[int32](p, 4, 0, 99, -1))
		*v = oneOf[uint64](p, 0, 1, mostly[uint64](p, 0, 2, 1<<40))
		p.call(cuapi.IDMemPoolSetAttribute, fmt.Sprint(p.names[uint64(h)], " ", attr, " ", *v), p.MemPoolSetAttribute(h, attr, out(v)))
	default:
		keep := oneOf[uintptr](p, 0, 1<<20, ^uintptr(0))
		p.call(cuapi.IDMemPoolTrimTo, fmt.Sprint(p.names[uint64(h)], " ", keep), p.MemPoolTrimTo(h, keep))
	}
}

func (p *player) poolAccess() {
	if len(p.pools) == 0 {
		return
	}
	h := oneOf(p, p.pools...)
	loc := cuapi.MemLocation{Type: mostly[int32](p, 1, 0, 99), ID: mostly[int32](p, 0, -1, 99)}
	if p.rng.IntN(2) == 0 {
		flags := new(int32)
		r := p.MemPoolGetAccess(flags, h, &loc)
		p.call(cuapi.IDMemPoolGetAccess, fmt.Sprint(p.names[uint64(h)], " ", loc), r, *flags)
		return
	}
	desc := &cuapi.MemAccessDesc{Location: loc, Flags: mostly[int32](p, 3, 0, 1, 2, 9)}
	n := mostly[uintptr](p, 1, 0)
	p.call(cuapi.IDMemPoolSetAccess, fmt.Sprint(p.names[uint64(h)], " ", *desc, " ", n), p.MemPoolSetAccess(h, desc, n))
}

func (p *player) askPointer() {
	b := oneOf(p, p.blocks...)
	at, text := b.at, b.value
	switch p.rng.IntN(6) {
	case 0:
		at, text = at+cuapi.DevicePtr(b.size-1), text+"'s end"
	case 1:
		at, text = oneOf[cuapi.DevicePtr](p, 0, 16), "none"
	}
	switch p.rng.IntN(3) {
	case 0:
		base, size := new(cuapi.DevicePtr), new(uintptr)
		r := p.MemGetAddressRange(base, size, at)
		p.call(cuapi.IDMemGetAddressRange, text, r, *base == b.at, *size)
	case 1:
		if b.kind != hostBlock {
			return // no host pointer
		}
		fallthrough
	default:
		attr := oneOf[int32](p, 1, 2, 8, 9, 11, 12, mostly[int32](p, 2, 0, 99, -1))
		v := new([8]uint64)
		r := p.PointerGetAttribute(out(v), attr, at)
		got := any(v[0])
		switch attr {
		case cuapi.PointerContext:
			got = v[0] == uint64(p.core.Raw)
		case cuapi.PointerRangeStart:
			got = v[0] == uint64(b.at)
		}
		p.call(cuapi.IDPointerGetAttribute, fmt.Sprintf("%d, %s", attr, text), r, got)
	}
	if b.kind == hostBlock {
		d, flags := new(cuapi.DevicePtr), mostly[uint32](p, 0, 1)
		r := p.MemHostGetDevicePointer(d, b.host, flags)
		p.call(cuapi.IDMemHostGetDevicePointer, fmt.Sprint(b.value, flags), r, *d == b.at)
	}
}
