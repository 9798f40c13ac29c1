// Package publish moves values off the device safely.
//
// A [Session] captures a stream, allocates values, fills them by uploads and
// kernels, and publishes them: [Session.Publish] moves a [Value] into an
// immutable [Publication] together with its producer frontier, the event behind
// everything that the session ran before. The session may close at once. The
// publication is consumed later, from anywhere: [Publication.DownloadInto] moves
// it and a pinned buffer into a [Transfer], and [Transfer.Wait] gives the filled
// buffer back.
//
// # Ownership
//
// Each value and buffer has one owner at a time. A handle that was moved or
// closed is inert: what returns an error then returns one that matches
// driver.ErrMoved or driver.ErrClosed; so does a nil handle. Close is
// idempotent and never waits. Memory is released only once the device is
// observed to be done with it; where that can not be proven it is retained for
// the life of the process, and counted in [Stats].
//
// # Errors
//
// A [*RejectedError] means that nothing was enqueued and every owner stays with
// the caller. An [*UnprovenError] means that something may have been enqueued.
//
// # Room
//
// What is in flight and what waits to be released is bounded, so that no call
// blocks in the driver and no memory is gone without a trace. At a bound, after
// one look at what completed, an operation is rejected: ErrStreamFull,
// ErrContextFull, ErrQueueFull, or driver.ErrOutOfMemory. [Session.AllocContext],
// [Session.UploadContext], [Session.LaunchContext] and
// [Publication.DownloadIntoContext] wait for room instead. [Session.Publish] needs
// none: a value has the slot that its publication and its end need. What is
// beyond a bound altogether is rejected at once, with ErrTooLarge besides.
//
// Who waits keeps what it holds. Workers that each hold a value and then wait for
// an upload need more slots than there are workers, or all of them wait until
// their contexts end.
//
// # What is dropped
//
// A handle that becomes garbage without a Close is ended as by a close, sooner or
// later, without a driver call from the collector, and counted in
// [Stats].Abandoned. A pinned buffer whose Bytes was called is then never used
// again.
//
// # States
//
// states.go has the state machines: what each method does in each state.
//
// All handles are safe for concurrent use, from any goroutine and any thread.
package publish

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/outside"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/room"
	"github.com/purecuda/purecuda/internal/watch"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/memory"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/retirequeue"
	"github.com/purecuda/purecuda/stream"
)

// contextPin is a runtime's pin of its context, apart from the runtime: the
// cleanup of one that became garbage without a close lets go of it.
type contextPin struct {
	core *wire.Context
	over atomic.Bool
}

// end lets go of the context, once. It makes no driver call.
func (p *contextPin) end() {
	if p.over.CompareAndSwap(false, true) {
		p.core.Release()
	}
}

// Config sets a runtime's limits. The zero Config is the default.
type Config struct {
	// Slots bounds the values, publications and transfers that are alive or
	// retired and not yet released. A value, its publication and its download
	// share one slot; an upload takes one more, until Wait or Close. 0 means
	// 16,384.
	Slots int
	// Bytes bounds the memory that these own, of the device and pinned: a
	// download needs those of its buffer besides the publication's. 0 means no
	// bound but that of the device and PinnedBytes.
	Bytes int64
	// Stacks keeps where each session, value, publication and transfer was made,
	// for Stats and for the error of Shutdown. It is for finding what was not
	// closed: each of them costs some microseconds more.
	Stacks bool
	// PinnedBytes bounds the pinned memory of the context, for all its
	// runtimes, in blocks of a power of two, 4,096 at least. 0 leaves it as it
	// is, which is 1 GiB at first.
	PinnedBytes int64
}

const defaultSlots = 16384

