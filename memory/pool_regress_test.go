package memory_test

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// A look that began while nobody waited does not undo what a wait asks for.
func TestLentBesideLooks(t *testing.T) {
	var reclaim atomic.Uint64
	r := newRig(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDMemFreeAsync {
			reclaim.Store(c.Args[1])
		}
		return next()
	})
	p := r.pool()
	lane := uintptr(reclaim.Load())
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			p.Poll() // as the look of a drain does
		}
	})
	defer wg.Wait()
	defer stop.Store(true)
	for i := range 1000 {
		b := r.alloc(p, 64)
		r.sim.Hold(lane)
		r.free(p, b)
		freed, done := r.core.Memory.Await()
		lent := p.Lent(64)
		if i%3 == 0 {
			runtime.Gosched()
		}
		r.sim.Release(lane)
		if !lent {
			t.Fatalf("round %d: what is being freed is nobody's", i)
		}
		select {
		case <-freed:
		case <-ctx.Done():
			t.Fatalf("round %d: memory came back, and nobody was told", i)
		}
		done()
	}
}
