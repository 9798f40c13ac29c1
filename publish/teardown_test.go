package publish_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// another returns a runtime beside the rig's, as a rig.
func (r *rig) another() *rig {
	r.t.Helper()
	rt, err := publish.New(r.ctx, publish.Config{})
	must(r.t, err)
	return &rig{t: r.t, sim: r.sim, drv: r.drv, ctx: r.ctx, rt: rt, inc: r.inc, bad: r.bad}
}

// over is a context that has ended.
func over() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// released checks that a runtime let go of everything.
func (r *rig) released() {
	r.t.Helper()
	s := r.rt.Stats()
	if q := s.Queue; s.Sessions != 0 || q.Reserved != 0 || q.Pending != 0 || q.Permanent != 0 || q.Entered != q.Released {
		r.t.Errorf("not everything is released: %+v", s)
	}
}

func (r *rig) busy(what string, err error) {
	r.t.Helper()
	if !errors.Is(err, driver.ErrBusy) {
		r.t.Errorf("shutdown with %s open: %v", what, err)
	}
}

// Two runtimes on one context close in each order, with nothing open and with
// everything. What the first one published outlives it while the other goes on.
func TestTwoRuntimesEndInEachOrder(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		for _, swapped := range []bool{false, true} {
			for _, things := range []bool{false, true} {
				first, second := r.another(), r.another()
				if swapped { // made in the other order
					first, second = second, first
				}
				if !things {
					must(t, first.rt.Shutdown(r.within()))
					must(t, second.workflow(random(64)))
					must(t, second.rt.Shutdown(r.within()))
					continue
				}
				s1, s2 := first.session(), second.session()
				release := first.hold(s1)
				p1, want1 := first.publication(s1, 64)
				q1, wantq := first.publication(s1, 64)
				tr1, err := q1.DownloadInto(first.buffer(make([]byte, 64)))
				must(t, err)
				p2, want2 := second.publication(s2, 64)
				must(t, first.rt.Close())
				if _, err := first.rt.OpenSession(nil); !errors.Is(err, driver.ErrClosed) {
					t.Errorf("a closed runtime opens a session: %v", err)
				}
				must(t, second.workflow(random(64))) // beside a held stream
				buf, err := second.rt.Pinned(64)     // of the context, which both have
				must(t, err)
				release()
				tr, err := p1.DownloadInto(buf)
				must(t, err)
				first.busy("transfers", first.rt.Shutdown(r.within()))
				first.finish(tr, want1)
				first.finish(tr1, wantq)
				first.busy("a session", first.rt.Shutdown(r.within()))
				must(t, s1.Close())
				must(t, first.rt.Shutdown(r.within()))
				first.released()
				r.busy("another runtime", r.ctx.Shutdown(r.within()))
				second.download(p2, want2)
				must(t, second.workflow(random(64)))
				must(t, s2.Close())
				must(t, second.rt.Shutdown(r.within()))
				second.released()
			}
		}
		must(t, r.workflow(random(64)))
	})
}

// Of two users of a context each may end first. The last one ends it, and the
// next call of Primary makes another, which works.
func TestTwoUsersOfAContextEndInEachOrder(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		must(t, r.rt.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within()))
		last := r.ctx
		for range 2 {
			one, err := r.device().Primary()
			must(t, err)
			two, err := r.device().Primary()
			must(t, err)
			if one != two || one == last {
				t.Fatal("two users have two contexts, or one that has ended")
			}
			last = one
			a, b := r.on(one), r.on(two)
			p, want := a.publicationOf(64)
			buf := a.buffer(make([]byte, 64))
			must(t, a.rt.Close())
			must(t, one.Shutdown(r.within())) // one user less, whatever is open
			must(t, one.Err())
			must(t, b.workflow(random(64)))
			r.busy("a publication and a runtime", two.Shutdown(r.within()))
			tr, err := p.DownloadInto(buf)
			must(t, err)
			a.finish(tr, want)
			r.busy("a runtime", two.Shutdown(r.within()))
			must(t, b.rt.Close())
			must(t, a.rt.Shutdown(r.within()))
			must(t, b.rt.Shutdown(r.within()))
			must(t, two.Shutdown(r.within()))
			must(t, two.Shutdown(r.within())) // has the same result
			if _, err := publish.New(one, publish.Config{}); !errors.Is(err, driver.ErrClosed) {
				t.Errorf("a runtime on a context that has ended: %v", err)
			}
		}
	})
}

