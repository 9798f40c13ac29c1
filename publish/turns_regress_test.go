package publish_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A wait is a call that waits with a context, which counts how often it parked.
type wait struct {
	context.Context
	cancel context.CancelFunc
	parks  atomic.Int64
	done   chan error
}

func (w *wait) Done() <-chan struct{} {
	w.parks.Add(1)
	return w.Context.Done()
}

// wait begins a wait, and returns once it is parked or over.
func (r *rig) wait(f func(context.Context) error) *wait {
	w := &wait{done: make(chan error, 1)}
	w.Context, w.cancel = context.WithCancel(r.within())
	go func() { w.done <- f(w) }()
	w.parked(1)
	return w
}

// parked returns once the wait has parked n times, or is over.
func (w *wait) parked(n int64) {
	for w.parks.Load() < n && len(w.done) == 0 {
		runtime.Gosched()
	}
}

// refused checks that the wait ends for that reason, and for no other.
func (w *wait) refused(t testing.TB, want error) {
	t.Helper()
	var rejected *publish.RejectedError
	if err := <-w.done; !errors.Is(err, want) || !errors.As(err, &rejected) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, want)
	}
}

// A clock counts the watcher's looks.
type clock struct {
	looks atomic.Int64
	over  atomic.Bool
}

func (c *clock) Poll() (progress, more bool) {
	c.looks.Add(1)
	return false, !c.over.Load()
}

// looks returns after n looks of the watcher.
func (r *rig) looks(n int64) {
	c := new(clock)
	stream.WatcherOf(wire.ContextOf(r.ctx)).Add(c)
	for c.looks.Load() < n {
		runtime.Gosched()
	}
	c.over.Store(true)
}

// stays checks that nothing wakes the wait.
func (r *rig) stays(w *wait) {
	r.t.Helper()
	before := w.parks.Load()
	r.looks(100)
	if n := w.parks.Load() - before; n > 1 || len(w.done) > 0 {
		r.t.Errorf("tried %d times in 100 looks, though nothing came free; over: %v", n, len(w.done) > 0)
	}
}

// A gate holds up the first call of an entry point after it was armed.
type gate struct {
	armed     atomic.Bool
	held, let chan struct{}
}

func newGate() *gate { return &gate{held: make(chan struct{}), let: make(chan struct{})} }

// pass tells whether it was held up.
func (g *gate) pass() bool {
	if !g.armed.CompareAndSwap(true, false) {
		return false
	}
	close(g.held)
	<-g.let
	return true
}

// fill enqueues until the session's stream, which is held, is full.
func (r *rig) fill(s *publish.Session, v *publish.Value) {
	for r.launch(s, v) == nil {
	}
}

func (r *rig) launchContext(s *publish.Session, v *publish.Value) func(context.Context) error {
	return func(ctx context.Context) error {
		return s.LaunchContext(ctx, r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
	}
}

func allocContext(s *publish.Session, n int) func(context.Context) error {
	return func(ctx context.Context) error {
		v, err := s.AllocContext(ctx, publish.U8, n)
		return errors.Join(err, v.Close())
	}
}

// Memory that another took between the look for it and the try comes back too.
func TestRoomThatAnotherTook(t *testing.T) {
	var hook atomic.Pointer[func()]
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		res := next()
		if c.ID == cuapi.IDStreamQuery {
			if f := hook.Swap(nil); f != nil {
				(*f)()
			}
		}
		return res
	}})
	s, other := r.session(), r.session()
	v, err := other.Alloc(publish.U8, 40<<20)
	must(t, err)
	must(t, other.Synchronize(r.within()))
	w := r.wait(allocContext(s, 40<<20))
	var x *publish.Value
	take := func() { x, err = other.Alloc(publish.U8, 40<<20) }
	hook.Store(&take)
	must(t, v.Close())
	w.parked(2)
	if len(w.done) > 0 {
		t.Fatalf("a wait ended while another holds the memory: %v", <-w.done)
	}
	must(t, err)
	must(t, x.Close())
	must(t, <-w.done)
	must(t, s.Close())
	must(t, other.Close())
}

