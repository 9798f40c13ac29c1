package publish_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// during runs f inside the first call of the entry point after arming.
type during struct {
	id  cuapi.ID
	on  atomic.Bool
	f   func()
	ret cuapi.Result // returned instead of making the call, unless 0
}

func (d *during) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if c.ID != d.id || !d.on.CompareAndSwap(true, false) {
		return next()
	}
	d.f()
	if d.ret != 0 {
		return d.ret
	}
	return next()
}

// A publish that begins while a launch of the value is failing must not win.
func TestPublishBesideAFailingLaunch(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	got := make(chan error, 1)
	d := &during{id: cuapi.IDLaunchKernel, ret: cuapi.InvalidValue}
	r := newRig(t, options{around: d.around})
	r.keep = true
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	d.f = func() {
		go func() { _, err := s.Publish(v); got <- err }()
		for range 20 {
			runtime.Gosched()
		}
	}
	d.on.Store(true)
	if err := s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)); err == nil {
		t.Fatal("the launch succeeded")
	}
	if err := <-got; !errors.Is(err, publish.ErrStreamFailed) {
		t.Fatalf("published what an unproven launch wrote: %v", err)
	}
	must(t, v.Close())
	must(t, s.Close())
	if q := r.rt.Stats().Queue; q.Permanent != 1 {
		t.Errorf("%+v", q)
	}
}

// An upload that failed taints the value that it wrote to.
func TestUnprovenUploadTaints(t *testing.T) {
	f := &slip{}
	r := newRig(t, options{around: f.around})
	r.keep = true
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	buf := r.buffer(random(64))
	f.arm(0, cuapi.InvalidValue, true)
	_, err = s.Upload(v, buf)
	f.disarm()
	var unproven *publish.UnprovenError
	if !errors.As(err, &unproven) || v.Err() != nil || buf.Err() == nil {
		t.Fatal(err)
	}
	must(t, v.Close())
	must(t, s.Close())
	r.settle()
	if q := r.rt.Stats().Queue; q.Permanent != 2 || q.PermanentBytes != 128 {
		t.Errorf("%+v", q)
	}
	if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("before the runtime's close: %v", err)
	}
	r.retained()
}

// retained shuts down and checks that the context stays retained, with a cause.
func (r *rig) retained() {
	r.t.Helper()
	r.rt.Shutdown(r.within())
	if err := r.ctx.Shutdown(r.within()); err == nil || errors.Is(err, driver.ErrBusy) {
		r.t.Errorf("shutdown over what is retained for good: %v", err)
	}
}

// What the queue itself moves to the permanent side ends as what a close does:
// the runtime is not pinned for ever, and the context says why it stays.
func TestAFenceThatFailsInTheQueue(t *testing.T) {
	var bad atomic.Bool
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventQuery && bad.Load() {
			return cuapi.IllegalAddress
		}
		return next()
	}})
	r.keep = true
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	must(t, p.Close())
	must(t, s.Close())
	bad.Store(true)
	r.settle()
	r.retained()
	if _, err := r.device().Primary(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("a lost context that stays retained came back: %v", err)
	}
	release()
}

func (r *rig) device() *driver.Device {
	r.t.Helper()
	dev, err := r.drv.Device(0)
	must(r.t, err)
	return dev
}

func TestLeakedAdoptedMemoryKeepsTheContext(t *testing.T) {
	r := newRig(t, options{})
	r.keep = true
	s := r.session()
	addr, _ := r.foreign(4096)
	v, err := s.Adopt(addr, publish.U8, []int{4096}, nil)
	must(t, err)
	p, err := s.PublishAsserted(v)
	must(t, err)
	p.Leak()
	must(t, s.Close())
	r.retained()
}

// A leak that another call's use delays is still a leak.
func TestLeakDuringACall(t *testing.T) {
	d := &during{id: cuapi.IDEventQuery}
	r := newRig(t, options{around: d.around})
	r.keep = true
	s := r.session()
	release := r.hold(s)
	p, _ := r.publication(s, 64)
	r.rt.Drain()
	d.f = p.Leak
	d.on.Store(true)
	p.FrontierReady()
	release()
	r.settle()
	if st := r.rt.Stats(); st.Leaked != 1 || st.Queue.Permanent != 1 {
		t.Errorf("%+v", st)
	}
	must(t, s.Close())
}

