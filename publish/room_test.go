package publish_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// waiting runs f, which must wait for room until free makes some.
func (r *rig) waiting(what string, f func(context.Context) error, free func()) {
	r.t.Helper()
	before := publish.Waiting(r.rt)
	// First with an end: the wait ends, and nothing else does.
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	for publish.Waiting(r.rt) == before && len(done) == 0 {
		runtime.Gosched()
	}
	cancel()
	err := <-done
	var rejected *publish.RejectedError
	if !errors.Is(err, context.Canceled) || !errors.As(err, &rejected) {
		r.t.Fatalf("%s: a cancelled wait: %v", what, err)
	}
	go func() { done <- f(r.within()) }()
	for publish.Waiting(r.rt) == before && len(done) == 0 {
		runtime.Gosched()
	}
	free()
	if err := <-done; err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
}

func (r *rig) launch(s *publish.Session, v *publish.Value) error {
	return s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
}

// At each bound there is a form that waits with a context, and the owners are the
// caller's all along.
func TestRoomInAFullStream(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		var vs []*publish.Value
		var ps []*publish.Publication
		for range 3 {
			v, err := s.Alloc(publish.U8, 64)
			must(t, err)
			vs = append(vs, v)
		}
		for range 3 {
			p, _ := r.publication(s, 64)
			ps = append(ps, p)
		}
		args := []kernel.Arg{publish.In(vs[0]), publish.Out(vs[0]), kernel.U32(64)}
		for what, f := range map[string]func(context.Context) error{
			"LaunchContext": func(ctx context.Context) error {
				return s.LaunchContext(ctx, r.inc, kernel.Grid(64), args...)
			},
			"UploadContext": func(ctx context.Context) error {
				buf := r.spare(64)
				up, err := s.UploadContext(ctx, vs[1], buf)
				if err != nil && buf.Err() != nil {
					t.Errorf("the buffer went away with %v", err)
				}
				return errors.Join(err, up.Close())
			},
			"AllocContext": func(ctx context.Context) error {
				v, err := s.AllocContext(ctx, publish.U8, 64)
				return errors.Join(err, v.Close())
			},
			"DownloadIntoContext": func(ctx context.Context) error {
				tr, err := ps[0].DownloadIntoContext(ctx, r.spare(64))
				return errors.Join(err, tr.Close())
			},
			"DownloadRangeContext": func(ctx context.Context) error {
				tr, err := ps[1].DownloadRangeContext(ctx, r.spare(32), 32, 32)
				return errors.Join(err, tr.Close())
			},
		} {
			r.spare(64)
			release := r.hold(s)
			for r.launch(s, vs[2]) == nil {
			}
			r.waiting(what, f, release)
			must(t, s.Synchronize(r.within()))
		}
		for _, v := range vs {
			must(t, v.Close())
		}
		for _, p := range ps {
			must(t, p.Close())
		}
		must(t, s.Close())
	})
}

// The bounds of a runtime, in entries and bytes: a handle that is closed behind a
// held stream makes room once the stream goes on.
func TestRoomInAFullQueue(t *testing.T) {
	for what, cfg := range map[string]publish.Config{"slots": {Slots: 2}, "bytes": {Bytes: 128 + 63}} {
		onEach(t, options{cfg: cfg}, func(r *rig) {
			t := r.t
			s := r.session()
			release := r.hold(s)
			a, err := s.Alloc(publish.U8, 64)
			must(t, err)
			b, err := s.Alloc(publish.U8, 64)
			must(t, err)
			if _, err := s.Alloc(publish.U8, 64); !errors.Is(err, publish.ErrQueueFull) {
				t.Fatalf("%s: %v", what, err)
			}
			p, err := s.Publish(b)
			must(t, err)
			buf := r.spare(64)
			if what == "bytes" { // a transfer owns the buffer, too
				_, err := p.DownloadInto(buf)
				var rejected *publish.RejectedError
				if !errors.Is(err, publish.ErrQueueFull) || !errors.As(err, &rejected) || p.Err() != nil || buf.Err() != nil {
					t.Fatal(err)
				}
			}
			must(t, a.Close()) // retired, and counted all the same
			if q := r.rt.Stats().Queue; q.Pending != 1 || q.PendingBytes != 64 || q.ReservedBytes != 64 {
				t.Errorf("%s: %+v", what, q)
			}
			r.waiting(what, func(ctx context.Context) error {
				v, err := s.AllocContext(ctx, publish.U8, 64)
				return errors.Join(err, v.Close())
			}, release)
			tr, err := p.DownloadIntoContext(r.within(), buf)
			must(t, err)
			back, err := tr.Wait(r.within())
			must(t, err)
			must(t, back.Close())
			must(t, s.Close())
		})
	}
}

