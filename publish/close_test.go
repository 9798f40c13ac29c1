package publish_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A family is one of everything on one runtime, parents and children.
type family struct {
	*rig
	st  *stream.Stream
	s   *publish.Session
	v   *publish.Value // a kernel read it
	p   *publish.Publication
	tr  *publish.Transfer // of a download
	up  *publish.Transfer
	buf *pinned.Buffer

	want    []byte // of p
	release func() // lets the stream go
}

const familyBytes = 64 // of each value and buffer

// family makes one on a runtime of its own, behind a stream that is held if asked
// for.
func (r *rig) family(held bool) *family {
	r.t.Helper()
	t, f := r.t, &family{rig: r.another(), release: func() {}}
	must(t, f.rt.Reserve(4, familyBytes))
	var err error
	f.st, err = stream.New(r.ctx)
	must(t, err)
	f.s, err = f.rt.OpenSession(f.st)
	must(t, err)
	if held {
		f.release = f.hold(f.s)
	}
	f.v, err = f.s.Alloc(publish.U8, familyBytes)
	must(t, err)
	data := random(familyBytes)
	f.up, err = f.s.Upload(f.v, f.buffer(data))
	must(t, err)
	pub := func() *publish.Publication {
		w, err := f.s.Alloc(publish.U8, familyBytes)
		must(t, err)
		must(t, f.s.Launch(f.inc, kernel.Grid(familyBytes), publish.In(f.v), publish.Out(w), kernel.U32(familyBytes)))
		p, err := f.s.Publish(w)
		must(t, err)
		return p
	}
	f.p = pub()
	f.tr, err = pub().DownloadInto(f.buffer(make([]byte, familyBytes)))
	must(t, err)
	f.buf = f.buffer(make([]byte, familyBytes))
	for _, b := range data {
		f.want = append(f.want, b+1)
	}
	return f
}

type member struct {
	name  string
	close func() error
}

// members are what can be closed of a family, its context apart.
func (f *family) members() []member {
	return []member{
		{"session", f.s.Close}, {"stream", f.st.Close}, {"value", f.v.Close}, {"publication", f.p.Close},
		{"download", f.tr.Close}, {"upload", f.up.Close}, {"buffer", f.buf.Close}, {"runtime", f.rt.Close},
	}
}

// gone closes what is left, and checks that all of it is released, once.
func (f *family) gone() {
	f.t.Helper()
	for range 2 {
		for _, m := range f.members() {
			must(f.t, m.close())
		}
	}
	f.release()
	must(f.t, f.rt.Shutdown(f.within()))
	f.released()
	if s := f.rt.Stats(); s.Memory.InUse != 0 || s.Pinned.InUse != 0 {
		f.t.Errorf("memory is left: %+v", s)
	}
}

// permutation returns the i-th of the permutations of n things.
func permutation(i, n int) (order []int) {
	left := make([]int, n)
	for k := range left {
		left[k] = k
	}
	for ; n > 0; n-- {
		order = append(order, left[i%n])
		left = slices.Delete(left, i%n, i%n+1)
		i /= n
	}
	return order
}

// Session, stream, source value, publication or transfer, buffer, runtime and
// context are closed in random orders, on hardware in a few, with the stream held
// until all are closed and with one that runs. Nothing is released while it is
// held, the counters conserve all along, and all is released in the end. The
// context refuses its end until the rest is closed, and then ends: where it comes
// last, and each eighth time at least.
func TestOrdersOfParentsAndChildren(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		const all = 5040 // take them all to be sure: that takes a minute
		n := 280
		if r.sim == nil {
			n = 24
		}
		r.often()
		var of *rig
		for i, k := range rand.Perm(all)[:n] {
			order := permutation(k, 7)
			for _, held := range []bool{false, true} {
				if of == nil {
					ctx, err := r.device().Primary()
					must(r.t, err)
					of = r.on(ctx)
					must(r.t, of.rt.Close())
				}
				// Half of them with a publication, half with a transfer.
				ended := of.closeInOrder(order, held, i%2 == 0, i%8 == 0 || i == n-1)
				if r.t.Failed() {
					r.t.Fatalf("order %v, held %v, publication %v", order, held, i%2 == 0)
				}
				if ended {
					of = nil
				}
			}
		}
	})
}

