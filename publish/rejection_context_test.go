package publish_test

import (
	"errors"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// elsewhere is a runtime on another device.
func (r *rig) elsewhere() (other *rig, end func()) {
	r.t.Helper()
	dev, err := r.drv.Device(1)
	must(r.t, err)
	own := *r
	own.ctx, err = dev.Primary()
	must(r.t, err)
	own.rt, err = publish.New(own.ctx, publish.Config{})
	must(r.t, err)
	return &own, func() {
		must(r.t, own.rt.Shutdown(r.within()))
		must(r.t, own.ctx.Shutdown(r.within()))
	}
}

// What belongs to another device's context is refused before any call with it.
// The machine needs two devices.
func TestRejectionsOfAnotherContext(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Devices: 2}, trace: true})
	for _, c := range []refusal{
		{"buffer of another context", ofBuffer, publish.ErrForeign, swapped(partBuffer, func(a *attempt) (*pinned.Buffer, func()) {
			other, end := a.r.elsewhere()
			b := other.buffer(make([]byte, valueSize))
			return b, func() { must(t, b.Err()); must(t, b.Close()); end() }
		})},
		{"value of another context", valueRefusals, publish.ErrForeign, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
			other, end := a.r.elsewhere()
			s := other.session()
			v, err := s.Alloc(publish.U8, valueSize)
			must(t, err)
			return v, func() { must(t, v.Close()); must(t, s.Close()); end() }
		})},
		{"function of another context", launches, publish.ErrForeign, swapped(partFunction, func(a *attempt) (*kernel.Function, func()) {
			other, end := a.r.elsewhere()
			mod, err := kernel.Load(other.ctx, []byte(testPTX))
			must(t, err)
			f, err := mod.Function("inc")
			must(t, err)
			return f, end
		})},
		{"memory of another device", adopts, publish.ErrNotDevice, swapped(partAddress, func(a *attempt) (uint64, func()) {
			other, end := a.r.elsewhere()
			addr, free := other.deviceMemory(valueSize)
			return addr, func() { free(); end() }
		})},
		{"memory of another device's pool", adopts, publish.ErrNotDevice, swapped(partAddress, func(a *attempt) (uint64, func()) {
			other, end := a.r.elsewhere() // which tells no context
			s := other.session()
			raw, err := s.Raw()
			must(t, err)
			d := new(cuapi.DevicePtr)
			other.raw(func(t *cuapi.Table) cuapi.Result { return t.MemAllocAsync(d, valueSize, cuapi.Stream(raw)) })
			return uint64(*d), func() {
				other.raw(func(t *cuapi.Table) cuapi.Result { return t.MemFreeAsync(*d, cuapi.Stream(raw)) })
				must(t, s.Synchronize(a.r.within()))
				must(t, s.Close())
				end()
			}
		})},
	} {
		for _, name := range c.of {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				own := *r
				own.t = t
				own.refused(operations[name], name, c, nil)
			})
		}
	}
	other, end := r.elsewhere()
	st, err := stream.New(other.ctx)
	must(t, err)
	calls := r.trace(func() { _, err = r.rt.OpenSession(st) })
	if !errors.Is(err, publish.ErrForeign) || len(calls) > 0 {
		t.Errorf("a session on another context's stream: %v, %v", err, calls)
	}
	s, err := other.rt.OpenSession(st)
	must(t, err)
	must(t, s.Close())
	must(t, st.Close())
	end()
}

// A stream of which an enqueue failed publishes no more; what is there stays
// usable, and the first cause is told.
func TestRejectionOfAFailedStream(t *testing.T) {
	f := &trip{}
	onEach(t, options{around: f.around, trace: true}, func(r *rig) {
		t := r.t
		r.keep = true
		st, err := stream.New(r.ctx)
		must(t, err)
		a := &attempt{r: r, st: st}
		a.open()
		earlier, wantEarlier := r.publication(a.s, valueSize)
		v, want := r.produce(a.s, random(valueSize))
		x := a.alloc()
		f.next(cuapi.IDLaunchKernel, cuapi.InvalidValue, true)
		if err := a.run(r.inc, x); !errors.Is(err, driver.ErrInvalidValue) {
			t.Fatal(err)
		}
		f.stop(t)
		refused := func(s *publish.Session, v *publish.Value) {
			t.Helper()
			var err error
			calls := r.trace(func() { _, err = s.Publish(v) })
			var rejected *publish.RejectedError
			if !errors.As(err, &rejected) || !errors.Is(err, publish.ErrStreamFailed) || !errors.Is(err, driver.ErrInvalidValue) || errors.Is(err, driver.ErrInvalidHandle) {
				t.Errorf("%v", err)
			} else if rejected.Value != v || v.Err() != nil {
				t.Errorf("the value went away: %+v", rejected)
			}
			if n := enqueues(calls); len(n) > 0 {
				t.Errorf("enqueued %v", n)
			}
		}
		refused(a.s, v)
		refused(a.s, x)
		f.next(cuapi.IDLaunchKernel, cuapi.InvalidHandle, true) // a second failure
		if err := a.run(r.inc, x); !errors.Is(err, driver.ErrInvalidHandle) {
			t.Fatal(err)
		}
		f.stop(t)
		refused(a.s, v)
		must(t, a.s.Close())
		a.open() // another session on that stream
		refused(a.s, v)
		must(t, a.run(r.inc, v)) // the value is usable there, and its bytes are not published
		other := r.session()
		p, want2 := r.publication(other, valueSize)
		r.download(p, want2)
		must(t, other.Close())
		r.download(earlier, wantEarlier)
		must(t, v.Close())
		must(t, a.s.Close())
		must(t, st.Close())
		r.settle()
		if q := r.rt.Stats().Queue; q.Permanent != 0 || q.Reserved != 1 {
			t.Errorf("%+v", q)
		}
		must(t, x.Close()) // which is tainted
		if q := r.rt.Stats().Queue; q.Permanent != 1 || q.PermanentBytes != valueSize || !errors.Is(q.Cause, driver.ErrInvalidValue) {
			t.Errorf("%+v", q)
		}
		_ = want
	})
}

