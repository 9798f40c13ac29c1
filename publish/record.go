package publish

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/room"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/memory"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/retirequeue"
	"github.com/purecuda/purecuda/stream"
)

// A record is all that one life owns: a value, then its publication, then the
// transfer that consumes it; or an upload alone. It keeps runtime, stream,
// memory, extent and marks, so that each works after every other handle is
// gone. What refers to a life from inside refers to its record.
type record struct {
	rt   *Runtime
	lane *stream.Lane
	extent
	block   *memory.Block         // device memory; none for an upload
	adopted *adoption             // other code's memory: how it is let go
	buf     *pinned.Block         // host memory of a transfer
	n       int                   // the bytes of buf
	used    atomic.Uint64         // the last operation of the lane on the block
	taint   atomic.Pointer[error] // an operation that borrowed it failed

	origin atomic.Pointer[origin] // with Config.Stacks: of the handle that is live

	back  atomic.Bool   // the transfer gave its buffer back
	leaks atomic.Uint32 // stages that are to be leaked
	lost  bool          // an allocation that may have happened: its address is unknown
	late  bool          // closed, and not fenced yet

	val      own.Cell // of the three handles at most one is live
	pub      own.Cell
	transfer own.Cell

	frontier stream.Mark // behind the producing work
	copied   stream.Mark // behind the transfer's copy
	ended    stream.Mark // behind the last use of a value that was closed

	gone room.Room // tells that a handle was closed or moved
	idle room.Room // tells that a call with a handle is over

	ticket retirequeue.Ticket
	fence  *stream.Mark // what retirement waits for
	next   *record      // in the runtime's list of those left to be ended
}

// life is what the handles of one record are parts of: one allocation, one
// cleanup, and a stale handle stays stale.
type life struct {
	value    Value
	pub      Publication
	transfer Transfer
}

// newLife makes a record with a retirement slot for that many bytes, pinned to
// runtime and lane.
// For a value it reserves the event that letting go of it may need.
func (rt *Runtime) newLife(l *stream.Lane, forValue bool, bytes int64) (*life, error) {
	r := &record{rt: rt, lane: l}
	if err := rt.admit(&r.ticket, bytes); err != nil {
		return nil, err
	}
	l.Retain()
	if forValue {
		if err := l.Reserve(&r.ended); err != nil {
			r.cancel()
			return nil, err
		}
	}
	lf := &life{}
	lf.value = Value{r, lf}
	lf.pub = Publication{r, lf}
	lf.transfer = Transfer{r, lf}
	runtime.AddCleanup(lf, (*record).abandon, r)
	return lf, nil
}

// born notes where the handle that is live now was made.
func (r *record) born(what string) {
	if os := r.rt.origins; os != nil {
		os.end(r.origin.Swap(os.born(what)), "")
	}
}

// over notes that the caller has no handle of the record any more.
func (r *record) over(fate string) {
	if os := r.rt.origins; os != nil {
		os.end(r.origin.Swap(nil), fate)
	}
}

// unpin ends the record: it owns nothing any more.
func (r *record) unpin() {
	r.over("")
	r.lane.Unreserve(&r.ended)
	r.lane.Drop()
	r.rt.unpin()
}

// cancel ends a record that owns nothing, and gives its slot back.
func (r *record) cancel() {
	r.ticket.Cancel()
	r.unpin()
}

// abandon is the cleanup of a life: it makes no driver call.
func (r *record) abandon() {
	for _, c := range []*own.Cell{&r.val, &r.pub, &r.transfer} {
		if c.Err() == nil {
			r.rt.abandons.Add(1)
			r.over("abandoned")
			r.rt.unburied.Add(1)
			r.rt.left.push(r)
			r.rt.watch()
			return
		}
	}
}

func init() {
	wire.Cleanups = append(wire.Cleanups, func(handle any) bool {
		switch h := handle.(type) {
		case *Value:
			h.r.abandon()
		case *Publication:
			h.r.abandon()
		case *Transfer:
			h.r.abandon()
		case *Session:
			h.st.abandon()
		default:
			return false
		}
		return true
	})
}

// retire hands what the record owns to the queue, behind m.
func (r *record) retire(m *stream.Mark) {
	r.fence = m
	r.over("")
	if done, err := m.Peek(); err != nil {
		r.keep(err)
	} else if done {
		r.releaseNow()
	} else {
		r.ticket.Retire(r)
		m.Want()
		r.rt.watch()
	}
}

// releaseNow releases without the queue: the fence is known to be done.
func (r *record) releaseNow() {
	if err := r.free(); err != nil {
		r.keep(err)
		return
	}
	r.cancel()
}

// keep hands what the record owns to the permanent side.
func (r *record) keep(cause error) { r.ticket.Keep(r, cause) }

// Kept ends a record on the permanent side, however it came there: the context
// is never released, and the lane, which may still run, never used again.
func (r *record) Kept(cause error) {
	r.over("")
	if r.buf != nil {
		r.buf.Keep()
	}
	var device int64
	if r.adopted == nil && r.block != nil {
		device = r.bytes
	}
	r.rt.mem.Keep(device)
	r.rt.kept.add(r.owned(), cause)
	r.lane.Unreserve(&r.ended)
	r.lane.Keep()
	r.rt.unpin()
}

// kept counts what is retained for good in one context, so that its shutdown
// does not release it.
type kept struct {
	mu    sync.Mutex
	n     int
	bytes int64
	cause error
}

type keptKey struct{}

func keptOf(core *wire.Context) *kept {
	return core.Shared(keptKey{}, func() any {
		k := new(kept)
		core.OnShutdown(k.err)
		return k
	}).(*kept)
}

func (k *kept) add(bytes int64, cause error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.n++
	k.bytes += bytes
	if k.cause == nil {
		k.cause = cause
	}
}

