package cudasim

import (
	"runtime"
	"testing"

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
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "calls/s")
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
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "calls/s")
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
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "calls/s")
}

func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		New(Config{})
	}
}

func check(b *testing.B, results ...cuapi.Result) {
	for i, r := range results {
		if r != cuapi.Success {
			b.Fatalf("call %d: %d", i, r)
		}
	}
}
