package publish_test

import (
	"context"
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/publish"
)

// The path that the specification left undriven: the wait for a frontier fails.
// The first failure is latched, nothing reports readiness, nothing is released.
func TestEvidenceTerminalPath(t *testing.T) {
	for _, c := range []struct {
		name   string
		code   cuapi.Result
		sticky bool
	}{
		{"publication", cuapi.InvalidHandle, false},
		{"context", cuapi.IllegalAddress, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &trip{}
			onEach(t, options{around: f.around, trace: true, alone: c.sticky}, func(r *rig) {
				r.keep = true
				r.terminalPath(f, c.code, c.sticky)
			})
		})
	}
}

func (r *rig) terminalPath(f *trip, code cuapi.Result, sticky bool) {
	t := r.t
	s := r.session()
	before, want := r.publication(s, 64)
	must(t, before.AwaitFrontier(r.within()))
	buf, spare := r.buffer(make([]byte, 64)), r.buffer(make([]byte, 64))
	v, err := s.Alloc(publish.U8, 64)
	must(t, err)
	must(t, s.Synchronize(r.within()))
	r.settle() // the frontier is all that there is to query
	release := r.hold(s)
	p, err := s.Publish(v)
	must(t, err)
	must(t, s.Close())
	done := p.Done()
	f.next(cuapi.IDEventQuery, code, false) // for the watcher, or for the wait
	is := func(what string, err error) {
		t.Helper()
		var unproven *publish.UnprovenError
		if !errors.As(err, &unproven) || !errors.Is(err, driver.Result(code)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	is("AwaitFrontier", p.AwaitFrontier(r.within()))
	<-done
	f.stop(t)
	release()                                 // the device goes on, and it changes nothing
	f.each(cuapi.IDEventQuery, cuapi.Unknown) // which would be a second failure
	for range 2 {
		ready, err := p.FrontierReady()
		is("FrontierReady", err)
		if ready {
			t.Error("a failed publication is ready")
		}
		is("AwaitFrontier again", p.AwaitFrontier(r.within()))
		is("Err", p.Err())
	}
	f.arm(cuapi.IDEventQuery, 0, 0, false)
	<-p.Done()
	if p.Bytes() != 64 || p.DType() != publish.U8 || len(p.Shape()) != 1 {
		t.Error("a failed publication does not describe itself")
	}
	calls := r.trace(func() { _, err = p.DownloadInto(buf) })
	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	switch {
	case !errors.As(err, &rejected) || errors.As(err, &unproven) || !errors.Is(err, driver.Result(code)):
		t.Errorf("DownloadInto: %v", err)
	case rejected.Publication != p || rejected.Buffer != buf || buf.Err() != nil || len(buf.Bytes()) != 64:
		t.Errorf("DownloadInto: owners went away: %+v", rejected)
	case sticky != errors.Is(err, publish.ErrLost):
		t.Errorf("DownloadInto: %v", err)
	}
	if n := enqueues(calls); len(n) > 0 {
		t.Errorf("DownloadInto enqueued %v", n)
	}
	if sticky {
		<-r.rt.Lost()
		is("another publication", before.AwaitFrontier(r.within()))
		must(t, spare.Close())
		must(t, before.Close())
	} else {
		tr, err := before.DownloadInto(spare) // one failed query is not the stream's end
		must(t, err)
		r.finish(tr, want)
	}
	r.settle() // the watcher makes no calls from here on
	q := r.rt.Stats().Queue
	calls = r.trace(func() { must(t, p.Close()) })
	if len(calls) > 0 {
		t.Errorf("the close of a failed publication made %v", calls)
	}
	after := r.rt.Stats().Queue
	if after.Permanent-q.Permanent != 1 || after.PermanentBytes-q.PermanentBytes != 64 || !errors.Is(after.Cause, driver.Result(code)) {
		t.Errorf("Close: %+v, then %+v", q, after)
	}
	if ready, err := p.FrontierReady(); ready || !errors.Is(err, driver.ErrClosed) {
		t.Errorf("after Close: %v, %v", ready, err)
	}
	must(t, p.Close())
	must(t, buf.Close())
	if err := r.rt.Shutdown(r.within()); !errors.Is(err, driver.Result(code)) || errors.Is(err, driver.ErrBusy) {
		t.Errorf("Shutdown: %v", err)
	}
	if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.Result(code)) || errors.Is(err, driver.ErrBusy) {
		t.Errorf("the context's Shutdown: %v", err)
	}
}

// Pending transfers behave as before: looks, waits, cancelled waits, close,
// leak, and what tells of their end.
func TestEvidencePendingTransfers(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		for name, begin := range map[string]func(s *publish.Session, n int) (tr *publish.Transfer, want []byte, end func()){
			"upload": func(s *publish.Session, n int) (*publish.Transfer, []byte, func()) {
				data := random(n)
				v, err := s.Alloc(publish.U8, n)
				must(r.t, err)
				tr, err := s.Upload(v, r.buffer(data))
				must(r.t, err)
				return tr, data, func() { must(r.t, v.Close()) }
			},
			"download": func(s *publish.Session, n int) (*publish.Transfer, []byte, func()) {
				p, want := r.publication(s, n)
				tr, err := p.DownloadInto(r.buffer(make([]byte, n)))
				must(r.t, err)
				return tr, want, func() {}
			},
		} {
			r.pendingTransfer(name, func(s *publish.Session) (*publish.Transfer, []byte, func()) { return begin(s, 600) })
		}
	})
}

