package cudasim

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"runtime"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A place is one end of a copy: a range of a block, or memory that is not
// pinned.
type place struct {
	b    *block
	addr uint64
	raw  []byte
}

func (p place) bytes(n uintptr) []byte {
	if p.b == nil {
		return p.raw
	}
	return p.b.at(p.addr, n)
}

// devicePlace resolves an address, of device memory or of pinned memory: they
// are one address space.
func (s *Sim) devicePlace(addr cuapi.DevicePtr, n uintptr) (place, cuapi.Result) {
	b, r := s.span(uint64(addr), n)
	return place{b: b, addr: uint64(addr)}, r
}

// hostPlace resolves a host pointer. Memory that is not pinned is a violation:
// the copy would race with whoever owns it, or be moved by the collector. It
// is copied all the same.
func (s *Sim) hostPlace(p cuapi.HostPtr, n uintptr) (place, cuapi.Result) {
	if b := s.mem.at(hostAddress(p)); b != nil {
		return s.devicePlace(cuapi.DevicePtr(hostAddress(p)), n)
	}
	s.violate(Pageable, fmt.Sprintf("%d bytes at %#x are not pinned memory", n, hostAddress(p)), nil)
	return place{raw: hostBytes(p, n)}, cuapi.Success
}

// copy enqueues a copy between two places.
func (s *Sim) copy(hs cuapi.Stream, kind queueKind, dst, src func() (place, cuapi.Result), n uintptr) cuapi.Result {
	st, r := s.room(hs, kind)
	if r != cuapi.Success || n == 0 { // a copy of 0 bytes does nothing (measured)
		return r
	}
	d, r := dst()
	if r != cuapi.Success {
		return r
	}
	f, r := src()
	if r != cuapi.Success {
		return r
	}
	if st.capture == nil && d.b != nil && f.b != nil && d.b.host != nil && f.b.host != nil {
		return s.copyHere(st, dst, src, n)
	}
	o := op{fills: kind, span: copySpan(d, f, n), uses: uses(d.b, f.b), reads: f.extent(n), writes: d.extent(n)}
	if d.b == nil || f.b == nil {
		o.run = func() cuapi.Result {
			copy(d.bytes(n), f.bytes(n))
			return cuapi.Success
		}
	}
	return s.enqueue(st, &o)
}

// copyHere copies from host to host: it is the caller that copies (documented), and
// it waits for the stream before (measured).
func (s *Sim) copyHere(st *stream, dst, src func() (place, cuapi.Result), n uintptr) cuapi.Result {
	if r := s.wait(nil, func() bool { return st.pending() == 0 }); r != cuapi.Success {
		return r
	}
	s.observeFaults()
	if r := st.ctx.usable(); r != cuapi.Success {
		return r
	}
	s.saw(st.now())
	d, r := dst() // again: what was there may be gone
	if r != cuapi.Success {
		return r
	}
	f, r := src()
	if r == cuapi.Success {
		copy(d.bytes(n), f.bytes(n))
	}
	return r
}

// uses lists the blocks whose free an operation forbids. Use behind a free was
// reported already.
func uses(blocks ...*block) []*block {
	out := blocks[:0]
	for _, b := range blocks {
		if b != nil && !b.freeing && !b.freed {
			out = append(out, b)
		}
	}
	return out
}

func (s *Sim) memcpyHtoDAsync(dst cuapi.DevicePtr, src cuapi.HostPtr, n uintptr, hs cuapi.Stream) cuapi.Result {
	return s.copy(hs, work,
		func() (place, cuapi.Result) { return s.devicePlace(dst, n) },
		func() (place, cuapi.Result) { return s.hostPlace(src, n) }, n)
}

func (s *Sim) memcpyDtoHAsync(dst cuapi.HostPtr, src cuapi.DevicePtr, n uintptr, hs cuapi.Stream) cuapi.Result {
	return s.copy(hs, downloads,
		func() (place, cuapi.Result) { return s.hostPlace(dst, n) },
		func() (place, cuapi.Result) { return s.devicePlace(src, n) }, n)
}

