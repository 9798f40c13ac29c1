package drivertest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
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
	{Name: "PublishFullContext", Evidence: law + "streams that are filled through the library block nothing, however many", Child: true, run: fullContext},
	{Name: "PublishBesideCapture", Evidence: law + "a runtime at work spoils no capture of other code, and works beside it", Child: true, run: publishBesideCapture},
	{Name: "PublishLostContext", Evidence: law + "a kernel's fault is told by every handle, releases nothing, and hangs nothing", Child: true, run: publishLost},
}

// publishBesideCapture goes the whole way, misses of the pools included, while
// other code captures a stream in global mode.
func publishBesideCapture(r *rig) {
	d := newDesk(r, r.ctx)
	s, mem, g := r.stream(), r.device(64, 0), new(cuapi.Graph)
	r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeGlobal))
	r.ok(r.MemsetD8Async(mem, 1, 64, s))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, n := range []int{1, 4096, 3 << 20} {
			session := d.session()
			pub := d.publish(session, n, 9)
			if _, err := pub.FrontierReady(); err != nil {
				d.Error(err)
			}
			if err := pub.AwaitFrontier(d.wait); err != nil {
				d.Error(err)
			}
			if err := session.Submit(); err != nil {
				d.Error(err)
			}
			if err := session.Close(); err != nil {
				d.Error(err)
			}
			d.download(pub, d.filled(n, nil), pattern(n, 9))
		}
	}()
	<-done
	r.want(r.StreamEndCapture(s, g), cuapi.Success, "the end of the capture")
	r.ok(r.GraphDestroy(*g))
	d.check(d.Shutdown(d.wait))
}

// publishLost has a kernel fault behind publications, and ends everything.
func publishLost(r *rig) {
	r.gone = true
	mod, err := kernel.Load(r.ctx, []byte(PTX))
	d := newDesk(r, r.ctx)
	d.check(err)
	wild, err := mod.Function("wild")
	d.check(err)
	s := d.session()
	fine := d.publish(s, 4096, 1)
	d.check(fine.AwaitFrontier(d.wait))
	buf := d.filled(4096, nil)
	d.holdSession(s)
	d.check(s.Launch(wild, kernel.Config{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}))
	behind := d.publish(s, 4096, 2)
	r.release()

	lost := func(what string, err error) {
		r.Helper()
		if !errors.Is(err, driver.ErrIllegalAddress) {
			r.Errorf("%s: %v", what, err)
		}
	}
	lost("await", behind.AwaitFrontier(d.wait))
	<-d.Lost()
	lost("the runtime", d.Runtime.Err())
	for what, p := range map[string]*publish.Publication{"behind": behind, "complete": fine} {
		ready, err := p.FrontierReady()
		if ready {
			r.Errorf("%s: ready on a lost context", what)
		}
		lost(what, err)
		lost(what, p.AwaitFrontier(d.wait))
		_, err = p.DownloadInto(buf)
		lost(what, err)
		var rejected *publish.RejectedError
		if !errors.As(err, &rejected) || buf.Err() != nil {
			r.Errorf("%s: the owners did not come back: %v", what, err)
		}
		d.check(p.Close())
	}
	_, err = publish.New(r.ctx, publish.Config{})
	lost("a new runtime", err)
	d.check(buf.Close())
	d.check(s.Close())
	lost("the runtime's end", d.Shutdown(d.wait))
	if q := d.Runtime.Stats().Queue; q.Permanent < 2 || q.Pending != 0 || q.Reserved != 0 {
		r.Errorf("%+v", q)
	}
	lost("the context's end", r.ctx.Shutdown(d.wait))
	r.ended = true
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

// fullContext fills 24 held streams through the library, with downloads of what
// they published, until it refuses.
func fullContext(r *rig) {
	d := newDesk(r, r.ctx)
	var sessions []*publish.Session
	var values []*publish.Value
	for range 24 {
		s := d.session()
		v, err := s.Alloc(publish.U8, 4096)
		d.check(err)
		sessions, values = append(sessions, s), append(values, v)
	}
	bufs := make([]*pinned.Buffer, 2000)
	for i := range bufs {
		bufs[i] = d.filled(64, nil)
	}
	for _, s := range sessions[:4] {
		d.holdSession(s)
	}
	raw, err := sessions[0].Raw()
	d.check(err)
	e := r.event()
	r.ok(r.EventRecord(e, cuapi.Stream(raw)))
	for _, s := range sessions[4:] { // behind the first one
		raw, err := s.Raw()
		d.check(err)
		r.ok(r.StreamWaitEvent(cuapi.Stream(raw), e, 0))
	}
	took, full := 0, false // full: of the whole context
	filling := r.start("filling through the library", func() cuapi.Result {
		for i, s := range sessions {
			for {
				v, err := s.Alloc(publish.U8, 64)
				if err == nil {
					var pub *publish.Publication
					var tr *publish.Transfer
					if pub, err = s.Publish(v); err == nil {
						if tr, err = pub.DownloadInto(bufs[took]); err == nil {
							d.check(tr.Close())
						}
						d.check(pub.Close())
					}
					d.check(v.Close())
				}
				if full = full || errors.Is(err, publish.ErrContextFull); full || errors.Is(err, publish.ErrStreamFull) {
					break
				}
				if err != nil {
					r.Errorf("session %d: %v", i, err)
					return cuapi.InvalidValue
				}
				took++
			}
		}
		return cuapi.Success
	})
	r.mustReturn(filling, cuapi.Success)
	r.Logf("%d values, publications and downloads in flight in %d streams", took, len(sessions))
	if !full || took < 400 { // an allocation and a download each
		r.Errorf("the context is full: %v, with %d", full, took)
	}
	r.release()
	for i, s := range sessions {
		d.check(values[i].Close())
		d.check(s.Synchronize(d.wait))
		d.check(s.Close())
	}
	for _, b := range bufs {
		d.check(b.Close())
	}
	d.finish()
}
