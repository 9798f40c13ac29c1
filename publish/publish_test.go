package publish_test

import (
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

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