func (s *Sim) memcpyAsync(dst, src cuapi.DevicePtr, n uintptr, hs cuapi.Stream) cuapi.Result {
	return s.copy(hs, work,
		func() (place, cuapi.Result) { return s.anyPlace(dst, n) },
		func() (place, cuapi.Result) { return s.anyPlace(src, n) }, n)
}

// anyPlace resolves an address of the device's or the host's. What is neither a real
// driver takes for the host's, and follows it.
func (s *Sim) anyPlace(addr cuapi.DevicePtr, n uintptr) (place, cuapi.Result) {
	if s.mem.at(uint64(addr)) == nil {
		s.violate(Pageable, fmt.Sprintf("%#x is no memory of the driver: a real one follows it", uint64(addr)), nil)
	}
	return s.devicePlace(addr, n)
}

func (s *Sim) memcpyDtoDAsync(dst, src cuapi.DevicePtr, n uintptr, hs cuapi.Stream) cuapi.Result {
	return s.copy(hs, work,
		func() (place, cuapi.Result) { return s.devicePlace(dst, n) },
		func() (place, cuapi.Result) { return s.devicePlace(src, n) }, n)
}

func (s *Sim) memcpyPeerAsync(dst cuapi.DevicePtr, dc cuapi.Context, src cuapi.DevicePtr, sc cuapi.Context, n uintptr, hs cuapi.Stream) cuapi.Result {
	for _, h := range []cuapi.Context{dc, sc} {
		if h == 0 {
			s.violate(Misuse, "a peer copy with no context: a real driver crashed", nil) // measured
			return cuapi.InvalidContext
		}
		ctx, r := s.context(h)
		if r == cuapi.Success {
			r = ctx.usable()
		}
		if r != cuapi.Success {
			return r
		}
	}
	if st, r := s.stream(hs); r == cuapi.Success && st.capture != nil {
		st.capture.invalid = true
		return cuapi.StreamCaptureUnsupported
	}
	return s.memcpyDtoDAsync(dst, src, n, hs)
}

func (s *Sim) memsetD8Async(dst cuapi.DevicePtr, v uint8, n uintptr, hs cuapi.Stream) cuapi.Result {
	st, r := s.room(hs, work)
	if r != cuapi.Success || n == 0 {
		return r
	}
	if st.capture != nil {
		return s.enqueue(st, &op{}) // its range is not looked at (measured)
	}
	d, r := s.devicePlace(dst, n)
	if r != cuapi.Success {
		return r
	}
	return s.enqueue(st, &op{fills: work, span: span{kind: costFill, bytes: uint64(n)}, uses: uses(d.b), writes: d.extent(n), run: func() cuapi.Result {
		fill(d.bytes(n), v)
		return cuapi.Success
	}})
}

// compare are the conditions of cuStreamWaitValue32, by its flags.
var compare = [...]func(have, want uint32) bool{
	func(have, want uint32) bool { return int32(have-want) >= 0 }, // GEQ
	func(have, want uint32) bool { return have == want },          // EQ
	func(have, want uint32) bool { return have&want != 0 },        // AND
	func(have, want uint32) bool { return ^(have | want) != 0 },   // NOR
}

// streamWaitValue32 holds the stream until the word in memory fits. Host
// writes of the word must be atomic stores; they are noticed at the next
// driver call, or soon after while a call blocks.
func (s *Sim) streamWaitValue32(hs cuapi.Stream, addr cuapi.DevicePtr, want, flags uint32) cuapi.Result {
	st, d, r := s.flagPlace(hs, addr)
	if r != cuapi.Success {
		return r
	}
	if st.capture == nil && st.ctx.fault == cuapi.Success {
		s.flags++
	}
	fits := compare[flags&3]
	st.blind = true
	return s.enqueue(st, &op{
		uses: uses(d.b), holds: true, span: span{kind: costWait, word: d.addr, in: d.b},
		ready: func() bool { return fits(loadFlag(d.bytes(4)), want) },
		run:   func() cuapi.Result { s.flags--; return cuapi.Success },
	})
}

