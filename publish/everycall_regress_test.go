package publish_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// The event of a record that failed is never used again, and ends with the
// context: the simulator's close finds nothing left.
func TestEventsOfFailedRecordsEnd(t *testing.T) {
	f := &trip{}
	r := newRig(t, options{around: f.around})
	s := r.session()
	for _, after := range []bool{false, true} {
		f.next(cuapi.IDEventRecord, cuapi.InvalidValue, after)
		if err := s.Synchronize(r.within()); !errors.Is(err, driver.ErrInvalidValue) {
			t.Error(err)
		}
		f.stop(t)
	}
	must(t, s.Close())
}

// A look that fails leaves the operations before it without a mark. Once their
// stream is nobody's any more the credits come back, though other code has known
// the stream.
func TestCreditsBehindAFailedLookComeBack(t *testing.T) {
	f := &trip{}
	r := newRig(t, options{around: f.around})
	r.keep = true
	s := r.session()
	must(t, second(s.Raw()))
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	p, err := s.Publish(v)
	must(t, err)
	tr, err := p.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	f.next(cuapi.IDEventQuery, cuapi.InvalidValue, false)
	if _, err := tr.Ready(); !errors.Is(err, driver.ErrInvalidValue) {
		t.Error(err)
	}
	f.stop(t)
	must(t, tr.Close())
	must(t, s.Close())
	core := wire.ContextOf(r.ctx)
	_, stop := stream.AwaitCredits(core)
	defer stop()
	for bound := r.within(); stream.InFlight(core) > 0; runtime.Gosched() {
		if bound.Err() != nil {
			t.Fatalf("%d credits never come back", stream.InFlight(core))
		}
	}
}
