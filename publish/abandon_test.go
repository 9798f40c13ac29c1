package publish_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A meter counts the allocations that the driver knows, and driver calls from
// cleanups. Reading it is no call of the library.
type meter struct {
	live      atomic.Int64
	inCleanup atomic.Int64
}

func (m *meter) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if inCleanup() {
		m.inCleanup.Add(1)
	}
	r := next()
	if r == cuapi.Success {
		switch c.ID {
		case cuapi.IDMemAllocFromPoolAsync:
			m.live.Add(1)
		case cuapi.IDMemFreeAsync:
			m.live.Add(-1)
		}
	}
	return r
}

// inCleanup tells whether the calling goroutine runs a cleanup.
func inCleanup() bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs[:])])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if strings.HasPrefix(f.Function, "runtime.") && strings.HasSuffix(f.Function, "runCleanups") {
			return true
		}
	}
	return false
}

// quiet checks that no cleanup made a driver call.
func (m *meter) quiet(t testing.TB) {
	t.Helper()
	if n := m.inCleanup.Load(); n != 0 {
		t.Errorf("%d driver calls from cleanups", n)
	}
}

// The meter sees a driver call that a cleanup makes.
func TestTheMeterSeesCleanups(t *testing.T) {
	var meter meter
	r := newRig(t, options{around: meter.around})
	table := wire.Table(r.drv)
	for range 2 {
		table.DriverGetVersion(new(int32))
		meter.quiet(t)
	}
	runtime.AddCleanup(new([64]byte), func(int) { table.DriverGetVersion(new(int32)) }, 0)
	collect(t, func() bool { return meter.inCleanup.Load() == 1 })
}

// collected runs collections and nothing else until ok.
func (r *rig) collected(ok func() bool) {
	r.t.Helper()
	for bound := r.within(); bound.Err() == nil; runtime.GC() {
		if ok() {
			return
		}
	}
	r.t.Fatalf("never came true: %+v", r.rt.Stats())
}

// swept returns once what is garbage now had its cleanups run, as far as anyone
// can tell: those of what became garbage later have, three times.
func (r *rig) swept() {
	r.t.Helper()
	for range 3 {
		var ran atomic.Bool
		runtime.AddCleanup(new([64]byte), func(int) { ran.Store(true) }, 0)
		r.collected(ran.Load)
	}
}

// A kind is a kind of owner: make makes one behind what the session runs.
type kind struct {
	name   string
	allocs int // of device memory
	make   func(r *rig, s *publish.Session) owner
}

type owner interface {
	Close() error
	Leak()
	Err() error
}

var kinds = []kind{
	{"value", 1, func(r *rig, s *publish.Session) owner { return r.used(s) }},
	{"publication", 1, func(r *rig, s *publish.Session) owner {
		p, err := s.Publish(r.used(s))
		must(r.t, err)
		return p
	}},
	{"download", 1, func(r *rig, s *publish.Session) owner {
		p, err := s.Publish(r.used(s))
		must(r.t, err)
		tr, err := p.DownloadInto(r.buffer(make([]byte, 64)))
		must(r.t, err)
		return tr
	}},
	{"upload", 1, func(r *rig, s *publish.Session) owner {
		v := r.used(s)
		up, err := s.Upload(v, r.buffer(random(64)))
		must(r.t, err)
		must(r.t, v.Close())
		return up
	}},
}

// used returns a value that a kernel used.
func (r *rig) used(s *publish.Session) *publish.Value {
	r.t.Helper()
	v, err := s.Alloc(publish.U8, 64)
	must(r.t, err)
	must(r.t, s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)))
	return v
}

// Handles that became garbage are handed over by cleanups, which make no driver
// call, and are counted. An idle process, in which nobody calls the library any
// more, gives their memory back as soon as the device is done with it, and not
// before.
func TestFault11AnIdleProcessFreesWhatWasAbandoned(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around}, func(r *rig) {
		t := r.t
		must(t, r.rt.Reserve(4, 64))
		for _, held := range []bool{false, true} {
			for _, seen := range []bool{true, false} { // complete, and who knows it
				for _, k := range kinds {
					s := r.session()
					base, before := meter.live.Load(), r.rt.Stats()
					release := func() {}
					if held {
						release = r.hold(s)
					}
					func() {
						o := k.make(r, s)
						if !held && seen {
							must(t, s.Synchronize(r.within()))
							r.settle() // the watcher sleeps from here on
						}
						must(t, o.Err())
					}()
					if held {
						r.collected(func() bool { return r.rt.Stats().Abandoned > before.Abandoned })
						r.swept()
						if n := meter.live.Load() - base; n != int64(k.allocs) {
							t.Errorf("%s: %d allocations are left of one behind a held stream", k.name, n)
						}
					}
					release()
					r.swept()
					r.collected(func() bool { return meter.live.Load() == base })
					// The pinned memory is with the library, which is asked for it.
					r.collected(func() bool { return r.rt.Stats().Pinned.InUse == 0 })
					if n := r.rt.Stats().Abandoned - before.Abandoned; n != 1 {
						t.Errorf("%s, held %v: %d are counted as abandoned", k.name, held, n)
					}
					must(t, s.Close())
					r.settle()
					r.released()
				}
			}
		}
		meter.quiet(t)
	})
}

