package publish_test

import (
	"context"
	"errors"
	"fmt"
	"math"
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
)

// foreign allocates device memory as other code would, behind the library.
func (r *rig) foreign(n int) (addr uint64, free func()) {
	r.t.Helper()
	table := r.sim.Table()
	d := new(cuapi.DevicePtr)
	in := func(f func() cuapi.Result) {
		if res := r.current(f); res != cuapi.Success {
			r.t.Error(res)
		}
	}
	in(func() cuapi.Result { return table.MemAlloc(d, uintptr(n)) })
	return uint64(*d), func() { in(func() cuapi.Result { return table.MemFree(*d) }) }
}

func TestAdoptedMemory(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(4096)
	released := make(chan struct{}, 1)
	v, err := s.Adopt(addr, publish.U8, []int{4000}, func() { released <- struct{}{} })
	must(t, err)
	in := random(4000)
	up, err := s.Upload(v, r.buffer(in))
	must(t, err)
	must(t, up.Close())
	if _, err := s.Publish(v); !errors.Is(err, publish.ErrProvenance) {
		t.Fatal(err)
	}
	release := r.hold(s)
	p, err := s.PublishAsserted(v)
	must(t, err)
	tr, err := p.DownloadInto(r.buffer(make([]byte, 4000)))
	must(t, err)
	select {
	case <-released:
		t.Fatal("released while a copy reads it")
	default:
	}
	release()
	r.finish(tr, in)
	<-released
	free()
	must(t, s.Close())
}

// What other code enqueued in the stream counts too: adopted memory is released
// behind it, whatever our own operations are known to have done.
func TestAdoptedMemoryWaitsForWorkOfOtherCode(t *testing.T) {
	for _, pending := range []bool{false, true} {
		r := newRig(t, options{})
		s := r.session()
		raw, err := s.Raw()
		must(t, err)
		addr, free := r.foreign(4096)
		released := make(chan struct{}, 1)
		release := r.hold(s)
		var p *publish.Publication
		if pending { // a mark of ours, ahead of the other code's work
			p, _ = r.publication(s, 64)
		}
		if res := r.sim.Table().MemsetD8Async(cuapi.DevicePtr(addr), 1, 4096, cuapi.Stream(raw)); res != cuapi.Success {
			t.Fatal(res)
		}
		v, err := s.Adopt(addr, publish.U8, []int{4096}, func() { released <- struct{}{} })
		must(t, err)
		must(t, v.Close())
		r.rt.Drain()
		if q := r.rt.Stats().Queue; q.Pending == 0 {
			t.Errorf("released while other code's work on it is pending: %+v", q)
		}
		release()
		<-released
		free()
		if p != nil {
			must(t, p.Close())
		}
		must(t, s.Close())
	}
}

