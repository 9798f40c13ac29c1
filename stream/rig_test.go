package stream_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// A hook stands about every driver call of a rig.
type hook func(c cuapi.Call, next func() cuapi.Result) cuapi.Result

// A rig is a context on the simulator with a piece of device memory and one of
// pinned memory. At the test's end everything must have been released and no
// rule of the driver broken, unless the test says so.
type rig struct {
	t    *testing.T
	sim  *cudasim.Sim
	drv  *driver.Driver
	ctx  *driver.Context
	core *wire.Context
	hook atomic.Pointer[hook]
	dev  cuapi.DevicePtr
	host cuapi.HostPtr
	used []*stream.Lane // dropped at the end
	keep bool           // the context can not be released
}

const size = 64

func newRig(t *testing.T, cfg cudasim.Config) *rig {
	t.Helper()
	r := &rig{t: t, sim: cudasim.New(cfg)}
	r.sim.Table().Init(0)
	d, err := wire.NewDriver(cuapi.Intercept(r.sim.Table(), func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if h := r.hook.Load(); h != nil {
			return (*h)(c, next)
		}
		return next()
	}), "simulator")
	must(t, err)
	r.drv = d.(*driver.Driver)
	r.ctx = r.context(0)
	r.core = wire.ContextOf(r.ctx)
	r.current(func() cuapi.Result { return r.core.Table.MemAlloc(&r.dev, size) })
	r.current(func() cuapi.Result { return r.core.Table.MemHostAlloc(&r.host, size, 0) })
	t.Cleanup(r.end)
	return r
}

func (r *rig) context(ordinal int) *driver.Context {
	r.t.Helper()
	dev, err := r.drv.Device(ordinal)
	must(r.t, err)
	ctx, err := dev.Primary()
	must(r.t, err)
	return ctx
}

func (r *rig) current(f func() cuapi.Result) {
	r.t.Helper()
	r.ok(r.core.Current(f))
}

func (r *rig) ok(res cuapi.Result) {
	r.t.Helper()
	if res != cuapi.Success {
		r.t.Fatal(res)
	}
}

func (r *rig) end() {
	t := r.t
	if t.Failed() {
		return
	}
	r.hook.Store(nil)
	r.sim.ReleaseAll()
	for _, l := range r.used {
		l.Drop()
	}
	if !r.keep {
		r.current(func() cuapi.Result { return r.core.Table.CtxSynchronize() })
		r.current(func() cuapi.Result { return r.core.Table.MemFree(r.dev) })
		r.current(func() cuapi.Result { return r.core.Table.MemFreeHost(r.host) })
		must(t, r.ctx.Shutdown(r.within()))
		must(t, r.sim.Close())
	}
	for _, v := range r.sim.Violations() {
		t.Errorf("violation: %v\n%s", v, v.Stack())
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within bounds a wait that must end: reaching the bound fails the test.
func (r *rig) within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("never came true")
		}
	}
}

func (r *rig) lane() *stream.Lane {
	r.t.Helper()
	l, err := stream.Take(r.core)
	must(r.t, err)
	r.used = append(r.used, l)
	return l
}

// hold holds a lane without telling it, as a slow device does.
func (r *rig) hold(l *stream.Lane) (release func()) {
	r.sim.Hold(uintptr(l.Handle()))
	return func() { r.sim.Release(uintptr(l.Handle())) }
}

// upload enqueues a copy and returns the mark behind it.
func (r *rig) upload(l *stream.Lane) *stream.Mark {
	r.t.Helper()
	m := new(stream.Mark)
	must(r.t, l.Upload(r.dev, r.host, size, m))
	return m
}

func (r *rig) fill(l *stream.Lane) error { return l.Fill(r.dev, 1, size) }

// fail makes the n-th call of an entry point fail from now on, from 0: before
// its effect, or after it. It returns what tells whether that happened.
func (r *rig) fail(id cuapi.ID, n int, code cuapi.Result, after bool) (hit func() bool) {
	var mu sync.Mutex
	seen, done := 0, false
	h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID != id {
			return next()
		}
		mu.Lock()
		now := seen == n
		seen++
		done = done || now
		mu.Unlock()
		if !now {
			return next()
		}
		if after {
			next()
		}
		return code
	})
	r.hook.Store(&h)
	return func() bool { mu.Lock(); defer mu.Unlock(); return done }
}

func (r *rig) calls(ids ...cuapi.ID) (n int) {
	for _, c := range r.sim.Trace() {
		for _, id := range ids {
			if c.ID == id {
				n++
			}
		}
	}
	return n
}

func (r *rig) events() event.Stats { return event.PoolOf(r.core).Stats() }

// state is what was observed of a mark, without a look at it.
func state(t *testing.T, m *stream.Mark) bool {
	t.Helper()
	done, err := m.Peek()
	must(t, err)
	return done
}

func isEnqueued(err error) bool {
	var e *stream.Enqueued
	return errors.As(err, &e)
}
