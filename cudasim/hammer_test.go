package cudasim

import (
	"runtime"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Many goroutines with a stream each, some held and released by another one,
// free everything they made.
func TestHammer(t *testing.T) {
	r := newRig(t, Config{HardwareQueues: 64})
	pl := r.pool()
	stop := make(chan struct{})
	var work, holder sync.WaitGroup
	streams := make([]cuapi.Stream, 16)
	for i := range streams {
		streams[i] = r.stream()
	}
	holder.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				h := uintptr(streams[i%len(streams)])
				r.sim.Hold(h)
				runtime.Gosched()
				r.sim.Release(h)
			}
		}
	})
	for _, st := range streams {
		work.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			must := func(results ...cuapi.Result) {
				for i, got := range results {
					if got != cuapi.Success {
						t.Errorf("call %d: %d", i, got)
					}
				}
			}
			var ev cuapi.Event
			var host cuapi.HostPtr
			must(r.CtxSetCurrent(r.ctx), r.EventCreate(&ev, 0), r.MemHostAlloc(&host, 64, 0))
			for i := range 50 {
				var dev cuapi.DevicePtr
				must(r.MemAllocFromPoolAsync(&dev, 64, pl, st), r.MemsetD8Async(dev, byte(i), 64, st),
					r.MemcpyDtoHAsync(host, dev, 64, st), r.MemFreeAsync(dev, st), r.EventRecord(ev, st), r.EventSynchronize(ev))
				if got := hostBytes(host, 64)[63]; got != byte(i) {
					t.Errorf("got %d, want %d", got, byte(i))
				}
			}
			must(r.EventDestroy(ev), r.MemFreeHost(host), r.CtxSetCurrent(0))
		})
	}
	work.Wait()
	close(stop)
	holder.Wait()
	for _, st := range streams {
		r.ok(r.StreamDestroy(st))
	}
	r.ok(r.MemPoolDestroy(pl))
	r.ok(r.DevicePrimaryCtxRelease(0))
	if err := r.sim.Close(); err != nil {
		t.Error(err)
	}
}
