package watch_test

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/purecuda/purecuda/internal/watch"
)

// A source has n looks to go before it is done.
type source struct {
	n     atomic.Int64
	polls atomic.Int64
	look  func()
}

func (s *source) Poll() (progress, more bool) {
	s.polls.Add(1)
	if s.look != nil {
		s.look()
	}
	for {
		n := s.n.Load()
		if n <= 0 {
			return false, false
		}
		if s.n.CompareAndSwap(n, n-1) {
			return true, n > 1
		}
	}
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("never came true")
		}
	}
}

func TestStartsOnAddAndStopsWhenIdle(t *testing.T) {
	before := runtime.NumGoroutine()
	w := new(watch.Watcher)
	if w.Running() {
		t.Fatal("runs with nothing to do")
	}
	for range 100 {
		s := &source{}
		s.n.Store(5)
		w.Add(s)
		until(t, func() bool { return s.n.Load() == 0 && !w.Running() })
	}
	until(t, func() bool { return runtime.NumGoroutine() <= before })
}

func TestWakeStartsAndStops(t *testing.T) {
	before := runtime.NumGoroutine()
	w := new(watch.Watcher)
	w.Wake()
	until(t, func() bool { return !w.Running() && runtime.NumGoroutine() <= before })
	w.Look() // of nothing
}

// A source that was looked at to its end is dropped; Look reaches those that
// are watched, on the caller's goroutine.
func TestADoneSourceIsDropped(t *testing.T) {
	w := new(watch.Watcher)
	s := &source{}
	s.n.Store(3)
	w.Add(s)
	until(t, func() bool { return !w.Running() })
	polls := s.polls.Load()
	w.Look()
	if s.polls.Load() != polls || polls != 3 {
		t.Errorf("%d looks, %d after the end", polls, s.polls.Load())
	}
}

// A source that is added while a look at it finds nothing more is looked at
// again: the look may have been too early.
func TestAddDuringTheLastLook(t *testing.T) {
	w := new(watch.Watcher)
	s := &source{}
	var late sync.Once
	s.look = func() {
		late.Do(func() {
			w.Add(s) // in the middle of the look that says "no more"
		})
	}
	w.Add(s)
	until(t, func() bool { return !w.Running() })
	if n := s.polls.Load(); n != 2 {
		t.Errorf("%d looks, want 2", n)
	}
}

// Add races with the watcher's stopping: no source is ever lost.
func TestAddAgainstStoppingHammer(t *testing.T) {
	before := runtime.NumGoroutine()
	w := new(watch.Watcher)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 400 {
				s := &source{}
				s.n.Store(1)
				w.Add(s)
				for s.n.Load() != 0 {
					runtime.Gosched()
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(120 * time.Second):
		t.Fatal("a source was lost")
	}
	until(t, func() bool { return !w.Running() && runtime.NumGoroutine() <= before })
}

// One goroutine looks at all, never two at once.
func TestOneGoroutine(t *testing.T) {
	w := new(watch.Watcher)
	var inside, most atomic.Int64
	look := func() {
		most.Store(max(most.Load(), inside.Add(1)))
		runtime.Gosched()
		inside.Add(-1)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				s := &source{look: look}
				s.n.Store(2)
				w.Add(s)
				for s.n.Load() != 0 {
					runtime.Gosched()
				}
			}
		})
	}
	wg.Wait()
	until(t, func() bool { return !w.Running() })
	if most.Load() != 1 {
		t.Errorf("%d looks at one time", most.Load())
	}
}

// Without progress the watcher backs off to a look each millisecond; a source
// that is added meanwhile brings short intervals back.
func TestBackOffAndWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := new(watch.Watcher)
		var stop atomic.Bool
		var mu sync.Mutex
		var looks []time.Time
		s := stuck(func() bool {
			mu.Lock()
			defer mu.Unlock()
			looks = append(looks, time.Now())
			return !stop.Load()
		})
		seen := func() []time.Time {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(looks)
		}
		run := w.Held()
		w.Add(s)
		go run()
		<-time.After(100 * time.Millisecond)
		at := seen()
		n := len(at)
		if n < 64+100 || n > 64+120 {
			t.Errorf("%d looks in 100 ms", n)
		}
		if d := at[n-1].Sub(at[n-2]); d != time.Millisecond {
			t.Errorf("%v between looks in the end", d)
		}
		<-time.After(300 * time.Microsecond) // it sleeps now
		w.Add(s)
		<-time.After(10 * time.Millisecond)
		at = seen()
		if len(at) < n+64 || at[n+60].Sub(at[n]) > time.Millisecond {
			t.Errorf("%d looks in the 10 ms after a source was added", len(at)-n)
		}
		stop.Store(true)
		<-time.After(5 * time.Millisecond)
		synctest.Wait()
		if w.Running() {
			t.Error("runs on when all is done")
		}
	})
}

type stuckSource struct{ look func() bool }

func (s *stuckSource) Poll() (progress, more bool) { return false, s.look() }

func stuck(look func() bool) watch.Source { return &stuckSource{look} }

// Whoever starts the watcher, it runs outside every bubble.
func TestRunsOutsideBubbles(t *testing.T) {
	w := new(watch.Watcher)
	in := func() bool { return time.Now().Year() == 2000 } // where a bubble's clock starts
	for _, add := range []func(watch.Source){
		w.Add,
		func(s watch.Source) { synctest.Test(t, func(*testing.T) { w.Add(s) }) },
	} {
		bubbled := make(chan bool, 1)
		add(stuck(func() bool {
			bubbled <- in()
			return false
		}))
		if <-bubbled {
			t.Error("looked from inside a bubble")
		}
	}
	until(t, func() bool { return !w.Running() })
}

// What a Look finds more to look for is watched on, though the watcher, which
// looked beside it, found nothing and stopped.
func TestLookBesideTheLastLook(t *testing.T) {
	w := new(watch.Watcher)
	s := &source{}
	var looking atomic.Bool
	s.look = func() {
		if looking.CompareAndSwap(true, false) { // the Look's own
			until(t, func() bool { return !w.Running() })
			s.n.Store(2) // one for this look, one more
		}
	}
	s.n.Store(1)
	run := w.Held()
	w.Add(s)
	looking.Store(true)
	done := make(chan struct{})
	go func() { w.Look(); close(done) }()
	until(t, func() bool { return !looking.Load() })
	run() // finds nothing more
	<-done
	until(t, func() bool { return s.n.Load() == 0 && !w.Running() })
}
