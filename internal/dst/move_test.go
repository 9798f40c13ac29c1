package dst

import (
	"context"
	"errors"
	"slices"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

func is(err, want error) bool { return errors.Is(err, want) }

// ended is a context that is over: a wait with it returns at once.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (w *world) take() {
	if len(w.bufs) > 24 {
		return
	}
	rt := w.runtime()
	n := w.size()
	if l, ok := pick(w, w.lives); ok && w.chance(3, 4) {
		n, rt = min(max(1, l.size), 1<<16), l.rt
	}
	w.takeFrom(rt, n)
}

func (w *world) takeFrom(rt *runtimeOf, n int) *buffer {
	c := w.call(rt, "runtime: pinned").expect(rt.closed, driver.ErrClosed)
	b, err := rt.rt.Pinned(n)
	c.may(true, pinned.ErrLimit, driver.ErrOutOfMemory) // of a pinned memory that is short
	if c.end(err) != done {
		return nil
	}
	w.keep = append(w.keep, b)
	m := &buffer{id: w.id(), b: b, dev: rt.dev}
	w.scribble(m)
	w.bufs = append(w.bufs, m)
	return m
}

// scribble writes all over a buffer: whoever still reads or writes it shows.
func (w *world) scribble(m *buffer) {
	p := m.b.Bytes()
	m.shown = true
	if p == nil {
		w.fail("a buffer of ours has no bytes")
		return
	}
	fillBytes(p, w.rng.Uint32())
	m.data = slices.Clone(p)
}

// owned checks that nobody wrote into a buffer of ours.
func (w *world) owned(m *buffer) { w.compare(m.b.Bytes(), m.data, "a buffer that nobody else has") }

func (w *world) drop() {
	m, ok := pick(w, w.bufs)
	if !ok {
		return
	}
	if m.moving {
		m.revoked = true
		m.b.Close()
		return
	}
	w.owned(m)
	w.lost(m)
	m.b.Close()
	w.is(m.b.Err(), driver.ErrClosed, "a buffer that was closed")
	w.past = append(w.past, m)
}

// lost takes a buffer out of the model.
func (w *world) lost(m *buffer) {
	m.gone = true
	w.bufs = slices.DeleteFunc(w.bufs, func(o *buffer) bool { return o == m })
}

// buffer returns one of so many bytes for a device, or any now and then.
func (w *world) buffer(rt *runtimeOf, n int) *buffer {
	if w.chance(1, 24) {
		if m, ok := pick(w, w.bufs); ok && !m.moving {
			return m
		}
	}
	if len(w.devs) > 1 && n <= 4096 && w.chance(1, 32) { // the other device's
		d := w.devs[0]
		if d == rt.dev {
			d = w.devs[1]
		}
		return w.takeFrom(d.runtimes[len(d.runtimes)-1], n)
	}
	for _, m := range w.bufs {
		if m.dev == rt.dev && m.b.Len() == n && !m.moving {
			return m
		}
	}
	if n > 1<<16 {
		return nil
	}
	return w.takeFrom(rt, n)
}

// given ends the move of a buffer.
func (w *world) given(m *buffer, o outcome) {
	m.moving = false
	switch {
	case o != rejected:
		w.lost(m)
		w.is(m.b.Err(), driver.ErrMoved, "a buffer that was moved")
		if m.b.Bytes() != nil {
			w.fail("the bytes of a buffer that was moved can be reached")
		}
		w.past = append(w.past, m)
	case m.revoked:
		w.lost(m)
	default:
		w.is(m.b.Err(), nil, "a buffer whose move was refused")
		w.owned(m)
	}
}

func (w *world) upload() {
	s := w.session()
	if s == nil {
		return
	}
	l := w.valueOf(s)
	if l == nil {
		return
	}
	m := w.buffer(s.rt, l.size)
	if m == nil || l.stage != value || l.moving {
		return
	}
	w.owned(m)
	c := w.call(s.rt, "upload").expect(l.rt != s.rt, publish.ErrForeign).expect(l.lane != s.lane, publish.ErrOtherStream).
		expect(m.dev != s.rt.dev, publish.ErrForeign).expect(m.b.Len() != l.size, publish.ErrLength).expect(s.rt.closed, driver.ErrClosed)
	l.busy++
	m.moving = true
	var t *publish.Transfer
	var err error
	if w.chance(1, 6) {
		t, err = s.s.UploadContext(ended, l.v, m.b)
	} else {
		t, err = s.s.Upload(l.v, m.b)
	}
	l.busy--
	o := c.may(s.closed || s.rt.closed || m.revoked, driver.ErrClosed).
		may(l.stage != value || l.revoked || l.moving, driver.ErrClosed, driver.ErrMoved, driver.ErrBusy).end(err)
	data := m.data
	w.given(m, o)
	w.full(s.rt.dev, err)
	switch o {
	case done:
		l.data = data
		u := &life{id: w.id(), rt: s.rt, lane: s.lane, stage: upload, t: t, buf: m.b.Len(), moved: data, needs: s.lane.sure}
		w.lives = append(w.lives, u)
		w.keep = append(w.keep, t)
	case unproven:
		s.lane.broken = true
		s.rt.keeps++
		s.rt.dev.kept++
		w.taint(l)
	}
}