// Dropped sessions, streams, buffers and runtimes let go of what they held: of
// their stream, their memory, and the context in the end.
func TestAbandonedParentsLetTheContextGo(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around}, func(r *rig) {
		t := r.t
		r.often()
		for name, drop := range map[string]func(of *rig){
			"session":           func(of *rig) { of.session() },
			"session in use":    func(of *rig) { must(t, of.used(of.session()).Close()) },
			"stream":            func(of *rig) { must(t, second(stream.New(of.ctx))) },
			"buffer":            func(of *rig) { must(t, second(of.rt.Pinned(64))) },
			"runtime":           func(of *rig) { of.another() },
			"closed runtime":    func(of *rig) { must(t, of.another().rt.Close()) },
			"runtime with work": func(of *rig) { must(t, of.another().workflow(random(64))) },
			"all, the children first": func(of *rig) {
				of = of.another()
				s := of.session()
				of.publication(s, 64)
				must(t, second(of.rt.Pinned(64)))
			},
			"a closed runtime with children": func(of *rig) {
				of = of.another()
				of.publication(of.session(), 64)
				must(t, of.rt.Close())
			},
		} {
			ctx, err := r.device().Primary()
			must(t, err)
			of := r.on(ctx)
			func() { drop(of) }()
			r.swept()
			r.busy("a runtime that was not dropped", ctx.Shutdown(r.within()))
			wait := r.within()
			for _, end := range []func(context.Context) error{of.rt.Shutdown, ctx.Shutdown} {
				r.collected(func() bool { err = end(wait); return !errors.Is(err, driver.ErrBusy) })
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
		meter.quiet(t)
	})
}

func second[T any](_ T, err error) error { return err }

// A publication outlives its parents, dropped and not closed, and so does an
// upload its value. A session outlives its children.
func TestAbandonedParentsAndChildren(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around}, func(r *rig) {
		t := r.t
		base := meter.live.Load()
		buf := r.buffer(make([]byte, 64))
		var release func()
		p, want := func() (*publish.Publication, []byte) {
			of := r.another()
			st, err := stream.New(r.ctx)
			must(t, err)
			s, err := of.rt.OpenSession(st)
			must(t, err)
			release = r.hold(s)
			return of.publication(s, 64)
		}()
		r.swept()
		tr, err := p.DownloadInto(buf)
		must(t, err)
		p = nil
		r.swept()
		release()
		r.finish(tr, want)
		r.collected(func() bool { return meter.live.Load() == base })

		s := r.session()
		release = r.hold(s)
		up := func() *publish.Transfer {
			v := r.used(s)
			up, err := s.Upload(v, r.buffer(random(64)))
			must(t, err)
			return up
		}()
		r.collected(func() bool { return r.rt.Stats().Abandoned == 1 })
		r.swept()
		if n := meter.live.Load() - base; n != 1 {
			t.Errorf("%d allocations are left of one that a copy writes", n)
		}
		for range 8 {
			for _, k := range kinds {
				k.make(r, s)
			}
		}
		r.collected(func() bool { return r.rt.Stats().Abandoned == 1+8*len(kinds) })
		release()
		r.collected(func() bool { return meter.live.Load() == base })
		back, err := up.Wait(r.within())
		must(t, err)
		must(t, back.Close())
		p, want = r.publication(s, 64)
		r.download(p, want)
		must(t, s.Close())
		must(t, r.rt.Shutdown(r.within()))
		wait := r.within()
		r.collected(func() bool { err = r.ctx.Shutdown(wait); return !errors.Is(err, driver.ErrBusy) })
		must(t, err)
		meter.quiet(t)
	})
}

// What failed, was used by what failed, or is on a lost context is retained for
// good when it becomes garbage.
func TestAbandonedAfterAFailure(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			var meter meter
			var query, launch atomic.Bool
			r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
				if c.ID == cuapi.IDEventQuery && query.Load() || c.ID == cuapi.IDLaunchKernel && launch.Load() {
					return cuapi.InvalidValue
				}
				return meter.around(c, next)
			}})
			r.keep = true
			s := r.session()
			release := r.hold(s)
			base := meter.live.Load()
			func() {
				o := k.make(r, s)
				if v, ok := o.(*publish.Value); ok {
					launch.Store(true)
					if s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)) == nil {
						t.Error("the launch succeeded")
					}
					launch.Store(false)
					return
				}
				query.Store(true)
				var failed *publish.UnprovenError
				for !errors.As(o.Err(), &failed) { // the watcher or we see it first
					switch o := o.(type) {
					case *publish.Publication:
						o.FrontierReady()
					case *publish.Transfer:
						o.Ready()
					}
				}
			}()
			r.collected(func() bool { return r.rt.Stats().Abandoned == 1 })
			query.Store(false)
			release()
			must(t, s.Close())
			r.settle()
			r.swept()
			q := r.rt.Stats().Queue
			if q.Permanent == 0 || q.Entered != q.Released+q.Permanent || q.Reserved != 0 || meter.live.Load() == base {
				t.Errorf("not retained: %+v, %d allocations", q, meter.live.Load()-base)
			}
			if err := r.rt.Shutdown(r.within()); !errors.Is(err, driver.Result(cuapi.InvalidValue)) {
				t.Errorf("the cause is not told: %v", err)
			}
			r.retained()
			meter.quiet(t)
		})
	}
}

