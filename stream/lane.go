package stream

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/watch"
	"github.com/purecuda/purecuda/internal/wire"
)

var (
	// ErrCapturing is in the error of an enqueue on a stream that captures:
	// nothing was enqueued.
	ErrCapturing = errors.New("stream captures a graph")
	// ErrHeld is in the error of a second session on a stream.
	ErrHeld = errors.New("stream is held by another session")

	errUnset = errors.New("event was never recorded")
)

// markEvery is how many operations without a fence go by before a lane records
// a mark of its own, so that credits return.
const markEvery = 64

// Lane is the engine of a stream: it orders enqueues, counts what is in flight
// and owns the events of its marks. This module's packages reach it through
// internal/wire; programs use [Stream].
type Lane struct {
	core    *wire.Context
	h       cuapi.Stream
	events  *event.Pool
	watcher *watch.Watcher
	flow    *flow

	held     atomic.Bool // a session captured it
	foreign  atomic.Bool // other code knows the handle: it may capture
	adopted  bool        // other code owns the driver's stream
	users    atomic.Int32
	kept     atomic.Int32          // of these: for good
	broken   atomic.Pointer[error] // the first enqueue that failed: not for new users
	credits  atomic.Int64
	spinning atomic.Bool   // one wait looks before it parks
	issued   atomic.Uint64 // operations enqueued; written under enq

	unmarked atomic.Int64 // operations since the last mark

	enq sync.Mutex // over own enqueues alone: the order of marks is their order in the stream

	mu      sync.Mutex // never held over a driver call
	head    *Mark      // pending marks in stream order
	tail    *Mark
	solo    *Mark // pending marks that were recorded outside enq
	retired uint64
	wanted  int // pending marks that the watcher looks for
	looking int // queries of marks under way
	asking  int // queries of the stream under way
	dead    bool
}

// submitsLate tells that the driver may keep enqueued work from the device
// until a query, as it does under Windows' display driver model.
const submitsLate = runtime.GOOS == "windows"

// An Enqueued error tells that an enqueue failed after it began: whether the
// driver enqueued anything is unknown.
type Enqueued struct{ Err error }

func (e *Enqueued) Error() string { return e.Err.Error() }
func (e *Enqueued) Unwrap() error { return e.Err }

func newLane(core *wire.Context, h cuapi.Stream) *Lane {
	l := &Lane{core: core, h: h, events: event.PoolOf(core), watcher: WatcherOf(core), flow: flowOf(core)}
	l.Retain()
	l.flow.add(l)
	return l
}

type watcherKey struct{}

// WatcherOf returns the context's completion watcher.
func WatcherOf(core *wire.Context) *watch.Watcher {
	return core.Shared(watcherKey{}, func() any { return new(watch.Watcher) }).(*watch.Watcher)
}

// Retain keeps the lane for one more user.
func (l *Lane) Retain() { l.users.Add(1) }

// retain does so only while the lane has a user.
func (l *Lane) retain() bool {
	for {
		n := l.users.Load()
		if n == 0 || l.users.CompareAndSwap(n, n+1) {
			return n != 0
		}
	}
}

// Drop ends one use. The last one gives the lane to the context's idle ones. It
// makes no driver call.
func (l *Lane) Drop() {
	if l.users.Add(-1) == 0 {
		p := idleOf(l.core)
		if l.adopted {
			p.forget(l)
			l.wantLast()
		}
		p.push(l)
	}
}

// Keep makes one use last for good: what it was for is never released, so that
// the lane is never taken again. Nobody enqueues on behalf of such a use.
func (l *Lane) Keep() { l.kept.Add(1) }

// wantLast has the watcher look at what the lane has pending, so that a lane that
// is not taken again is done with.
func (l *Lane) wantLast() {
	l.mu.Lock()
	last := l.tail
	l.mu.Unlock()
	if last != nil {
		last.Want()
	}
}

