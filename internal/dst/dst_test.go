package dst

import (
	_ "embed"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strings"
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
			if w := progress.world.Load(); w != nil && now == last {
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
	defer progress.world.Store(nil)
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
	if *seedFlag != 0 { // nothing else
		if err := flag.Set("test.run", "^TestReplay$"); err != nil {
			panic(err)
		}
	}
	stop := watchdog(*hangFlag)
	code := m.Run()
	stop()
	os.Exit(code)
}

// or returns n, or what stands for none.
func or(n, none int) int {
	if n == 0 {
		return none
	}
	return n
}

// TestReplay replays a seed: what a failure prints.
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
	sum := live(t, seed, or(*stepsFlag, 20000))
	sum.tell(t)
}

//go:embed testdata/seeds.txt
var cases string

// TestSeeds runs the worlds that found something once.
func TestSeeds(t *testing.T) {
	n := 0
	for line := range strings.Lines(cases) {
		line, why, _ := strings.Cut(strings.TrimSpace(line), "#")
		var seed, index uint64
		if line == "" {
			continue
		}
		if _, err := fmt.Sscan(line, &seed, &index); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		n++
		if w := run(seed, index); w.found != nil {
			t.Errorf("%v\nit was committed for:%s", w.found, why)
		}
	}
	if n == 0 {
		t.Error("no seeds")
	}
}

// TestFresh runs a seed that nobody ran before.
func TestFresh(t *testing.T) {
	seed := rand.Uint64()
	fmt.Printf("seed %d\n", seed)
	live(t, seed, or(*stepsFlag, 100000))
}

// TestRepeats: a world repeats, driver call for driver call.
func TestRepeats(t *testing.T) {
	seed := rand.Uint64()
	fmt.Printf("seed %d\n", seed)
	for index := range uint64(40) {
		a, b := run(seed, index), run(seed, index)
		if a.hash() != b.hash() {
			t.Fatalf("world %d of seed %d went two ways: %d and %d driver calls", index, seed, a.stats.calls, b.stats.calls)
		}
		if other := run(seed+1, index); other.hash() == a.hash() {
			t.Fatalf("world %d of seeds %d and %d are the same", index, seed, seed+1)
		}
	}
}

// TestEverythingHappens: each action, faults, losses and actions in the midst of
// others do occur.
func TestEverythingHappens(t *testing.T) {
	sum := live(t, 7, 60000)
	for i, n := range sum.actions {
		if n == 0 {
			t.Errorf("no actor ever does: %s", actions[i].name)
		}
	}
	for o, n := range sum.ends {
		if n == 0 {
			t.Errorf("no call ends so: %v", outcome(o))
		}
	}
	if sum.faults == 0 || sum.losses == 0 || sum.nested == 0 {
		t.Errorf("%d faults, %d losses, %d actions in the midst of others", sum.faults, sum.losses, sum.nested)
	}
}
