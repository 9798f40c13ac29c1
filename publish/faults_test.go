package publish_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// Faults that users met in similar libraries, each as a class: the tests are
// named after their numbers in the project's list of them. Number 10 is the
// leases', 5 and 6 are the driver's; 11, 12 and 21 are in fault_test.go.

// After a launch failure every call fails: everything closes all the same.
func TestFault01ClosingAfterEveryCallFails(t *testing.T) {
	var failing atomic.Bool
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if failing.Load() && !cleanup[c.ID] {
			return cuapi.LaunchFailed
		}
		return next()
	}
	onEach(t, options{around: around, alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		s := r.session()
		p, _ := r.publication(s, 64)
		q, _ := r.publication(s, 64)
		tr, err := q.DownloadInto(r.buffer(make([]byte, 64)))
		must(t, err)
		v := r.uploaded(s, random(64))
		buf := r.buffer(make([]byte, 64))
		failing.Store(true)
		if _, err := s.Alloc(publish.U8, 64); !errors.Is(err, driver.ErrLaunchFailed) {
			t.Error(err)
		}
		<-r.rt.Lost()
		for _, c := range []interface{ Close() error }{p, tr, v, buf, s, p, tr, v, buf, s} {
			must(t, c.Close())
		}
		if err := r.rt.Shutdown(r.within()); !errors.Is(err, driver.ErrLaunchFailed) {
			t.Error(err)
		}
		if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrLaunchFailed) {
			t.Error(err)
		}
		if err := r.rt.Err(); !errors.Is(err, driver.ErrLaunchFailed) {
			t.Error(err)
		}
		failing.Store(false)
	})
}

// A poll that meets an error tells it, and not "not yet".
func TestFault02APollTellsTheError(t *testing.T) {
	f := &trip{}
	onEach(t, options{around: f.around, alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		p, err := s.Publish(v)
		must(t, err)
		f.next(cuapi.IDEventQuery, cuapi.IllegalAddress, false)
		if ready, err := p.FrontierReady(); ready || !errors.Is(err, driver.ErrIllegalAddress) {
			t.Errorf("on the poll that met it: %v, %v", ready, err)
		}
		f.stop(t)
		if ready, err := p.FrontierReady(); ready || !errors.Is(err, driver.ErrIllegalAddress) {
			t.Errorf("on the next one: %v, %v", ready, err)
		}
	})
}

// addresses takes n buffers, overwrites them, and returns where they were.
func (r *rig) addresses(n, size int) map[uintptr]bool {
	r.t.Helper()
	all := map[uintptr]bool{}
	var held []*pinned.Buffer
	for range n {
		b := r.buffer(bytes.Repeat([]byte{0xEE}, size))
		held = append(held, b)
		all[addressOf(b.Bytes())] = true
	}
	for _, b := range held {
		must(r.t, b.Close())
	}
	return all
}

// A second upload, and more, leave the source of the first alone.
func TestFault03UploadsLeaveEachOthersSources(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s := r.session()
		first, second := random(4096), random(4096)
		v, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		w, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		a, b := r.buffer(first), r.buffer(second)
		at := addressOf(a.Bytes())
		release := r.hold(s)
		calls := r.trace(func() {
			ta, err := s.Upload(v, a)
			must(t, err)
			must(t, ta.Close())
			tb, err := s.Upload(w, b)
			must(t, err)
			must(t, tb.Close())
			if r.addresses(20, 4096)[at] {
				t.Error("the source of an upload in flight was handed out")
			}
		})
		if callsOf(calls, cuapi.IDMemFreeHost)+callsOf(calls, cuapi.IDMemFreeAsync) > 0 {
			t.Error("freed in flight")
		}
		pv, err := s.Publish(v)
		must(t, err)
		pw, err := s.Publish(w)
		must(t, err)
		release()
		must(t, s.Close())
		r.download(pv, first)
		r.download(pw, second)
	})
}

// What a copy reads or writes is not within the caller's reach.
func TestFault04ABufferInFlightIsOutOfReach(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		data := random(64)
		src, dst := r.buffer(data), r.buffer(make([]byte, 64))
		release := r.hold(s)
		up, err := s.Upload(v, src)
		must(t, err)
		p, err := s.Publish(v)
		must(t, err)
		down, err := p.DownloadInto(dst)
		must(t, err)
		for name, b := range map[string]*pinned.Buffer{"source": src, "target": dst} {
			if b.Bytes() != nil || !errors.Is(b.Err(), driver.ErrMoved) || b.Len() != 64 {
				t.Errorf("the %s is within reach: %v", name, b.Err())
			}
			must(t, b.Close()) // and stays so
		}
		release()
		r.finish(up, data)
		r.finish(down, data)
		if src.Bytes() != nil || dst.Bytes() != nil {
			t.Error("a stale handle came back to life")
		}
		must(t, s.Close())
	})
}