func (k *kept) err() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.n == 0 {
		return nil
	}
	return fmt.Errorf("publish: %d owners of %d bytes are retained for good, the first since: %w", k.n, k.bytes, k.cause)
}

// terminal returns why what a value owns may never be released, or nil.
func (r *record) terminal() error {
	if p := r.taint.Load(); p != nil {
		return *p
	}
	return r.rt.core.Lost()
}

// use notes that the block was used by the lane's first n operations.
func (r *record) use(n uint64) {
	for old := r.used.Load(); n > old && !r.used.CompareAndSwap(old, n); old = r.used.Load() {
	}
}

// Done and Release make the record an entry of the retirement queue.
func (r *record) Done() (bool, error) { return r.fence.Peek() }

func (r *record) Release() error {
	if err := r.free(); err != nil {
		return err
	}
	r.unpin()
	return nil
}

func (r *record) free() error {
	switch {
	case r.block == nil:
	case r.adopted != nil:
		r.adopted.free()
	default:
		if err := r.rt.mem.Free(r.block); err != nil {
			return err
		}
	}
	r.block = nil
	if r.buf != nil {
		r.buf.Free()
		r.buf = nil
	}
	return nil
}

func (r *record) owned() int64 {
	var n int64
	if r.block != nil || r.lost {
		n = r.bytes
	}
	if r.buf != nil {
		n += int64(r.n)
	}
	return n
}

// closeValue, closePublication and closeTransfer are the ends of the three
// stages, when the handle's cell says that the caller must see to it.
func (r *record) closeValue() {
	c := r.value()
	if r.leaked(stageValue, valueTable.Leak.at[c]) {
		return
	}
	r.over("")
	if valueTable.Close.at[c] == keeps {
		r.keep(r.terminal())
		return
	}
	used := r.used.Load()
	if r.adopted != nil {
		used = math.MaxUint64 // other code's work counts too, and nobody counts it
	}
	m, known := r.lane.Behind(used)
	switch {
	case known:
		r.releaseNow()
		return
	case m == nil:
		m = &r.ended
		switch err := r.lane.Fence(m, used); {
		case errors.Is(err, stream.ErrCapturing):
			r.postpone() // nothing is unproven
			return
		case err != nil:
			if _, unproven := outcome(err); unproven != nil {
				err = unproven
			}
			r.keep(err)
			return
		}
	}
	r.retire(m)
}

func (r *record) closePublication() {
	r.close(stagePublication, &r.frontier, &publicationTable.Close, &publicationTable.Leak)
}

func (r *record) closeTransfer() {
	r.close(stageTransfer, &r.copied, &transferTable.Close, &transferTable.Leak)
}

func (r *record) close(stage uint32, m *stream.Mark, closes, leaks *rule) {
	m.LetGo()
	c, err := work(m)
	switch {
	case r.leaked(stage, leaks.at[c]):
	case closes.at[c] == keeps:
		r.keep(err)
	default:
		r.retire(m)
	}
}

// cause is the reason of a refusal for a failure.
func (r *record) cause(err error) error {
	if lost := r.rt.core.Lost(); lost != nil {
		return &lostError{lost}
	}
	return err
}

// postpone puts a value whose stream captures where the next drain tries again.
// The watcher is woken for the first time alone, so that its looks grow rare.
func (r *record) postpone() {
	first := !r.late
	r.late = true
	r.rt.unburied.Add(1)
	r.rt.left.push(r)
	if first {
		r.rt.watch()
	}
}

// bury ends an abandoned record as a close would, and tries a postponed one
// again.
func (r *record) bury() {
	switch {
	case r.late:
		r.closeValue()
	case r.val.Close():
		r.closeValue()
	case r.pub.Close():
		r.closePublication()
	case r.transfer.Close():
		r.closeTransfer()
	}
}

// The stages of a life, as bits.
const (
	stageValue = 1 << iota
	stagePublication
	stageTransfer
)

// leak ends a stage by retaining what the record owns, on purpose. While another
// call uses the handle, the end of that call does it.
func (r *record) leak(stage uint32, rule *rule, cell *own.Cell, end func()) {
	if cell.Err() != nil {
		return
	}
	r.leaks.Or(stage)
	release, _ := rule.enter(cell)
	r.gone.Signal()
	if release {
		end()
	}
}

// leaked retains the record if its stage was leaked and the rule keeps it.
func (r *record) leaked(stage uint32, act act) bool {
	if r.leaks.Load()&stage == 0 || act != keeps {
		return false
	}
	r.rt.leaked.Add(1)
	r.over("leaked")
	r.keep(errLeaked)
	return true
}

// takeBuffer begins the move of a caller's buffer of want bytes.
func (rt *Runtime) takeBuffer(buf *pinned.Buffer, want int64) (*own.Cell, *pinned.Block, error) {
	cell, b := wire.BufferOf(buf)
	if cell == nil {
		return nil, nil, none("buffer")
	}
	block := b.(*pinned.Block)
	if err := cell.Err(); err != nil {
		return nil, nil, unusable("buffer", err)
	}
	if block.Pool() != rt.pinned {
		return nil, nil, fmt.Errorf("buffer of another context: %w", ErrForeign)
	}
	if int64(buf.Len()) != want {
		return nil, nil, fmt.Errorf("%w: the buffer has %d bytes, the transfer %d", ErrLength, buf.Len(), want)
	}
	if err := cell.Take(); err != nil {
		return nil, nil, unusable("buffer", err)
	}
	return cell, block, nil
}

// giveBack ends a refused move of a buffer.
func giveBack(cell *own.Cell, b *pinned.Block) {
	if cell.Restore() {
		b.Free()
	}
}
