package publish_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// The faults of order, of several owners and contexts, and of what is told.

// Everything is closed by a goroutine with another device's context current: it
// goes well, and that context is current behind it. The machine needs two
// devices.
func TestFault07AForeignContextIsCurrent(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Devices: 2}})
	other, end := r.elsewhere()
	foreign := wire.ContextOf(other.ctx).Raw
	table := r.sim.Table()
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	q, _ := r.publication(s, 64)
	tr, err := q.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	v, want := r.produce(s, random(64))
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with this
		if res := table.CtxPushCurrent(foreign); res != cuapi.Success {
			t.Error(res)
		}
		current := func(what string) {
			c := new(cuapi.Context)
			if res := table.CtxGetCurrent(c); res != cuapi.Success || *c != foreign {
				t.Errorf("%s: %v, and %#x is current, not %#x", what, res, *c, foreign)
			}
		}
		for name, c := range map[string]interface{ Close() error }{"publication": p, "transfer": tr} {
			if err := c.Close(); err != nil {
				t.Error(name, err)
			}
			current(name)
		}
		for range 200 { // more than the events at hand
			x, err := s.Alloc(publish.U8, 64)
			if err != nil {
				t.Error(err)
				return
			}
			if err := x.Close(); err != nil {
				t.Error(err)
			}
		}
		current("values")
		pub, err := s.Publish(v)
		if err != nil {
			t.Error(err)
			return
		}
		current("publish")
		buf, err := r.rt.Pinned(1 << 20)
		if err != nil {
			t.Error(err)
			return
		}
		current("a buffer")
		buf.Close()
		release()
		out, err := r.rt.Pinned(64)
		if err != nil {
			t.Error(err)
			return
		}
		down, err := pub.DownloadInto(out)
		if err != nil {
			t.Error(err)
			return
		}
		r.finish(down, want)
		s.Close()
		current("session")
		if err := r.rt.Shutdown(r.within()); err != nil {
			t.Error(err)
		}
		if err := r.ctx.Shutdown(r.within()); err != nil {
			t.Error(err)
		}
		current("shutdown")
	}()
	<-done
	end()
}

// An event is recorded in streams of its own context alone: what would mix two
// is refused before any call. The machine needs two devices.
func TestFault15ContextsDoNotMix(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Devices: 2}, trace: true})
	other, end := r.elsewhere()
	st, err := stream.New(r.ctx)
	must(t, err)
	s, so := r.session(), other.session()
	v, want := r.produce(s, random(64))
	calls := r.trace(func() {
		if _, err := so.Publish(v); !errors.Is(err, publish.ErrForeign) {
			t.Error(err)
		}
		if _, err := other.rt.OpenSession(st); !errors.Is(err, publish.ErrForeign) {
			t.Error(err)
		}
		if err := so.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)); !errors.Is(err, publish.ErrForeign) {
			t.Error(err)
		}
	})
	if n := enqueues(calls); len(n) > 0 {
		t.Errorf("refused after %v", n)
	}
	p, err := s.Publish(v)
	must(t, err)
	r.download(p, want)
	must(t, s.Close())
	must(t, so.Close())
	must(t, st.Close())
	end()
}