// There is no way into the device, or out of it, for ordinary memory: nothing
// but pinned buffers is taken, and there is no synchronous copy to call.
func TestFault08NoRouteTakesOrdinaryMemory(t *testing.T) {
	for _, f := range exported(t) {
		for _, p := range append(slices.Clone(f.params), f.results...) {
			for _, word := range []string{"[]byte", "[]uint8", "[]float", "unsafe.", "uintptr", "io.", "any", "interface"} {
				if strings.Contains(p, word) && f.name != "Session.Raw" { // the driver's stream
					t.Errorf("%s has a %s", f.name, p)
				}
			}
		}
	}
	for _, e := range cuapi.Entries {
		if n := e.Symbol(); (strings.HasPrefix(n, "cuMemcpy") || strings.HasPrefix(n, "cuMemset")) && !strings.Contains(n, "Async") {
			t.Errorf("%s is in no stream's order", n)
		}
	}
}

// A cancelled wait frees nothing: the next one delivers.
func TestFault09ACancelledWaitKeepsTheBuffers(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s := r.session()
		release := r.hold(s)
		p, want := r.publication(s, 4096)
		buf := r.buffer(make([]byte, 4096))
		at := addressOf(buf.Bytes())
		tr, err := p.DownloadInto(buf)
		must(t, err)
		calls := r.trace(func() {
			for range 3 {
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if out, err := tr.Wait(ctx); out != nil || err != context.Canceled {
					t.Errorf("a cancelled wait: %v, %v", out, err)
				}
			}
			if r.addresses(20, 4096)[at] {
				t.Error("the target of a download in flight was handed out")
			}
		})
		if callsOf(calls, cuapi.IDMemFreeHost)+callsOf(calls, cuapi.IDMemFreeAsync) > 0 {
			t.Error("freed in flight")
		}
		must(t, tr.Err())
		release()
		r.finish(tr, want)
		must(t, s.Close())
	})
}

// The source of an upload whose every handle is garbage stays until the copy is
// done.
func TestFault13ACollectedSourceStays(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		want := random(4096)
		v, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		release := r.hold(s)
		var at uintptr
		func() {
			src := r.buffer(want)
			at = addressOf(src.Bytes())
			_, err := s.Upload(v, src)
			must(t, err)
		}()
		collect(t, func() bool { return r.rt.Stats().Abandoned == 1 })
		for range 5 {
			runtime.GC()
			if r.addresses(20, 4096)[at] {
				t.Fatal("the source of an upload in flight was handed out")
			}
		}
		p, err := s.Publish(v)
		must(t, err)
		release()
		r.download(p, want)
		must(t, s.Close())
	})
}

// The pinned pool has a bound, which is an error and no crash.
func TestFault14ThePinnedPoolIsBounded(t *testing.T) {
	onEach(t, options{cfg: publish.Config{PinnedBytes: 64 << 10}}, func(r *rig) {
		t := r.t
		var all []*pinned.Buffer
		var err error
		for range 100 {
			var b *pinned.Buffer
			if b, err = r.rt.Pinned(4096); err != nil {
				break
			}
			all = append(all, b)
		}
		if !errors.Is(err, pinned.ErrLimit) || len(all) != 16 {
			t.Fatalf("after %d buffers: %v", len(all), err)
		}
		if held := r.rt.Stats().Pinned.Held; held > 64<<10 {
			t.Errorf("%d bytes are held", held)
		}
		if err := r.rt.Reserve(1, 4096); !errors.Is(err, pinned.ErrLimit) {
			t.Error(err)
		}
		for range 100 { // what comes back is used again
			must(t, all[0].Close())
			all[0], err = r.rt.Pinned(4096)
			must(t, err)
		}
		for _, b := range all {
			must(t, b.Close())
		}
	})
}

// A capturing stream publishes nothing, and nobody asks for what it captures:
// the capture ends well, while another stream is waited for.
func TestFault16NothingBreaksACapture(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s, busy := r.session(), r.session()
		v, want := r.produce(s, random(64))
		raw, err := s.Raw()
		must(t, err)
		release := r.hold(busy)
		waited, wantWaited := r.publication(busy, 64)
		done := waited.Done() // the watcher looks from here on
		mend := capturing(&attempt{r: r, s: s})
		calls := r.trace(func() {
			if _, err := s.Publish(v); !errors.Is(err, publish.ErrCapturing) || v.Err() != nil {
				t.Error(err)
			}
			for range 100 {
				r.rt.Drain()
				if ready, err := waited.FrontierReady(); ready || err != nil {
					t.Fatal(ready, err)
				}
			}
		})
		for _, c := range calls {
			if c.ID == cuapi.IDStreamQuery && c.Args[0] == uint64(raw) {
				t.Error("a capturing stream was queried")
			}
		}
		release()
		<-done
		mend() // which fails if anything spoiled the capture
		p, err := s.Publish(v)
		must(t, err)
		r.download(p, want)
		r.download(waited, wantWaited)
		must(t, s.Close())
		must(t, busy.Close())
	})
}