// Expose returns the driver's stream for other code, which may capture it: from
// then on it is queried on behalf of its own user alone, and each operation has a
// mark.
func (l *Lane) Expose() uintptr {
	l.mu.Lock()
	first := l.foreign.CompareAndSwap(false, true)
	for l.asking > 0 { // queries never wait
		l.mu.Unlock()
		runtime.Gosched()
		l.mu.Lock()
	}
	l.mu.Unlock()
	if first && l.unmarked.Load() > 0 {
		l.Record(new(Mark)) // for what has none; a failure fails the lane
	}
	return uintptr(l.h)
}

// Failed returns the first failed enqueue, or nil.
func (l *Lane) Failed() error {
	if p := l.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// Core returns the context.
func (l *Lane) Core() *wire.Context { return l.core }

// Handle returns the driver's stream.
func (l *Lane) Handle() cuapi.Stream { return l.h }

// Hold captures the lane for one session.
func (l *Lane) Hold() bool { return l.held.CompareAndSwap(false, true) }

// Unhold ends the capture.
func (l *Lane) Unhold() { l.held.Store(false) }

// Issued returns how many operations the lane enqueued so far.
func (l *Lane) Issued() uint64 { return l.issued.Load() }

// InFlight returns how many operations are not known to be complete.
func (l *Lane) InFlight() int { return int(l.credits.Load()) }

// Upload copies n bytes of pinned memory to the device, and records m behind
// the copy, in one crossing (cuMemcpyHtoDAsync, cuEventRecord).
func (l *Lane) Upload(dst cuapi.DevicePtr, src cuapi.HostPtr, n uintptr, m *Mark) error {
	list := cuapi.NewList()
	list.MemcpyHtoDAsync(dst, src, n, l.h)
	return l.run(list, 1, m, n)
}

// Download copies n bytes of device memory to pinned memory, and records m
// behind the copy, in one crossing (cuMemcpyDtoHAsync, cuEventRecord).
func (l *Lane) Download(dst cuapi.HostPtr, src cuapi.DevicePtr, n uintptr, m *Mark) error {
	list := cuapi.NewList()
	list.MemcpyDtoHAsync(dst, src, n, l.h)
	return l.run(list, 1, m, n)
}

// Fill sets n bytes of device memory (cuMemsetD8Async).
func (l *Lane) Fill(dst cuapi.DevicePtr, value byte, n uintptr) error {
	list := cuapi.NewList()
	list.MemsetD8Async(dst, value, n, l.h)
	return l.run(list, 1, nil, n)
}

// Launch starts a kernel (cuLaunchKernel). The driver copies the arguments
// before it returns.
func (l *Lane) Launch(f cuapi.Function, grid, block [3]uint32, shared uint32, params *cuapi.HostPtr) error {
	list := cuapi.NewList()
	list.LaunchKernel(f, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, l.h, params, nil)
	return l.run(list, 1, nil, 0)
}

// Alloc takes n bytes from a pool, in stream order (cuMemAllocFromPoolAsync).
// It counts as an operation: what frees the memory elsewhere must be behind it.
func (l *Lane) Alloc(out *cuapi.DevicePtr, n uintptr, pool cuapi.MemPool) error {
	list := cuapi.NewList()
	list.MemAllocFromPoolAsync(out, n, pool, l.h)
	list.Relax()
	return l.run(list, 1, nil, n)
}

// Record records m behind everything enqueued so far (cuEventRecord).
func (l *Lane) Record(m *Mark) error { return l.run(cuapi.NewList(), 0, m, 0) }

// run enqueues the list, which holds n operations, with m's record behind it,
// and frees the list. A plain error is a rejection: no driver call was made
// that enqueues. An *Enqueued error is not.
func (l *Lane) run(list *cuapi.List, n int, m *Mark, bytes uintptr) error {
	defer list.Free()
	if err := l.admit(n); err != nil {
		return err
	}
	own := m == nil // a mark of the lane's own, if one is due
	if own && (l.unmarked.Add(int64(n)) >= markEvery || l.foreign.Load()) && n > 0 {
		m = new(Mark)
	}
	if m != nil {
		ev, err := l.events.Get()
		switch {
		case err == nil:
			m.lane, m.ev = l, ev
			list.EventRecord(ev.Handle(), l.h)
			l.unmarked.Store(0)
		case own:
			m = nil // the next operation tries again
		default:
			l.give(int64(n))
			return err
		}
	}
	l.enq.Lock()
	done, r := l.core.Table.Run(list)
	if m != nil && done < n { // the record was not reached: its event is as it was
		l.events.Put(m.ev)
		m.ev = nil
		l.unmarked.Store(markEvery) // the next operation tries again
	} else if m != nil && r != cuapi.Success { // it may be recorded
		l.events.Bar(m.ev)
		m.ev = nil
	}
	if done < n && r == cuapi.OutOfMemory && list.ID(done) == cuapi.IDMemAllocFromPoolAsync {
		n = 0 // no memory, and nothing enqueued: the credit comes back
		l.give(1)
	}
	// What failed may have been enqueued all the same: it counts.
	issued := l.issued.Add(uint64(n))
	if m != nil && r == cuapi.Success {
		m.upto = issued
		l.mu.Lock()
		m.turn(recorded)
		if l.tail == nil {
			l.head = m
		} else {
			l.tail.next = m
		}
		l.tail = m
		l.mu.Unlock()
	}
	l.enq.Unlock()
	if r == cuapi.Success {
		if submitsLate && m != nil {
			l.Submit() // what it finds is found again by the mark's query
		}
		return nil
	}
	var detail string
	if bytes != 0 && list.ID(done) != cuapi.IDEventRecord {
		detail = fmt.Sprintf("%d bytes", bytes)
	}
	err := l.core.Fail(list.ID(done), r, detail)
	if own && list.ID(done) == cuapi.IDEventRecord {
		return nil // the lane's own mark failed: the operation did not
	}
	if r != cuapi.OutOfMemory || list.ID(done) != cuapi.IDMemAllocFromPoolAsync { // no memory is no damage
		l.broken.CompareAndSwap(nil, &err)
	}
	if n > 0 && l.foreign.Load() { // so that the credits return
		l.Record(new(Mark))
	}
	return &Enqueued{err}
}

// admit takes n credits, or says why nothing may be enqueued.
func (l *Lane) admit(n int) error {
	if err := l.core.Lost(); err != nil {
		return err
	}
	if l.foreign.Load() {
		if err := l.capturing(); err != nil {
			return err
		}
	}
	if n == 0 || l.take(int64(n)) == nil {
		return nil
	}
	l.sweep(true) // one look at what completed, here and then elsewhere
	if l.take(int64(n)) == nil {
		return nil
	}
	l.flow.Poll()
	return l.take(int64(n))
}

func (l *Lane) capturing() error {
	status := new(int32)
	if r := l.core.Table.StreamIsCapturing(l.h, status); r != cuapi.Success {
		return l.core.Fail(cuapi.IDStreamIsCapturing, r, "")
	}
	if *status != cuapi.CaptureStatusNone {
		return ErrCapturing
	}
	return nil
}

// Fence sets m to a fence behind the first upto operations of the lane, for an
// owner that is let go of: it takes no enqueue lock. m is complete already, or
// recorded now, outside the lane's order (cuEventRecord).
func (l *Lane) Fence(m *Mark, upto uint64) error {
	m.lane = l
	l.mu.Lock()
	known := l.retired >= upto
	l.mu.Unlock()
	if known {
		l.Unreserve(m)
		m.turn(needless)
		return l.core.Lost()
	}
	if err := l.admit(0); err != nil {
		return err
	}
	if err := l.Reserve(m); err != nil {
		return err
	}
	ev := m.ev
	m.upto = l.issued.Load() // all of these were enqueued before the record is
	if r := l.core.Table.EventRecord(ev.Handle(), l.h); r != cuapi.Success {
		m.ev = nil
		l.events.Bar(ev) // it may be recorded
		return &Enqueued{l.core.Fail(cuapi.IDEventRecord, r, "")}
	}
	l.mu.Lock()
	m.solo, m.next = true, l.solo
	m.turn(recorded)
	l.solo = m
	l.mu.Unlock()
	return nil
}

// Behind returns a pending mark that is behind the first upto operations, if
// there is one, or tells that they are known to be complete: then no fence is
// needed.
func (l *Lane) Behind(upto uint64) (m *Mark, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.retired >= upto:
		return nil, true
	case l.tail != nil && l.tail.upto >= upto:
		return l.tail, false
	case l.solo != nil && l.solo.upto >= upto: // the newest one
		return l.solo, false
	}
	return nil, false
}