// Closing needs no event that the driver could refuse then.
func TestCloseNeedsNoNewEvent(t *testing.T) {
	var bad atomic.Bool
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventCreate && bad.Load() {
			return cuapi.OutOfMemory
		}
		return next()
	}})
	s := r.session()
	release := r.hold(s)
	for range 200 {
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		must(t, s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)))
		bad.Store(true)
		must(t, v.Close())
		bad.Store(false)
	}
	release()
	r.settle()
	if q := r.rt.Stats().Queue; q.Permanent != 0 {
		t.Errorf("%+v", q)
	}
	must(t, s.Close())
}

// Many values that are closed behind one held stream share a fence: a drain does
// not ask for each.
func TestClosedValuesShareAFence(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	release := r.hold(s)
	var vs []*publish.Value
	for range 400 {
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		vs = append(vs, v)
	}
	for _, v := range vs {
		must(t, v.Close())
	}
	r.sim.StartTrace()
	r.rt.Drain()
	n := 0
	for _, c := range r.sim.Trace() {
		if c.ID == cuapi.IDEventQuery {
			n++
		}
	}
	r.sim.StopTrace()
	if n > 40 {
		t.Errorf("%d queries for one drain", n)
	}
	release()
	r.settle()
	must(t, s.Close())
}

// A value that is closed while its stream captures waits for the capture's end.
func TestCloseWhileCapturing(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(64)
	freed := make(chan struct{})
	v, err := s.Adopt(addr, publish.U8, []int{64}, func() { free(); close(freed) }) // of which no mark of ours tells enough
	must(t, err)
	raw, err := s.Raw()
	must(t, err)
	table := r.sim.Table()
	if res := table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed); res != cuapi.Success {
		t.Fatal(res)
	}
	must(t, v.Close())
	r.rt.Drain()
	if q := r.rt.Stats().Queue; q.Permanent != 0 || q.Reserved != 1 {
		t.Errorf("while it captures: %+v", q)
	}
	must(t, s.Close())
	down := make(chan error)
	go func() { down <- r.rt.Shutdown(r.within()) }()
	for range 200 { // it waits for the capture's end
		r.rt.Drain()
		select {
		case err := <-down:
			t.Fatalf("shut down while a value waits: %v", err)
		default:
			runtime.Gosched()
		}
	}
	g := new(cuapi.Graph)
	if res := table.StreamEndCapture(cuapi.Stream(raw), g); res != cuapi.Success {
		t.Fatal(res)
	}
	if res := table.GraphDestroy(*g); res != cuapi.Success {
		t.Fatal(res)
	}
	must(t, <-down)
	<-freed
	if q := r.rt.Stats().Queue; q.Permanent != 0 || q.Reserved != 0 {
		t.Errorf("after it: %+v", q)
	}
}

// A stream that captures is no idle stream for a new session.
func TestANewSessionGetsNoCapturingStream(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	raw, err := s.Raw()
	must(t, err)
	table := r.sim.Table()
	table.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
	must(t, s.Close())
	s = r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	must(t, v.Close())
	must(t, s.Close())
	g := new(cuapi.Graph)
	table.StreamEndCapture(cuapi.Stream(raw), g)
	table.GraphDestroy(*g)
}

// The watcher only queries: a value that became garbage while the process is
// stalled does not keep it from telling a wait that its work is done.
func TestTheWatcherDoesNotStall(t *testing.T) {
	r := newRig(t, options{})
	table := r.sim.Table()
	host := new(cuapi.HostPtr)
	if res := r.current(func() cuapi.Result { return table.MemHostAlloc(host, 4096, cuapi.MemHostAllocPortable) }); res != cuapi.Success {
		t.Fatal(res)
	}
	a, b, c := r.session(), r.session(), r.session()
	releaseA, releaseB := r.hold(a), r.hold(b)
	pub, want := r.publication(b, 64)
	func() { // garbage, behind work that no mark covers
		v, err := c.Alloc(publish.U8, 64)
		must(t, err)
		must(t, c.Launch(r.inc, kernel.Grid(1), publish.In(v), publish.Out(v), kernel.U32(1)))
	}()
	v, err := a.Alloc(publish.U8, 64)
	must(t, err)
	blocked := r.sim.Blocked()
	freed := make(chan cuapi.Result)
	go func() { freed <- r.current(func() cuapi.Result { return table.MemFreeHost(*host) }) }()
	collect(t, func() bool { return r.sim.Blocked() > blocked && r.rt.Stats().Abandoned == 1 })
	done := make(chan error)
	go func() { done <- pub.AwaitFrontier(r.within()) }()
	releaseB()
	if err := <-done; err != nil {
		t.Errorf("a wait for what is done: %v", err)
	}
	releaseA()
	if res := <-freed; res != cuapi.Success {
		t.Error(res)
	}
	r.download(pub, want)
	must(t, v.Close())
	for _, s := range []*publish.Session{a, b, c} {
		must(t, s.Close())
	}
}

