package publish_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// Every rejection comes before any driver call that enqueues, names its
// reason, and leaves the owners usable.
func TestRejections(t *testing.T) {
	enqueues := map[cuapi.ID]bool{}
	for _, e := range cuapi.Entries {
		enqueues[e.ID] = e.List
	}
	for _, id := range []cuapi.ID{cuapi.IDEventQuery, cuapi.IDStreamQuery, cuapi.IDMemFreeAsync} {
		enqueues[id] = false // the watcher makes these
	}
	var mu sync.Mutex
	var watching bool
	var seen []string
	r := newRig(t, options{around: func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		mu.Lock()
		if watching && enqueues[c.ID] {
			seen = append(seen, c.Name())
		}
		mu.Unlock()
		return next()
	}})
	other, err := publish.New(r.ctx, publish.Config{})
	must(t, err)
	t.Cleanup(func() { must(t, other.Shutdown(r.within())) })
	so, err := other.OpenSession(nil)
	must(t, err)
	foreign, err := so.Alloc(publish.U8, 16)
	must(t, err)
	s, s2 := r.session(), r.session()
	v, want := r.produce(s, random(16))
	onOther, err := s2.Alloc(publish.U8, 16)
	must(t, err)
	short, buf := r.buffer(make([]byte, 15)), r.buffer(make([]byte, 16))
	gone := r.buffer(make([]byte, 16))
	must(t, gone.Close())
	closedSession := r.session()
	must(t, closedSession.Close())

	cases := []struct {
		name string
		do   func() error
		want error
	}{
		{"publish nil", func() error { _, err := s.Publish(nil); return err }, driver.ErrClosed},
		{"publish on a nil session", func() error { _, err := (*publish.Session)(nil).Publish(v); return err }, driver.ErrClosed},
		{"publish on a closed session", func() error { _, err := closedSession.Publish(v); return err }, driver.ErrClosed},
		{"publish foreign", func() error { _, err := s.Publish(foreign); return err }, publish.ErrForeign},
		{"publish of another stream", func() error { _, err := s.Publish(onOther); return err }, publish.ErrOtherStream},
		{"upload short", func() error { _, err := s.Upload(v, short); return err }, publish.ErrLength},
		{"upload closed buffer", func() error { _, err := s.Upload(v, gone); return err }, driver.ErrClosed},
		{"upload nil buffer", func() error { _, err := s.Upload(v, nil); return err }, driver.ErrClosed},
		{"upload of another stream", func() error { _, err := s.Upload(onOther, buf); return err }, publish.ErrOtherStream},
		{"launch of another stream", func() error {
			return s.Launch(r.inc, kernel.Grid(16), publish.In(onOther), publish.Out(v), kernel.U32(16))
		}, publish.ErrOtherStream},
		{"launch with too few arguments", func() error { return s.Launch(r.inc, kernel.Grid(16), publish.In(v)) }, kernel.ErrArguments},
		{"launch with a wide argument", func() error {
			return s.Launch(r.inc, kernel.Grid(16), publish.In(v), publish.Out(v), kernel.I64(16))
		}, kernel.ErrArguments},
		{"launch of nothing", func() error { return s.Launch(nil, kernel.Grid(16)) }, driver.ErrClosed},
		{"unserved dtype", func() error { _, err := s.Alloc(publish.DType(99), 4); return err }, publish.ErrDType},
		{"no shape", func() error { _, err := s.Alloc(publish.U8); return err }, publish.ErrShape},
		{"zero dimension", func() error { _, err := s.Alloc(publish.F32, 4, 0); return err }, publish.ErrShape},
		{"overflow", func() error { _, err := s.Alloc(publish.F64, 1<<31, 1<<31, 1<<31); return err }, publish.ErrShape},
		{"nil publication", func() error { _, err := (*publish.Publication)(nil).DownloadInto(buf); return err }, driver.ErrClosed},
	}
	for _, c := range cases {
		mu.Lock()
		watching, seen = true, nil
		mu.Unlock()
		err := c.do()
		mu.Lock()
		watching = false
		mu.Unlock()
		var rejected *publish.RejectedError
		if !errors.Is(err, c.want) || !errors.As(err, &rejected) {
			t.Errorf("%s: %v, want a rejection for %v", c.name, err, c.want)
		}
		if len(seen) > 0 {
			t.Errorf("%s: enqueued %v", c.name, seen)
		}
	}
	p, err := s.Publish(v)
	must(t, err)
	r.download(p, want)
	must(t, r.rejectedDownloads(s, buf, short, gone))
	for _, v := range []*publish.Value{foreign, onOther} {
		must(t, v.Close())
	}
	for _, s := range []*publish.Session{s, s2, so} {
		must(t, s.Close())
	}
	must(t, short.Close())
	must(t, buf.Close())
}

