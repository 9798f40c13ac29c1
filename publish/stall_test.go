package publish_test

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/publish"
)

// returns runs f on a goroutine of its own, which must come to its end.
func (r *rig) returns(what string, f func()) {
	r.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-r.within().Done():
		r.t.Fatalf("%s does not return", what)
	}
}

// With a stream held, everything that does not take a context goes on, as does
// the whole way on another stream; a thousand owners that are retired meanwhile
// make no difference. No call that is made may stall.
func TestStallsNothingBehindAHeldStream(t *testing.T) {
	for _, c := range []struct {
		name    string
		retired int
	}{{"alone", 0}, {"with a thousand retired owners", 1000}} {
		t.Run(c.name, func(t *testing.T) {
			onEach(t, options{trace: true}, func(r *rig) { r.stallsNothing(c.retired) })
		})
	}
}

func (r *rig) stallsNothing(retired int) {
	t := r.t
	r.keep = true // what is leaked
	must(t, r.rt.Reserve(16, 256))
	s, other := r.session(), r.session()
	var values []*publish.Value
	for i := range retired {
		v, err := s.Alloc(publish.U8, 256)
		must(t, err)
		if values = append(values, v); i%100 == 0 {
			must(t, s.Synchronize(r.within())) // what has run takes no room
		}
	}
	must(t, s.Synchronize(r.within()))
	r.settle()
	release := r.hold(s)
	expect := r.rt.Stats().Queue

	const cycles = 5
	var transfers []*publish.Transfer
	var wants [][]byte
	calls := r.trace(func() {
		r.returns("what is done beside a held stream", func() {
			for _, v := range values { // behind the held stream
				p, err := s.Publish(v)
				if err != nil {
					t.Error(err)
					return
				}
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}
			for range cycles {
				tr, want, ok := r.stallCycle(s, other)
				if !ok {
					return
				}
				transfers, wants = append(transfers, tr), append(wants, want)
			}
		})
	})
	stalls(t, calls)
	if r.sim != nil {
		if n := r.sim.Blocked(); n > 0 {
			t.Errorf("%d calls block", n)
		}
	}
	if t.Failed() {
		return
	}
	if n := callsOf(calls, cuapi.IDEventRecord); n < retired+4*cycles {
		t.Errorf("the trace shows %d records", n)
	}
	q := r.rt.Stats().Queue
	if n := q.Pending - expect.Pending; n < retired+3*cycles || q.Permanent != 2*cycles {
		t.Errorf("behind the held stream: %+v", q)
	}
	release()
	for i, tr := range transfers {
		r.finish(tr, wants[i])
	}
	must(t, s.Close())
	must(t, other.Close())
	r.settle()
	q = r.rt.Stats().Queue
	if q.Reserved != 0 || q.Pending != 0 || q.Permanent != 2*cycles || q.Entered != q.Released+q.Permanent {
		t.Errorf("in the end: %+v", q)
	}
}

// stallCycle does all that never waits on the held session, and the whole way on
// the other one. It is not on the test's goroutine.
func (r *rig) stallCycle(held, other *publish.Session) (tr *publish.Transfer, want []byte, ok bool) {
	t := r.t
	var err error
	check := func(e error) bool {
		if e != nil {
			t.Error(e)
		}
		return e == nil
	}
	pubs := make([]*publish.Publication, 4)
	for i := range pubs {
		data := random(256)
		v, e := held.Alloc(publish.U8, len(data))
		if !check(e) {
			return nil, nil, false
		}
		buf, e := r.rt.Pinned(len(data))
		if !check(e) {
			return nil, nil, false
		}
		copy(buf.Bytes(), data)
		up, e := held.Upload(v, buf)
		if !check(e) || !check(up.Close()) {
			return nil, nil, false
		}
		if want == nil {
			want = data
		}
		if pubs[i], err = held.Publish(v); !check(err) {
			return nil, nil, false
		}
		if ready, err := pubs[i].FrontierReady(); ready || err != nil {
			t.Errorf("poll: %v, %v", ready, err)
		}
	}
	buf, err := r.rt.Pinned(256)
	if !check(err) {
		return nil, nil, false
	}
	if tr, err = pubs[0].DownloadInto(buf); !check(err) {
		return nil, nil, false
	}
	if ready, err := tr.Ready(); ready || err != nil {
		t.Errorf("poll of a transfer: %v, %v", ready, err)
	}
	check(pubs[1].Close())
	pubs[2].Leak()
	if buf, err = r.rt.Pinned(256); !check(err) {
		return nil, nil, false
	}
	second, err := pubs[3].DownloadInto(buf)
	if !check(err) {
		return nil, nil, false
	}
	second.Leak()
	retired, err := held.Alloc(publish.U8, 256)
	if !check(err) {
		return nil, nil, false
	}
	check(retired.Close())
	r.rt.Drain()

	err = r.rt.WithSession(func(s *publish.Session) error { return r.wholeWay(s) })
	return tr, want, check(err) && check(r.wholeWay(other))
}

// wholeWay uploads, publishes, waits and downloads on a stream that moves.
func (r *rig) wholeWay(s *publish.Session) error {
	v, err := s.Alloc(publish.U8, 256)
	if err != nil {
		return err
	}
	buf, err := r.rt.Pinned(256)
	if err != nil {
		return err
	}
	up, err := s.Upload(v, buf)
	if err != nil {
		return err
	}
	p, err := s.Publish(v)
	if err != nil {
		return err
	}
	if err := p.AwaitFrontier(r.within()); err != nil {
		return err
	}
	if buf, err = up.Wait(r.within()); err != nil {
		return err
	}
	tr, err := p.DownloadInto(buf)
	if err != nil {
		return err
	}
	if buf, err = tr.Wait(r.within()); err != nil {
		return err
	}
	return buf.Close()
}
