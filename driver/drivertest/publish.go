package drivertest

import (
	"bytes"
	"context"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// The library's own promises, on the same targets.
const law = "design: "

var publishCases = []Case{
	{Name: "PublishRoundTrips", Evidence: law + "publish and download give back what was uploaded", run: roundTrips},
	{Name: "PublishPending", Evidence: law + "a frontier is pending while its stream is held, and complete after", run: publishPending},
	{Name: "PublishOutlives", Evidence: law + "a publication works after its session and its runtime were closed", run: publishOutlives},
	{Name: "PublishTrace", Evidence: law + "consuming a publication makes exactly a copy and a record", run: publishTrace},
	{Name: "PublishClosePending", Evidence: law + "closing a pending publication does not wait, and it is released after", run: closePending},
	{Name: "PublishTwoSessions", Evidence: law + "a held session does not hold another", run: twoSessions},
}

// A desk is a runtime with what its cases do over and over.
type desk struct {
	*rig
	*publish.Runtime
	wait context.Context
}

func newDesk(r *rig, ctx *driver.Context) *desk {
	r.Helper()
	rt, err := publish.New(ctx, publish.Config{})
	d := &desk{rig: r, Runtime: rt}
	d.check(err)
	wait, cancel := context.WithTimeout(context.Background(), deadline)
	r.Cleanup(cancel)
	d.wait = wait
	return d
}

func (d *desk) check(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

func (d *desk) session() *publish.Session {
	d.Helper()
	s, err := d.OpenSession(nil)
	d.check(err)
	return s
}

// holdSession holds the session's stream.
func (d *desk) holdSession(s *publish.Session) {
	d.Helper()
	raw, err := s.Raw()
	d.check(err)
	free, err := hold.Stream(d.Context(), raw)
	d.check(err)
	d.holds = append(d.holds, free)
}

func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16) ^ seed
	}
	return p
}

// publish uploads a pattern of n bytes and publishes it.
func (d *desk) publish(s *publish.Session, n int, seed byte) *publish.Publication {
	d.Helper()
	v, err := s.Alloc(publish.U8, n)
	d.check(err)
	up, err := s.Upload(v, d.filled(n, pattern(n, seed)))
	d.check(err)
	pub, err := s.Publish(v)
	d.check(err)
	d.check(up.Close())
	return pub
}

func (d *desk) filled(n int, with []byte) *pinned.Buffer {
	d.Helper()
	b, err := d.Runtime.Pinned(n)
	d.check(err)
	copy(b.Bytes(), with)
	return b
}

// download consumes a publication into buf and compares.
func (d *desk) download(pub *publish.Publication, buf *pinned.Buffer, want []byte) {
	d.Helper()
	tr, err := pub.DownloadInto(buf)
	d.check(err)
	got, err := tr.Wait(d.wait)
	d.check(err)
	if !bytes.Equal(got.Bytes(), want) {
		d.Errorf("%d bytes came back wrong", len(want))
	}
	d.check(got.Close())
}

// finish ends the runtime: everything must have been released.
func (d *desk) finish() {
	d.Helper()
	d.check(d.Shutdown(d.wait))
	if q := d.Stats().Queue; q.Pending != 0 || q.Permanent != 0 || q.Reserved != 0 {
		d.Errorf("the queue at the end: %+v", q)
	}
}

func roundTrips(r *rig) {
	d := newDesk(r, r.ctx)
	s := d.session()
	for i, n := range []int{1, 2, 8, 4095, 4096, 4097, 1 << 20, 8<<20 + 1, 64 << 20} {
		d.download(d.publish(s, n, byte(i)), d.filled(n, nil), pattern(n, byte(i)))
	}
	d.check(s.Close())
	d.finish()
}

func (d *desk) ready(pub *publish.Publication, want bool) {
	d.Helper()
	got, err := pub.FrontierReady()
	d.check(err)
	if got != want {
		d.Errorf("the frontier is ready: %v, want %v", got, want)
	}
}

func publishPending(r *rig) {
	d := newDesk(r, r.ctx)
	s := d.session()
	d.holdSession(s)
	pub := d.publish(s, 4096, 1)
	for range 100 {
		d.ready(pub, false)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := pub.AwaitFrontier(over); err != context.Canceled {
		d.Errorf("a cancelled wait: %v", err)
	}
	d.release()
	d.check(pub.AwaitFrontier(d.wait))
	d.ready(pub, true)
	d.download(pub, d.filled(4096, nil), pattern(4096, 1))
	d.check(s.Close())
	d.finish()
}

func publishOutlives(r *rig) {
	d := newDesk(r, r.ctx)
	s, buf := d.session(), d.filled(4096, nil)
	d.holdSession(s)
	pub := d.publish(s, 4096, 2)
	d.check(s.Close())
	d.check(d.Close())
	d.ready(pub, false)
	d.release()
	d.download(pub, buf, pattern(4096, 2))
	d.finish()
}

func publishTrace(r *rig) {
	var mu sync.Mutex
	var ids []cuapi.ID
	traced := cuapi.Intercept(r.Table, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		mu.Lock()
		ids = append(ids, c.ID)
		mu.Unlock()
		return next()
	})
	made, err := wire.NewDriver(traced, "traced")
	if err != nil {
		r.Fatal(err)
	}
	dev, err := made.(*driver.Driver).Device(0)
	if err != nil {
		r.Fatal(err)
	}
	ctx, err := dev.Primary()
	if err != nil {
		r.Fatal(err)
	}
	d := newDesk(r, ctx)
	s, buf := d.session(), d.filled(4096, nil)
	pub := d.publish(s, 4096, 3)
	d.check(pub.AwaitFrontier(d.wait))

	mu.Lock()
	ids = nil
	mu.Unlock()
	tr, err := pub.DownloadInto(buf)
	d.check(err)
	mu.Lock()
	// The watcher's queries are nobody's enqueues.
	got := slices.DeleteFunc(slices.Clone(ids), func(id cuapi.ID) bool { return id == cuapi.IDEventQuery })
	mu.Unlock()
	if want := []cuapi.ID{cuapi.IDMemcpyDtoHAsync, cuapi.IDEventRecord}; !slices.Equal(got, want) {
		for _, id := range got {
			d.Errorf("consuming a publication made %s", cuapi.Entries[id].Symbol())
		}
	}
	b, err := tr.Wait(d.wait)
	d.check(err)
	d.check(b.Close())
	d.check(s.Close())
	d.finish()
	d.check(ctx.Shutdown(d.wait))
}

func closePending(r *rig) {
	d := newDesk(r, r.ctx)
	s, buf := d.session(), d.filled(4096, nil)
	d.holdSession(s)
	closed, moved := d.publish(s, 4096, 4), d.publish(s, 4096, 5)
	tr, err := moved.DownloadInto(buf)
	d.check(err)
	d.check(closed.Close())
	d.check(tr.Close())
	d.check(s.Close())
	if q := d.Stats().Queue; q.Pending == 0 {
		d.Errorf("nothing is pending: %+v", q)
	}
	d.release()
	d.finish()
}

func twoSessions(r *rig) {
	d := newDesk(r, r.ctx)
	a, b := d.session(), d.session()
	d.holdSession(a)
	slow, fast := d.publish(a, 4096, 6), d.publish(b, 4096, 7)
	d.download(fast, d.filled(4096, nil), pattern(4096, 7))
	d.ready(slow, false)
	d.release()
	d.download(slow, d.filled(4096, nil), pattern(4096, 6))
	d.check(a.Close())
	d.check(b.Close())
	d.finish()
}
