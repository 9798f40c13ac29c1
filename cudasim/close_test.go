package cudasim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

func TestCloseReportsWhatIsLeft(t *testing.T) {
	r := newRig(t, Config{})
	if err := func() error {
		s := New(Config{})
		_, err := s.Driver()
		return errors.Join(err, s.Close())
	}(); err != nil {
		t.Errorf("nothing was made: %v", err)
	}
	r.stream()
	r.event()
	r.device(8)
	r.pinned(8)
	r.pool()
	r.function(addPTX, "none")
	var e *CloseError
	if !errors.As(r.sim.Close(), &e) {
		t.Fatal("no CloseError")
	}
	for _, want := range []string{"primary context of device 0", "stream", "event", "device memory", "pinned memory", "memory pool", "module"} {
		i := slices.IndexFunc(e.Left, func(l string) bool { return strings.HasPrefix(l, want) })
		if i < 0 {
			t.Errorf("no %s in %q", want, e.Left)
		} else if !strings.Contains(e.Left[i], "_test.go:") {
			t.Errorf("no creation stack: %s", e.Left[i])
		}
	}
	first, _, _ := strings.Cut(e.Error(), "\n")
	want := "cudasim: 0 violations, 7 things left alive (1 primary context, 1 stream, 1 event, 1 module, 1 device memory, 1 pinned memory, 1 memory pool); " +
		"a context is still retained: shut it down before Close"
	if len(e.Left) != 7 || len(e.Violations) != 0 || first != want {
		t.Errorf("%v", e)
	}
}

// However much is wrong, the text is short.
func TestCloseErrorIsBounded(t *testing.T) {
	r := newRig(t, Config{})
	for range 1000 {
		r.event()
		r.want(cuapi.InvalidHandle, r.EventQuery(12345))
	}
	err := r.sim.Close()
	var e *CloseError
	if !errors.As(err, &e) || len(e.Violations) != 1000 || len(e.Left) != 1001 {
		t.Fatalf("the fields do not have it all: %v", err)
	}
	text := err.Error()
	for _, want := range []string{
		"cudasim: 1000 violations (1000 dead handle), 1001 things left alive (1 primary context, 1000 event)\n",
		"\n... and 995 violations more", "\n... and 996 things more",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q lacks %q", text, want)
		}
	}
	if n := strings.Count(text, "\n"); n > 100 {
		t.Errorf("%d lines", n)
	}
}

func TestLastReleaseDestroysWhatIsLeft(t *testing.T) {
	r := newRig(t, Config{})
	ev := r.event()
	var again cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&again, 0))
	if again != r.ctx {
		t.Error("two handles of one primary context")
	}
	r.ok(r.DevicePrimaryCtxRelease(0))
	r.ok(r.EventQuery(ev))
	r.ok(r.DevicePrimaryCtxRelease(0))
	r.want(cuapi.InvalidHandle, r.EventQuery(ev))
	var e *CloseError
	if !errors.As(r.sim.Close(), &e) || !strings.Contains(strings.Join(e.Left, ""), "destroyed with its context") {
		t.Errorf("%v", e)
	}
}

func TestCleanClose(t *testing.T) {
	r := newRig(t, Config{})
	st, ev, dev, pl := r.stream(), r.event(), r.device(8), r.pool()
	host, _ := r.pinned(8)
	m, _ := r.function(addPTX, "add")
	r.ok(r.EventRecord(ev, st))
	r.ok(r.StreamDestroy(st))
	r.ok(r.EventDestroy(ev))
	r.ok(r.MemFree(dev))
	r.ok(r.MemFreeHost(host))
	r.ok(r.ModuleUnload(m))
	r.ok(r.MemPoolDestroy(pl))
	r.ok(r.DevicePrimaryCtxRelease(0))
	if err := r.sim.Close(); err != nil {
		t.Error(err)
	}
}

// A fakeT keeps what a test would be failed with.
type fakeT struct {
	failures []string
	cleanup  func()
}

func (t *fakeT) Helper() {}
func (t *fakeT) Errorf(format string, args ...any) {
	t.failures = append(t.failures, fmt.Sprintf(format, args...))
}
func (t *fakeT) Cleanup(f func()) { t.cleanup = f }

func TestForTest(t *testing.T) {
	var good, bad fakeT
	ForTest(&good, Config{})
	s := ForTest(&bad, Config{})
	good.cleanup()
	if len(good.failures) != 0 {
		t.Errorf("nothing is wrong: %q", good.failures)
	}
	table := s.Table()
	var ctx cuapi.Context
	var ev cuapi.Event
	table.Init(0)
	table.DevicePrimaryCtxRetain(&ctx, 0)
	table.CtxPushCurrent(ctx)
	table.EventCreate(&ev, 0)
	table.EventDestroy(ev)
	table.EventDestroy(ev)
	table.EventQuery(ev)
	table.CtxPopCurrent(nil)
	bad.cleanup()
	for i, want := range []string{"dead handle: cuEventDestroy", "dead handle: cuEventQuery", "left alive: primary context"} {
		if len(bad.failures) != 3 || !strings.Contains(bad.failures[i], want) || strings.Count(bad.failures[i], "close_test.go") != 2-i/2 {
			t.Fatalf("failure %d of %q: want %q with the stacks of both sides", i, bad.failures, want)
		}
	}
	bad.cleanup()
	if len(bad.failures) != 3 {
		t.Error("it fails the test twice")
	}
}
