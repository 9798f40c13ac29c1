package publish_test

import (
	"context"
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// A doomed rig has handles of each kind when a kernel faults.
type doomed struct {
	let func() // the held stream go
	*rig
	s, held     *publish.Session // the one of the kernel, and one whose stream never moves
	pubs        map[string]*publish.Publication
	transfers   map[string]*publish.Transfer
	values      map[string]*publish.Value
	waits       map[string]chan error
	other       *publish.Runtime // another user of the context
	otherPub    *publish.Publication
	cause, lost func(what string, err error)
}

// A kernel that faults loses the context: what waits wakes, the first cause is
// kept, every handle reports it, complete frontiers and other users of the
// context included, and nothing hangs, panics or frees.
func TestTerminalFailureByAKernel(t *testing.T) {
	onEach(t, options{alone: true, trace: true}, func(r *rig) {
		r.keep = true
		d := r.doom()
		calls := r.trace(func() {
			d.publicationsFail()
			d.transfersFail()
			d.sessionsRefuse()
			d.valuesFail()
			d.runtimeRefuses()
			d.ends()
		})
		for _, id := range []cuapi.ID{
			cuapi.IDMemFree, cuapi.IDMemFreeAsync, cuapi.IDMemFreeHost, cuapi.IDMemPoolDestroy, cuapi.IDMemPoolTrimTo,
			cuapi.IDDevicePrimaryCtxRelease, cuapi.IDModuleUnload, cuapi.IDStreamDestroy,
		} {
			if n := callsOf(calls, id); n > 0 {
				r.t.Errorf("%d calls of %s on a lost context", n, cuapi.Entries[id].Symbol())
			}
		}
		if n := enqueues(calls); len(n) > 0 {
			r.t.Errorf("enqueued on a lost context: %v", n)
		}
	})
}

func (r *rig) doom() *doomed {
	t := r.t
	d := &doomed{
		rig: r, pubs: map[string]*publish.Publication{}, transfers: map[string]*publish.Transfer{},
		values: map[string]*publish.Value{}, waits: map[string]chan error{},
	}
	d.cause = func(what string, err error) {
		t.Helper()
		if !errors.Is(err, driver.ErrIllegalAddress) {
			t.Errorf("%s: %v, want the first cause", what, err)
		}
	}
	d.lost = func(what string, err error) {
		t.Helper()
		d.cause(what, err)
		if !errors.Is(err, publish.ErrLost) {
			t.Errorf("%s: %v, want a loss", what, err)
		}
	}
	var err error
	d.other, err = publish.New(r.ctx, publish.Config{})
	must(t, err)
	so, err := d.other.OpenSession(nil)
	must(t, err)
	d.otherPub, _ = r.publication(so, 32)
	must(t, d.otherPub.AwaitFrontier(r.within()))

	d.s, d.held = r.session(), r.session()
	begin := func(s *publish.Session) *publish.Transfer {
		p, want := r.publication(s, 32)
		tr, err := p.DownloadInto(r.buffer(make([]byte, len(want))))
		must(t, err)
		return tr
	}
	for _, name := range []string{"complete", "complete and leaked"} {
		d.pubs[name], _ = r.publication(d.s, 32)
		must(t, d.pubs[name].AwaitFrontier(r.within()))
	}
	for _, name := range []string{"complete", "complete and closed", "complete and leaked"} {
		d.transfers[name] = begin(d.s)
		<-d.transfers[name].Done()
	}
	for _, name := range []string{"sound", "sound and leaked"} {
		d.values[name] = r.uploaded(d.s, random(32))
	}
	d.let = r.hold(d.held)
	d.pubs["held"], _ = r.publication(d.held, 32)
	held := begin(d.held)
	d.transfers["held"] = held
	for name, wait := range map[string]func(context.Context) error{
		"AwaitFrontier": d.pubs["held"].AwaitFrontier,
		"Wait":          func(ctx context.Context) error { _, err := held.Wait(ctx); return err },
		"Synchronize":   d.held.Synchronize,
	} {
		ch, ctx := make(chan error, 1), r.within()
		d.waits[name] = ch
		go func() { ch <- wait(ctx) }()
	}

	release := r.hold(d.s) // or the watcher may see the fault in the middle of this
	d.pubs["before"], _ = r.publication(d.s, 32)
	v := d.values["sound"]
	must(t, d.s.Launch(r.bad, kernel.Grid(1), publish.Out(v)))
	d.pubs["broken"], _ = r.publication(d.s, 32)
	d.pubs["broken and leaked"], _ = r.publication(d.s, 32)
	d.transfers["broken"] = begin(d.s)
	release()
	if err := d.pubs["broken"].AwaitFrontier(r.within()); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Fatal(err)
	}
	<-r.rt.Lost()
	<-d.other.Lost()
	for name, ch := range d.waits {
		d.cause(name+", which began before", <-ch)
	}
	must(t, so.Close())
	r.settle() // what was retired before is on the permanent side
	return d
}

