package outside_test

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/purecuda/purecuda/internal/outside"
)

// A bubble's clock starts in the year 2000.
func bubbled() bool { return time.Now().Year() == 2000 }

func TestGoLeavesTheBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if !bubbled() {
			t.Fatal("a bubble's clock is not what this test takes it for")
		}
		ch := outside.Chan()
		in := true
		outside.Go(func() {
			in = bubbled()
			close(ch)
		})
		<-ch
		if in {
			t.Error("ran inside the bubble")
		}
	})
}

// What one bubble waits for is closed from another, or from none.
func TestChanOfAnyBubble(t *testing.T) {
	var chs []chan struct{}
	synctest.Test(t, func(t *testing.T) {
		for range 200 { // more than the stock
			chs = append(chs, outside.Chan())
		}
	})
	for _, ch := range chs[:100] {
		close(ch)
	}
	synctest.Test(t, func(t *testing.T) {
		for _, ch := range chs[100:] {
			close(ch)
		}
		for _, ch := range chs {
			<-ch
		}
	})
}

// Each call has a channel of its own, and each function runs once.
func TestHammer(t *testing.T) {
	const callers, each = 16, 500
	before := runtime.NumGoroutine()
	var mu sync.Mutex
	seen := map[chan struct{}]bool{}
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range each {
				ch := outside.Chan()
				ran := 0
				outside.Go(func() { ran++; close(ch) })
				<-ch
				mu.Lock()
				if seen[ch] || ran != 1 {
					t.Errorf("seen %v, ran %d times", seen[ch], ran)
				}
				seen[ch] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(seen) != callers*each {
		t.Errorf("%d channels", len(seen))
	}
	for end := time.Now().Add(60 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

// A cleanup may call both, whatever bubble it was registered in.
func TestFromACleanup(t *testing.T) {
	const n = 300 // more than fits the server's queue
	var wg sync.WaitGroup
	wg.Add(n)
	synctest.Test(t, func(*testing.T) {
		for range n {
			runtime.AddCleanup(new([64]byte), func(int) {
				ch := outside.Chan()
				outside.Go(func() { close(ch); wg.Done() })
			}, 0)
		}
	})
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for end := time.Now().Add(60 * time.Second); ; runtime.GC() {
		select {
		case <-done:
			return
		default:
		}
		if time.Now().After(end) {
			t.Fatal("not all cleanups came through")
		}
	}
}

func BenchmarkChan(b *testing.B) {
	for b.Loop() {
		outside.Chan()
	}
}

func BenchmarkGo(b *testing.B) {
	for b.Loop() {
		ch := outside.Chan()
		outside.Go(func() { close(ch) })
		<-ch
	}
}
