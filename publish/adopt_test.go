package publish_test

import (
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
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

func TestAdoptRefuses(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(4096)
	buf := r.buffer(make([]byte, 4096))
	pinned := uint64(addressOf(buf.Bytes()))
	var stack [8]byte
	for name, c := range map[string]struct {
		addr  uint64
		shape []int
		d     publish.DType
		want  error
	}{
		"null":       {0, []int{1}, publish.U8, publish.ErrNotDevice},
		"unknown":    {12345, []int{1}, publish.U8, publish.ErrNotDevice},
		"go memory":  {uint64(addressOf(stack[:])), []int{1}, publish.U8, publish.ErrNotDevice},
		"pinned":     {pinned, []int{1}, publish.U8, publish.ErrNotDevice},
		"past end":   {addr, []int{4097}, publish.U8, publish.ErrNotDevice},
		"past end 2": {addr + 4090, []int{2}, publish.F32, publish.ErrNotDevice},
		"shape":      {addr, []int{0}, publish.U8, publish.ErrShape},
		"dtype":      {addr, []int{1}, 77, publish.ErrDType},
	} {
		_, err := s.Adopt(c.addr, c.d, c.shape, func() { t.Error(name, "released what was refused") })
		var rejected *publish.RejectedError
		if !errors.Is(err, c.want) || !errors.As(err, &rejected) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, buf.Close())
	must(t, s.Close())
	if _, err := s.Adopt(addr, publish.U8, []int{1}, nil); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
	free()
}

func TestAPanicInAReleaseIsCaught(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	addr, free := r.foreign(64)
	v, err := s.Adopt(addr, publish.U8, []int{64}, func() { panic("mine") })
	must(t, err)
	must(t, v.Close())
	must(t, s.Close())
	r.settle()
	for r.rt.Stats().Panics == 0 {
		collect(t, func() bool { return r.rt.Stats().Panics == 1 })
	}
	free()
}
