package cudasim

import (
	"runtime"
	"testing"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A cycle of copy, record and query, in driver calls per second; held: the
// queues are in use.
func BenchmarkCalls(b *testing.B) {
	for _, held := range []bool{false, true} {
		name := "free"
		if held {
			name = "held"
		}
		b.Run(name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			s := New(Config{})
			t := s.Table()
			var ctx cuapi.Context
			var st, other cuapi.Stream
			var ev cuapi.Event
			var dev cuapi.DevicePtr
			var host cuapi.HostPtr
			check(b, t.Init(0), t.DevicePrimaryCtxRetain(&ctx, 0), t.CtxSetCurrent(ctx), t.StreamCreate(&st, 1),
				t.StreamCreate(&other, 1), t.EventCreate(&ev, 2), t.MemAlloc(&dev, 4096), t.MemHostAlloc(&host, 4096, 0))
			if held {
				s.Hold(uintptr(other))
			}
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				check(b, t.MemcpyDtoHAsync(host, dev, 64, st), t.EventRecord(ev, st), t.EventQuery(ev))
				n += 3
			}
			rate(b, n)
		})
	}
}

// The same cycle where a test steps.
func BenchmarkStepped(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := New(Config{Stepped: true})
	t := s.Table()
	var ctx cuapi.Context
	var st cuapi.Stream
	var ev cuapi.Event
	var dev cuapi.DevicePtr
	var host cuapi.HostPtr
	check(b, t.Init(0), t.DevicePrimaryCtxRetain(&ctx, 0), t.CtxSetCurrent(ctx), t.StreamCreate(&st, 1),
		t.EventCreate(&ev, 2), t.MemAlloc(&dev, 4096), t.MemHostAlloc(&host, 4096, 0))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		check(b, t.MemcpyDtoHAsync(host, dev, 64, st), t.EventRecord(ev, st))
		for s.Step() {
		}
		check(b, t.EventQuery(ev))
		n += 3
	}
	rate(b, n)
}

func BenchmarkPool(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := New(Config{})
	t := s.Table()
	var ctx cuapi.Context
	var st cuapi.Stream
	var pool cuapi.MemPool
	var dev cuapi.DevicePtr
	check(b, t.Init(0), t.DevicePrimaryCtxRetain(&ctx, 0), t.CtxSetCurrent(ctx), t.StreamCreate(&st, 1), t.DeviceGetDefaultMemPool(&pool, 0))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		check(b, t.MemAllocFromPoolAsync(&dev, 4096, pool, st), t.MemFreeAsync(dev, st))
		n += 2
	}
	rate(b, n)
}

// The bars: New takes less than a millisecond, and 200,000 calls a second are made
// on one core.
func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		New(Config{})
	}
	if each := b.Elapsed() / time.Duration(b.N); b.N > 100 && each > time.Millisecond {
		b.Errorf("New takes %v", each)
	}
}

// rate reports calls per second, and fails below the bar.
func rate(b *testing.B, calls int) {
	r := float64(calls) / b.Elapsed().Seconds()
	b.ReportMetric(r, "calls/s")
	if calls > 1000 && r < 200_000 {
		b.Errorf("%.0f calls a second", r)
	}
}

func check(b *testing.B, results ...cuapi.Result) {
	for i, r := range results {
		if r != cuapi.Success {
			b.Fatalf("call %d: %d", i, r)
		}
	}
}