// A lost context says so at once, on each handle and with the first cause, and
// nobody gets a new runtime on it.
func TestFault20ALostContextIsTold(t *testing.T) {
	onEach(t, options{alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		s, far := r.session(), r.session()
		done, _ := r.publication(far, 64)
		must(t, done.AwaitFrontier(r.within()))
		v, err := far.Alloc(publish.U8, 64)
		must(t, err)
		r.lose()
		for range 3 {
			for what, f := range map[string]func() error{
				"a complete publication": func() error { _, err := done.FrontierReady(); return err },
				"its wait":               func() error { return done.AwaitFrontier(r.within()) },
				"another stream":         func() error { _, err := far.Publish(v); return err },
				"an allocation":          func() error { _, err := s.Alloc(publish.U8, 64); return err },
				"a buffer":               func() error { _, err := r.rt.Pinned(64); return err },
				"a session":              func() error { _, err := r.rt.OpenSession(nil); return err },
				"a new runtime":          func() error { _, err := publish.New(r.ctx, publish.Config{}); return err },
				"the runtime":            r.rt.Err,
				"the context":            r.ctx.Err,
			} {
				if err := f(); !errors.Is(err, driver.ErrIllegalAddress) {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
	})
}

// A wait that was given up holds nobody else up: other streams answer.
func TestFault22AnAbandonedWaitBlocksNobody(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s, other := r.session(), r.session()
		release := r.hold(s)
		p, want := r.publication(s, 64)
		ctx, cancel := context.WithCancel(context.Background())
		waited := make(chan error)
		go func() { waited <- p.AwaitFrontier(ctx) }()
		q, wantOther := r.publication(other, 64) // beside the wait
		must(t, q.AwaitFrontier(r.within()))
		cancel()
		if err := <-waited; err != context.Canceled {
			t.Error(err)
		}
		if ready, err := q.FrontierReady(); !ready || err != nil {
			t.Error(ready, err)
		}
		r.download(q, wantOther)
		if ready, err := p.FrontierReady(); ready || err != nil {
			t.Error(ready, err)
		}
		release()
		r.download(p, want)
		must(t, s.Close())
		must(t, other.Close())
	})
}

// Parents and children close in any order: nobody keeps the other for ever.
func TestFault24CloseInAnyOrder(t *testing.T) {
	orders := permutations(5)
	onEach(t, options{}, func(r *rig) {
		t := r.t
		for i, order := range orders {
			rt, err := publish.New(r.ctx, publish.Config{})
			must(t, err)
			st, err := stream.New(r.ctx)
			must(t, err)
			s, err := rt.OpenSession(st)
			must(t, err)
			own := *r
			own.rt = rt
			release := func() {}
			if i%10 == 0 {
				release = r.hold(s)
			}
			p, _ := own.publication(s, 64)
			q, want := own.publication(s, 64)
			tr, err := q.DownloadInto(own.buffer(make([]byte, 64)))
			must(t, err)
			closers := []interface{ Close() error }{rt, st, s, p, tr}
			for n, which := range order {
				if which == 4 && n == len(order)-1 { // the last of all delivers
					release()
					own.finish(tr, want)
				}
				must(t, closers[which].Close())
			}
			release()
			must(t, rt.Shutdown(r.within()))
			if q := rt.Stats().Queue; q.Entered != q.Released || q.Reserved != 0 {
				t.Errorf("order %v: %+v", order, q)
			}
		}
	})
}

func permutations(n int) (all [][]int) {
	if n == 0 {
		return [][]int{nil}
	}
	for _, p := range permutations(n - 1) {
		for at := range n {
			q := append([]int(nil), p[:at]...)
			all = append(all, append(append(q, n-1), p[at:]...))
		}
	}
	return all
}

// Two users of one device share its context: what belongs to it serves both, what
// belongs to one runtime says so to the other, and the context is released once
// for each time it was retained.
func TestFault25TwoUsersOfOneContext(t *testing.T) {
	var retained, released atomic.Int64
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		switch c.ID {
		case cuapi.IDDevicePrimaryCtxRetain:
			retained.Add(1)
		case cuapi.IDDevicePrimaryCtxRelease:
			released.Add(1)
		}
		return next()
	}
	onEach(t, options{around: around}, func(r *rig) {
		t := r.t
		retained.Store(1) // the rig's
		released.Store(0)
		same, err := r.device().Primary()
		must(t, err)
		if same != r.ctx {
			t.Error("a second context of one device")
		}
		rt, err := publish.New(same, publish.Config{})
		must(t, err)
		other := *r
		other.ctx, other.rt = same, rt
		s, so := r.session(), other.session()
		p, want := r.publication(s, 64)
		buf := other.buffer(make([]byte, 64)) // of the context
		tr, err := p.DownloadInto(buf)
		must(t, err)
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		if _, err := so.Publish(v); !errors.Is(err, publish.ErrForeign) {
			t.Errorf("a value of another runtime: %v", err)
		}
		q, wantOther := other.publication(so, 64)
		must(t, v.Close())
		must(t, s.Close())
		must(t, so.Close())
		must(t, r.rt.Close())
		r.finish(tr, want)
		other.download(q, wantOther)
		must(t, r.rt.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within())) // one of two users
		if err := same.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) || released.Load() != 0 {
			t.Errorf("shut down under a runtime: %v", err)
		}
		must(t, rt.Shutdown(r.within()))
		must(t, same.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within())) // once more: it is done
		if retained.Load() != released.Load() || released.Load() == 0 {
			t.Errorf("retained %d times, released %d times", retained.Load(), released.Load())
		}
	})
}

