package dst

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "the seed to replay; 0: fixed seeds and a fresh one")
	stepsFlag = flag.Int("steps", 0, "how many actions; 0: a bounded number")
	worldFlag = flag.Int("world", -1, "one world of the seed alone")
	hangFlag  = flag.Duration("hang", 20*time.Second, "how long an action may take before it counts as stuck")
)

// actionsOf is how many actions a world has.
func actionsOf(w *world) int { return 200 + w.rng.IntN(1200) }

// progress is watched by a goroutine that ends the process when it stands still:
// a call of the library never waits here.
var progress struct {
	at    atomic.Int64
	world atomic.Pointer[world]
}

func watchdog(limit time.Duration) (stop func()) {
	quit := make(chan struct{})
	go func() {
		last := progress.at.Load()
		for {
			select {
			case <-quit:
				return
			case <-time.After(limit):
			}
			now := progress.at.Load()
			if now == last {
				w := progress.world.Load()
				f := &failure{w.seed, w.index, w.step, "an action does not return", w.log.String()}
				debug.SetTraceback("all")
				fmt.Printf("FOUND %v\n", f)
				panic("stuck")
			}
			last = now
		}
	}()
	return func() { close(quit) }
}

// run lives through one world, and returns what went wrong.
func run(seed, index uint64) (w *world) {
	w = newWorld(seed, index)
	progress.world.Store(w)
	defer w.guard.end()
	defer func() {
		if p := recover(); p != nil && w.found == nil {
			if _, ok := p.(stop); !ok {
				w.fail("panic: %v\n%s", p, debug.Stack())
			}
		}
	}()
	for n := actionsOf(w); w.step < n && w.found == nil; w.step++ {
		progress.at.Add(1)
		w.act()
		w.laws()
	}
	if w.found == nil {
		w.finishAll()
	}
	w.step++
	if w.found == nil {
		w.step = (w.step + 7) &^ 7
		w.laws()
	}
	if w.found == nil && w.spotless() {
		if err := w.sim.Close(); err != nil {
			w.fail("%v", err)
		}
	}
	w.stats.steps, w.stats.worlds = w.step, 1
	return w
}

// spotless tells whether nothing may be left on the simulated machine.
func (w *world) spotless() bool {
	for _, d := range w.devs {
		if d.sticky || d.stranded > 0 {
			return false
		}
		for _, rt := range d.runtimes {
			if rt.leaks > 0 {
				return false
			}
		}
	}
	return w.guard.injected == 0
}

// live runs worlds of a seed until so many actions are done.
func live(t testing.TB, seed uint64, steps int) (sum tally) {
	t.Helper()
	for index := uint64(0); sum.steps < steps; index++ {
		w := run(seed, index)
		sum.add(&w.stats)
		if w.found != nil {
			fmt.Printf("FOUND after %d steps: %v\n", sum.steps, w.found)
			t.Fatalf("%v", w.found)
		}
	}
	return sum
}

func TestMain(m *testing.M) {
	flag.Parse()
	stop := watchdog(*hangFlag)
	code := m.Run()
	stop()
	os.Exit(code)
}

// TestReplay replays what a failure prints; with no arguments, a first seed.
func TestReplay(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = 1
	}
	fmt.Printf("seed %d\n", seed)
	if *worldFlag >= 0 {
		if w := run(seed, uint64(*worldFlag)); w.found != nil {
			t.Fatal(w.found)
		}
		return
	}
	began := time.Now()
	steps := *stepsFlag
	if steps == 0 {
		steps = 20000
	}
	sum := live(t, seed, steps)
	t.Logf("%d steps in %v: %+v", sum.steps, time.Since(began), sum)
}

// TestFresh runs a seed that nobody ran before.
func TestFresh(t *testing.T) {
	seed := rand.Uint64()
	fmt.Printf("seed %d\n", seed)
	live(t, seed, 20000)
}