// A close that waits for a capture to end wakes nobody.
func TestRoomBesideAPostponedClose(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}})
	a, b, s := r.session(), r.session(), r.session()
	big, err := a.Alloc(publish.U8, 40<<20)
	must(t, err)
	v, err := b.Alloc(publish.U8, 64)
	must(t, err)
	must(t, a.Synchronize(r.within()))
	addr, free := r.foreign(64)
	late, err := s.Adopt(addr, publish.U8, []int{64}, free)
	must(t, err)
	raw, err := s.Raw()
	must(t, err)
	release := r.hold(b)
	r.fill(b, v)
	waits := []*wait{r.wait(allocContext(a, 40<<20)), r.wait(r.launchContext(b, v))}
	table, g := r.sim.Table(), new(cuapi.Graph)
	table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
	must(t, late.Close())
	for _, w := range waits {
		r.stays(w)
		w.cancel()
		w.refused(t, context.Canceled)
	}
	table.StreamEndCapture(cuapi.Stream(raw), g)
	table.GraphDestroy(*g)
	release()
	must(t, big.Close())
	must(t, v.Close())
	must(t, a.Close())
	must(t, b.Close())
	must(t, s.Close())
}

// A Synchronize does not hold up what a close of its session ends.
func TestRoomOfASessionThatSynchronizes(t *testing.T) {
	var records atomic.Int64
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventRecord {
			records.Add(1)
		}
		return next()
	}})
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	release := r.hold(s)
	must(t, r.launch(s, v))
	before := records.Load()
	synced := make(chan error, 1)
	go func() { synced <- s.Synchronize(r.within()) }()
	for records.Load() == before {
		runtime.Gosched()
	}
	r.fill(s, v)
	w := r.wait(r.launchContext(s, v))
	must(t, s.Close())
	w.refused(t, driver.ErrClosed)
	if len(synced) > 0 {
		t.Errorf("synchronized with what is held: %v", <-synced)
	}
	release()
	must(t, <-synced)
	must(t, v.Close())
}

// A move of what would get the room ends the wait for it.
func TestRoomForWhatMoves(t *testing.T) {
	t.Run("download", func(t *testing.T) {
		r := newRig(t, options{cfg: publish.Config{Bytes: 200}})
		s := r.session()
		v, err := s.Alloc(publish.U8, 100)
		must(t, err)
		p, err := s.Publish(v)
		must(t, err)
		hog, err := s.Alloc(publish.U8, 50)
		must(t, err)
		big, small := r.spare(100), r.buffer(make([]byte, 10))
		w := r.wait(func(ctx context.Context) error { _, err := p.DownloadIntoContext(ctx, big); return err })
		tr, err := p.DownloadRange(small, 0, 10)
		must(t, err)
		w.refused(t, driver.ErrMoved)
		must(t, hog.Close())
		b, err := tr.Wait(r.within())
		must(t, err)
		must(t, b.Close())
		must(t, big.Close())
		must(t, s.Close())
	})
	t.Run("upload", func(t *testing.T) {
		r := newRig(t, options{cfg: publish.Config{Slots: 2}})
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		hog, err := s.Alloc(publish.U8, 64)
		must(t, err)
		buf := r.buffer(make([]byte, 64))
		w := r.wait(func(ctx context.Context) error { _, err := s.UploadContext(ctx, v, buf); return err })
		p, err := s.Publish(v)
		must(t, err)
		w.refused(t, driver.ErrMoved)
		must(t, hog.Close())
		must(t, p.Close())
		must(t, buf.Close())
		must(t, s.Close())
	})
}

// Nobody waits for memory that other code has, though some is in use here.
func TestRoomThatOthersHave(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}})
	_, free := r.deviceMemory(40 << 20)
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	r.wait(allocContext(s, 40<<20)).refused(t, driver.ErrOutOfMemory)
	must(t, v.Close())
	must(t, s.Synchronize(r.within()))
	free()
	must(t, s.Close())
}

// Without pools nobody waits for what comes back to another class.
func TestRoomOfAnotherClass(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20, NoPools: true}})
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	big, err := s.Alloc(publish.U8, 16<<20)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	must(t, big.Close())
	r.wait(allocContext(s, 32<<20)).refused(t, driver.ErrOutOfMemory)
	must(t, v.Close())
	must(t, s.Close())
}

