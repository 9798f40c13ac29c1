package dst

import (
	"context"
	"errors"
	"slices"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// count reads the counters of everything, and holds them against the model.
func (w *world) count() {
	for _, d := range w.devs {
		for _, rt := range d.runtimes {
			w.conserved(rt)
		}
	}
}

func (w *world) conserved(rt *runtimeOf) {
	s := rt.rt.Stats()
	q := s.Queue
	if q.Entered != q.Released+q.Permanent+q.Pending || min(q.Reserved, q.Pending, q.Permanent, q.Released) < 0 || min(q.ReservedBytes, q.PendingBytes) < 0 {
		w.fail("the queue does not conserve: %+v", q)
	}
	if q.Reserved+q.Pending > rt.cfg.Slots || rt.cfg.Bytes > 0 && q.ReservedBytes+q.PendingBytes > rt.cfg.Bytes {
		w.fail("the queue is beyond its bounds: %+v", q)
	}
	if min(s.Sessions, s.Pinned.InUse-s.Pinned.Kept-s.Pinned.Abandoned, s.Events.InUse) < 0 || s.Memory.InUse < 0 || s.Panics > 0 {
		w.fail("counters are off: %+v", s)
	}
	if w.guard.depth > 0 {
		return
	}
	if rt.dropped == 0 && q.Permanent < rt.keeps {
		w.fail("%d owners are retained, and %d must be", q.Permanent, rt.keeps)
	}
	if s.Pinned.Kept < rt.dev.kept {
		w.fail("%d pinned buffers are retained, and %d must be", s.Pinned.Kept, rt.dev.kept)
	}
	owners, bytes := 0, int64(0)
	for _, l := range w.lives {
		if l.rt == rt {
			owners++
			bytes += int64(l.size + l.buf)
		}
	}
	if q.Reserved < owners || q.Reserved > owners+rt.dropped {
		w.fail("%d owners of a runtime have %d slots; %d are dropped", owners, q.Reserved, rt.dropped)
	}
	if rt.dropped == 0 && q.ReservedBytes != bytes {
		w.fail("%d owners of %d bytes have reserved %d", owners, bytes, q.ReservedBytes)
	}
	open := 0
	for _, m := range w.sessions {
		if m.rt == rt {
			open++
		}
	}
	if s.Sessions != open {
		w.fail("%d sessions are open, and %d are counted", open, s.Sessions)
	}
	if s.Leaked > rt.leaks || !rt.hurt && q.Permanent != rt.leaks {
		w.fail("%d owners are retained, %d were leaked, and nothing failed: %v", q.Permanent, rt.leaks, q.Cause)
	}
}

// laws are checked after each action.
func (w *world) laws() {
	for _, d := range w.devs {
		err := d.ctx.Err()
		switch {
		case err == nil && d.cause == nil:
		case d.cause == nil:
			d.cause = err
			if !d.sticky {
				w.fail("the context is lost, and no call said so: %v", err)
			}
		case err != d.cause:
			w.fail("the first cause of a loss was %v and is now %v", d.cause, err)
		}
	}
	if w.step%8 == 0 {
		if v := w.sim.Violations(); len(v) > 0 {
			w.fail("the simulated driver: %v\n%s other side:\n%s", v[0], v[0].Stack(), v[0].Other())
		}
	}
}

// full looks at a refusal for want of room in flight: once the device has done
// what it was given there must be room.
func (w *world) full(d *device, err error) {
	if !is(err, publish.ErrStreamFull) && !is(err, publish.ErrContextFull) || w.guard.depth > 0 || d.sticky || !w.chance(1, 4) {
		return
	}
	calm := w.guard.calm
	w.guard.calm = true
	w.drained(d)
	w.guard.calm = calm
}

// drained lets a device do everything, and checks that all credits come back.
func (w *world) drained(d *device) {
	w.guard.dev = d
	_, stop := stream.AwaitCredits(d.core)
	for range 3 { // a round may end what was dropped, behind a record of its own
		w.settle()
		d.watcher.Round()
	}
	stop()
	if n := stream.InFlight(d.core); n != 0 && d.ctx.Err() == nil {
		w.fail("all is done, and %d operations are in flight", n)
	}
}

// burst enqueues until there is no room, or many times.
func (w *world) burst() {
	s := w.session()
	if s == nil || s.lane.broken || s.rt.dev.sticky {
		return
	}
	v := w.valueOf(s)
	if v == nil || v.lane != s.lane || v.rt != s.rt {
		return
	}
	n := 30 + w.rng.IntN(500)
	if w.chance(1, 8) {
		n = 1100
	}
	for range n {
		if w.found != nil || v.stage != value || s.closed || w.launchOn(s, v, nil) != done {
			return
		}
	}
}

// replace ends a runtime and makes another on its device: what is alive stays so.
func (w *world) replace() {
	rt := w.runtime()
	d := rt.dev
	w.guard.dev = d
	switch w.rng.IntN(3) {
	case 0:
		rt.rt.Close()
		rt.closed = true
	case 1:
		if err := rt.rt.Shutdown(ended); !is(err, context.Canceled) {
			w.fail("a cancelled shutdown: %v", err)
		}
		rt.closed = true
	case 2:
		w.shutDown(rt)
	}
	if len(d.runtimes) < 4 && !d.sticky {
		w.addRuntime(d)
	} else if rt == d.runtimes[len(d.runtimes)-1] && len(d.runtimes) < 8 && !d.sticky {
		w.addRuntime(d)
	}
}

// shutDown shuts a runtime down while the device goes on.
func (w *world) shutDown(rt *runtimeOf) error {
	w.guard.dev = rt.dev
	t := w.turn(rt.dev, nil)
	t.settled = func() bool {
		if rt.rt.Stats().Queue.Pending > 0 {
			return false
		}
		rt.dev.watcher.Round()
		return rt.rt.Stats().Queue.Pending == 0
	}
	err := rt.rt.Shutdown(t)
	w.guard.quiet--
	rt.closed = true
	if is(err, context.Canceled) {
		return err
	}
	rt.dropped = 0
	w.left(rt, err)
	return err
}

// left holds the result of a shutdown against the counters.
func (w *world) left(rt *runtimeOf, err error) {
	s := rt.rt.Stats()
	if s.Queue.Pending > 0 {
		w.fail("a shutdown is through, and %d owners are pending", s.Queue.Pending)
	}
	isOpen := s.Sessions > 0 || s.Queue.Reserved > 0
	if is(err, driver.ErrBusy) != isOpen {
		w.fail("a shutdown with %d sessions and %d owners open: %v", s.Sessions, s.Queue.Reserved, err)
	}
	if (err == nil) != (!isOpen && s.Queue.Permanent == 0) {
		w.fail("a shutdown with %d owners retained: %v", s.Queue.Permanent, err)
	}
}

// lose launches a kernel that faults: the context is lost for good.
func (w *world) lose() {
	if w.guard.dire == 0 || w.guard.rate == 0 || !w.chance(1, 8) {
		return
	}
	s := w.session()
	if s == nil {
		return
	}
	l := w.valueOf(s)
	if l == nil || l.lane != s.lane || l.rt != s.rt {
		return
	}
	c := w.call(s.rt, "launch of a fault")
	err := s.s.Launch(s.rt.dev.bad, kernel.Grid(1), publish.Out(l.v))
	if c.may(s.lane.hurt, errAny).end(err) == unproven {
		s.lane.broken = true
		w.taint(l)
	}
	l.data = nil
	for _, rt := range s.rt.dev.runtimes {
		rt.hurt = true
	}
}

// waitForRoom allocates and waits for room, which the device's progress brings.
func (w *world) waitForRoom() {
	s := w.session()
	if s == nil {
		return
	}
	n := w.size()
	c := w.call(s.rt, "alloc and wait").expect(s.rt.closed, driver.ErrClosed).may(true, context.Canceled)
	v, err := s.s.AllocContext(w.turn(s.rt.dev, nil), publish.U8, n)
	w.guard.quiet--
	switch c.end(err) {
	case done:
		l := &life{id: w.id(), rt: s.rt, lane: s.lane, v: v, size: n}
		w.lives = append(w.lives, l)
		w.keep = append(w.keep, v)
	case unproven:
		s.lane.broken = true
		s.rt.keeps++
	}
}

// finishAll stops the faults, and requires that all completes and drains.
func (w *world) finishAll() {
	g := &w.guard
	g.calm = true
	w.settle()
	for _, d := range w.devs {
		g.dev = d
		d.watcher.Round()
	}
	for _, l := range slices.Clone(w.lives) {
		w.complete(l)
	}
	for _, s := range slices.Clone(w.sessions) {
		w.forget(s)
		g.dev = s.rt.dev
		s.s.Close()
	}
	for _, m := range slices.Clone(w.bufs) {
		w.owned(m)
		w.lost(m)
		m.b.Close()
	}
	for _, d := range w.devs {
		w.endDevice(d)
	}
}

// complete brings one owner to its end: what did not fail must be done by now.
func (w *world) complete(l *life) {
	w.guard.dev = l.rt.dev
	c := w.call(l.rt, "await the end").earlier()
	var err error
	switch l.stage {
	case publication:
		ready, e := l.p.FrontierReady()
		if err = e; err == nil && !ready {
			w.fail("all is done, and a frontier is not ready")
		}
	case download, upload:
		ready, e := l.t.Ready()
		if err = e; err == nil && !ready {
			w.fail("all is done, and a transfer is not ready")
		}
		if w.found == nil && w.chance(1, 2) {
			w.finish(l, context.Background(), c)
			return
		}
	}
	if err != nil {
		c.end(err)
	} else if l.stage != value {
		w.ran(l, "the end")
	}
	w.closeLife(l)
}

func (w *world) endDevice(d *device) {
	g := &w.guard
	g.dev = d
	for range 4 {
		d.watcher.Round()
		for _, rt := range d.runtimes {
			rt.rt.Drain()
		}
		w.settle()
	}
	w.drained(d)
	retained := 0
	for _, rt := range d.runtimes {
		rt.dropped = 0
		w.conserved(rt)
		q := rt.rt.Stats().Queue
		if q.Pending > 0 || q.Reserved > 0 {
			w.fail("all is done, and the queue has %+v", q)
			return
		}
		retained += q.Permanent
		if err := w.shutDown(rt); (err == nil) != (q.Permanent == 0) {
			w.fail("the last shutdown of a runtime: %v; %d are retained", err, q.Permanent)
		}
	}
	s := d.runtimes[0].rt.Stats()
	if s.Pinned.InUse != s.Pinned.Kept+s.Pinned.Abandoned || s.Pinned.Abandoned != d.stranded {
		w.fail("all is done, and pinned memory has %+v; %d were dropped", s.Pinned, d.stranded)
	}
	if retained == 0 && s.Memory.InUse != 0 {
		w.fail("all is released, and %d bytes of device memory are in use", s.Memory.InUse)
	}
	w.endContext(d, retained+s.Pinned.Abandoned)
}

// endContext shuts the context down: it is released when nothing is retained.
func (w *world) endContext(d *device, retained int) {
	w.settle()
	w.sim.SetStepped(false)
	for _, m := range d.memory {
		if m.life != nil {
			continue // retained
		}
		d.core.Current(func() cuapi.Result { return w.sim.Table().MemFree(m.addr) })
	}
	err := d.ctx.Shutdown(context.Background())
	if retained == 0 && err != nil || retained > 0 && err == nil && d.ctx.Err() == nil {
		w.fail("the context's shutdown: %v; %d owners are retained", err, retained)
	}
	if n := d.runtimes[0].rt.Stats().Events.InUse; n != 0 && err == nil && w.guard.injected == 0 && !d.sticky {
		w.fail("the context is gone, and %d events are in use", n)
	}
	if errors.Is(err, driver.ErrBusy) {
		w.fail("something is open: %v", err)
	}
}