// often prepares for a test that makes many contexts of the device: it retains
// the primary one as other code would, so that the driver need not make another.
func (r *rig) often() {
	r.t.Helper()
	must(r.t, r.rt.Shutdown(r.within()))
	must(r.t, r.ctx.Shutdown(r.within()))
	table := wire.Table(r.drv)
	if res := table.DevicePrimaryCtxRetain(new(cuapi.Context), 0); res != cuapi.Success {
		r.t.Fatal(res)
	}
	r.t.Cleanup(func() { table.DevicePrimaryCtxRelease(0) })
}

// on returns a rig with a runtime and a kernel of its own on the context.
func (r *rig) on(ctx *driver.Context) *rig {
	r.t.Helper()
	mod, err := kernel.Load(ctx, []byte(testPTX))
	must(r.t, err)
	inc, err := mod.Function("inc")
	must(r.t, err)
	of := &rig{t: r.t, sim: r.sim, drv: r.drv, ctx: ctx, inc: inc}
	return of.another()
}

// publicationOf publishes from a session that is closed.
func (r *rig) publicationOf(n int) (p *publish.Publication, want []byte) {
	r.t.Helper()
	must(r.t, r.rt.WithSession(func(s *publish.Session) error {
		p, want = r.publication(s, n)
		return nil
	}))
	return p, want
}

// Each thing alone keeps the context from its end, which is refused and works
// once the thing is closed.
func TestFault24EachThingRefusesTheEnd(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		must(t, r.rt.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within()))
		type closer interface{ Close() error }
		for _, c := range []struct {
			name string
			open func(r *rig, s *publish.Session) closer
		}{
			{"a session", func(r *rig, s *publish.Session) closer { return r.session() }},
			{"a stream", func(r *rig, s *publish.Session) closer {
				st, err := stream.New(r.ctx)
				must(t, err)
				return st
			}},
			{"a value", func(r *rig, s *publish.Session) closer {
				v, err := s.Alloc(publish.U8, 64)
				must(t, err)
				return v
			}},
			{"a publication", func(r *rig, s *publish.Session) closer { p, _ := r.publication(s, 64); return p }},
			{"a download", func(r *rig, s *publish.Session) closer {
				p, _ := r.publication(s, 64)
				tr, err := p.DownloadInto(r.buffer(make([]byte, 64)))
				must(t, err)
				return tr
			}},
			{"an upload", func(r *rig, s *publish.Session) closer {
				v, err := s.Alloc(publish.U8, 64)
				must(t, err)
				up, err := s.Upload(v, r.buffer(random(64)))
				must(t, err)
				must(t, v.Close())
				return up
			}},
			{"a buffer", func(r *rig, s *publish.Session) closer { return r.buffer(random(64)) }},
			{"a runtime", func(r *rig, s *publish.Session) closer { return r.another().rt }},
		} {
			ctx, err := r.device().Primary()
			must(t, err)
			of := r.on(ctx)
			s := of.session()
			thing := c.open(of, s)
			must(t, s.Close())
			err = of.rt.Shutdown(r.within()) // of the rest, as far as it can tell
			if err != nil && !errors.Is(err, driver.ErrBusy) {
				t.Errorf("%s: %v", c.name, err)
			}
			for range 3 {
				must(t, of.rt.Close()) // again: it lets go of nothing more
				r.busy(c.name, ctx.Shutdown(r.within()))
				must(t, ctx.Err())
			}
			must(t, thing.Close())
			must(t, of.rt.Shutdown(r.within()))
			must(t, ctx.Shutdown(r.within()))
		}
	})
}