// taint notes that an operation which borrowed a value is unproven.
func (w *world) taint(l *life) {
	if l.stage == over && !l.tainted { // closed meanwhile
		l.rt.keeps++
	}
	l.tainted, l.data = true, nil
}

func (w *world) download() {
	l := w.life(publication)
	if l == nil || !w.free(l.lane) {
		return
	}
	at, n := 0, l.size
	if w.chance(1, 4) {
		at = w.rng.IntN(l.size)
		n = 1 + w.rng.IntN(l.size-at)
	}
	m := w.buffer(l.rt, n)
	if m == nil || l.stage != publication || l.moving {
		return
	}
	w.owned(m)
	c := w.call(l.rt, "download").expect(m.dev != l.rt.dev, publish.ErrForeign).expect(m.b.Len() != n, publish.ErrLength)
	c.may(l.busy > 0, driver.ErrBusy)
	l.moving, m.moving = true, true
	var t *publish.Transfer
	var err error
	switch {
	case w.chance(1, 6) && w.guard.depth == 0:
		t, err = l.p.DownloadRangeContext(ended, m.b, int64(at), int64(n))
	case n == l.size:
		t, err = l.p.DownloadInto(m.b)
	default:
		t, err = l.p.DownloadRange(m.b, int64(at), int64(n))
	}
	l.moving = false
	o := c.may(m.revoked || l.revoked, driver.ErrClosed).may(l.lane.hurt || l.rt.hurt, errAny).end(err)
	w.given(m, o)
	w.full(l.rt.dev, err)
	switch o {
	case done:
		l.stage, l.t, l.buf, l.revoked, l.ready = download, t, n, false, false
		if l.data != nil {
			l.moved = l.data[at : at+n]
		}
		w.keep = append(w.keep, t)
		w.past = append(w.past, l.p)
		w.is(l.p.Err(), driver.ErrMoved, "a publication that was downloaded")
	case unproven:
		l.lane.broken = true
		l.rt.dev.kept++
		w.retained(l)
		w.is(l.p.Err(), driver.ErrMoved, "a publication whose download is unproven")
	case rejected:
		w.back(l)
	}
}

// A turning is the context of a wait that the waiter itself brings about: each
// time that the wait parks, the device goes on and the watcher makes a round. So
// a wait parks as anywhere, and one goroutine is enough.
type turning struct {
	context.Context
	w       *world
	dev     *device
	left    int         // rounds, until it is cancelled
	settled func() bool // the wait needs no more; nil: any wake-up will do
}

func (w *world) turn(d *device, settled func() bool) *turning {
	w.guard.quiet++
	return &turning{context.Background(), w, d, 1 + w.rng.IntN(40), settled}
}

func (t *turning) Err() error {
	if t.left <= 0 {
		return context.Canceled
	}
	return nil
}

func (t *turning) Done() <-chan struct{} {
	for t.left > 0 {
		for range 1 + t.w.rng.IntN(4) {
			t.w.sim.Step()
		}
		t.w.guard.dev = t.dev
		t.dev.watcher.Round()
		if t.settled != nil && t.settled() {
			t.dev.watcher.Round() // it may be settled by a loss that was found elsewhere
			return nil
		}
		t.left--
		if t.settled == nil {
			break
		}
	}
	return ended.Done()
}

func (w *world) waitForCopy() {
	l := w.life(download)
	if l == nil || w.chance(1, 3) {
		l = w.life(upload)
	}
	if l == nil {
		return
	}
	w.waitFor(l)
}

func (w *world) waitFor(l *life) {
	ctx := ended
	c := w.call(l.rt, "await copy").earlier()
	parks := !l.ready && w.chance(1, 16)
	if parks {
		ctx = w.turn(l.rt.dev, func() bool { ok, err := l.t.Ready(); return ok || err != nil })
	}
	w.finish(l, ctx, c)
	if parks {
		w.guard.quiet--
	}
}