func (r *rig) rejectedDownloads(s *publish.Session, buf, short, gone *pinned.Buffer) error {
	p, want := r.publication(s, 16)
	for _, c := range []struct {
		buf      *pinned.Buffer
		off, n   int64
		want     error
		wantsBuf bool
	}{
		{short, 0, 16, publish.ErrLength, true},
		{gone, 0, 16, driver.ErrClosed, true},
		{nil, 0, 16, driver.ErrClosed, false},
		{buf, 1, 16, publish.ErrLength, true},
		{buf, -1, 16, publish.ErrLength, true},
		{buf, 0, 0, publish.ErrLength, true},
		{buf, 17, 1, publish.ErrLength, true},
		{buf, 1 << 62, 1 << 62, publish.ErrLength, true},
	} {
		_, err := p.DownloadRange(c.buf, c.off, c.n)
		var rejected *publish.RejectedError
		if !errors.Is(err, c.want) || !errors.As(err, &rejected) || rejected.Publication != p || rejected.Buffer != c.buf {
			r.t.Errorf("download %d from %d: %v", c.n, c.off, err)
		}
	}
	part, err := p.DownloadRange(short, 1, 15)
	if err != nil {
		return err
	}
	out, err := part.Wait(r.within())
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want[1:], out.Bytes()); diff != "" {
		r.t.Error(diff)
	}
	return out.Close()
}

func TestOneSessionAStream(t *testing.T) {
	r := newRig(t, options{})
	st, err := stream.New(r.ctx)
	must(t, err)
	s, err := r.rt.OpenSession(st)
	must(t, err)
	r.sim.StartTrace()
	if _, err := r.rt.OpenSession(st); !errors.Is(err, publish.ErrSessionHeld) {
		t.Fatal(err)
	}
	if calls := r.sim.Trace(); len(calls) > 0 {
		t.Fatalf("a refused session made driver calls: %v", calls)
	}
	r.sim.StopTrace()
	must(t, s.Close())
	again, err := r.rt.OpenSession(st)
	must(t, err)
	must(t, again.Close())
	must(t, st.Close())
	if _, err := r.rt.OpenSession(st); !errors.Is(err, driver.ErrClosed) {
		t.Fatal(err)
	}
}

func TestScopedSessionMayPublish(t *testing.T) {
	r := newRig(t, options{})
	var p *publish.Publication
	var want []byte
	must(t, r.rt.WithSession(func(s *publish.Session) error {
		p, want = r.publication(s, 300)
		return nil
	}))
	r.download(p, want)
	boom := errors.New("boom")
	if err := r.rt.WithSession(func(*publish.Session) error { return boom }); !errors.Is(err, boom) {
		t.Fatal(err)
	}
	func() {
		defer func() { recover() }()
		r.rt.WithSession(func(*publish.Session) error { panic("in the callback") })
	}()
	if n := r.rt.Stats().Sessions; n != 0 {
		t.Fatalf("%d sessions stay open", n)
	}
}