func TestRoomThatNeverComes(t *testing.T) {
	r := newRig(t, options{cfg: publish.Config{Bytes: 100}, sim: cudasim.Config{Memory: 8 << 20}})
	s := r.session()
	_, err := s.AllocContext(context.Background(), publish.U8, 101)
	var rejected *publish.RejectedError
	if !errors.Is(err, publish.ErrQueueFull) || !errors.As(err, &rejected) || !strings.Contains(err.Error(), "an owner of 101 bytes is never admitted, the whole bound is 100 bytes") {
		t.Error(err)
	}
	v, err := s.Alloc(publish.U8, 60)
	must(t, err)
	p, err := s.Publish(v)
	must(t, err)
	buf := r.buffer(make([]byte, 60))
	if _, err := p.DownloadIntoContext(context.Background(), buf); !errors.Is(err, publish.ErrQueueFull) || p.Err() != nil || buf.Err() != nil {
		t.Error(err)
	}
	must(t, buf.Close())
	must(t, p.Close())
	must(t, s.Close())
}

// Memory that is short comes back from whoever closes something, of another
// runtime of the context too. Where nobody can give any back nobody waits.
func TestRoomInMemory(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{Memory: 64 << 20}})
	other, err := publish.New(r.ctx, publish.Config{})
	must(t, err)
	s, so := r.session(), (*publish.Session)(nil)
	so, err = other.OpenSession(nil)
	must(t, err)
	const n = 40 << 20
	if _, err := s.AllocContext(context.Background(), publish.U8, 80<<20); !errors.Is(err, driver.ErrOutOfMemory) {
		t.Fatalf("with nothing to come back: %v", err)
	}
	for what, of := range map[string]*publish.Session{"its own": s, "another's": so} {
		v, err := of.Alloc(publish.U8, n)
		must(t, err)
		r.waiting(what, func(ctx context.Context) error {
			v, err := s.AllocContext(ctx, publish.U8, n)
			return errors.Join(err, v.Close())
		}, func() { must(t, v.Close()) })
		for r.rt.Stats().Memory.InUse > 0 {
			r.rt.Drain()
			other.Drain()
		}
	}
	must(t, s.Close())
	must(t, so.Close())
	must(t, other.Shutdown(r.within()))
}