// On a lost context each operation is refused with the first cause, makes no
// driver call, and leaves its owners.
func TestRejectionsOfALostContext(t *testing.T) {
	onEach(t, options{alone: true, trace: true}, func(r *rig) {
		t := r.t
		r.keep = true
		attempts := map[string]*attempt{}
		for name, op := range operations {
			a := &attempt{r: r, s: r.session()}
			op.prepare(a)
			attempts[name] = a
		}
		idle, err := stream.New(r.ctx)
		must(t, err)
		r.lose()
		is := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, publish.ErrLost) || !errors.Is(err, driver.ErrIllegalAddress) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for name, op := range operations {
			a := attempts[name]
			want := op.owners(a)
			v, pub := a.v, a.pub
			calls := r.trace(func() { err = op.do(a) })
			a.v, a.pub = v, pub
			is(name, err)
			var rejected *publish.RejectedError
			var unproven *publish.UnprovenError
			switch {
			case !errors.As(err, &rejected) || errors.As(err, &unproven):
				t.Errorf("%s: %v", name, err)
			case rejected.Op != name || rejected.Value != want.Value || rejected.Publication != want.Publication || rejected.Buffer != want.Buffer:
				t.Errorf("%s: owners %+v, want %+v", name, *rejected, want)
			}
			if n := enqueues(calls); len(n) > 0 {
				t.Errorf("%s enqueued %v", name, n)
			}
			if a.v != nil {
				must(t, a.v.Err())
				must(t, a.v.Close())
			}
			if a.buf != nil {
				must(t, a.buf.Err())
				if len(a.buf.Bytes()) != valueSize {
					t.Errorf("%s: the buffer is out of reach", name)
				}
				must(t, a.buf.Close())
			}
			if a.pub != nil {
				must(t, a.pub.Close())
			}
		}
		_, err = r.rt.OpenSession(nil)
		is("a session", err)
		_, err = r.rt.OpenSession(idle)
		is("a session on a stream", err)
		_, err = r.rt.Pinned(valueSize)
		is("a buffer", err)
		is("buffers", r.rt.Reserve(1, valueSize))
		is("a scoped session", r.rt.WithSession(func(*publish.Session) error { t.Error("opened"); return nil }))
		_, err = publish.New(r.ctx, publish.Config{})
		is("a runtime", err)
	})
}

// lose has a kernel fault, and returns when the loss is known.
func (r *rig) lose() {
	r.t.Helper()
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(r.t, err)
	release := r.hold(s) // or the watcher may see the fault in the middle of this
	must(r.t, s.Launch(r.bad, kernel.Grid(1), publish.Out(v)))
	p, err := s.Publish(v)
	must(r.t, err)
	release()
	if err := p.AwaitFrontier(r.within()); !errors.Is(err, driver.ErrIllegalAddress) {
		r.t.Fatal(err)
	}
	<-r.rt.Lost()
	must(r.t, p.Close())
	must(r.t, s.Close())
}

// What another call uses can not be moved: refused, and fine behind that call.
func TestRejectionOfABusyHandle(t *testing.T) {
	d := &during{}
	onEach(t, options{around: d.around}, func(r *rig) {
		t := r.t
		busy := func(what string, err error) {
			t.Helper()
			var rejected *publish.RejectedError
			if !errors.Is(err, driver.ErrBusy) || !errors.As(err, &rejected) {
				t.Errorf("%s: %v", what, err)
			}
		}
		within := func(id cuapi.ID, f, call func()) {
			t.Helper()
			met := false
			d.id, d.f = id, func() { met = true; f() }
			d.on.Store(true)
			call()
			if !met {
				t.Errorf("no call of %s", cuapi.Entries[id].Symbol())
			}
		}
		a := &attempt{r: r, s: r.session()}
		v, want := r.produce(a.s, random(valueSize))
		x := a.alloc()
		must(t, a.s.Synchronize(r.within()))
		r.settle() // the watcher makes no queries from here on
		within(cuapi.IDLaunchKernel,
			func() { _, err := a.s.Publish(v); busy("a value that a launch uses", err) },
			func() {
				must(t, a.s.Launch(r.inc, kernel.Grid(1), publish.In(v), publish.Out(x), kernel.U32(1)))
			})
		release := r.hold(a.s)
		buf := r.buffer(make([]byte, valueSize))
		p, err := a.s.Publish(v)
		must(t, err)
		within(cuapi.IDEventQuery,
			func() { _, err := p.DownloadInto(buf); busy("a publication that a look uses", err) },
			func() { p.FrontierReady() })
		other := attempt{r: r, s: r.session()}
		y := other.alloc()
		var tr *publish.Transfer
		within(cuapi.IDMemcpyDtoHAsync,
			func() { _, err := other.s.Upload(y, buf); busy("a buffer that a download takes", err) },
			func() { tr, err = p.DownloadInto(buf) })
		must(t, err)
		release()
		r.finish(tr, want)
		for _, v := range []*publish.Value{x, y} {
			must(t, v.Close())
		}
		must(t, a.s.Close())
		must(t, other.s.Close())
	})
}