// unproven checks the error of a method whose rule says that it fails.
func (d *doomed) unproven(what string, err error) {
	d.t.Helper()
	d.cause(what, err)
	var unproven *publish.UnprovenError
	if !errors.As(err, &unproven) {
		d.t.Errorf("%s: %T", what, err)
	}
}

// rejected checks the error of one whose rule says that it refuses.
func (d *doomed) rejected(what string, err error) *publish.RejectedError {
	d.t.Helper()
	d.lost(what, err)
	rejected := new(publish.RejectedError)
	var unproven *publish.UnprovenError
	if !errors.As(err, &rejected) || errors.As(err, &unproven) {
		d.t.Errorf("%s: %T", what, err)
	}
	return rejected
}

// kept checks that f hands one owner of n bytes to the permanent side.
func (d *doomed) kept(what string, n int64, f func()) {
	d.t.Helper()
	q := d.rt.Stats().Queue
	f()
	after := d.rt.Stats().Queue
	if after.Permanent != q.Permanent+1 || after.PermanentBytes != q.PermanentBytes+n || after.Reserved != q.Reserved-1 || after.Pending != q.Pending {
		d.t.Errorf("%s: %+v, then %+v", what, q, after)
	}
}

func (d *doomed) publicationsFail() {
	t := d.t
	for name, p := range d.pubs {
		for range 2 {
			ready, err := p.FrontierReady()
			if ready {
				t.Errorf("%s: ready on a lost context", name)
			}
			d.unproven(name+": FrontierReady", err)
			d.unproven(name+": AwaitFrontier", p.AwaitFrontier(d.within()))
			d.unproven(name+": Err", p.Err())
		}
		<-p.Done()
		if p.Bytes() != 32 || p.DType() != publish.U8 || len(p.Shape()) != 1 {
			t.Errorf("%s does not describe itself", name)
		}
		_, err := p.DownloadInto(nil)
		if e := d.rejected(name+": DownloadInto", err); e.Publication != p {
			t.Errorf("%s: DownloadInto: the publication went away: %v", name, err)
		}
		if name == "complete and leaked" || name == "broken and leaked" {
			d.kept(name, 32, p.Leak)
		} else {
			d.kept(name, 32, func() { must(t, p.Close()) })
		}
		if _, err := p.FrontierReady(); !errors.Is(err, driver.ErrClosed) {
			t.Errorf("%s: after its end: %v", name, err)
		}
		must(t, p.Close())
	}
	_, err := d.otherPub.FrontierReady()
	d.unproven("a publication of another runtime", err)
	must(t, d.otherPub.Close())
	if q := d.other.Stats().Queue; q.Permanent < 1 || q.Reserved != 0 || q.Pending != 0 {
		t.Errorf("another runtime: %+v", q)
	}
}

func (d *doomed) transfersFail() {
	t := d.t
	for name, tr := range d.transfers {
		if name == "held" { // its wait has ended it
			_, err := tr.Ready()
			d.unproven(name+": Ready", err)
			d.unproven(name+": Err", tr.Err())
			continue
		}
		ready, err := tr.Ready()
		if ready {
			t.Errorf("%s: ready on a lost context", name)
		}
		d.unproven(name+": Ready", err)
		d.unproven(name+": Err", tr.Err())
		<-tr.Done()
		switch name {
		case "complete and closed":
			d.kept(name, 64, func() { must(t, tr.Close()) })
		case "complete and leaked":
			d.kept(name, 64, tr.Leak)
		default:
			d.kept(name, 64, func() {
				buf, err := tr.Wait(d.within())
				d.unproven(name+": Wait", err)
				if buf != nil {
					t.Errorf("%s: the buffer came back", name)
				}
			})
		}
		buf, err := tr.Wait(d.within())
		switch name {
		case "complete and closed", "complete and leaked": // closed is closed
			if !errors.Is(err, driver.ErrClosed) {
				t.Errorf("%s: Wait again: %v", name, err)
			}
		default:
			d.unproven(name+": Wait again", err)
		}
		if buf != nil {
			t.Errorf("%s: the buffer came back", name)
		}
		must(t, tr.Close())
	}
}