func (s *Sim) streamWriteValue32(hs cuapi.Stream, addr cuapi.DevicePtr, v, flags uint32) cuapi.Result {
	st, d, r := s.flagPlace(hs, addr)
	switch {
	case r != cuapi.Success:
		return r
	case flags&^1 != 0: // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
		return cuapi.InvalidValue
	}
	return s.enqueue(st, &op{shows: true, uses: uses(d.b), span: span{word: d.addr, in: d.b}, run: func() cuapi.Result {
		storeFlag(d.bytes(4), v)
		return cuapi.Success
	}})
}

func (s *Sim) flagPlace(hs cuapi.Stream, addr cuapi.DevicePtr) (*stream, place, cuapi.Result) {
	st, r := s.target(hs)
	if r != cuapi.Success {
		return nil, place{}, r
	}
	if addr%4 != 0 {
		return nil, place{}, cuapi.InvalidValue
	}
	d, r := s.devicePlace(addr, 4)
	switch {
	case r != cuapi.Success:
	case d.b.pool != nil && st.capture == nil:
		r = cuapi.InvalidValue // measured
	default:
		d.b.flagged = true
	}
	return st, d, r
}

// HostFunc registers a Go function and returns a value to pass to
// cuLaunchHostFunc in place of a C function pointer. The function runs without
// the simulator's lock, on the goroutine whose call reaches it.
func (s *Sim) HostFunc(f func()) uintptr {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.newID()
	s.hostFuncs[h] = f
	return h
}

func (s *Sim) launchHostFunc(hs cuapi.Stream, fn, data uintptr) cuapi.Result {
	st, r := s.room(hs, work)
	if r != cuapi.Success {
		return r
	}
	if fn == s.semWait {
		return s.waitSemaphore(st, cuapi.DevicePtr(data))
	}
	f := s.hostFuncs[fn]
	if f == nil {
		s.violate(NoFunction, fmt.Sprintf("host function %#x was not registered by HostFunc", fn), nil)
		return cuapi.InvalidValue
	}
	r = s.enqueue(st, &op{fills: work, shows: true, callout: true, run: func() cuapi.Result {
		if text, at := s.outside(f); at != nil {
			s.violateAt(Panicked, text, at, nil)
		}
		return cuapi.Success
	}})
	st.blind = true
	return r
}

// semMark stands behind a semaphore's word, so that one that was never made shows.
const semMark = 0x5E3A

// hostWait gives the simulator's own semaphores: a word of pinned memory that
// counts posts. The wait is no Go function, which would keep the goroutine whose
// call reaches it, but an operation that is ready when there is a post. Posts are
// no driver calls: they are noticed as writes of flags are.
func (s *Sim) hostWait() (*cuapi.HostWait, error) {
	return &cuapi.HostWait{
		Wait: s.semWait,
		Init: func(sem cuapi.HostPtr) {
			storeFlag(hostBytes(sem, 4), 0)
			storeFlag(hostBytes(sem, 8)[4:], semMark)
		},
		Post:  func(sem cuapi.HostPtr) { addFlag(hostBytes(sem, 4), 1) },
		Taken: func(sem cuapi.HostPtr) bool { return loadFlag(hostBytes(sem, 4)) == 0 },
	}, nil
}

// waitSemaphore holds the stream until it takes a post. Whether a host function
// that waits occupies a hardware queue was never measured: it is taken to.
func (s *Sim) waitSemaphore(st *stream, addr cuapi.DevicePtr) cuapi.Result {
	d, r := s.devicePlace(addr, cuapi.SemaphoreBytes)
	if r != cuapi.Success || d.b.host == nil || loadFlag(d.bytes(8)[4:]) != semMark {
		s.violate(Misuse, fmt.Sprintf("no semaphore in pinned memory is at %#x", uint64(addr)), nil)
		return cuapi.InvalidValue // a real driver would not look
	}
	d.b.flagged = true
	if st.capture == nil && st.ctx.fault == cuapi.Success {
		s.flags++
	}
	st.blind = true
	return s.enqueue(st, &op{
		uses: uses(d.b), fills: work, holds: true, span: span{word: d.addr, in: d.b},
		ready: func() bool { return loadFlag(d.bytes(4)) > 0 },
		run: func() cuapi.Result {
			addFlag(d.bytes(4), ^uint32(0))
			s.flags--
			return cuapi.Success
		},
	})
}