// Runtime is one user of a context: it counts what is alive, and retires what
// was let go of.
type Runtime struct {
	ctx     *driver.Context
	core    *wire.Context
	mem     *memory.Pool
	pinned  *pinned.Pool
	queue   *retirequeue.Queue
	hungry  atomic.Bool // the queue refused somebody
	slots   room.Room   // of those that wait for the queue
	ended   room.Room   // tells that it was closed
	watcher *watch.Watcher

	origins *origins // with Config.Stacks

	kept     *kept        // of the context
	left     list         // records to be ended: abandoned, or postponed
	unburied atomic.Int64 // of these, and of those that are being ended
	burying  atomic.Bool
	abandons atomic.Int64
	leaked   atomic.Int64
	panics   atomic.Int64

	held *contextPin

	mu       sync.Mutex
	closed   bool
	pins     int             // sessions and records
	sessions int             // open
	quiet    []chan struct{} // closed when nothing is left to drain
}

// New makes a runtime on the context, which it pins. It is set-up: the first
// one of a context makes and warms its memory pool. It fails with the first
// cause on a context that is lost.
func New(ctx *driver.Context, cfg Config) (*Runtime, error) {
	core := wire.ContextOf(ctx)
	if core == nil {
		return nil, none("context")
	}
	if cfg.Slots < 0 || cfg.Bytes < 0 || cfg.PinnedBytes < 0 {
		return nil, fmt.Errorf("publish: negative limits: %+v", cfg)
	}
	if err := core.Lost(); err != nil {
		return nil, fmt.Errorf("publish: %w", &lostError{err})
	}
	if err := core.Retain(); err != nil {
		return nil, err
	}
	mem, err := memory.PoolOf(core)
	if err == nil {
		err = event.PoolOf(core).Reserve(64)
	}
	if err != nil {
		core.Release()
		return nil, err
	}
	rt := &Runtime{
		ctx: ctx, core: core, mem: mem, pinned: pinned.PoolOf(core),
		watcher: stream.WatcherOf(core), kept: keptOf(core), pins: 1,
		origins: newOrigins(cfg.Stacks), held: &contextPin{core: core},
	}
	if cfg.Slots == 0 {
		cfg.Slots = defaultSlots
	}
	rt.queue = retirequeue.New(retirequeue.Limits{Slots: cfg.Slots, Bytes: cfg.Bytes, Freed: rt.freed})
	if cfg.PinnedBytes > 0 {
		rt.pinned.Limit(cfg.PinnedBytes)
	}
	// What pins the runtime refers to it: garbage has no pin but its own.
	runtime.AddCleanup(rt, (*contextPin).end, rt.held)
	return rt, nil
}

// Context returns the runtime's context.
func (rt *Runtime) Context() *driver.Context {
	if rt.none() {
		return nil
	}
	return rt.ctx
}

// none tells that there is no runtime: a nil or a zero one.
func (rt *Runtime) none() bool { return rt == nil || rt.core == nil }

// Lost returns a channel that is closed when the context's loss is noticed: by a
// driver call that tells, such as that of a wait, a look, or an allocation. A
// launch, an upload or a publish may still succeed behind a kernel that faulted,
// and nobody asks the driver while nothing is waited for or retired.
// [Session.Submit] and [Publication.FrontierReady] ask without waiting.
func (rt *Runtime) Lost() <-chan struct{} { return rt.Context().Lost() }

// Err returns the first cause of the context's loss, or nil while none was
// noticed, as for Lost. The cause names the call that noticed it.
func (rt *Runtime) Err() error {
	if rt.none() {
		return none("runtime")
	}
	return rt.core.Lost()
}

// Pinned returns a pinned buffer of n bytes, from the context's pool, which is
// the caller's to close or to move. A miss takes it from the driver
// (cuMemHostAlloc), which is set-up: Reserve fills the pool ahead. At the bound of
// pinned memory the error matches pinned.ErrLimit, on a closed runtime
// driver.ErrClosed, and on a lost context ErrLost.
func (rt *Runtime) Pinned(n int) (*pinned.Buffer, error) {
	if rt.none() {
		return nil, none("runtime")
	}
	if err := rt.pin(); err != nil { // the context stays for the call
		return nil, err
	}
	defer rt.unpin()
	return rt.pinned.Take(n)
}

// Reserve makes the pool hold at least count idle buffers of n bytes. It is
// set-up, and fails as Pinned does.
func (rt *Runtime) Reserve(count, n int) error {
	if rt.none() {
		return none("runtime")
	}
	if err := rt.pin(); err != nil {
		return err
	}
	defer rt.unpin()
	return rt.pinned.Reserve(count, n)
}

