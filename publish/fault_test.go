package publish_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
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

// A slip makes one driver call fail, counted from the arming on.
type slip struct {
	mu    sync.Mutex
	armed bool
	at    int // the call that fails, from 0
	code  cuapi.Result
	after bool // the call has its effect and fails all the same
	n     int
	hit   string
}

func (f *slip) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	f.mu.Lock()
	i := f.n
	armed := f.armed && !cleanup[c.ID]
	if armed {
		f.n++
	}
	hit := armed && i == f.at
	if hit {
		f.hit = c.Name()
	}
	f.mu.Unlock()
	if !hit {
		return next()
	}
	if f.after {
		next()
	}
	return f.code
}

// cleanup are the calls that tell about an error; failing them changes nothing.
var cleanup = map[cuapi.ID]bool{cuapi.IDGetErrorString: true, cuapi.IDGetErrorName: true}

func (f *slip) arm(at int, code cuapi.Result, after bool) {
	f.mu.Lock()
	f.armed, f.at, f.code, f.after, f.n, f.hit = true, at, code, after, 0, ""
	f.mu.Unlock()
}

func (f *slip) disarm() (calls int, hit string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.armed = false
	return f.n, f.hit
}

// workflow is the whole way, and stops at the first error. Owners that stay
// with the caller are closed, as a careful program would.
func (r *rig) workflow(data []byte) (err error) {
	s, err := r.rt.OpenSession(nil)
	if err != nil {
		return err
	}
	defer s.Close()
	in, err := r.rt.Pinned(len(data))
	if err != nil {
		return err
	}
	defer in.Close()
	copy(in.Bytes(), data)
	src, err := s.Alloc(publish.U8, len(data))
	if err != nil {
		return err
	}
	defer src.Close()
	up, err := s.Upload(src, in)
	if err != nil {
		return err
	}
	defer up.Close()
	dst, err := s.Alloc(publish.U8, len(data))
	if err != nil {
		return err
	}
	defer dst.Close()
	if err := s.Launch(r.inc, kernel.Grid(len(data)), publish.In(src), publish.Out(dst), kernel.U32(uint32(len(data)))); err != nil {
		return err
	}
	pub, err := s.Publish(dst)
	if err != nil {
		return err
	}
	defer pub.Close()
	s.Close()
	if _, err := pub.FrontierReady(); err != nil {
		return err
	}
	if err := pub.AwaitFrontier(r.within()); err != nil {
		ready, err2 := pub.FrontierReady()
		return fmt.Errorf("%w (ready now: %v, %v)", err, ready, err2)
	}
	out, err := r.rt.Pinned(len(data))
	if err != nil {
		return err
	}
	defer out.Close()
	tr, err := pub.DownloadInto(out)
	if err != nil {
		return err
	}
	defer tr.Close()
	back, err := tr.Wait(r.within())
	if err != nil {
		ready, err2 := tr.Ready()
		return fmt.Errorf("%w (ready now: %v, %v)", err, ready, err2)
	}
	defer back.Close()
	for i, b := range back.Bytes() {
		if b != data[i]+1 {
			return fmt.Errorf("byte %d is wrong", i)
		}
	}
	return nil
}

// settle drains until nothing is pending and the watcher has gone.
func (r *rig) settle() {
	r.t.Helper()
	for range 1000000 {
		r.rt.Drain()
		if r.rt.Stats().Queue.Pending == 0 && !stream.WatcherOf(wire.ContextOf(r.ctx)).Running() {
			return
		}
		runtime.Gosched()
	}
	r.t.Fatalf("never drains: %+v", r.rt.Stats().Queue)
}

func TestQueueFullKeepsOwners(t *testing.T) {
	r := newRig(t, options{cfg: publish.Config{Slots: 2}})
	s := r.session()
	release := r.hold(s)
	a, err := s.Alloc(publish.U8, 16)
	must(t, err)
	b, err := s.Alloc(publish.U8, 16)
	must(t, err)
	if _, err := s.Alloc(publish.U8, 16); !errors.Is(err, publish.ErrQueueFull) {
		t.Fatal(err)
	}
	buf := r.buffer(make([]byte, 16))
	if _, err := s.Upload(a, buf); !errors.Is(err, publish.ErrQueueFull) {
		t.Fatal(err)
	}
	must(t, b.Close())
	if _, err := s.Upload(a, buf); !errors.Is(err, publish.ErrQueueFull) {
		t.Fatalf("a retired owner still takes its slot: %v", err)
	}
	release()
	up, err := s.Upload(a, buf) // one look at what completed made room
	must(t, err)
	must(t, up.Close())
	must(t, a.Close())
	must(t, s.Close())
}