// What is retained for good keeps the context retained: the error says how much
// it is and why. The device's next context works, and so do other devices.
func TestRetainedOwnersKeepTheContext(t *testing.T) {
	onEach(t, options{sim: cudasim.Config{Devices: 2}, alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		s := r.session()
		p, _ := r.publication(s, 64)
		v, err := s.Alloc(publish.F64, 10)
		must(t, err)
		p.Leak()
		v.Leak()
		must(t, s.Close())
		q, want := r.publicationOf(64)
		buf := r.buffer(make([]byte, 64))
		for range 2 {
			err = r.rt.Shutdown(r.within())
			if !errors.Is(err, driver.ErrBusy) || !strings.Contains(err.Error(), "2 owners of 144 bytes") {
				t.Errorf("the runtime's end: %v", err)
			}
		}
		tr, err := q.DownloadInto(buf)
		must(t, err)
		r.finish(tr, want)
		for i, end := range []func(context.Context) error{r.rt.Shutdown, r.rt.Shutdown, r.ctx.Shutdown, r.ctx.Shutdown} {
			err := end(r.within())
			if err == nil || errors.Is(err, driver.ErrBusy) || !strings.Contains(err.Error(), "2 owners of 144 bytes") || !strings.Contains(err.Error(), "leaked") {
				t.Errorf("end %d: %v", i, err)
			}
		}
		ordinals := []int{0}
		if r.sim != nil {
			ordinals = append(ordinals, 1)
		}
		for _, n := range ordinals {
			dev, err := r.drv.Device(n)
			must(t, err)
			ctx, err := dev.Primary()
			must(t, err)
			of := r.on(ctx)
			must(t, of.workflow(random(64)))
			must(t, of.rt.Shutdown(r.within()))
			must(t, ctx.Shutdown(r.within()))
		}
		for _, n := range ordinals { // what was leaked is alive all the same
			live := new(int32)
			wire.Table(r.drv).DevicePrimaryCtxGetState(cuapi.Device(n), new(uint32), live)
			if (*live != 0) != (n == 0) {
				t.Errorf("device %d: the context's state is %d", n, *live)
			}
		}
	})
}

// The end of ctx ends a wait of a runtime's Shutdown and nothing else: what was
// retired is released behind it, and other calls have the result.
func TestShutdownOfARuntimeEndsTheWaitAlone(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		release := r.hold(s)
		p, _ := r.publication(s, 64)
		must(t, p.Close())
		must(t, s.Close())
		for range 3 {
			if err := r.rt.Shutdown(over()); !errors.Is(err, context.Canceled) {
				t.Fatalf("while a stream is held: %v", err)
			}
		}
		r.busy("what is pending", r.ctx.Shutdown(r.within()))
		var wg sync.WaitGroup
		var waits, ended atomic.Int64
		for range 16 {
			wg.Go(func() {
				waits.Add(1)
				if err := r.rt.Shutdown(r.within()); err != nil {
					t.Error(err)
				}
				ended.Add(1)
			})
		}
		for waits.Load() < 16 {
			runtime.Gosched()
		}
		if n := ended.Load(); n != 0 {
			t.Errorf("%d ended before the stream moved", n)
		}
		release()
		wg.Wait()
		r.released()
	})
}

// The same of the last Shutdown of a context, which is stuck in the driver
// behind a stream that other code holds; Primary waits for it.
func TestShutdownOfAContextEndsTheWaitAlone(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		must(t, r.rt.Shutdown(r.within()))
		must(t, r.ctx.Shutdown(r.within()))
		ctx, err := r.device().Primary()
		must(t, err)
		core, raw := wire.ContextOf(ctx), new(cuapi.Stream)
		if res := core.Current(func() cuapi.Result { return core.Table.StreamCreate(raw, cuapi.StreamNonBlocking) }); res != cuapi.Success {
			t.Fatal(res)
		}
		// Held once before anything else, so that the flag is freed last.
		release, err := hold.Stream(ctx, uintptr(*raw))
		must(t, err)
		release()
		of := r.on(ctx)
		must(t, of.workflow(random(64)))
		must(t, of.rt.Shutdown(r.within()))
		release, err = hold.Stream(ctx, uintptr(*raw))
		must(t, err)
		t.Cleanup(release)
		core.Table.StreamDestroy(*raw) // its work stays pending
		for range 3 {
			if err := ctx.Shutdown(over()); !errors.Is(err, context.Canceled) {
				t.Fatalf("while a stream is held: %v", err)
			}
		}
		if _, err := publish.New(ctx, publish.Config{}); !errors.Is(err, driver.ErrClosed) {
			t.Errorf("a runtime on a context that ends: %v", err)
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := ctx.Shutdown(r.within()); err != nil {
					t.Errorf("the result of the shutdown: %v", err)
				}
			})
			wg.Go(func() {
				next, err := r.device().Primary()
				if err != nil || next == ctx {
					t.Errorf("Primary during a shutdown: %v", err)
				}
			})
		}
		release()
		wg.Wait()
		next, err := r.device().Primary()
		must(t, err)
		of = r.on(next)
		must(t, of.workflow(random(64)))
		must(t, of.rt.Shutdown(r.within()))
		for range 9 { // users
			must(t, next.Shutdown(r.within()))
		}
	})
}

