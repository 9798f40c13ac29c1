package publish_test

import (
	"bytes"
	"errors"
	"runtime"
	"testing"

	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A held stream is filled through the library past the driver's own limit, with
// each operation that takes room: it is refused in time, with all owners, nothing
// blocks, and it recovers.
func TestFlowAHeldStreamIsFilled(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		const attempts = 1100 // the driver blocks near 1,021
		s := r.session()
		v := r.uploaded(s, random(64))
		scratch, err := s.Alloc(publish.U8, 64)
		must(t, err)
		var values []*publish.Value
		var pubs []*publish.Publication
		for range attempts / 4 {
			w, err := s.Alloc(publish.U8, 64)
			must(t, err)
			p, err := s.Publish(w)
			must(t, err)
			pubs = append(pubs, p)
			must(t, s.Synchronize(r.within()))
		}
		buf, data := r.buffer(make([]byte, 64)), random(64)
		up := r.buffer(data)
		r.settle()
		release := r.hold(s)
		done, refused := 0, 0
		took := func(what string, err error) bool {
			t.Helper()
			if err == nil {
				done++
				return true
			}
			var rejected *publish.RejectedError
			if refused++; !errors.Is(err, publish.ErrStreamFull) || !errors.As(err, &rejected) {
				t.Fatalf("%s, after %d operations: %v", what, done, err)
			}
			return false
		}
		calls := r.trace(func() {
			for i := range attempts {
				switch i % 4 {
				case 0:
					took("launch", s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(scratch), kernel.U32(64)))
				case 1:
					tr, err := s.Upload(scratch, up)
					if took("upload", err) {
						must(t, tr.Close())
						up = r.buffer(data)
					}
				case 2:
					p := pubs[i/4]
					tr, err := p.DownloadInto(buf)
					if took("download", err) {
						must(t, tr.Close())
						buf = r.buffer(make([]byte, 64))
					} else {
						must(t, p.Err())
						must(t, p.Close())
					}
				case 3:
					w, err := s.Alloc(publish.U8, 64)
					if took("alloc", err) {
						values = append(values, w)
					}
				}
			}
		})
		stalls(t, calls)
		if done < stream.Credits-8 || done > stream.Credits || refused != attempts-done {
			t.Errorf("%d operations were taken, and %d refused", done, refused)
		}
		if r.sim != nil && r.sim.Blocked() > 0 {
			t.Errorf("%d calls block", r.sim.Blocked())
		}
		// Records take no room, and other streams have some.
		var last *publish.Publication
		if len(values) > 0 {
			last, err = s.Publish(values[0])
			must(t, err)
			values = values[1:]
		}
		must(t, r.workflow(random(64)))
		must(t, buf.Err())
		must(t, up.Err())
		release()
		must(t, s.Synchronize(r.within()))
		tr, err := s.Upload(scratch, up) // the same handles
		must(t, err)
		must(t, tr.Close())
		p, err := s.Publish(scratch)
		must(t, err)
		tr, err = p.DownloadInto(buf)
		must(t, err)
		r.finish(tr, data)
		for _, w := range append(values, v) {
			must(t, w.Close())
		}
		must(t, last.Close())
		must(t, s.Close())
	})
}

// Twenty sessions, of which four stand: the others go all the way, over and over,
// and the four do once they may.
func TestFlowTwentySessions(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		var sessions []*publish.Session
		var releases []func()
		for i := range 20 {
			s := r.session()
			sessions = append(sessions, s)
			if i%5 == 0 {
				releases = append(releases, r.hold(s))
			}
		}
		type result struct {
			p    *publish.Publication
			want []byte
		}
		var standing []result
		for range 10 {
			for i, s := range sessions {
				p, want := r.publication(s, 128)
				if i%5 != 0 {
					must(t, p.AwaitFrontier(r.within()))
					r.download(p, want)
					continue
				}
				if ready, err := p.FrontierReady(); ready || err != nil {
					t.Fatalf("session %d, which is held: %v, %v", i, ready, err)
				}
				standing = append(standing, result{p, want})
			}
		}
		for _, release := range releases {
			release()
		}
		for _, x := range standing {
			r.download(x.p, x.want)
		}
		for _, s := range sessions {
			must(t, s.Close())
		}
	})
}

// Launches without any fence get their room back: no number of them uses it up.
func TestFlowSteadyLaunches(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		v := r.uploaded(s, make([]byte, 64))
		out, err := s.Alloc(publish.U8, 64)
		must(t, err)
		bound := r.within()
		for i := range 20000 {
			err := s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(out), kernel.U32(64))
			for errors.Is(err, publish.ErrStreamFull) && r.sim == nil && bound.Err() == nil {
				runtime.Gosched() // a GPU may be behind: it only takes a moment
				err = s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(out), kernel.U32(64))
			}
			if err != nil {
				t.Fatalf("launch %d: %v", i, err)
			}
		}
		p, err := s.Publish(out)
		must(t, err)
		r.download(p, bytes.Repeat([]byte{1}, 64))
		must(t, v.Close())
		must(t, s.Close())
	})
}