// An error names the operation, the code with its number, and the sizes and
// offsets.
func TestFault26ErrorsAreComplete(t *testing.T) {
	f := &trip{}
	onEach(t, options{around: f.around}, func(r *rig) {
		t := r.t
		r.keep = true
		tells := func(what string, err error, words ...string) {
			t.Helper()
			for _, w := range words {
				if !strings.Contains(fmt.Sprint(err), w) {
					t.Errorf("%s: %q has no %q", what, err, w)
				}
			}
		}
		s := r.session()
		p, _ := r.publication(s, 96)
		buf := r.buffer(make([]byte, 95))
		_, err := p.DownloadInto(buf)
		tells("a short buffer", err, "download", "95", "96")
		_, err = p.DownloadRange(buf, 90, 95)
		tells("a range past the end", err, "download", "95", "90", "96")
		v, err := s.Alloc(publish.U8, 96)
		must(t, err)
		_, err = s.Upload(v, buf)
		tells("a long upload", err, "upload", "95", "96")
		_, err = s.Alloc(publish.F32, 4, 0)
		tells("a shape", err, "alloc", "f32", "[4 0]")
		_, err = s.Alloc(publish.U8, 1<<20, 1<<20)
		tells("out of memory", err, "alloc", "cuMemAllocFromPoolAsync", "CUDA_ERROR_OUT_OF_MEMORY", "(2)", "1099511627776 bytes")
		_, err = s.Adopt(12345, publish.U8, []int{77}, nil)
		tells("an address", err, "adopt", "0x3039")
		must(t, buf.Close())

		buf = r.buffer(make([]byte, 96))
		f.next(cuapi.IDMemcpyHtoDAsync, cuapi.InvalidHandle, true)
		_, err = s.Upload(v, buf)
		f.stop(t)
		tells("a failed copy", err, "upload", "unproven", "cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_HANDLE", "(400)", "96 bytes")
		_, err = s.Publish(v)
		tells("a failed stream", err, "publish", "rejected", "cuMemcpyHtoDAsync", "(400)")
		f.next(cuapi.IDMemcpyDtoHAsync, cuapi.InvalidHandle, true)
		_, err = p.DownloadRange(r.buffer(make([]byte, 32)), 8, 32)
		f.stop(t)
		tells("a failed download", err, "download", "unproven", "cuMemcpyDtoHAsync", "(400)", "32 bytes")
		must(t, v.Close())
		tells("a moved publication", p.Err(), "publication", "moved")
		tells("a closed value", v.Err(), "value", "closed")
		tells("a shutdown", r.rt.Shutdown(r.within()), "retained", "bytes", "CUDA_ERROR_INVALID_HANDLE")
	})
}

// Every way to the device and back is ordered on its stream: behind a producer
// that is held nothing arrives early.
func TestFault27EveryRouteIsOrdered(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		st, err := stream.New(r.ctx)
		must(t, err)
		s, err := r.rt.OpenSession(st)
		must(t, err)
		release := r.hold(s)
		first, want := r.produce(s, random(256)) // an upload and a kernel behind the hold
		second := random(256)
		both, err := s.Alloc(publish.U8, 256)
		must(t, err)
		// A kernel and then an upload write the same memory: the later one counts.
		must(t, s.Launch(r.inc, kernel.Grid(256), publish.In(first), publish.Out(both), kernel.U32(256)))
		up, err := s.Upload(both, r.buffer(second))
		must(t, err)
		p, err := s.Publish(first)
		must(t, err)
		q, err := s.Publish(both)
		must(t, err)
		must(t, s.Close())
		part, err := p.DownloadRange(r.buffer(make([]byte, 100)), 50, 100)
		must(t, err)
		whole, err := q.DownloadInto(r.buffer(make([]byte, 256)))
		must(t, err)
		for name, tr := range map[string]*publish.Transfer{"upload": up, "range": part, "download": whole} {
			if ready, err := tr.Ready(); ready || err != nil {
				t.Errorf("%s ran ahead of its stream: %v, %v", name, ready, err)
			}
		}
		// Another stream goes on meanwhile.
		must(t, r.rt.WithSession(func(s *publish.Session) error {
			p, want := r.publication(s, 64)
			r.download(p, want)
			return nil
		}))
		release()
		r.finish(part, want[50:150])
		r.finish(whole, second)
		r.finish(up, second)
		must(t, st.Close())
	})
}