// Every refusal is a rejection that asked for attributes alone, takes nothing and
// releases nothing, and the session goes on.
func TestAdoptRefuses(t *testing.T) {
	var tracing atomic.Bool
	var foreign, elsewhere atomic.Uint64
	calls := map[cuapi.ID]int{} // the test's goroutine alone calls, while it traces
	r := newRig(t, options{
		sim: cudasim.Config{Devices: 2},
		around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
			if tracing.Load() {
				calls[c.ID]++
			}
			return next()
		},
		// The simulator has one context for each device. Another one of the same
		// device is answered for one address, that of the other device, and for
		// another one a range that does not contain it.
		seen: func(t *cuapi.Table) {
			get := t.PointerGetAttribute
			t.PointerGetAttribute = func(data cuapi.HostPtr, attr int32, addr cuapi.DevicePtr) cuapi.Result {
				if attr == cuapi.PointerContext && uint64(addr) == foreign.Load() || attr == cuapi.PointerRangeStart && uint64(addr) == foreign.Load()+8 {
					addr = cuapi.DevicePtr(elsewhere.Load())
				}
				return get(data, attr, addr)
			}
		},
	})
	table := r.sim.Table()
	s := r.session()
	addr, free := r.foreign(4096)
	other, freeOther := r.foreign(4096)
	dead, freeDead := r.foreign(4096)
	freeDead()
	managed := new(cuapi.DevicePtr)
	if res := r.current(func() cuapi.Result { return table.MemAllocManaged(managed, 4096, cuapi.MemAttachGlobal) }); res != cuapi.Success {
		t.Fatal(res)
	}
	dev, err := r.drv.Device(1)
	must(t, err)
	ctx1, err := dev.Primary()
	must(t, err)
	on1 := new(cuapi.DevicePtr)
	if res := wire.ContextOf(ctx1).Current(func() cuapi.Result { return table.MemAlloc(on1, 4096) }); res != cuapi.Success {
		t.Fatal(res)
	}
	st1, pool1 := new(cuapi.Stream), new(cuapi.DevicePtr) // its context is none
	if res := wire.ContextOf(ctx1).Current(func() cuapi.Result { return table.StreamCreate(st1, cuapi.StreamNonBlocking) }); res != cuapi.Success {
		t.Fatal(res)
	}
	if res := table.MemAllocAsync(pool1, 4096, *st1); res != cuapi.Success {
		t.Fatal(res)
	}
	foreign.Store(other)
	elsewhere.Store(uint64(*on1))
	buf := r.buffer(make([]byte, 4096))
	pinned := uint64(addressOf(buf.Bytes()))
	var stack [8]byte
	before := r.rt.Stats()
	for name, c := range map[string]struct {
		addr  uint64
		shape []int
		d     publish.DType
		want  error
	}{
		"null":            {0, []int{1}, publish.U8, publish.ErrNotDevice},
		"unknown":         {12345, []int{1}, publish.U8, publish.ErrNotDevice},
		"go memory":       {uint64(addressOf(stack[:])), []int{1}, publish.U8, publish.ErrNotDevice},
		"freed":           {dead, []int{1}, publish.U8, publish.ErrNotDevice},
		"pinned":          {pinned, []int{1}, publish.U8, publish.ErrNotDevice},
		"managed":         {uint64(*managed), []int{1}, publish.U8, publish.ErrNotDevice},
		"another device":  {uint64(*on1), []int{1}, publish.U8, publish.ErrNotDevice},
		"another's pool":  {uint64(*pool1), []int{1}, publish.U8, publish.ErrNotDevice},
		"another context": {other, []int{1}, publish.U8, publish.ErrNotDevice},
		"another range":   {other + 8, []int{1}, publish.U8, publish.ErrNotDevice},
		"past the end":    {addr, []int{4097}, publish.U8, publish.ErrNotDevice},
		"across the end":  {addr + 4090, []int{2}, publish.F32, publish.ErrNotDevice},
		"behind the end":  {addr + 4096, []int{1}, publish.U8, publish.ErrNotDevice},
		"beyond memory":   {addr + 1, []int{math.MaxInt / 2}, publish.U8, publish.ErrNotDevice},
		"shape":           {addr, []int{0}, publish.U8, publish.ErrShape},
		"dtype":           {addr, []int{1}, 77, publish.ErrDType},
	} {
		clear(calls)
		tracing.Store(true)
		v, err := s.Adopt(c.addr, c.d, c.shape, func() { t.Error(name, "released what was refused") })
		tracing.Store(false)
		var rejected *publish.RejectedError
		if v != nil || !errors.Is(err, c.want) || !errors.As(err, &rejected) {
			t.Errorf("%s: %v", name, err)
		}
		for id, n := range calls {
			if id != cuapi.IDPointerGetAttribute && !cleanup[id] {
				t.Errorf("%s: %d calls of %s", name, n, cuapi.Entries[id].Symbol())
			}
		}
		if asked := calls[cuapi.IDPointerGetAttribute] > 0; asked != (c.want == publish.ErrNotDevice) {
			t.Errorf("%s: the driver was asked: %v", name, asked)
		}
	}
	if after := r.rt.Stats(); after.Queue != before.Queue {
		t.Errorf("refusals took something: %+v, before %+v", after.Queue, before.Queue)
	}
	p, want := r.publication(s, 64)
	r.download(p, want)
	// The whole of it, and its last byte, are device memory.
	for at, n := range map[uint64]int{addr: 4096, addr + 4095: 1} {
		v, err := s.Adopt(at, publish.U8, []int{n}, nil)
		must(t, err)
		must(t, v.Close())
	}
	must(t, buf.Close())
	must(t, s.Close())
	if _, err := s.Adopt(addr, publish.U8, []int{1}, nil); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
	r.settle()
	free()
	freeOther()
	for _, p := range []*cuapi.DevicePtr{managed, on1} {
		if res := table.MemFree(*p); res != cuapi.Success {
			t.Error(res)
		}
	}
	if res := table.MemFreeAsync(*pool1, *st1); res != cuapi.Success {
		t.Error(res)
	}
	if res := table.StreamDestroy(*st1); res != cuapi.Success {
		t.Error(res)
	}
	must(t, ctx1.Shutdown(r.within()))
}

