package pinned_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/pinned"
)

type rig struct {
	t       *testing.T
	sim     *cudasim.Sim
	ctx     *driver.Context
	pool    *pinned.Pool
	failing atomic.Int64 // the cuMemHostAlloc that fails, from 1; 0: none
	allocs  atomic.Int64
	keep    bool // buffers are retained for good
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, sim: cudasim.New(cudasim.Config{})}
	r.sim.Table().Init(0)
	d, err := wire.NewDriver(cuapi.Intercept(r.sim.Table(), func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDMemHostAlloc && r.allocs.Add(1) == r.failing.Load() {
			return cuapi.OutOfMemory
		}
		return next()
	}), "simulator")
	must(t, err)
	dev, err := d.(*driver.Driver).Device(0)
	must(t, err)
	r.ctx, err = dev.Primary()
	must(t, err)
	r.pool = pinned.PoolOf(wire.ContextOf(r.ctx))
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		r.conserved()
		if r.keep {
			return
		}
		must(t, r.ctx.Shutdown(context.Background()))
		must(t, r.sim.Close())
	})
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) take(n int) *pinned.Buffer {
	r.t.Helper()
	b, err := r.pool.Take(n)
	must(r.t, err)
	return b
}

// conserved checks the counters against the driver's own view.
func (r *rig) conserved() {
	r.t.Helper()
	s := r.pool.Stats()
	if s.Held > s.Limit || s.InUse > s.Hits+s.Misses || s.Abandoned > s.InUse || s.InUse < 0 || s.Held < 0 {
		r.t.Errorf("%+v", s)
	}
}

func collect(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); runtime.GC() {
		if time.Now().After(end) {
			t.Fatal("never came true")
		}
	}
}

func TestLengthsAreExactAndClassesRound(t *testing.T) {
	r := newRig(t)
	for n, class := range map[int]int64{1: 4096, 4095: 4096, 4096: 4096, 4097: 8192, 8192: 8192, 1 << 20: 1 << 20, 1<<20 + 1: 2 << 20} {
		before := r.pool.Stats().Held
		b := r.take(n)
		p := b.Bytes()
		if b.Len() != n || len(p) != n || cap(p) != n {
			t.Errorf("%d bytes: Len %d, len %d, cap %d", n, b.Len(), len(p), cap(p))
		}
		p[0], p[n-1] = 1, 2
		if got := r.pool.Stats().Held - before; got != class && got != 0 {
			t.Errorf("%d bytes took %d, want a block of %d", n, got, class)
		}
		must(t, b.Close())
		other := r.take(int(class)) // the whole class is the same block
		if s := r.pool.Stats(); s.Held-before > class {
			t.Errorf("%d bytes are not of the class of %d: %+v", n, class, s)
		}
		must(t, other.Close())
	}
}

func TestAClosedBufferIsAHit(t *testing.T) {
	r := newRig(t)
	a := r.take(5000)
	at := &a.Bytes()[0]
	must(t, a.Close())
	must(t, a.Close())
	r.sim.StartTrace()
	b := r.take(6000)
	if &b.Bytes()[0] != at || len(r.sim.Trace()) != 0 {
		t.Errorf("a block of the class is idle, and %d driver calls were made", len(r.sim.Trace()))
	}
	if s := r.pool.Stats(); s.Hits != 1 || s.Misses != 1 || s.InUse != 1 || s.Held != 8192 {
		t.Errorf("%+v", s)
	}
	if a.Bytes() != nil || a.Len() != 5000 || !errors.Is(a.Err(), driver.ErrClosed) {
		t.Errorf("a closed buffer: %d bytes, %v", len(a.Bytes()), a.Err())
	}
	must(t, b.Close())
}

func TestLengthsThatNoBufferHas(t *testing.T) {
	r := newRig(t)
	for _, n := range []int{0, -1, math.MinInt} {
		if b, err := r.pool.Take(n); err == nil || b != nil || !strings.Contains(err.Error(), fmt.Sprintf("%d bytes", n)) {
			t.Errorf("Take(%d): %v", n, err)
		}
		if err := r.pool.Reserve(1, n); err == nil {
			t.Errorf("Reserve(1, %d) succeeded", n)
		}
	}
	for _, n := range []int{math.MaxInt, math.MaxInt/2 + 2, 1 << 47} {
		if _, err := r.pool.Take(n); !errors.Is(err, pinned.ErrLimit) {
			t.Errorf("Take(%d): %v", n, err)
		}
	}
	must(t, r.pool.Reserve(-1, 10))
	if s := r.pool.Stats(); s.Held != 0 {
		t.Errorf("%+v", s)
	}
}