// Memory is used again only behind the fence, not once it is submitted: what was
// closed is neither handed out nor written meanwhile.
func TestFault17ReuseIsBehindTheFence(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s, other := r.session(), r.session()
		want := random(4096)
		v, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		out, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		src := r.buffer(want)
		at := addressOf(src.Bytes())
		release := r.hold(s)
		var up *publish.Transfer
		uploaded := r.trace(func() {
			up, err = s.Upload(v, src)
			must(t, err)
		})
		must(t, s.Launch(r.inc, kernel.Grid(4096), publish.In(v), publish.Out(out), kernel.U32(4096)))
		p, err := s.Publish(out)
		must(t, err)
		calls := r.trace(func() {
			must(t, up.Close()) // all submitted
			must(t, v.Close())
			r.rt.Drain()
			if r.addresses(20, 4096)[at] {
				t.Error("host memory was handed out ahead of its fence")
			}
			for range 20 { // they would overwrite v's memory
				w := r.uploaded(other, bytes.Repeat([]byte{0xEE}, 4096))
				must(t, w.Close())
			}
			must(t, other.Synchronize(r.within()))
		})
		targets := func(calls []cuapi.Call) (all []uint64) {
			for _, c := range calls {
				if c.ID == cuapi.IDMemcpyHtoDAsync {
					all = append(all, c.Args[0])
				}
			}
			return all
		}
		written := targets(calls)
		if len(written) != 20 || slices.Contains(written, targets(uploaded)[0]) {
			t.Errorf("device memory was handed out ahead of its fence: %#x of %#x", targets(uploaded), written)
		}
		release()
		for i := range want {
			want[i]++
		}
		r.download(p, want)
		r.settle()
		if q := r.rt.Stats().Queue; q.Pending != 0 || q.Permanent != 0 {
			t.Errorf("%+v", q)
		}
		must(t, s.Close())
		must(t, other.Close())
	})
}

// Giving pinned memory back calls no driver while a stream waits for the host.
func TestFault18PinnedMemoryIsGivenBackToThePool(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s, other := r.session(), r.session()
		buf, spare := r.buffer(random(64)), r.buffer(random(1<<20))
		release := r.hold(s)
		pending, wantPending := r.publication(s, 64)
		calls := r.trace(func() {
			must(t, spare.Close())
			p, want := r.publication(other, 64)
			if ready, err := pending.FrontierReady(); ready || err != nil {
				t.Error(ready, err)
			}
			r.download(p, want)
			must(t, buf.Close())
			q, _ := r.publication(other, 64)
			must(t, q.Close())
			r.rt.Drain()
		})
		stalls(t, calls)
		if n := callsOf(calls, cuapi.IDMemFreeHost); n > 0 {
			t.Errorf("%d calls of cuMemFreeHost", n)
		}
		release()
		r.download(pending, wantPending)
		must(t, s.Close())
		must(t, other.Close())
	})
}

// A thousand waits cost no thread each.
func TestFault23AThousandWaiters(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		release := r.hold(s)
		p, want := r.publication(s, 64)
		tr, err := func() (*publish.Transfer, error) {
			q, _ := r.publication(s, 64)
			return q.DownloadInto(r.buffer(make([]byte, 64)))
		}()
		must(t, err)
		threads := pprof.Lookup("threadcreate")
		before := threads.Count()
		const n = 1000
		var begun, woken atomic.Int64
		var all sync.WaitGroup
		ctx := r.within()
		for i := range n {
			all.Go(func() {
				begun.Add(1)
				if i%2 == 0 {
					if err := p.AwaitFrontier(ctx); err != nil {
						t.Error(err)
					}
				} else if out, err := tr.Wait(ctx); err == nil {
					out.Close()
				} else if !errors.Is(err, driver.ErrMoved) { // one of them has the buffer
					t.Error(err)
				}
				woken.Add(1)
			})
		}
		for begun.Load() < n {
			runtime.Gosched()
		}
		if woken.Load() != 0 {
			t.Errorf("%d woke behind a held stream", woken.Load())
		}
		if more := threads.Count() - before; more > runtime.GOMAXPROCS(0)+4 {
			t.Errorf("%d threads for %d waits", more, n)
		}
		release()
		all.Wait()
		r.download(p, want)
		must(t, s.Close())
	})
}