func (d *doomed) sessionsRefuse() {
	v := d.values["sound"]
	for name, s := range map[string]*publish.Session{"the kernel's session": d.s, "the held session": d.held} {
		_, err := s.Alloc(publish.U8, 32)
		d.rejected(name+": Alloc", err)
		_, err = s.Adopt(1<<20, publish.U8, []int{32}, nil)
		d.rejected(name+": Adopt", err)
		_, err = s.Publish(v)
		d.rejected(name+": Publish", err)
		_, err = s.PublishAsserted(v)
		d.rejected(name+": PublishAsserted", err)
		_, err = s.Upload(v, nil)
		d.rejected(name+": Upload", err)
		d.rejected(name+": Launch", s.Launch(d.inc, kernel.Grid(1), publish.In(v), publish.Out(v), kernel.U32(1)))
		d.lost(name+": Submit", s.Submit())
		d.lost(name+": Synchronize", s.Synchronize(d.within()))
		_, err = s.Raw()
		d.lost(name+": Raw", err)
		if s.Stats().Values == 0 {
			d.t.Errorf("%s does not tell what it did", name)
		}
		must(d.t, s.Close())
		if _, err := s.Alloc(publish.U8, 32); !errors.Is(err, driver.ErrClosed) {
			d.t.Errorf("%s: after its close: %v", name, err)
		}
	}
	if n := d.rt.Stats().Sessions; n != 0 {
		d.t.Errorf("%d sessions are open", n)
	}
}

func (d *doomed) valuesFail() {
	for name, v := range d.values {
		must(d.t, v.Err()) // the caller owns it still
		if v.Bytes() != 32 || v.DType() != publish.U8 || len(v.Shape()) != 1 {
			d.t.Errorf("%s does not describe itself", name)
		}
		if name == "sound" {
			d.kept(name, 32, func() { must(d.t, v.Close()) })
		} else {
			d.kept(name, 32, v.Leak)
		}
		must(d.t, v.Close())
		if err := v.Err(); !errors.Is(err, driver.ErrClosed) {
			d.t.Errorf("%s: after its end: %v", name, err)
		}
	}
}

func (d *doomed) runtimeRefuses() {
	for _, rt := range []*publish.Runtime{d.rt, d.other} {
		d.cause("Err", rt.Err())
		_, err := rt.OpenSession(nil)
		d.lost("OpenSession", err)
		_, err = rt.Pinned(32)
		d.lost("Pinned", err)
		d.lost("Reserve", rt.Reserve(1, 32))
		d.lost("WithSession", rt.WithSession(func(*publish.Session) error { d.t.Error("a session on a lost context"); return nil }))
		rt.Drain()
		if rt.Context() != d.ctx {
			d.t.Error("another context")
		}
	}
	_, err := publish.New(d.ctx, publish.Config{})
	d.lost("New", err)
	_, err = kernel.Load(d.ctx, []byte(testPTX))
	d.cause("a module", err)
}

func (d *doomed) ends() {
	t := d.t
	for _, rt := range []*publish.Runtime{d.rt, d.other} {
		q := rt.Stats().Queue
		if q.Pending != 0 || q.Reserved != 0 || q.Entered != q.Released+q.Permanent {
			t.Errorf("%+v", q)
		}
		must(t, rt.Close())
		must(t, rt.Close())
		for range 2 {
			err := rt.Shutdown(d.within())
			d.cause("Shutdown", err)
			if errors.Is(err, driver.ErrBusy) {
				t.Errorf("Shutdown: something is open: %v", err)
			}
		}
		d.cause("Err", rt.Err())
	}
	d.let() // the flag itself is a thing of the context
	err := d.ctx.Shutdown(d.within())
	d.cause("the context's Shutdown", err)
	if errors.Is(err, driver.ErrBusy) {
		t.Errorf("the context's Shutdown: something is open: %v", err)
	}
	_, err = d.device().Primary()
	d.cause("the context again", err)
}