// The bound is by bytes; reaching it is an error with the numbers, and what is
// given back can be taken again.
func TestFault14TheBoundIsAnError(t *testing.T) {
	r := newRig(t)
	r.pool.Limit(3 * 8192)
	var list []*pinned.Buffer
	for range 3 {
		list = append(list, r.take(8000))
	}
	_, err := r.pool.Take(8000)
	if !errors.Is(err, pinned.ErrLimit) {
		t.Fatal(err)
	}
	for _, want := range []string{"8000 bytes", "24576 of 24576 bytes are held", "8192 more", "0 buffers were dropped"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
	if err := r.pool.Reserve(1, 8192); !errors.Is(err, pinned.ErrLimit) {
		t.Error(err)
	}
	must(t, list[0].Close())
	list[0] = r.take(8192)
	r.pool.Limit(4096) // lower than what is held: nothing new
	if _, err := r.pool.Take(1); !errors.Is(err, pinned.ErrLimit) {
		t.Error(err)
	}
	r.pool.Limit(1 << 20)
	for _, b := range list {
		must(t, b.Close())
	}
}

func TestReserveFillsAhead(t *testing.T) {
	r := newRig(t)
	must(t, r.pool.Reserve(5, 10000))
	r.sim.StartTrace()
	var list []*pinned.Buffer
	for range 5 {
		list = append(list, r.take(9000))
	}
	if n := len(r.sim.Trace()); n != 0 {
		t.Errorf("%d driver calls after Reserve", n)
	}
	for _, b := range list {
		must(t, b.Close())
	}
	// A bound in the middle keeps what was got.
	r.pool.Limit(7 * 16384)
	if err := r.pool.Reserve(9, 16384); !errors.Is(err, pinned.ErrLimit) {
		t.Error(err)
	}
	if s := r.pool.Stats(); s.Held != 7*16384 || s.InUse != 0 {
		t.Errorf("%+v", s)
	}
}

// The i-th cuMemHostAlloc fails, for every i: its bytes return to the bound,
// and all of it is there for the next.
func TestAFailedAllocationReturnsItsBytes(t *testing.T) {
	const n = 4
	for i := int64(1); i <= n+1; i++ {
		r := newRig(t)
		r.pool.Limit(n * 4096)
		r.failing.Store(i)
		var list []*pinned.Buffer
		for {
			b, err := r.pool.Take(4096)
			if errors.Is(err, driver.ErrOutOfMemory) {
				if !strings.Contains(err.Error(), "4096 bytes") || !strings.Contains(err.Error(), "cuMemHostAlloc") {
					t.Errorf("%q", err)
				}
				continue
			}
			if errors.Is(err, pinned.ErrLimit) {
				break
			}
			must(t, err)
			list = append(list, b)
		}
		if s := r.pool.Stats(); len(list) != n || s.Held != n*4096 || s.Misses != n || s.InUse != n {
			t.Errorf("call %d: %d buffers, %+v", i, len(list), s)
		}
		if i <= n == (r.allocs.Load() == n) {
			t.Errorf("call %d: %d calls", i, r.allocs.Load())
		}
		for _, b := range list {
			must(t, b.Close())
		}
	}
}

func TestBytesAreGoneAfterAMove(t *testing.T) {
	r := newRig(t)
	b := r.take(100)
	b.Bytes()[0] = 7
	cell, block := wire.BufferOf(b)
	must(t, cell.Take())
	if b.Bytes() != nil { // the copy may be under way
		t.Error("reachable while it moves")
	}
	cell.Give()
	if b.Bytes() != nil || !errors.Is(b.Err(), driver.ErrMoved) || b.Len() != 100 {
		t.Errorf("after the move: %v", b.Err())
	}
	must(t, b.Close())
	if s := r.pool.Stats(); s.InUse != 1 {
		t.Errorf("closing a moved buffer released it: %+v", s)
	}
	back := wire.NewBuffer(block, 100).(*pinned.Buffer)
	if p := back.Bytes(); len(p) != 100 || p[0] != 7 {
		t.Error("another block came back")
	}
	if b.Bytes() != nil || !errors.Is(b.Err(), driver.ErrMoved) {
		t.Error("the stale handle came alive")
	}
	must(t, back.Close())
}

// A dropped buffer that nobody looked into is used again; one that gave its
// bytes away never is, and counts.
func TestAbandonedBuffers(t *testing.T) {
	r := newRig(t)
	r.keep = true
	r.pool.Limit(2 * 4096)
	func() {
		r.take(100)
		r.take(200).Bytes()
	}()
	collect(t, func() bool { s := r.pool.Stats(); return s.Abandoned == 1 && s.InUse == 1 })
	again := r.take(300)
	if s := r.pool.Stats(); s.Hits != 1 || s.Held != 2*4096 {
		t.Errorf("%+v", s)
	}
	if _, err := r.pool.Take(1); !errors.Is(err, pinned.ErrLimit) || !strings.Contains(err.Error(), "1 buffers were dropped") {
		t.Errorf("an abandoned buffer left the bound: %v", err)
	}
	must(t, again.Close())
	if err := r.ctx.Shutdown(context.Background()); err == nil || !strings.Contains(err.Error(), "1 buffers are retained") {
		t.Errorf("Shutdown: %v", err)
	}
	if v := r.sim.Violations(); len(v) != 0 {
		t.Error(v)
	}
}

// 64 goroutines close one buffer while collections run: one release.
func TestFault19OneRelease(t *testing.T) {
	r := newRig(t)
	stop := make(chan struct{})
	var gc sync.WaitGroup
	gc.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	for range 30 {
		b := r.take(100)
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() { b.Close() })
		}
		wg.Wait()
		if s := r.pool.Stats(); s.InUse != 0 {
			t.Fatalf("%+v", s)
		}
		x, y := r.take(100), r.take(100) // a block released twice would be both
		if &x.Bytes()[0] == &y.Bytes()[0] {
			t.Fatal("two buffers share memory")
		}
		must(t, x.Close())
		must(t, y.Close())
	}
	close(stop)
	gc.Wait()
}

func TestPoolHammer(t *testing.T) {
	r := newRig(t)
	r.pool.Limit(64 * 4096)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 300 {
				b, err := r.pool.Take(1 + (g*37+i*101)%9000)
				if errors.Is(err, pinned.ErrLimit) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				p := b.Bytes()
				for _, at := range []int{0, len(p) - 1} {
					p[at] = byte(g) // the race detector sees a shared block
				}
				if p[0] != byte(g) {
					t.Error("somebody else wrote this buffer")
				}
				b.Close()
			}
		})
	}
	wg.Wait()
	if s := r.pool.Stats(); s.InUse != 0 || s.Hits == 0 {
		t.Errorf("%+v", s)
	}
}
