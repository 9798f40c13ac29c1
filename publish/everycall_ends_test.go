package publish_test

import (
	"context"
	"errors"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// watching tells whether the context's watcher has something to look for.
func (x *trial) watching() bool { return stream.WatcherOf(wire.ContextOf(x.ctx)).Running() }

// opening makes context, runtime and kernel.
func opening(x *trial) error { return x.openAll() }

// stuck tells whether the fault left a context current on a thread that nobody
// knows of: there another one can not begin as if nothing had been.
func (x *trial) stuck() bool {
	hit, _ := x.c.Injected()
	return hit.Call == "cuCtxPushCurrent_v2" && hit.After || hit.Call == "cuCtxPopCurrent_v2" && !hit.After
}

// afterOpening tries again what failed: on a context that is not lost it works.
func afterOpening(x *trial) {
	if x.stuck() {
		return
	}
	if x.ctx != nil && x.ctx.Err() != nil || x.inj.Lost() != 0 {
		x.lostWhileOpening()
		return
	}
	if err := x.openAll(); err != nil {
		x.t.Fatalf("a second attempt: %v", err)
	}
	hit, _ := x.c.Injected()
	x.untidy = hit.Call == "cuCtxPushCurrent_v2" // the probe could not end what it made
	if hit.Call == "cuFuncGetParamInfo" {        // it took away what a launch is checked by
		x.settle()
		x.shutdown()
		return
	}
	x.end()
}

// lostWhileOpening ends a context that was lost before it had a runtime. What
// follows it is another one.
func (x *trial) lostWhileOpening() {
	hit, _ := x.c.Injected()
	if x.rt != nil {
		must(x.t, x.rt.Shutdown(x.within()))
	}
	must(x.t, x.ctx.Shutdown(x.within())) // nothing is retained
	if x.inj.Lost() != 0 {
		return
	}
	x.rig.ctx, x.rig.rt, x.rig.inc = nil, nil, nil
	if err := x.openAll(); err != nil {
		x.t.Fatalf("%v: the context that follows: %v", hit, err)
	}
	if err := x.workflow(random(64)); err != nil {
		x.t.Errorf("%v: the context that follows: %v", hit, err)
	}
	must(x.t, x.rt.Shutdown(x.within()))
	must(x.t, x.ctx.Shutdown(x.within()))
}

// readyEnd has something in each pool.
func readyEnd(x *trial) {
	x.opened()
	for range 2 {
		must(x.t, x.workflow(random(64)))
	}
}

// shut shuts down runtime and context. The errors are the injected one's, or of
// what was retained before.
func (x *trial) shut() error {
	return errors.Join(x.rt.Shutdown(x.within()), x.ctx.Shutdown(x.within()))
}

func endIdle(x *trial) error { return x.shut() }

// endOpen is refused while things are open, and changes nothing.
func endOpen(x *trial) error {
	s := get(x.enter())
	v, want := x.produced(s, 64)
	p := get(x.publish(s, v))
	b := get(x.buffered(64))
	for range 2 {
		for what, end := range map[string]func(context.Context) error{"runtime": x.rt.Shutdown, "context": x.ctx.Shutdown} {
			if err := end(x.within()); !errors.Is(err, driver.ErrBusy) {
				x.t.Errorf("the %s ends while things are open: %v", what, err)
			}
		}
	}
	q := x.queue()
	tr, err := p.DownloadInto(b) // no new work of the runtime
	do(x.owners("download", q, err, 128, []any{p, b}, nil))
	x.later(tr.Close)
	back := get(x.waited(tr))
	x.has("a download from a closed runtime", back, want)
	must(x.t, back.Close())
	x.closeAll()
	return x.shut()
}

func readyEndHeld(x *trial) {
	readyEnd(x)
	x.held, x.let = x.hold(1)
}

// endInFlight waits for what is retired behind a held stream. The end of its
// context ends the wait alone.
func endInFlight(x *trial) error {
	s := x.held[0]
	v, _ := x.produced(s, 64)
	get(x.publish(s, v))
	w, _ := x.produced(s, 64)
	get(x.downloaded(get(x.publish(s, w))))
	release := x.let[0]
	x.closes[1] = func() {} // the stream stays held
	x.closeAll()
	if err := x.rt.Shutdown(over()); !errors.Is(err, context.Canceled) {
		x.closes = append(x.closes, release)
		return err
	}
	release()
	return x.shut()
}

// closeAll closes now what is closed at the end.
func (x *trial) closeAll() {
	for i := len(x.closes) - 1; i >= 0; i-- {
		x.closes[i]()
	}
	x.closes = nil
}

// ended is behind an end: another one has the same result, nothing begins on what
// has ended, and the device has another context.
func ended(x *trial) {
	hit, _ := x.c.Injected()
	x.rt.Shutdown(x.within()) // where an error came before
	first := x.ctx.Shutdown(x.within())
	if q := x.queue(); q.Permanent > 0 && first == nil {
		x.t.Errorf("%v: the context is released with %d retained", hit, q.Permanent)
	}
	if _, err := publish.New(x.ctx, publish.Config{}); !errors.Is(err, driver.ErrClosed) && x.ctx.Err() == nil {
		x.t.Errorf("a runtime on a context that has ended: %v", err)
	}
	if first == nil && x.err == nil && x.ctx.Err() == nil {
		x.clean()
		return
	}
	if x.ctx.Err() != nil && first != nil || x.inj.Lost() != 0 || x.stuck() {
		return
	}
	x.rig.ctx, x.rig.rt, x.rig.inc = nil, nil, nil
	must(x.t, x.openAll())
	must(x.t, x.workflow(random(64)))
	must(x.t, x.rt.Shutdown(x.within()))
	must(x.t, x.ctx.Shutdown(x.within()))
}