func TestAbandonedOnALostContext(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around, alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		base := meter.live.Load()
		s := r.session()
		func() {
			var all []owner
			for _, k := range kinds {
				all = append(all, k.make(r, s))
			}
			doomed := r.session()
			v, err := doomed.Alloc(publish.U8, 64)
			must(t, err)
			must(t, doomed.Launch(r.bad, kernel.Grid(1), publish.Out(v)))
			if err := doomed.Synchronize(r.within()); err == nil {
				t.Error("a kernel that faults did nothing")
			}
			<-r.rt.Lost()
			runtime.KeepAlive(all)
			all = nil
		}()
		n := len(kinds) + 1
		r.collected(func() bool { st := r.rt.Stats(); return st.Abandoned == n+1 && st.Sessions == 1 })
		r.settle()
		r.swept()
		st := r.rt.Stats()
		// The value of the upload was closed: before the loss it may have been released.
		if q := st.Queue; q.Permanent < n || q.Entered != q.Released+q.Permanent || q.Reserved != 0 || meter.live.Load()-base < int64(n-1) {
			t.Errorf("not retained: %+v, %d allocations", q, meter.live.Load()-base)
		}
		must(t, s.Close())
		r.retained()
		meter.quiet(t)
	})
}

// What is leaked stays where it is, is counted as leaked and not as abandoned, and
// is never freed, whatever becomes of its handle.
func TestLeakedHandlesAreNeverFreed(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around, alone: true}, func(r *rig) {
		t := r.t
		r.keep = true
		s := r.session()
		base := meter.live.Load()
		for _, held := range []bool{true, false} {
			release := func() {}
			if held {
				release = r.hold(s)
			}
			func() {
				for _, k := range kinds {
					o := k.make(r, s)
					if !held {
						must(t, s.Synchronize(r.within()))
					}
					o.Leak()
					o.Leak()
					must(t, o.Close())
					if !errors.Is(o.Err(), driver.ErrClosed) {
						t.Errorf("%s is leaked, and usable: %v", k.name, o.Err())
					}
				}
				r.used(s) // which is freed
			}()
			release()
			// But for the value of the upload, which was closed.
			leaked := int64(len(kinds) - 1)
			if !held {
				leaked *= 2
			}
			r.collected(func() bool { return meter.live.Load() == base+leaked })
			r.swept()
			if n := meter.live.Load() - base; n != leaked {
				t.Errorf("%d allocations are left of %d that were leaked", n, leaked)
			}
		}
		st := r.rt.Stats()
		if n := 2 * len(kinds); st.Leaked != n || st.Queue.Permanent != n || st.Abandoned != 2 {
			t.Errorf("%+v", st)
		}
		must(t, s.Close())
		r.settle()
		r.retained()
		meter.quiet(t)
	})
}

// Two thousand handles of every kind are dropped at once, behind a stream that is
// held and one that is not.
func TestAbandonMany(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around}, func(r *rig) {
		t := r.t
		const many, behind = 2000, 100
		base := meter.live.Load()
		free, held := r.session(), r.session()
		release := r.hold(held)
		all := make([]owner, 0, many)
		for i := range many {
			s := free
			if i < behind { // as many as a stream takes
				s = held
			} else if i%behind == 0 {
				must(t, s.Synchronize(r.within()))
			}
			all = append(all, kinds[i%len(kinds)].make(r, s))
		}
		r.swept()
		if st := r.rt.Stats(); st.Abandoned != 0 {
			t.Errorf("abandoned while there are handles: %+v", st)
		}
		runtime.KeepAlive(all)
		all = nil
		r.collected(func() bool { return r.rt.Stats().Abandoned == many && meter.live.Load() <= base+behind })
		r.swept()
		if n := meter.live.Load() - base; n != behind {
			t.Errorf("%d allocations are left of %d behind a held stream", n, behind)
		}
		release()
		r.collected(func() bool { return meter.live.Load() == base })
		must(t, free.Close())
		must(t, held.Close())
		r.settle()
		r.released()
		if st := r.rt.Stats(); st.Pinned.InUse != 0 || st.Memory.InUse != 0 {
			t.Errorf("memory is left: %+v", st)
		}
		meter.quiet(t)
	})
}