func TestLeakRetainsAndCounts(t *testing.T) {
	r := newRig(t, options{})
	r.keep = true
	s := r.session()
	p, _ := r.publication(s, 64)
	p.Leak()
	p.Leak()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	v.Leak()
	q, _ := r.publication(s, 64)
	tr, err := q.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	tr.Leak()
	must(t, s.Close())
	must(t, p.Close())
	r.settle()
	if st := r.rt.Stats(); st.Leaked != 3 || st.Queue.Permanent != 3 || st.Queue.PermanentBytes != 64*4 {
		t.Fatalf("%+v", st)
	}
	if err := r.rt.Shutdown(r.within()); err == nil {
		t.Fatal("shutdown did not tell of the leaks")
	}
	if err := r.ctx.Shutdown(r.within()); err == nil {
		t.Fatal("the context was released under leaked memory")
	}
}

func TestFault12WithoutPoolsACacheServes(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{NoPools: true}})
	for range 3 {
		must(t, r.workflow(random(5000)))
	}
	if r.rt.Stats().Memory.Pools {
		t.Fatal("pools on a device that has none")
	}
}

func TestOldDriver(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Version: 11000}})
	must(t, r.workflow(random(5000)))
	err := r.drv.Supports("cuMemAllocAsync")
	var unsupported *driver.UnsupportedError
	if !errors.As(err, &unsupported) || !errors.Is(err, errors.ErrUnsupported) || unsupported.Since != 11020 {
		t.Fatal(err)
	}
}

// A driver on which calls with handles need a current context, which the
// reference allows: Primary finds out, and brackets every call.
func TestBracketsWhereHandlesNeedAContext(t *testing.T) {
	needs := func(c cuapi.Call) bool {
		switch c.ID {
		case cuapi.IDEventRecord, cuapi.IDEventQuery, cuapi.IDStreamQuery, cuapi.IDMemcpyDtoHAsync, cuapi.IDMemcpyHtoDAsync,
			cuapi.IDLaunchKernel, cuapi.IDMemAllocFromPoolAsync, cuapi.IDMemFreeAsync, cuapi.IDStreamWaitEvent, cuapi.IDEventSynchronize:
			return true
		}
		return false
	}
	var refused, bracketed atomic.Int64
	var current func() cuapi.Context
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if needs(c) {
			// The rig's own simulator answers for the calling thread.
			if current() == 0 {
				refused.Add(1)
				return cuapi.InvalidContext
			}
			bracketed.Add(1)
		}
		return next()
	}, seen: func(t *cuapi.Table) {
		current = func() cuapi.Context {
			p := new(cuapi.Context)
			t.CtxGetCurrent(p)
			return *p
		}
	}})
	refused.Store(0)
	must(t, r.workflow(random(100)))
	if refused.Load() != 0 || bracketed.Load() == 0 {
		t.Fatalf("%d calls without a context, %d with", refused.Load(), bracketed.Load())
	}
}

// Many goroutines use, move and close the same things at once.
func TestHammer(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	for range 100 {
		p, want := r.publication(s, 128)
		bufs := make([]*publish.Transfer, 4)
		var wg sync.WaitGroup
		var consumed atomic.Int64
		for g := range 4 {
			b := r.buffer(make([]byte, 128))
			wg.Go(func() {
				p.FrontierReady()
				tr, err := p.DownloadInto(b)
				if err == nil {
					consumed.Add(1)
					bufs[g] = tr
				} else {
					b.Close()
				}
				p.AwaitFrontier(context.Background())
			})
			wg.Go(func() {
				if g == 3 {
					p.Close()
				}
				p.Done()
				p.Err()
			})
		}
		wg.Wait()
		if consumed.Load() > 1 {
			t.Fatalf("consumed %d times", consumed.Load())
		}
		for _, tr := range bufs {
			if tr == nil {
				continue
			}
			var got atomic.Int64
			for range 3 {
				wg.Go(func() {
					if out, err := tr.Wait(context.Background()); err == nil {
						got.Add(1)
						if string(out.Bytes()) != string(want) {
							t.Error("wrong bytes")
						}
						out.Close()
					}
				})
			}
			wg.Wait()
			if got.Load() != 1 {
				t.Fatalf("the buffer came back %d times", got.Load())
			}
		}
	}
	must(t, s.Close())
}