// Memory of a pool belongs to no context: other code's pools are as good as its
// plain memory.
func TestAdoptPoolMemory(t *testing.T) {
	for _, private := range []bool{false, true} {
		r := newRig(t, options{})
		table := r.sim.Table()
		s := r.session()
		raw, err := s.Raw()
		must(t, err)
		d, pool, st := new(cuapi.DevicePtr), new(cuapi.MemPool), cuapi.Stream(raw)
		alloc := func() cuapi.Result { return table.MemAllocAsync(d, 4096, st) }
		if private {
			props := &cuapi.MemPoolProps{AllocType: cuapi.MemAllocationTypePinned, Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice}}
			if res := table.MemPoolCreate(pool, props); res != cuapi.Success {
				t.Fatal(res)
			}
			alloc = func() cuapi.Result { return table.MemAllocFromPoolAsync(d, 4096, *pool, st) }
		}
		if res := alloc(); res != cuapi.Success {
			t.Fatal(res)
		}
		freed := make(chan cuapi.Result, 1)
		v, err := s.Adopt(uint64(*d)+96, publish.U8, []int{4000}, func() { freed <- table.MemFreeAsync(*d, st) })
		must(t, err)
		in := random(4000)
		up, err := s.Upload(v, r.buffer(in))
		must(t, err)
		must(t, up.Close())
		p, err := s.PublishAsserted(v)
		must(t, err)
		r.download(p, in)
		if res := <-freed; res != cuapi.Success {
			t.Error(res)
		}
		if _, err := s.Adopt(uint64(*d)+97, publish.U8, []int{4000}, nil); !errors.Is(err, publish.ErrNotDevice) {
			t.Errorf("freed, and past its end: %v", err)
		}
		must(t, s.Close())
		if private {
			if res := table.MemPoolDestroy(*pool); res != cuapi.Success {
				t.Error(res)
			}
		}
	}
}