// A wait for room ends with the context's loss, and with the session's close.
func TestRoomThatIsLost(t *testing.T) {
	for what, c := range map[string]struct {
		end  func(r *rig, s *publish.Session)
		want error
	}{
		"lost":   {func(r *rig, _ *publish.Session) { wire.ContextOf(r.ctx).Fail(0, 700, "") }, publish.ErrLost},
		"closed": {func(r *rig, s *publish.Session) { must(r.t, s.Close()) }, driver.ErrClosed},
	} {
		r := newRig(t, options{})
		r.keep = true
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		r.hold(s)
		for r.launch(s, v) == nil {
		}
		done := make(chan error)
		go func() {
			done <- s.LaunchContext(context.Background(), r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
		}()
		for publish.Waiting(r.rt) == 0 {
			runtime.Gosched()
		}
		c.end(r, s)
		if err := <-done; !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		r.sim.ReleaseAll()
	}
}

func TestRoomForNobody(t *testing.T) {
	ctx := context.Background()
	var s *publish.Session
	var p *publish.Publication
	_, a := s.AllocContext(ctx, publish.U8, 1)
	_, u := s.UploadContext(ctx, nil, nil)
	_, d := p.DownloadIntoContext(ctx, (*pinned.Buffer)(nil))
	for _, err := range []error{a, u, d, s.LaunchContext(ctx, nil, kernel.Config{})} {
		if !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
	}
}

// With Config.Stacks a runtime tells where things were made that nobody closed.
func TestOrigins(t *testing.T) {
	r := newRig(t, options{cfg: publish.Config{Stacks: true}})
	r.keep = true
	has := func(what, fate string, count int, where string) {
		t.Helper()
		for _, o := range r.rt.Stats().Origins {
			if o.What == what && o.Fate == fate && o.Count == count && strings.Contains(o.Stack, where) && !strings.Contains(o.Stack, "publish.(") {
				return
			}
		}
		t.Errorf("no %d x %s, %s, made in %s: %v", count, what, fate, where, r.rt.Stats().Origins)
	}
	s := r.session()
	has("session", "open", 1, "publish_test.(*rig).session")
	p, want := r.publication(s, 64)
	has("publication", "open", 1, "publish_test.(*rig).publication")
	tr, err := p.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	has("download", "open", 1, "publish_test.TestOrigins")
	r.finish(tr, want)
	must(t, s.Close())
	if all := r.rt.Stats().Origins; len(all) != 0 {
		t.Fatalf("everything is closed: %v", all)
	}
	s = r.session()
	for range 2 {
		func() { r.dropped(s) }()
	}
	collect(t, func() bool { return r.rt.Stats().Abandoned == 2 })
	has("value", "abandoned", 2, "publish_test.(*rig).dropped")
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	v.Leak()
	has("value", "leaked", 1, "publish_test.TestOrigins")
	p, _ = r.publication(s, 64)
	r.settle()
	err = r.rt.Shutdown(r.within())
	for _, part := range []string{"1 sessions and 1 values", "1 x publication, open, made at\n", "publish_test.(*rig).publication", "room_test.go:", "leaked on purpose"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not tell %q: %v", part, err)
		}
	}
	must(t, p.Close())
	must(t, s.Close())
}

func (r *rig) dropped(s *publish.Session) {
	_, err := s.Alloc(publish.U8, 64)
	must(r.t, err)
}

// Done is closed by a close and a leak, and tells of the frontier after a move.
func TestDoneIsClosed(t *testing.T) {
	r := newRig(t, options{})
	r.keep = true
	s := r.session()
	release := r.hold(s)
	still := func(ch <-chan struct{}) {
		t.Helper()
		select {
		case <-ch:
			t.Error("closed while it is pending")
		default:
		}
	}
	closed, _ := r.publication(s, 64)
	leaked, _ := r.publication(s, 64)
	moved, want := r.publication(s, 64)
	a, b, c := closed.Done(), leaked.Done(), moved.Done()
	still(a)
	still(b)
	must(t, closed.Close())
	leaked.Leak()
	<-a
	<-b
	<-closed.Done()
	<-leaked.Done()
	tr, err := moved.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	if moved.Done() != nil {
		t.Error("a channel after a move")
	}
	still(c)
	other, _ := r.publication(s, 64)
	tr2, err := other.DownloadInto(r.buffer(make([]byte, 64)))
	must(t, err)
	d := tr2.Done()
	still(d)
	must(t, tr2.Close())
	<-d
	<-tr2.Done()
	release()
	<-c
	<-tr.Done()
	r.finish(tr, want)
	if tr.Done() != nil {
		t.Error("a channel after the buffer came back")
	}
	must(t, s.Close())
}

// While all that may be in flight in the context stands still, a stream that has
// nothing in flight waits, too.
func TestRoomInAFullContext(t *testing.T) {
	r := newRig(t, options{sim: cudasim.Config{HardwareQueues: 128}})
	var sessions []*publish.Session
	var values []*publish.Value
	for range 24 {
		s := r.session()
		v, err := s.Alloc(publish.U8, 64)
		must(t, err)
		sessions, values = append(sessions, s), append(values, v)
	}
	last := len(sessions) - 1
	var release func()
	var err error
	for i, s := range sessions[:last] {
		free := r.hold(s)
		if i == 0 {
			release = free
		}
		for err = nil; err == nil; {
			err = r.launch(s, values[i])
		}
	}
	if err := r.launch(sessions[last], values[last]); !errors.Is(err, publish.ErrContextFull) {
		t.Fatal(err)
	}
	r.waiting("a full context", func(ctx context.Context) error {
		v := values[last]
		return sessions[last].LaunchContext(ctx, r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64))
	}, release)
	r.sim.ReleaseAll()
	for i := range sessions {
		must(t, values[i].Close())
		must(t, sessions[i].Close())
	}
}