// outside runs a host function without the lock, whatever way it ends.
func (s *Sim) outside(f func()) (text string, at stack) {
	s.mu.Unlock()
	defer s.mu.Lock()
	_, text, at = s.callback(f)
	return text, at
}

// callback runs a user's function with its thread marked, and returns what it
// panicked with, and where.
func (s *Sim) callback(f func()) (cause any, text string, at stack) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s.callbacks.enter()
	defer s.callbacks.leave()
	defer func() {
		if cause = recover(); cause != nil {
			text, at = fmt.Sprint(cause), callers()
		}
	}()
	f()
	return nil, "", nil
}

// A watch looks for what the host does with pinned memory while a copy is
// pending, since the memory is the copy's until then: a source that changes, and
// a destination that is written. So that an early reader sees it, a pending
// download fills its destination with 0xEE. Where the device or a host function
// may have done it, or where the program may let the copy go on only after the
// access, nothing is reported.
type watch struct {
	on      bool
	stirred int // of the block when it began
	sum     uint64
}

// flightByte fills what a pending download will overwrite.
const flightByte = 0xEE

// maxWatched is how many bytes are looked at from each end of a copy.
const maxWatched = 64 << 10

var watchSeed = maphash.MakeSeed()

// watched returns the extent that the host must leave alone while a copy is
// pending, and whether it must not even read it.
func (o *op) watched() (e extent, all bool) {
	switch {
	case o.span.toHost:
		return o.writes, true
	case o.span.fromHost:
		return o.reads, false
	}
	return extent{}, false
}

// ends returns what is looked at.
func (e extent) ends() [2][]byte {
	p := e.bytes()
	if len(p) <= 2*maxWatched {
		return [2][]byte{p}
	}
	return [2][]byte{p[:maxWatched], p[len(p)-maxWatched:]}
}

func (e extent) hash() (sum uint64) {
	for _, p := range e.ends() {
		sum = sum*31 + maphash.Bytes(watchSeed, p)
	}
	return sum
}

// startWatch begins to watch a copy that becomes pending.
func (s *Sim) startWatch(st *stream, o *op) {
	e, all := o.watched()
	b := e.b
	switch {
	case st.blind, b == nil || b.freed || b.freeing || b.flagged:
		return
	case all && b.pending > 0: // what is pending may still read it
		return
	}
	o.watch = watch{on: true, stirred: b.stirred}
	if !all {
		o.watch.sum = e.hash()
		return
	}
	for _, p := range e.ends() {
		fill(p, flightByte)
	}
}

// endWatch reports what happened, as the copy is about to run.
func (s *Sim) endWatch(o *op) {
	w := &o.watch
	if !w.on {
		return
	}
	e, all := o.watched()
	switch n := e.to - e.from; {
	case e.b.stirred != w.stirred, e.b.flagged:
	case !all && e.hash() != w.sum:
		s.violate(HostAccess, fmt.Sprintf("%v: the host wrote into the source of a pending upload of %d bytes", e.b, n), nil)
	case all && !e.holds(flightByte):
		s.violate(HostAccess, fmt.Sprintf("%v: the host wrote into the destination of a pending download of %d bytes", e.b, n), nil)
	}
}

// holds tells whether all that is looked at is one byte.
func (e extent) holds(v byte) bool {
	for _, p := range e.ends() {
		if len(p) > 0 && (p[0] != v || !bytes.Equal(p[1:], p[:len(p)-1])) {
			return false
		}
	}
	return true
}

// mayWrite tells whether an operation may write a block that it uses.
func (o *op) mayWrite(b *block) bool {
	isCopy := o.span.kind == costLink || o.span.kind == costInside
	return !isCopy || o.writes.b == b
}