// Each question of Adopt fails, before and after the driver answered it.
func TestAdoptWhenAnAttributeFails(t *testing.T) {
	attributes := []int32{
		cuapi.PointerMemoryType, cuapi.PointerIsManaged, cuapi.PointerOrdinal, cuapi.PointerContext, cuapi.PointerRangeStart, cuapi.PointerRangeSize,
	}
	for _, attr := range attributes {
		for _, code := range []cuapi.Result{cuapi.InvalidValue, cuapi.NotPermitted, cuapi.InvalidContext, cuapi.LaunchFailed} {
			for _, after := range []bool{false, true} {
				var hits int
				armed := false
				r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
					if c.ID != cuapi.IDPointerGetAttribute || !armed || int32(c.Args[1]) != attr {
						return next()
					}
					hits++
					if after {
						next()
					}
					return code
				}})
				where := fmt.Sprintf("attribute %d, code %d, after %v", attr, code, after)
				s := r.session()
				addr, free := r.foreign(64)
				armed = true
				v, err := s.Adopt(addr, publish.U8, []int{64}, func() { t.Error(where, "released what was refused") })
				armed = false
				if hits != 1 {
					t.Fatalf("%s: asked %d times", where, hits)
				}
				if attr == cuapi.PointerContext && code == cuapi.InvalidValue {
					// No context is told: there is none to compare.
					must(t, err)
					v.Leak()
					r.keep = true
					continue
				}
				var rejected *publish.RejectedError
				if v != nil || !errors.As(err, &rejected) || !errors.Is(err, driver.Result(code)) {
					t.Errorf("%s: %v", where, err)
				}
				if errors.Is(err, publish.ErrNotDevice) != (code == cuapi.InvalidValue) {
					t.Errorf("%s: is it no device memory? %v", where, err)
				}
				if lost := r.rt.Err(); errors.Is(lost, driver.Result(code)) != code.Sticky() || (lost != nil) != code.Sticky() {
					t.Errorf("%s: lost: %v", where, lost)
				}
				if code.Sticky() {
					<-r.rt.Lost()
					if _, err := s.Adopt(addr, publish.U8, []int{64}, nil); !errors.Is(err, publish.ErrLost) || !errors.Is(err, driver.Result(code)) {
						t.Errorf("%s: afterwards: %v", where, err)
					}
					r.keep = true
					continue
				}
				p, want := r.publication(s, 64)
				r.download(p, want)
				free()
				must(t, s.Close())
			}
		}
	}
}

// A release that takes its time holds up no drain and no other owner. Shutdown
// waits for it, as for the device, and the context stays until it has ended.
func TestAReleaseMayTakeItsTime(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(64)
	started, gate := make(chan struct{}), make(chan struct{})
	var ended atomic.Bool
	v, err := s.Adopt(addr, publish.U8, []int{64}, func() {
		close(started)
		<-gate
		free()
		ended.Store(true)
	})
	must(t, err)
	must(t, v.Close())
	<-started
	p, want := r.publication(s, 64)
	r.download(p, want)
	q, _ := r.publication(s, 64)
	must(t, q.Close())
	must(t, s.Close())
	for r.rt.Stats().Queue.Pending > 0 {
		r.rt.Drain()
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.rt.Shutdown(over); err != context.Canceled {
		t.Errorf("a cancelled Shutdown: %v", err)
	}
	if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
		t.Fatalf("the context was shut down under a release: %v", err)
	}
	down := make(chan error, 1)
	go func() { down <- r.rt.Shutdown(r.within()) }()
	for range 100 { // the watcher has looked, again and again
		other, err := publish.New(r.ctx, publish.Config{})
		must(t, err)
		must(t, other.Shutdown(r.within()))
		select {
		case err := <-down:
			t.Fatalf("Shutdown returned, %v, while a release runs", err)
		default:
			runtime.Gosched()
		}
	}
	close(gate)
	must(t, <-down)
	if !ended.Load() {
		t.Error("Shutdown returned before the release")
	}
	must(t, r.ctx.Shutdown(r.within()))
}

// Whatever way a release ends, and however often its owner is closed, it runs
// once, and everything ends.
func TestReleaseEndsAnyWay(t *testing.T) {
	for name, c := range map[string]struct {
		end    func()
		panics int
	}{
		"returns": {func() {}, 0},
		"panics":  {func() { panic("mine") }, 1},
		"nil":     {func() { panic(nil) }, 1},
		"exits":   {runtime.Goexit, 0},
	} {
		r := newRig(t, options{})
		s := r.session()
		addr, free := r.foreign(64)
		var ran atomic.Int64
		v, err := s.Adopt(addr, publish.U8, []int{64}, func() {
			ran.Add(1)
			c.end()
		})
		must(t, err)
		held := r.hold(s)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				v.Close()
				r.rt.Drain()
			})
		}
		wg.Wait()
		if n := ran.Load(); n != 0 {
			t.Errorf("%s: ran %d times while the stream is held", name, n)
		}
		held()
		must(t, v.Close())
		must(t, s.Close())
		must(t, r.rt.Shutdown(r.within()))
		if n := ran.Load(); n != 1 {
			t.Errorf("%s: ran %d times", name, n)
		}
		if st := r.rt.Stats(); st.Panics != c.panics || st.Queue.Permanent != 0 {
			t.Errorf("%s: %d panics, want %d; %+v", name, st.Panics, c.panics, st.Queue)
		}
		free()
	}
}