// A runtime is closed and shut down from within: from the function of
// WithSession, and from the release of adopted memory.
func TestEndsFromWithin(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		of := r.another()
		var p *publish.Publication
		var want []byte
		must(t, of.rt.WithSession(func(s *publish.Session) error {
			v, w := of.produce(s, random(64))
			want = w
			must(t, of.rt.Close())
			of.busy("the session that asks", of.rt.Shutdown(r.within()))
			r.busy("the session that asks", r.ctx.Shutdown(r.within()))
			if _, err := s.Alloc(publish.U8, 64); !errors.Is(err, driver.ErrClosed) {
				t.Errorf("new work of a closed runtime: %v", err)
			}
			var err error
			p, err = s.Publish(v) // no new work
			return err
		}))
		buf := r.buffer(make([]byte, 64))
		tr, err := p.DownloadInto(buf)
		must(t, err)
		of.finish(tr, want)
		must(t, of.rt.Shutdown(r.within()))

		r.often()
		for i := range 64 {
			ctx, err := r.device().Primary()
			must(t, err)
			of := r.on(ctx)
			s := of.session()
			core, addr := wire.ContextOf(ctx), new(cuapi.DevicePtr)
			if res := core.Current(func() cuapi.Result { return core.Table.MemAlloc(addr, 64) }); res != cuapi.Success {
				t.Fatal(res)
			}
			ended, let := make(chan error, 1), make(chan struct{})
			v, err := s.Adopt(uint64(*addr), publish.U8, []int{64}, func() {
				<-let
				core.Current(func() cuapi.Result { return core.Table.MemFree(*addr) })
				ended <- of.rt.Close() // and no Shutdown, which waits for this release
			})
			must(t, err)
			if i%2 == 1 {
				release := of.hold(s)
				must(t, s.Close())
				must(t, v.Close())
				release()
				close(let) // the stream's flag may be freed from here on
			} else {
				close(let)
				must(t, s.Close())
				must(t, v.Close())
			}
			if err := errors.Join(<-ended, of.rt.Shutdown(r.within()), ctx.Shutdown(r.within())); err != nil {
				t.Fatalf("behind a close from a release, pending before: %v: %v", i%2 == 1, err)
			}
		}
	})
}

// Many goroutines shut down runtime and context at once, beside each other and
// beside the last users of both: each call is refused or has the result.
func TestConcurrentShutdowns(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		r.often()
		for i := range 8 {
			ctx, err := r.device().Primary()
			must(t, err)
			of := r.on(ctx)
			p, want := of.publicationOf(64)
			buf := of.buffer(make([]byte, 64))
			wait := r.within()
			var wg, began sync.WaitGroup
			began.Add(1)
			for g := range 32 {
				wg.Go(func() {
					began.Wait()
					end := of.rt.Shutdown
					if g%2 == 1 {
						end = ctx.Shutdown
					}
					err := end(wait)
					for ; errors.Is(err, driver.ErrBusy); err = end(wait) { // until nothing is open
						runtime.Gosched()
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			wg.Go(func() {
				began.Wait()
				tr, err := p.DownloadInto(buf)
				if err != nil {
					t.Error(err)
					return
				}
				of.finish(tr, want)
			})
			began.Done()
			wg.Wait()
			of.released()
			for _, err := range []error{of.rt.Shutdown(r.within()), ctx.Shutdown(r.within())} {
				if err != nil {
					t.Fatalf("round %d: %v", i, fmt.Errorf("after the end: %w", err))
				}
			}
		}
	})
}