// closeInOrder makes a family and closes it, and the context if it comes last or
// end says so. It tells whether the context has ended.
func (r *rig) closeInOrder(order []int, held, publication, end bool) (ended bool) {
	t := r.t
	f := r.family(held)
	must(t, f.up.Close())
	consumed := f.p.Close
	if publication {
		must(t, f.tr.Close())
	} else {
		must(t, f.p.Close())
		consumed = f.tr.Close
	}
	closers := []func() error{f.s.Close, f.st.Close, f.v.Close, consumed, f.buf.Close, f.rt.Close}
	open := map[int]bool{0: true, 1: true, 2: true, 3: true, 4: true, 5: true}
	for _, k := range order {
		if k == len(closers) {
			err := r.ctx.Shutdown(r.within())
			if refused := errors.Is(err, driver.ErrBusy); !refused && (err != nil || held || len(open) > 0) {
				t.Errorf("the context's end with %d open: %v", len(open), err)
			}
			ended = err == nil
			continue
		}
		must(t, closers[k]())
		delete(open, k)
		s := f.rt.Stats()
		records, sessions := 0, 0
		for _, k := range []int{2, 3} {
			if open[k] {
				records++
			}
		}
		if open[0] {
			sessions = 1
		}
		if q := s.Queue; q.Reserved != records || s.Sessions != sessions || q.Permanent != 0 || q.Entered != q.Released+q.Pending {
			t.Errorf("after %d with %v open: %+v", k, open, s)
		}
		if held && (s.Queue.Released != 0 || s.Memory.InUse != 3*familyBytes) {
			t.Errorf("released behind a held stream: %+v", s)
		}
	}
	f.gone()
	if end || order[len(order)-1] == len(closers) {
		must(t, r.ctx.Shutdown(r.within()))
		ended = true
	}
	for range 2 { // all is over, and closing it again is nothing
		for _, c := range closers {
			must(t, c())
		}
	}
	return ended
}

// An at is a place in the driver calls that an operation makes.
type at struct {
	mu    sync.Mutex
	armed bool
	n     int // of the call before which f runs, from 0
	f     func()

	creates atomic.Int64 // of streams
}

func (a *at) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if c.ID == cuapi.IDStreamCreate {
		a.creates.Add(1)
	}
	a.mu.Lock()
	hit := a.armed && a.n == 0
	if hit {
		a.armed = false
	}
	a.n--
	a.mu.Unlock()
	if hit {
		a.f()
	}
	return next()
}

func (a *at) arm(n int, f func()) {
	a.mu.Lock()
	a.armed, a.n, a.f = true, n, f
	a.mu.Unlock()
}

// disarm tells whether the place was reached.
func (a *at) disarm() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	hit := !a.armed
	a.armed = false
	return hit
}

// Everything is closed, twice and by another goroutine, during each driver call
// of each operation that uses it or something near it. A close never waits for
// the operation, which succeeds or is refused, and everything is released.
func TestClosingDuringEachCall(t *testing.T) {
	var place at
	onEach(t, options{around: place.around}, func(r *rig) {
		t := r.t
		// What an operation makes it closes.
		ops := map[string]func(f *family) error{
			"alloc": func(f *family) error {
				v, err := f.s.Alloc(publish.U8, familyBytes)
				return errors.Join(err, v.Close())
			},
			"upload": func(f *family) error {
				up, err := f.s.Upload(f.v, f.buf)
				return errors.Join(err, up.Close())
			},
			"launch": func(f *family) error {
				return f.s.Launch(f.inc, kernel.Grid(familyBytes), publish.In(f.v), publish.Out(f.v), kernel.U32(familyBytes))
			},
			"publish": func(f *family) error {
				p, err := f.s.Publish(f.v)
				return errors.Join(err, p.Close())
			},
			"frontier": func(f *family) error { _, err := f.p.FrontierReady(); return err },
			"await":    func(f *family) error { return f.p.AwaitFrontier(f.within()) },
			"download": func(f *family) error {
				tr, err := f.p.DownloadInto(f.buf)
				return errors.Join(err, tr.Close())
			},
			"ready": func(f *family) error { _, err := f.tr.Ready(); return err },
			"wait": func(f *family) error {
				buf, err := f.tr.Wait(f.within())
				return errors.Join(err, buf.Close())
			},
			"wait for an upload": func(f *family) error {
				buf, err := f.up.Wait(f.within())
				return errors.Join(err, buf.Close())
			},
			"synchronize": func(f *family) error { return f.s.Synchronize(f.within()) },
			"submit":      func(f *family) error { return f.s.Submit() },
			"session": func(f *family) error {
				var all []*publish.Session
				var err error
				for n := place.creates.Load(); err == nil && place.creates.Load() == n; { // until none is idle
					var s *publish.Session
					s, err = f.rt.OpenSession(nil)
					all = append(all, s)
				}
				for _, s := range all {
					must(t, s.Close())
				}
				return err
			},
			"reserve": func(f *family) error { // one more than there are
				return f.rt.Reserve(int(f.rt.Stats().Pinned.Held/4096)+1, familyBytes)
			},
			"drain": func(f *family) error { f.rt.Drain(); return nil },
			"close": func(f *family) error { return f.v.Close() },
		}
		hits := map[string]int{}
		for name, op := range ops {
			for m := range append((&family{rig: r}).members(), member{}) {
				for n := 0; n < 24; n++ { // a wait looks often
					if !r.closeDuring(&place, n, m, name, op) {
						break
					}
					hits[name]++
					if t.Failed() {
						t.Fatalf("%s, member %d, call %d", name, m, n)
					}
				}
			}
		}
		t.Logf("closed during calls: %v", hits)
		for name := range ops {
			if hits[name] == 0 && name != "close" && name != "drain" { // which need not make one
				t.Errorf("nothing was closed during a call of %s", name)
			}
		}
	})
}