// WithSession opens a session on a stream of its own, calls f, and closes the
// session, also when f panics. f may publish: the publications outlive it.
func (rt *Runtime) WithSession(f func(*Session) error) error {
	s, err := rt.OpenSession(nil)
	if err != nil {
		return err
	}
	defer s.Close() // which has no errors
	return f(s)
}

// pin keeps runtime and context for a session or a record.
func (rt *Runtime) pin() error {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	switch c := rt.conditionLocked(); {
	case runtimeTable.Begin[c] != refuses:
		rt.pins++
		return nil
	case c == runtimeClosed:
		return unusable("runtime", driver.ErrClosed)
	default:
		return &lostError{rt.core.Lost()}
	}
}

// retain keeps what a record or session has pinned already.
func (rt *Runtime) retain() {
	rt.mu.Lock()
	rt.pins++
	rt.mu.Unlock()
}

// unpin makes no driver call.
func (rt *Runtime) unpin() {
	rt.mu.Lock()
	rt.pins--
	last := rt.pins == 0
	rt.mu.Unlock()
	if last {
		rt.held.end()
	}
}

// drains is how often an admission drains, beside another drain, before it is
// refused.
const drains = 128

// admit reserves a retirement slot and bytes, after one look at what completed
// if none are left, and pins the runtime.
func (rt *Runtime) admit(t *retirequeue.Ticket, bytes int64) error {
	if err := rt.pin(); err != nil {
		return err
	}
	err := rt.reserve(func() error { return rt.queue.Admit(t, bytes) })
	if err != nil {
		rt.unpin()
	}
	return err
}

// reserve takes room in the queue, after one look at what completed if there is
// none.
func (rt *Runtime) reserve(take func() error) error {
	err := take()
	for i := 0; err != nil && i < drains && !errors.Is(err, retirequeue.ErrNever); i++ {
		// What the watcher is looking at, our own drain does not see.
		beside := rt.queue.Draining()
		rt.Drain()
		beside = beside || rt.queue.Draining()
		rt.hungry.Store(true) // before the last try: what comes free behind it is told
		if err = take(); !beside {
			break
		}
		runtime.Gosched()
	}
	return err
}

// freed is told whenever a slot or bytes came free. Only a refusal makes that
// news: else a try that gives its own slot back would wake itself.
func (rt *Runtime) freed() {
	if rt.hungry.Swap(false) {
		rt.slots.Signal()
	}
}

// Drain releases what was retired and is known to be done, after one look at
// each stream, and returns how many owners were released meanwhile. It never
// waits. The watcher drains too: programs need not call it.
func (rt *Runtime) Drain() int {
	if rt.none() {
		return 0
	}
	before := rt.queue.Stats().Released
	rt.watcher.Look()
	rt.bury()
	rt.queue.Drain()
	return rt.queue.Stats().Released - before
}

func (rt *Runtime) watch() { rt.watcher.Add((*drain)(rt)) }

// drain is the runtime as the watcher sees it.
type drain Runtime

func (d *drain) Poll() (progress, more bool) { return (*Runtime)(d).look() }

// look is the watcher's look at the runtime. It only queries and releases: what
// may block while the process is stalled, such as the record of a fence, is
// done on a goroutine of its own, so that nobody waits for it.
func (rt *Runtime) look() (progress, more bool) {
	if !rt.left.empty() && rt.burying.CompareAndSwap(false, true) {
		rt.watcher.Go(func() {
			rt.bury()
			rt.burying.Store(false)
		})
	}
	released := rt.queue.Drain()
	rt.mu.Lock()
	quiet := rt.quiet // who asks from here on is answered by another look
	rt.quiet = nil
	rt.mu.Unlock()
	// In this order: what is being ended enters the queue before it is uncounted.
	more = rt.unburied.Load() > 0
	more = rt.queue.Stats().Pending > 0 || more
	if more {
		rt.mu.Lock()
		rt.quiet = append(rt.quiet, quiet...)
		rt.mu.Unlock()
		return released > 0, true
	}
	for _, ch := range quiet {
		close(ch)
	}
	return released > 0, false
}

