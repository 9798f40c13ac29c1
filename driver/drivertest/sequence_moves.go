package drivertest

import (
	"fmt"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// moves are the steps of a sequence. Arguments are right mostly, and wrong in
// ways that the reference names.
var moves = []move{
	{4, true, (*player).askDevice},
	{3, true, (*player).askContext},
	{3, true, (*player).setContext},
	{2, true, (*player).askError},
	{4, true, func(p *player) { p.newStream(oneOf[uint32](p, 0, 1, 1, 1, mostly[uint32](p, 1, 2, 0xFF))) }},
	{2, true, (*player).newPriority},
	{4, true, (*player).askStream},
	{6, true, (*player).waitStream},
	{2, true, (*player).dropStream},
	{4, true, func(p *player) {
		p.newEvent(oneOf[uint32](p, 0, 1, 2, 2, 3, mostly[uint32](p, 2, 4, 6, 8, 0x10, 0xFF)))
	}},
	{8, true, (*player).record},
	{8, true, (*player).waitEvent},
	{6, true, (*player).askEvent},
	{3, true, (*player).elapsed},
	{2, true, (*player).dropEvent},
	{5, true, func(p *player) {
		p.newDevice(oneOf[uintptr](p, 1, 7, 512, 4096, 70000, mostly(p, 64, 0, p.most())))
	}},
	{3, true, func(p *player) { p.newHost(oneOf[uintptr](p, 1, 7, 512, 4096, 70000)) }},
	{2, false, (*player).newManaged},
	{6, true, (*player).newFromPool},
	{5, true, (*player).freeAsync},
	{4, false, (*player).freeAny},
	{3, false, (*player).freeWrong},
	{4, true, (*player).pool},
	{5, true, (*player).poolAttributes},
	{3, false, (*player).poolAccess},
	{10, true, (*player).upload},
	{10, true, (*player).download},
	{10, true, (*player).copyAny},
	{8, true, (*player).fill},
	{4, true, (*player).writeHost},
	{5, true, (*player).flag},
	{6, true, (*player).askPointer},
	{3, false, (*player).loadModule},
	{3, false, (*player).askModule},
	{4, true, (*player).askFunction},
	{4, true, (*player).occupancy},
	{12, true, (*player).launchAny},
	{4, true, (*player).beginCapture},
	{6, true, func(p *player) { p.endCapture(p.stream()) }},
	{2, true, func(p *player) { p.asked(p.stream()) }},
	{2, true, func(p *player) {
		p.mode = true
		p.exchange(oneOf[int32](p, 0, 1, 2))
	}},
	{4, true, (*player).hold},
	{5, true, (*player).release},
}

func (p *player) askDevice() {
	v := new(int32)
	dev := mostly[cuapi.Device](p, 0, -1, 99)
	switch p.rng.IntN(5) {
	case 0:
		n := mostly[int32](p, 0, -1, 99)
		p.call(cuapi.IDDeviceGet, fmt.Sprint(n), p.DeviceGet(&dev, n), dev)
	case 1:
		attr := oneOf[int32](p, 1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 18, 19, 20, 31, 39, 40, 41, 75, 76, 83, 97, 115, mostly[int32](p, 41, 0, -1, 100000))
		r := p.DeviceGetAttribute(v, attr, dev)
		p.call(cuapi.IDDeviceGetAttribute, fmt.Sprintf("%d, %d", attr, dev), r, *v)
	case 2:
		n := oneOf[int32](p, 1, 5, 100)
		name := make([]byte, 100)
		p.call(cuapi.IDDeviceGetName, fmt.Sprintf("%d, %d", n, dev), p.DeviceGetName(&name[0], n, dev))
	case 3:
		if p.held != nil {
			return // never measured beside a held stream
		}
		peer := mostly[cuapi.Device](p, 0, -1, 99)
		r := p.DeviceCanAccessPeer(v, dev, peer)
		p.call(cuapi.IDDeviceCanAccessPeer, fmt.Sprintf("%d, %d", dev, peer), r, *v)
	default:
		active, flags := new(int32), new(uint32)
		r := p.DevicePrimaryCtxGetState(dev, flags, active)
		p.call(cuapi.IDDevicePrimaryCtxGetState, fmt.Sprint(dev), r, *active)
	}
}

func (p *player) askContext() {
	n := p.rng.IntN(5)
	if p.held != nil && (n == 2 || n == 3) {
		return // never measured beside a held stream
	}
	switch n {
	case 0:
		c := new(cuapi.Context)
		r := p.CtxGetCurrent(c)
		p.call(cuapi.IDCtxGetCurrent, "", r, *c == p.core.Raw, *c == 0)
	case 1:
		id := new(uint64)
		h := mostly(p, p.core.Raw, 0)
		r := p.CtxGetId(h, id)
		p.call(cuapi.IDCtxGetId, fmt.Sprint(h != 0), r, *id != 0)
	case 2:
		h := mostly(p, p.core.Raw, 0)
		flags := mostly[uint32](p, 0, 1)
		p.call(cuapi.IDCtxEnablePeerAccess, fmt.Sprint(h != 0, flags), p.CtxEnablePeerAccess(h, flags))
	case 3:
		h := mostly(p, p.core.Raw, 0)
		p.call(cuapi.IDCtxDisablePeerAccess, fmt.Sprint(h != 0), p.CtxDisablePeerAccess(h))
	default:
		dev := mostly[cuapi.Device](p, 0, -1, 99)
		c := new(cuapi.Context)
		if p.call(cuapi.IDDevicePrimaryCtxRetain, fmt.Sprint(dev), p.DevicePrimaryCtxRetain(c, dev)) == cuapi.Success {
			p.call(cuapi.IDDevicePrimaryCtxRelease, fmt.Sprint(dev), p.DevicePrimaryCtxRelease(dev))
		}
	}
}

// setContext has the context current, or none.
func (p *player) setContext() {
	switch p.rng.IntN(4) {
	case 0:
		h := oneOf(p, p.core.Raw, 0)
		if p.call(cuapi.IDCtxSetCurrent, fmt.Sprint(h != 0), p.CtxSetCurrent(h)) == cuapi.Success {
			if h == 0 && p.stack > 0 {
				p.stack--
			} else if h != 0 && p.stack == 0 {
				p.stack = 1
			}
		}
	case 1:
		h := mostly(p, p.core.Raw, 0)
		if p.stack < 4 && p.call(cuapi.IDCtxPushCurrent, fmt.Sprint(h != 0), p.CtxPushCurrent(h)) == cuapi.Success {
			p.stack++
		}
	case 2:
		c := new(cuapi.Context)
		r := p.CtxPopCurrent(c)
		if p.call(cuapi.IDCtxPopCurrent, "", r, *c == p.core.Raw, *c == 0) == cuapi.Success {
			p.stack--
		}
	default: // so that most moves have one
		if p.call(cuapi.IDCtxSetCurrent, "true", p.CtxSetCurrent(p.core.Raw)) == cuapi.Success && p.stack == 0 {
			p.stack = 1
		}
	}
}

func (p *player) askError() {
	code := oneOf[cuapi.Result](p, 0, 1, 2, 3, 4, 34, 46, 100, 101, 200, 201, 209, 214, 215, 217, 218, 220, 222, 400, 401, 500, 600, 700, 701, 702,
		704, 705, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717, 718, 719, 720, 721, 800, 801, 802, 803, 900, 901, 902, 903, 904, 905, 906, 907, 908, 999, -5, 99999)
	s := new(*byte)
	if p.rng.IntN(2) == 0 {
		r := p.GetErrorName(code, s)
		p.call(cuapi.IDGetErrorName, fmt.Sprint(int(code)), r, cuapi.CString(*s))
		return
	}
	r := p.GetErrorString(code, s)
	text, _, _ := strings.Cut(cuapi.CString(*s), " (simulated driver: ") // which it adds
	p.call(cuapi.IDGetErrorString, fmt.Sprint(int(code)), r, text)
}

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
	if p.wouldSpread(s, e.late) || s.h == 0 && e.late {
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

// keep takes a block, and fills it, so that its bytes are defined.
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

// fresh fills new memory in a stream that captures nothing.
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

// first fills new memory, or puts it aside.
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

// part is a range of a block, or one that is none.
func (p *player) part(b *seqBlock, most uintptr) (at cuapi.DevicePtr, n uintptr, text string) {
	n = min(b.size, most, oneOf[uintptr](p, 0, 1, 3, 64, 4096, 1<<20))
	off := uintptr(0)
	if b.size > n {
		off = uintptr(p.rng.Uint64N(uint64(b.size-n) + 1))
	}
	return b.at + cuapi.DevicePtr(off), n, fmt.Sprintf("%s+%d", b.value, off)
}

func (p *player) upload() {
	d, h, s := p.block(deviceBlock, poolBlock, managedBlock), p.block(hostBlock), p.stream()
	if d == nil || h == nil || !p.behind(d, s) || !p.behind(h, s) {
		return
	}
	at, n, text := p.part(d, h.size)
	if p.rng.IntN(12) == 0 {
		n = tooMuch
	}
	at = mostly(p, at, 0, 16)
	r := p.call(cuapi.IDMemcpyHtoDAsync, fmt.Sprintf("%s(%t), %s, %d, %s", text, at > 16, h.value, n, s.name), p.MemcpyHtoDAsync(at, h.host, n, s.h))
	p.used(s, r, d, h)
}

func (p *player) download() {
	d, h, s := p.block(deviceBlock, poolBlock, managedBlock), p.block(hostBlock), p.stream()
	if d == nil || h == nil || !p.behind(d, s) || !p.behind(h, s) {
		return
	}
	at, n, text := p.part(d, h.size)
	if p.rng.IntN(12) == 0 {
		n = tooMuch
	}
	at = mostly(p, at, 0, 16)
	r := p.call(cuapi.IDMemcpyDtoHAsync, fmt.Sprintf("%s, %s(%t), %d, %s", h.value, text, at > 16, n, s.name), p.MemcpyDtoHAsync(h.host, at, n, s.h))
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
	if a == b || a.kind == hostBlock && b.kind == hostBlock && s.late || !p.behind(a, s) || !p.behind(b, s) || s.late && a.kind == hostBlock && b.kind == hostBlock {
		return // from host to host the call waits for the stream
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
		if a.kind == hostBlock || b.kind == hostBlock {
			return // undefined where the addresses are the host's
		}
		r = p.call(cuapi.IDMemcpyDtoDAsync, asked, p.MemcpyDtoDAsync(to, from, n, s.h))
	case 1:
		if a.kind == hostBlock || b.kind == hostBlock {
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

func (p *player) loadModule() {
	m := new(cuapi.Module)
	image := mostly(p, PTX, "this is no device code", PTX[:len(PTX)-10]+"\n\tnonsense;\n}\n", "", ".version 7.0\n.target sm_70\n.address_size 64\n")
	_, r := load(p.Table, m, []byte(image))
	if p.call(cuapi.IDModuleLoadDataEx, fmt.Sprint(len(image)), r) == cuapi.Success {
		p.modules = append(p.modules, *m)
		p.name("m", uint64(*m))
	}
	if n := len(p.modules); n > 1 {
		p.call(cuapi.IDModuleUnload, p.names[uint64(p.modules[0])], p.ModuleUnload(p.modules[0]))
		p.modules = p.modules[1:]
	}
}

func (p *player) askModule() {
	name := oneOf(p, "fill", "scale", "nop", "missing", "")
	if p.rng.IntN(2) == 0 {
		f := new(cuapi.Function)
		p.call(cuapi.IDModuleGetFunction, "code, "+name, p.ModuleGetFunction(f, p.code, cstring(name)))
		return
	}
	name = oneOf(p, "answer", "missing", "fill", "")
	d, n := new(cuapi.DevicePtr), new(uintptr)
	r := p.ModuleGetGlobal(d, n, p.code, cstring(name))
	p.call(cuapi.IDModuleGetGlobal, "code, "+name, r, *n)
}

func (p *player) askFunction() {
	if len(p.funcs) == 0 {
		return
	}
	f := oneOf(p, p.funcs...)
	switch p.rng.IntN(3) {
	case 0:
		attr, v := oneOf[int32](p, 0, 1, 2, 3, 8, 9, mostly[int32](p, 8, -1, 100)), new(int32)
		r := p.FuncGetAttribute(v, attr, f)
		p.call(cuapi.IDFuncGetAttribute, fmt.Sprint(attr, " ", p.names[uint64(f)]), r, *v)
	case 1:
		attr, v := oneOf[int32](p, 8, 8, 9, mostly[int32](p, 8, 0, 3)), oneOf[int32](p, 0, 1024, 48<<10, 227<<10, mostly[int32](p, 49152, 1<<30, -1, 101))
		p.call(cuapi.IDFuncSetAttribute, fmt.Sprint(p.names[uint64(f)], " ", attr, " ", v), p.FuncSetAttribute(f, attr, v))
		if attr == 8 { // it outlives the sequence
			p.call(cuapi.IDFuncSetAttribute, "back", p.FuncSetAttribute(f, 8, 48<<10))
		} else {
			p.FuncSetAttribute(f, 9, -1)
		}
	default:
		i, off, size := oneOf[uintptr](p, 0, 1, 2, 3, 4, 99), new(uintptr), new(uintptr)
		r := p.FuncGetParamInfo(f, i, off, size)
		p.call(cuapi.IDFuncGetParamInfo, fmt.Sprint(p.names[uint64(f)], " ", i), r, *off, *size)
	}
}

func (p *player) occupancy() {
	if len(p.funcs) == 0 {
		return
	}
	f, shared := oneOf(p, p.funcs...), oneOf[uintptr](p, 0, 0, 1024, 16<<10, 1<<20)
	n := new(int32)
	if p.rng.IntN(2) == 0 {
		threads := oneOf[int32](p, 1, 32, 100, 256, 1024, mostly[int32](p, 64, 0, -1, 1025))
		r := p.OccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, shared)
		p.call(cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor, fmt.Sprint(p.names[uint64(f)], " ", threads, " ", shared), r, *n)
		return
	}
	block, limit := new(int32), oneOf[int32](p, 0, 128, 2000, mostly[int32](p, 0, -1))
	r := p.OccupancyMaxPotentialBlockSize(n, block, f, 0, shared, limit)
	p.call(cuapi.IDOccupancyMaxPotentialBlockSize, fmt.Sprint(p.names[uint64(f)], " ", shared, " ", limit), r, *n, *block)
}

func (p *player) launchAny() {
	if len(p.funcs) < 3 {
		return
	}
	s := p.stream()
	grid, threads, shared := mostly[uint32](p, 300, 0, 1<<31), mostly[uint32](p, 256, 1, 1024, 0, 1025, 1<<20), mostly[uint32](p, 0, 1024, 48<<10, 48<<10+1, 1<<20)
	by, bz := mostly[uint32](p, 1, 0, 2, 8, 65), mostly[uint32](p, 1, 0, 2, 65)
	a, b := p.block(deviceBlock, poolBlock, managedBlock), p.block(deviceBlock, poolBlock, managedBlock, hostBlock)
	if a == nil || b == nil || a == b || !p.behind(a, s) || !p.behind(b, s) {
		return
	}
	dims := fmt.Sprintf("%d, %d, %d, %d, %d, %s", grid, threads, by, bz, shared, s.name)
	var r cuapi.Result
	switch p.rng.IntN(8) {
	case 0:
		r = p.call(cuapi.IDLaunchKernel, "nop, "+dims, p.LaunchKernel(p.funcs[2], grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
		p.used(s, r)
	case 1:
		p.call(cuapi.IDLaunchKernel, "0, "+dims, p.LaunchKernel(0, grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
	case 2:
		p.call(cuapi.IDLaunchKernel, "fill without arguments, "+dims, p.LaunchKernel(p.funcs[0], grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
	case 3, 4:
		by, bz = 1, 1
		threads, grid = 256, 300
		n := uint64(min(a.size, b.size) / 4)
		args := []cuapi.HostPtr{cuapi.Word(uint64(a.at)), cuapi.Word(uint64(b.at)), cuapi.Word(0x40000000), cuapi.Word(n), nil} // by 2
		if a.at%4 != 0 || b.at%4 != 0 {
			return
		}
		r = p.call(cuapi.IDLaunchKernel, fmt.Sprintf("scale %s %s %d, %s", a.value, b.value, n, s.name), p.LaunchKernel(p.funcs[1], grid, 1, 1, threads, 1, 1, 0, s.h, &args[0], nil))
		p.used(s, r, a, b)
	default:
		n := uint64(a.size / 4)
		args := []cuapi.HostPtr{cuapi.Word(uint64(a.at)), cuapi.Word(uint64(p.rng.Uint32())), cuapi.Word(n), nil}
		if by*bz != 1 && threads < 1024 || threads != 256 {
			n = 0 // the kernel counts one dimension, and not all words
			args[2] = cuapi.Word(0)
		}
		r = p.call(cuapi.IDLaunchKernel, fmt.Sprintf("fill %s %d, %s", a.value, n, dims), p.LaunchKernel(p.funcs[0], grid, 1, 1, threads, by, bz, shared, s.h, &args[0], nil))
		p.used(s, r, a)
	}
}

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