// finish waits for a transfer, and judges what comes of it.
func (w *world) finish(l *life, ctx context.Context, c *call) {
	l.busy++
	l.waiting = true
	b, err := l.t.Wait(ctx)
	l.busy--
	l.waiting = false
	if l.stage == over { // another closed it in the midst
		if err == nil {
			b.Close()
		}
		return
	}
	if is(err, context.Canceled) {
		if l.ready && w.guard.injected == c.injected && !l.rt.dev.sticky {
			w.fail("a transfer that was ready is not waited for")
		}
		w.is(l.t.Err(), nil, "a transfer whose wait was cancelled")
		return
	}
	switch c.end(err) {
	case done:
		w.ran(l, c.op)
		w.keep = append(w.keep, b)
		m := &buffer{id: w.id(), b: b, dev: l.rt.dev, shown: true}
		if b.Len() != l.buf {
			w.fail("a buffer of %d bytes comes back with %d", l.buf, b.Len())
		}
		w.compare(b.Bytes(), l.moved, l.stage.String())
		w.end(l)
		w.is(l.t.Err(), driver.ErrMoved, "a transfer that was waited for")
		w.scribble(m)
		w.bufs = append(w.bufs, m)
	case unproven:
		l.rt.dev.kept++
		w.retained(l)
	}
}

func (w *world) await() {
	l := w.life(publication)
	if l == nil {
		return
	}
	c := w.call(l.rt, "await frontier").earlier()
	ctx := ended
	parks := w.chance(1, 8)
	if parks {
		ctx = w.turn(l.rt.dev, func() bool { ok, err := l.p.FrontierReady(); return ok || err != nil })
	}
	l.busy++
	err := l.p.AwaitFrontier(ctx)
	l.busy--
	if parks {
		w.guard.quiet--
	}
	if is(err, context.Canceled) || l.stage != publication { // another moved it in the midst
		return
	}
	if c.end(err) == done {
		w.ran(l, c.op)
	}
}

func (w *world) synchronize() {
	s := w.session()
	if s == nil {
		return
	}
	c := w.call(s.rt, "session: synchronize")
	issued := s.lane.sure
	err := s.s.Synchronize(ended)
	if is(err, context.Canceled) {
		return
	}
	switch c.may(s.closed, driver.ErrClosed).end(err) {
	case done:
		if w.stats.nested == c.nested {
			s.rt.dropped = 0
		}
		if s.lane.ran < issued {
			w.fail("synchronize returned, and launch %d is yet to run: %d did", issued, s.lane.ran)
		}
	case unproven:
		s.lane.broken = s.lane.broken || s.lane.hurt
	}
}

func (w *world) submit() {
	s := w.session()
	if s == nil {
		return
	}
	w.call(s.rt, "session: submit").may(true, errAny).end(s.s.Submit())
}

func (w *world) drain() {
	rt := w.runtime()
	w.guard.dev = rt.dev
	before := w.stats.nested
	rt.rt.Drain()
	if w.stats.nested == before { // nobody dropped anything meanwhile
		rt.dropped = 0
	}
}

// round is what the watcher's goroutine does.
func (w *world) round() {
	d := w.devs[w.rng.IntN(len(w.devs))]
	w.guard.dev = d
	d.watcher.Round()
}

// usePast uses a handle that has ended: it must say so.
func (w *world) usePast() {
	h, ok := pick(w, w.past)
	if !ok {
		return
	}
	inert := func(err error, what string) {
		if err == nil {
			w.fail("%s that has ended can be used", what)
		} else if !is(err, driver.ErrMoved) && !is(err, driver.ErrClosed) && !is(err, publish.ErrLost) {
			var un *publish.UnprovenError
			if !errors.As(err, &un) {
				w.fail("%s that has ended: %v", what, err)
			}
		}
	}
	calls := w.stats.calls
	switch h := h.(type) {
	case *session:
		_, err := h.s.Alloc(publish.U8, 1)
		inert(err, "a session")
		inert(h.s.Submit(), "a session")
	case *publish.Value:
		if s, ok := pick(w, w.sessions); ok && w.free(s.lane) {
			_, err := s.s.Publish(h)
			if err == nil {
				w.fail("a value that has ended can be published")
			}
		}
		inert(h.Err(), "a value")
	case *publish.Publication:
		_, err := h.FrontierReady()
		inert(err, "a publication")
		inert(h.AwaitFrontier(ended), "a publication")
	case *publish.Transfer:
		_, err := h.Ready()
		inert(err, "a transfer")
		_, err = h.Wait(ended)
		inert(err, "a transfer")
	case *buffer:
		if h.b.Bytes() != nil {
			w.fail("the bytes of a buffer that has ended can be reached")
		}
	}
	if w.stats.calls != calls {
		w.fail("a handle that has ended calls the driver")
	}
}