// bury ends what became garbage without a close, or could not be fenced.
func (rt *Runtime) bury() {
	for r := rt.left.take(); r != nil; {
		next := r.next
		r.next = nil
		r.bury()
		rt.unburied.Add(-1)
		r = next
	}
}

// Close ends the runtime: it refuses new work and returns at once. What is
// alive stays usable: publications and transfers pin what they need. Closing
// twice does nothing.
func (rt *Runtime) Close() error {
	if rt.none() {
		return nil
	}
	rt.mu.Lock()
	act := runtimeTable.Close[rt.conditionLocked()]
	rt.closed = true
	rt.mu.Unlock()
	if act == ends {
		rt.ended.Signal() // who waits for room gets none
		rt.unpin()
	}
	return nil
}

// Shutdown closes the runtime, which refuses new work from then on, and waits
// until everything that was retired is released. The end of ctx ends the wait
// alone, with ctx.Err(). It fails when something is still open (driver.ErrBusy),
// or was retained because the device may still touch it, and says what; it
// may be called again. Pinned buffers and streams are the context's: its Shutdown
// tells of them.
func (rt *Runtime) Shutdown(ctx context.Context) error {
	if rt.none() {
		return nil
	}
	rt.Close()
	quiet := outside.Chan()
	rt.mu.Lock()
	rt.quiet = append(rt.quiet, quiet)
	rt.mu.Unlock()
	rt.watch()
	select {
	case <-quiet:
	case <-ctx.Done():
		return ctx.Err()
	}
	return rt.leftovers()
}

func (rt *Runtime) leftovers() error {
	s := rt.Stats()
	var errs []error
	if s.Sessions > 0 || s.Queue.Reserved > 0 {
		text := fmt.Sprintf("publish: %d sessions and %d values, publications and transfers were never closed", s.Sessions, s.Queue.Reserved)
		for _, o := range s.Origins {
			if o.Fate == "open" {
				text += "\n" + o.String()
			}
		}
		errs = append(errs, own.StillOpen("%s", text))
	}
	if s.Queue.Permanent > 0 {
		errs = append(errs, fmt.Errorf("publish: %d owners of %d bytes are retained for good, the first since: %w", s.Queue.Permanent, s.Queue.PermanentBytes, s.Queue.Cause))
	}
	return errors.Join(errs...)
}

// Stats are a runtime's counters, with those of what its context shares.
type Stats struct {
	Sessions  int               // open
	Abandoned int               // sessions, values, publications and transfers that became garbage, ever
	Leaked    int               // leaked on purpose, ever
	Origins   []Origin          // with Config.Stacks: of what is open, abandoned or leaked
	Panics    int               // in release functions of adopted memory, ever
	Queue     retirequeue.Stats // Reserved and Pending are what Config.Slots bounds
	Memory    memory.Stats      // of the context
	Pinned    pinned.Stats      // of the context
	Events    event.Stats       // of the context
}

// Stats returns the counters at this instant.
func (rt *Runtime) Stats() Stats {
	if rt.none() {
		return Stats{}
	}
	rt.mu.Lock()
	sessions := rt.sessions
	rt.mu.Unlock()
	return Stats{
		Sessions: sessions, Abandoned: int(rt.abandons.Load()), Leaked: int(rt.leaked.Load()), Panics: int(rt.panics.Load()), Origins: rt.origins.list(), Queue: rt.queue.Stats(),
		Memory: rt.mem.Stats(), Pinned: rt.pinned.Stats(), Events: event.PoolOf(rt.core).Stats(),
	}
}

// list is a lock-free list of records, which cleanups push too.
type list struct{ head atomic.Pointer[record] }

func (l *list) push(r *record) {
	for {
		r.next = l.head.Load()
		if l.head.CompareAndSwap(r.next, r) {
			return
		}
	}
}

func (l *list) take() *record { return l.head.Swap(nil) }

func (l *list) empty() bool { return l.head.Load() == nil }