func (r *rig) pendingTransfer(name string, begin func(s *publish.Session) (*publish.Transfer, []byte, func())) {
	t := r.t
	s := r.session()
	release := r.hold(s)
	tr, want, end := begin(s)
	closed, _, endClosed := begin(s)
	must(t, tr.Err())
	for range 2 {
		if ready, err := tr.Ready(); ready || err != nil {
			t.Errorf("%s: behind a held stream: %v, %v", name, ready, err)
		}
	}
	done := tr.Done()
	select {
	case <-done:
		t.Errorf("%s: done behind a held stream", name)
	default:
	}
	ctx, cancel := context.WithCancel(context.Background())
	waited := make(chan error)
	go func() {
		_, err := tr.Wait(ctx)
		waited <- err
	}()
	cancel()
	if err := <-waited; err != context.Canceled {
		t.Errorf("%s: a cancelled wait: %v", name, err)
	}
	must(t, tr.Err()) // the transfer stays the caller's
	q := r.rt.Stats().Queue
	must(t, closed.Close())
	must(t, closed.Close())
	if after := r.rt.Stats().Queue; after.Entered != q.Entered+1 || after.Pending != q.Pending+1 {
		t.Errorf("%s: close behind a held stream: %+v, then %+v", name, q, after)
	}
	if _, err := closed.Wait(r.within()); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("%s: a wait for what is closed: %v", name, err)
	}
	release()
	r.finish(tr, want)
	<-done
	if tr.Done() != nil {
		t.Errorf("%s: a channel of what has ended", name)
	}
	if _, err := tr.Wait(r.within()); !errors.Is(err, driver.ErrMoved) {
		t.Errorf("%s: a second wait: %v", name, err)
	}
	if _, err := tr.Ready(); !errors.Is(err, driver.ErrMoved) {
		t.Errorf("%s: a look after the end: %v", name, err)
	}
	end()
	endClosed()
	must(t, s.Close())
	r.settle()
	if q := r.rt.Stats().Queue; q.Reserved != 0 || q.Permanent != 0 {
		t.Errorf("%s: %+v", name, q)
	}
}

// What is leaked stays out of reach and is counted, for both kinds.
func TestEvidenceLeakedTransfers(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		r.keep = true
		s := r.session()
		v, err := s.Alloc(publish.U8, 100)
		must(t, err)
		up, err := s.Upload(v, r.buffer(random(100)))
		must(t, err)
		up.Leak()
		p, err := s.Publish(v)
		must(t, err)
		down, err := p.DownloadInto(r.buffer(make([]byte, 100)))
		must(t, err)
		down.Leak()
		down.Leak()
		must(t, down.Close())
		must(t, s.Close())
		if _, err := down.Wait(r.within()); !errors.Is(err, driver.ErrClosed) {
			t.Errorf("a wait for what is leaked: %v", err)
		}
		st := r.rt.Stats()
		if st.Leaked != 2 || st.Queue.Permanent != 2 || st.Queue.PermanentBytes != 300 || st.Queue.Reserved != 0 || st.Pinned.Kept != 2 {
			t.Errorf("%+v", st)
		}
	})
}
