package publish_test

import (
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// A failed launch is unproven: its values stay the caller's, tainted, and the
// stream publishes no more.
func TestUnprovenLaunchTaints(t *testing.T) {
	f := &fault{}
	r := newRig(t, options{around: f.around})
	r.keep = true
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	f.arm(0, cuapi.InvalidValue, false)
	err = s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
	f.disarm()
	var unproven *publish.UnprovenError
	if !errors.As(err, &unproven) || !errors.Is(err, driver.ErrInvalidValue) {
		t.Fatal(err)
	}
	if v.Err() != nil {
		t.Fatal("a borrowed value went away")
	}
	if _, err := s.Publish(v); !errors.Is(err, publish.ErrStreamFailed) || !errors.Is(err, driver.ErrInvalidValue) {
		t.Fatal(err)
	}
	must(t, v.Close())
	must(t, s.Close())
	r.settle()
	if q := r.rt.Stats().Queue; q.Permanent != 1 {
		t.Fatalf("%+v", q)
	}
}

// The copy was enqueued and the record behind it failed: publication and
// buffer are retained.
func TestUnprovenDownloadRetainsBoth(t *testing.T) {
	f := &fault{}
	r := newRig(t, options{around: f.around})
	r.keep = true
	s := r.session()
	p, _ := r.publication(s, 64)
	r.settle()
	buf := r.buffer(make([]byte, 64))
	f.arm(1, cuapi.InvalidHandle, false)
	_, err := p.DownloadInto(buf)
	_, hit := f.disarm()
	var unproven *publish.UnprovenError
	if hit != "cuStreamIsCapturing" && hit != "cuEventRecord" {
		t.Fatalf("injected at %s", hit)
	}
	if !errors.As(err, &unproven) || !errors.Is(err, driver.ErrInvalidHandle) {
		t.Fatal(err)
	}
	if buf.Bytes() != nil || p.Err() == nil {
		t.Fatal("an owner came back after an enqueue failed")
	}
	must(t, s.Close())
	r.settle()
	if q := r.rt.Stats().Queue; q.Permanent != 1 || q.PermanentBytes != 128 {
		t.Fatalf("%+v", q)
	}
}
