package stream_test

import (
	"context"
	"errors"
	"runtime"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/stream"
)

// Many goroutines record, look, wait, fence and synchronize on one lane while
// it is held and released over and over.
func TestLaneHammer(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	full := func(err error) bool {
		if err != nil && !errors.Is(err, stream.ErrFull) {
			t.Error(err)
		}
		return err != nil
	}
	bound := r.within()
	var work sync.WaitGroup
	var waited, fenced atomic.Int64
	for g := range 8 {
		work.Go(func() {
			for i := range 100 {
				m, f := new(stream.Mark), new(stream.Mark)
				if full(l.Upload(r.dev, r.host, size, m)) {
					runtime.Gosched()
					continue
				}
				full(r.fill(l))
				if err := l.Fence(f, l.Issued()); err != nil {
					t.Error(err)
				}
				switch (g + i) % 4 {
				case 0:
					if err := m.Wait(bound); err != nil {
						t.Error(err)
					}
					waited.Add(1)
				case 1:
					ctx, cancel := context.WithCancel(context.Background())
					go cancel()
					if err := f.Wait(ctx); err != nil && err != context.Canceled {
						t.Error(err)
					}
				case 2:
					l.Poll()
					if _, err := m.Poll(); err != nil {
						t.Error(err)
					}
					<-f.Done()
					if done, err := f.Peek(); !done || err != nil {
						t.Errorf("woken, and the fence is %v, %v", done, err)
					}
					fenced.Add(1)
				default:
					if err := l.Synchronize(bound); err != nil {
						t.Error(err)
					}
					if done, err := m.Peek(); !done || err != nil {
						t.Errorf("synchronized, and the mark is %v, %v", done, err)
					}
				}
			}
		})
	}
	stop := make(chan struct{})
	var holder sync.WaitGroup
	holder.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			release := r.hold(l)
			for range 20 {
				runtime.Gosched()
			}
			release()
			runtime.Gosched()
		}
	})
	work.Wait()
	close(stop)
	holder.Wait()
	must(t, l.Synchronize(r.within()))
	l.Poll()
	until(t, func() bool { return !stream.WatcherOf(r.core).Running() }) // its looks borrow events
	if n, s := l.InFlight(), r.events(); n != 0 || s.InUse != 0 || waited.Load() == 0 || fenced.Load() == 0 {
		t.Errorf("%d in flight, %+v", n, s)
	}
}

// Many goroutines take, use and drop lanes: each lane has one user at a time.
func TestTakeAndDropHammer(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	var mu sync.Mutex
	used := map[cuapi.Stream]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				l, err := stream.Take(r.core)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if used[l.Handle()] {
					t.Error("one lane, two users")
				}
				used[l.Handle()] = true
				mu.Unlock()
				if err := r.fill(l); err != nil {
					t.Error(err)
				}
				mu.Lock()
				used[l.Handle()] = false
				mu.Unlock()
				l.Drop()
			}
		})
	}
	wg.Wait()
	if len(used) > 64 {
		t.Errorf("%d streams for 8 users", len(used))
	}
}

// Ten thousand goroutines wait for one mark and cost no thread each; half of
// them are cancelled at once, the others wake when the stream goes on.
func TestFault23TenThousandWaiters(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	release := r.hold(l)
	m := r.upload(l)
	threads := pprof.Lookup("threadcreate")
	before := threads.Count()
	const n = 10000
	ctx, cancel := context.WithCancel(context.Background())
	var parked, cancelled, woken atomic.Int64
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			wait := context.Background()
			if i%2 == 0 {
				wait = ctx
			}
			parked.Add(1)
			switch err := m.Wait(wait); err {
			case nil:
				woken.Add(1)
			case context.Canceled:
				cancelled.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	until(t, func() bool { return parked.Load() == n })
	if more := threads.Count() - before; more > runtime.GOMAXPROCS(0)+4 {
		t.Errorf("%d threads for %d waiters", more, n)
	}
	cancel()
	until(t, func() bool { return cancelled.Load() == n/2 })
	if woken.Load() != 0 || state(t, m) {
		t.Errorf("%d woke behind a held stream", woken.Load())
	}
	release()
	all.Wait()
	if woken.Load() != n/2 {
		t.Errorf("%d woke", woken.Load())
	}
	until(t, func() bool { return !stream.WatcherOf(r.core).Running() })
}