// Reserve gives m an event ahead of its Fence, so that letting go of an owner
// needs nothing that may be refused then.
func (l *Lane) Reserve(m *Mark) (err error) {
	if m.lane = l; m.ev == nil {
		m.ev, err = l.events.Get()
	}
	return err
}

// Unreserve gives the event of a mark back that was never recorded.
func (l *Lane) Unreserve(m *Mark) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m.state.Load() == unset && m.ev != nil {
		l.events.Put(m.ev)
		m.ev = nil
	}
}

// Poll looks at the oldest pending mark until one is not ready, and at each
// that stands for itself. It never waits, and is the watcher's look.
func (l *Lane) Poll() (progress, more bool) {
	for {
		l.mu.Lock()
		m := l.head
		l.mu.Unlock()
		if m == nil || !l.look(m) {
			break
		}
		progress = true
	}
	l.mu.Lock()
	var solo []*Mark
	for m := l.solo; m != nil; m = m.next {
		solo = append(solo, m)
	}
	l.mu.Unlock()
	for _, m := range solo {
		progress = l.look(m) || progress
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return progress, l.wanted > 0
}

// spins is how often a wait looks before it parks: about 20 µs of queries.
const spins = 64

// Wait waits until the mark is complete. The end of ctx ends this wait alone.
func (m *Mark) Wait(ctx context.Context) error {
	if done, err := m.Peek(); done || err != nil {
		return err
	}
	if done, err := m.spin(ctx); done || err != nil {
		return err
	}
	wake := m.park()
	defer m.unpark()
	select {
	case <-wake:
		done, err := m.Peek()
		if err == nil && !done {
			err = errUnset
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// spin looks at the mark for a short while, on behalf of one wait of the lane
// at a time: the others park, and the watcher looks for them.
func (m *Mark) spin(ctx context.Context) (done bool, err error) {
	if !m.lane.spinning.CompareAndSwap(false, true) {
		return false, ctx.Err()
	}
	defer m.lane.spinning.Store(false)
	for i := range spins {
		if done, err := m.Poll(); done || err != nil {
			return done, err
		}
		if err := ctx.Err(); err != nil {
			return false, err
		}
		if i > spins/2 {
			runtime.Gosched()
		}
	}
	return false, nil
}

// Synchronize waits until everything that the lane enqueued before is done.
func (l *Lane) Synchronize(ctx context.Context) error {
	m := new(Mark)
	if err := l.Record(m); err != nil {
		return err
	}
	return m.Wait(ctx)
}

// Submit has the driver send what it may hold back to the device, as Windows'
// display driver does until a query (cuStreamQuery). It never waits.
func (l *Lane) Submit() error {
	if err := l.admit(0); err != nil {
		return err
	}
	if r := l.query(); r != cuapi.Success && r != cuapi.NotReady {
		return l.core.Fail(cuapi.IDStreamQuery, r, "")
	}
	return nil
}

// query asks whether the stream is done (cuStreamQuery). It never waits.
func (l *Lane) query() cuapi.Result {
	list := cuapi.NewList()
	defer list.Free()
	list.StreamQuery(l.h)
	list.Relax()
	_, r := l.core.Table.Run(list)
	return r
}