// A value that nobody closed is released too.
func TestAbandonedAdoptionIsReleased(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(64)
	var ran atomic.Int64
	func() {
		_, err := s.Adopt(addr, publish.U8, []int{64}, func() { ran.Add(1) })
		must(t, err)
	}()
	collect(t, func() bool { return ran.Load() == 1 })
	must(t, s.Close())
	must(t, r.rt.Shutdown(r.within()))
	if n := ran.Load(); n != 1 {
		t.Errorf("released %d times", n)
	}
	free()
}

// Where nothing proves that the device is done, the memory is retained and its
// release never called.
func TestReleaseIsNeverCalledUnproven(t *testing.T) {
	// fails makes the first call of an operation fail, behind its effect.
	fails := func(f *slip, call string, do func() error) {
		t.Helper()
		f.arm(0, cuapi.InvalidHandle, true)
		err := do()
		_, hit := f.disarm()
		var unproven *publish.UnprovenError
		if hit != call || !errors.As(err, &unproven) {
			t.Errorf("the first call is %q, want %s: %v", hit, call, err)
		}
	}
	for name, spoil := range map[string]func(r *rig, f *slip, s *publish.Session, v *publish.Value){
		"launch": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			fails(f, "cuLaunchKernel", func() error {
				return s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
			})
			must(t, v.Close())
		},
		"upload": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			buf := r.buffer(make([]byte, 64))
			fails(f, "cuMemcpyHtoDAsync_v2", func() error { _, err := s.Upload(v, buf); return err })
			must(t, v.Close())
		},
		"publish": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			fails(f, "cuEventRecord", func() error { _, err := s.PublishAsserted(v); return err })
			v.Close()
		},
		"download": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			p, err := s.PublishAsserted(v)
			must(t, err)
			buf := r.buffer(make([]byte, 64))
			fails(f, "cuMemcpyDtoHAsync_v2", func() error { _, err := p.DownloadInto(buf); return err })
			p.Close()
		},
		"fence": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			f.arm(0, cuapi.InvalidHandle, true)
			must(t, v.Close())
			if _, hit := f.disarm(); hit != "cuEventRecord" {
				t.Errorf("closing calls %q first", hit)
			}
		},
		"lost": func(r *rig, f *slip, s *publish.Session, v *publish.Value) {
			must(t, s.Launch(r.bad, kernel.Grid(1), publish.Out(v)))
			if err := s.Synchronize(r.within()); !errors.Is(err, driver.ErrIllegalAddress) {
				t.Error(err)
			}
			must(t, v.Close())
		},
		"leak": func(r *rig, f *slip, s *publish.Session, v *publish.Value) { v.Leak() },
	} {
		f := &slip{}
		r := newRig(t, options{around: f.around})
		r.keep = true
		s := r.session()
		addr, _ := r.foreign(64)
		var ran atomic.Int64
		v, err := s.Adopt(addr, publish.U8, []int{64}, func() { ran.Add(1) })
		must(t, err)
		spoil(r, f, s, v)
		must(t, s.Close())
		r.settle()
		err = r.rt.Shutdown(r.within()) // which waits for releases
		if q := r.rt.Stats().Queue; err == nil || q.Permanent == 0 || q.Pending != 0 || q.Reserved != 0 {
			t.Errorf("%s: %v; %+v", name, err, q)
		}
		if n := ran.Load(); n != 0 {
			t.Errorf("%s: released %d times", name, n)
		}
	}
}