// An error is a rejection or unproven, never both.
func TestADownloadOnALostContextIsRejectedAlone(t *testing.T) {
	r := newRig(t, options{})
	r.keep = true
	s := r.session()
	p, _ := r.publication(s, 64)
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	buf := r.buffer(make([]byte, 64))
	s.Launch(r.bad, kernel.Grid(1), publish.Out(v))
	s.Synchronize(r.within())
	_, err = p.DownloadInto(buf)
	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	if !errors.As(err, &rejected) || errors.As(err, &unproven) || !errors.Is(err, publish.ErrLost) || buf.Err() != nil {
		t.Errorf("%v", err)
	}
}

// A buffer that is asked for while everything shuts down reaches the driver
// before the context's release, or not at all.
func TestPinnedBesideShutdown(t *testing.T) {
	d := &during{id: cuapi.IDCtxPushCurrent}
	r := newRig(t, options{around: d.around})
	r.keep = true
	d.f = func() {
		must(t, r.rt.Shutdown(context.Background()))
		if err := r.ctx.Shutdown(context.Background()); !errors.Is(err, driver.ErrBusy) {
			t.Errorf("the context was shut down under a call: %v", err)
		}
	}
	d.on.Store(true)
	b, err := r.rt.Pinned(1 << 16)
	must(t, err)
	if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("a buffer is open: %v", err)
	}
	must(t, b.Close())
	must(t, r.ctx.Shutdown(r.within()))
}

// Allocations that find no memory fill no stream.
func TestOutOfMemoryTakesNoCredits(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 8 << 20}})
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	release := r.hold(s)
	for range 1000 {
		if _, err := s.Alloc(publish.U8, 64<<20); !errors.Is(err, driver.ErrOutOfMemory) {
			t.Fatal(err)
		}
	}
	must(t, s.Launch(r.inc, kernel.Grid(1), publish.In(v), publish.Out(v), kernel.U32(1)))
	release()
	must(t, v.Close())
	must(t, s.Close())
}

// An allocation that fails otherwise may have happened: it is counted.
func TestUnprovenAllocIsCounted(t *testing.T) {
	f := &slip{}
	r := newRig(t, options{around: f.around})
	r.keep = true
	s := r.session()
	f.arm(1, cuapi.InvalidValue, true) // behind the exchange of the capture mode
	_, err := s.Alloc(publish.U8, 64)
	_, hit := f.disarm()
	var unproven *publish.UnprovenError
	if hit != "cuMemAllocFromPoolAsync" || !errors.As(err, &unproven) {
		t.Fatal(hit, err)
	}
	must(t, s.Close())
	if q := r.rt.Stats().Queue; q.Permanent != 1 || q.PermanentBytes != 64 {
		t.Errorf("%+v", q)
	}
	r.retained()
}

// A buffer's memory is out of reach from the first moment of its move.
func TestBytesWhileMoving(t *testing.T) {
	var buf *pinned.Buffer
	d := &during{id: cuapi.IDMemcpyDtoHAsync}
	r := newRig(t, options{around: d.around})
	s := r.session()
	p, want := r.publication(s, 64)
	buf = r.buffer(make([]byte, 64))
	d.f = func() {
		if buf.Bytes() != nil {
			t.Error("reachable while a copy is enqueued")
		}
	}
	d.on.Store(true)
	tr, err := p.DownloadInto(buf)
	must(t, err)
	r.finish(tr, want)
	must(t, s.Close())
}

// A runtime that is nil or zero answers, and never panics.
func TestNilAndZeroHandles(t *testing.T) {
	for _, rt := range []*publish.Runtime{nil, {}} {
		if _, err := rt.Pinned(1); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if err := rt.Reserve(1, 1); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if _, err := rt.OpenSession(nil); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if err := rt.WithSession(func(*publish.Session) error { return nil }); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if err := rt.Err(); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if rt.Context() != nil || rt.Lost() != nil || rt.Drain() != 0 {
			t.Error("a runtime that is none has a context")
		}
		_ = rt.Stats()
		must(t, rt.Close())
		must(t, rt.Shutdown(context.Background()))
	}
	for _, err := range []error{&publish.RejectedError{}, &publish.UnprovenError{}} {
		if err.Error() == "" {
			t.Error("no text")
		}
	}
}