// closeDuring does one operation, and closes a member of the family in the n-th
// of its driver calls. It tells whether there is one. The member behind the last
// is the context.
func (r *rig) closeDuring(place *at, n, m int, name string, op func(*family) error) (hit bool) {
	t, f := r.t, r.family(false)
	closing := append(f.members(), member{"context", func() error {
		if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
			t.Errorf("the context's end beside a %s: %v", name, err)
		}
		return nil
	}})[m]
	place.arm(n, func() {
		closed := make(chan error)
		for range 2 {
			go func() { closed <- closing.close() }()
		}
		for range 2 {
			if err := <-closed; err != nil {
				t.Error(err)
			}
		}
	})
	err := op(f)
	hit = place.disarm()
	var unproven *publish.UnprovenError
	if errors.As(err, &unproven) || err != nil && !errors.Is(err, driver.ErrClosed) && !errors.Is(err, driver.ErrBusy) {
		t.Errorf("%s while the %s is closed: %v", name, closing.name, err)
	}
	f.gone()
	return hit
}

// Whatever context is current on the thread that closes, it stays current, and
// everything is released on its own.
func TestFault07ClosingWithAForeignContextCurrent(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := newRig(t, options{sim: cudasim.Config{Devices: 2}})
	dev, err := r.drv.Device(1)
	must(t, err)
	foreign, err := dev.Primary()
	must(t, err)
	table := r.sim.Table()
	for _, current := range []cuapi.Context{wire.ContextOf(foreign).Raw, 0} {
		for _, held := range []bool{false, true} {
			if res := table.CtxSetCurrent(current); res != cuapi.Success {
				t.Fatal(res)
			}
			f := r.family(held)
			for _, m := range append(f.members(), member{"all", func() error { f.release(); return f.rt.Shutdown(r.within()) }}) {
				must(t, m.close())
				if now := new(cuapi.Context); table.CtxGetCurrent(now) != cuapi.Success || *now != current {
					t.Fatalf("after the close of the %s: %#x is current, not %#x", m.name, *now, current)
				}
			}
			f.gone()
		}
	}
	must(t, foreign.Shutdown(r.within()))
}

// 64 goroutines close one handle while collections run, then it becomes garbage:
// one release.
func TestFault19OneRelease(t *testing.T) {
	var meter meter
	onEach(t, options{around: meter.around}, func(r *rig) {
		t := r.t
		base := meter.live.Load()
		for _, held := range []bool{false, true} {
			for m := range (&family{rig: r}).members() {
				f := r.family(held)
				closing := f.members()[m]
				var wg, begun sync.WaitGroup
				begun.Add(1)
				for range 64 {
					wg.Go(func() {
						begun.Wait()
						if err := closing.close(); err != nil {
							t.Error(err)
						}
					})
				}
				var stop atomic.Bool
				var collections sync.WaitGroup
				collections.Go(func() {
					for !stop.Load() {
						runtime.GC()
					}
				})
				begun.Done()
				wg.Wait()
				stop.Store(true)
				collections.Wait()
				// Something released twice would be missing here.
				r.busy("the rest", r.ctx.Shutdown(r.within()))
				r.apart(closing.name)
				f.gone()
				name := closing.name
				f, closing = nil, member{}
				for range 2 { // the cleanups run too
					runtime.GC()
				}
				r.apart(name)
				if n := meter.live.Load() - base; n != 0 {
					t.Errorf("%s, held %v: %d allocations are left", name, held, n)
				}
			}
		}
	})
}

// apart checks that two new owners have nothing in common, as those of a thing
// that was put back twice would have.
func (r *rig) apart(after string) {
	r.t.Helper()
	a, b := r.session(), r.session()
	x, y := r.buffer(random(familyBytes)), r.buffer(random(familyBytes))
	rawA, err := a.Raw()
	must(r.t, err)
	rawB, err := b.Raw()
	must(r.t, err)
	if rawA == rawB || &x.Bytes()[0] == &y.Bytes()[0] {
		r.t.Error(fmt.Errorf("after the close of the %s two owners have one stream or one buffer", after))
	}
	for _, c := range []func() error{a.Close, b.Close, x.Close, y.Close} {
		must(r.t, c())
	}
}