// Two kinds of waiters, each of whose tries takes for a moment what the other
// kind wants, do not keep each other busy.
func TestRoomOfAHerd(t *testing.T) {
	var calls atomic.Int64
	r := newRig(t, options{cfg: publish.Config{Bytes: 4096}, around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDStreamIsCapturing { // of a try, not of a look
			calls.Add(1)
		}
		return next()
	}})
	a, b := r.session(), r.session()
	v, err := b.Alloc(publish.U8, 64)
	must(t, err)
	release := r.hold(b)
	r.fill(b, v)
	var waits []*wait
	for range 8 {
		buf := r.spare(64)
		waits = append(waits,
			r.wait(func(ctx context.Context) error { _, err := b.UploadContext(ctx, v, buf); return err }),
			r.wait(allocContext(a, 4096)))
	}
	r.looks(100)
	calls.Store(0)
	for _, w := range waits[:2] {
		r.stays(w)
	}
	if n := calls.Load(); n > 20 {
		t.Errorf("%d tries in 200 looks, though nothing came free", n)
	}
	for _, w := range waits {
		w.cancel()
		w.refused(t, context.Canceled)
	}
	release()
	must(t, v.Close())
	must(t, a.Close())
	must(t, b.Close())
}

// Who finds a handle busy waits for the end of that call, and parks: where it
// was refused the handle is his, where it moved it he is told so.
func TestTurnsOfABusyHandle(t *testing.T) {
	for _, download := range []bool{false, true} {
		for _, refuse := range []bool{false, true} {
			g := newGate()
			var r *rig
			var raw uintptr
			r = newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
				if c.ID != cuapi.IDStreamIsCapturing || !g.pass() || !refuse {
					return next()
				}
				table, graph := r.sim.Table(), new(cuapi.Graph)
				table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
				res := next()
				table.StreamEndCapture(cuapi.Stream(raw), graph)
				table.GraphDestroy(*graph)
				return res
			}})
			s := r.session()
			v, err := s.Alloc(publish.U8, 64)
			must(t, err)
			p, _ := r.publication(s, 64)
			raw, err = s.Raw()
			must(t, err)
			b1, b2 := r.buffer(make([]byte, 64)), r.buffer(make([]byte, 64))
			first := make(chan error, 1)
			var q *publish.Publication
			var tr1, tr2 *publish.Transfer
			g.armed.Store(true)
			go func() {
				var err error
				if download {
					tr1, err = p.DownloadInto(b1)
				} else {
					q, err = s.Publish(v)
				}
				first <- err
			}()
			<-g.held
			w := r.wait(func(ctx context.Context) (err error) {
				if download {
					tr2, err = p.DownloadIntoContext(ctx, b2)
				} else {
					tr2, err = s.UploadContext(ctx, v, b2)
				}
				return err
			})
			r.stays(w)
			close(g.let)
			if err := <-first; refuse != errors.Is(err, publish.ErrCapturing) || !refuse && err != nil {
				t.Errorf("download %v: %v", download, err)
			}
			if refuse {
				must(t, <-w.done)
			} else {
				w.refused(t, driver.ErrMoved)
			}
			must(t, errors.Join(q.Close(), tr1.Close(), tr2.Close(), p.Close(), v.Close(), b1.Close(), b2.Close(), s.Close()))
		}
	}
}

// The call that finds that the context is lost says so.
func TestLossIsToldByWhoFindsIt(t *testing.T) {
	var lost atomic.Bool
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDStreamIsCapturing && lost.Load() {
			return cuapi.IllegalAddress
		}
		return next()
	}})
	r.keep = true
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	_, err = s.Raw()
	must(t, err)
	lost.Store(true)
	if _, err = s.Publish(v); !errors.Is(err, publish.ErrLost) {
		t.Error(err)
	}
}

// running tells whether a goroutine is in the function.
func running(function string) bool {
	stacks := make([]byte, 1<<20)
	return strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), function+"(")
}
