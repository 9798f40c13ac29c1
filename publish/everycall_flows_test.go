package publish_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// workflows are all that fail. A new one is a function and a line here. The one
// that runs collections is first, while there is little to collect.
var workflows = []workflow{
	{name: "abandon", ready: readyHeld(1), run: abandon, silent: ownMark},
	{name: "publish", ready: (*trial).opened, run: publishAndDownload},
	{name: "old driver", o: options{sim: cudasim.Config{Version: 11000}}, simOnly: true, ready: (*trial).opened, run: publishAndDownload, silent: triedAgain},
	{name: "no pools", o: options{sim: cudasim.Config{NoPools: true}}, simOnly: true, ready: (*trial).opened, run: publishAndDownload, silent: triedAgain},
	{name: "upload", ready: (*trial).opened, run: uploads},
	{name: "scoped", ready: (*trial).opened, run: scoped},
	{name: "in flight", ready: readyHeld(3), run: manyInFlight, silent: ownMark, varies: eventGrowth},
	{name: "cancelled", ready: readyHeld(1), run: cancelled, silent: ownMark, varies: eventGrowth},
	{name: "parked", ready: readyHeld(1), run: parked, silent: ownMark, varies: eventGrowth},
	{name: "growth", ready: readyGrowth, run: growth},
	{name: "growth without pools", o: options{sim: cudasim.Config{NoPools: true}}, simOnly: true, ready: readyGrowth, run: growth, silent: triedAgain},
	{name: "room for owners", o: options{cfg: publish.Config{Slots: 3}}, ready: readyHeld(1), run: roomForOwners, silent: ownMark, varies: eventGrowth},
	{name: "room in memory", o: options{sim: cudasim.Config{Memory: 64 << 20}}, simOnly: true, ready: (*trial).opened, run: roomInMemory,
		// What it asks while memory is short: without an answer it does not wait.
		// The same where what would come back is retained.
		silent: of("cuMemGetInfo_v2", "cuMemPoolGetAttribute", "cuCtxPushCurrent_v2", "cuMemFreeAsync", "cuEventRecord", "cuEventQuery", "cuStreamQuery", exchange), varies: []string{"cuStreamQuery", "cuMemGetInfo_v2", "cuMemPoolGetAttribute"}},
	{name: "adopt", ready: readyAdopt, run: adopt, silent: noContext},
	{name: "open", run: opening, end: afterOpening,
		// Without an answer the device has no pools, and the kernel's parameters are
		// not checked; the probe has asked for that of a missing context.
		silent: func(hit fault.Injection) bool {
			probed := of("cuStreamWaitEvent", "cuEventSynchronize")(hit) && hit.Code == driver.ErrInvalidContext
			return of("cuDeviceGetAttribute", "cuFuncGetParamInfo")(hit) || probed
		}},
	{name: "end", ready: readyEnd, run: endIdle, end: ended},
	{name: "end while open", ready: readyEnd, run: endOpen, end: ended},
	{name: "end in flight", ready: readyEndHeld, run: endInFlight, silent: ownMark, varies: eventGrowth, end: ended},
}

// eventGrowth are the calls that make an event. Where streams go on in the midst,
// it is a matter of time whether one has come back by then. The workflow "growth"
// fails each of them.
var eventGrowth = []string{"cuCtxPushCurrent_v2", "cuEventCreate", "cuCtxPopCurrent_v2"}

// of are the failures of these calls.
func of(calls ...string) func(fault.Injection) bool {
	return func(hit fault.Injection) bool { return slices.Contains(calls, hit.Call) }
}

// triedAgain tells whether the cache, where there are no pools, asks once more.
func triedAgain(hit fault.Injection) bool {
	return hit.Code == driver.ErrOutOfMemory && (hit.Call == "cuMemAlloc_v2" || hit.Call == "cuCtxPushCurrent_v2")
}

// ownMark tells whether a failure may be that of a mark that a stream takes for
// itself, as one that other code knows does behind each operation: the next one
// tries again. An allocation that finds no memory is tried again as well.
func ownMark(hit fault.Injection) bool {
	return hit.Call == "cuEventCreate" || hit.Call == "cuCtxPushCurrent_v2" || hit.Call == "cuStreamIsCapturing" && hit.Code == driver.ErrOutOfMemory
}

// publishAndDownload is the whole way.
func publishAndDownload(x *trial) error {
	s := get(x.enter())
	v, want := x.produced(s, 64)
	p := get(x.publish(s, v))
	must(x.t, s.Close())
	if _, err := p.FrontierReady(); err != nil {
		x.waits++
		return err
	}
	do(x.awaited(p))
	x.has("a download", get(x.waited(get(x.downloaded(p)))), want)
	return nil
}

// uploads are several into one value: one is waited for, one closed, one left to
// a look. The buffers that come back are those that went.
func uploads(x *trial) error {
	s := get(x.enter())
	v := get(x.alloc(s, 64))
	var data []byte
	for i := range 3 {
		data = random(64)
		tr := get(x.upload(s, v, get(x.filled(data))))
		switch i {
		case 0:
			back := get(x.waited(tr))
			x.has("the source of an upload", back, data)
			must(x.t, back.Close())
		case 1:
			must(x.t, tr.Close())
		case 2:
			do(x.synced(s))
			ready, err := tr.Ready()
			if err != nil {
				x.waits++
				return err
			}
			if hit, _ := x.c.Injected(); !ready && hit.Code != driver.ErrNotReady {
				x.t.Error("an upload is not ready behind Synchronize")
			}
		}
	}
	x.has("the last upload", get(x.waited(get(x.downloaded(get(x.publish(s, v)))))), data)
	return nil
}

// scoped enters by WithSession: it publishes, returns an error, and panics.
func scoped(x *trial) error {
	none := func(how string) {
		if n := x.rt.Stats().Sessions; n != 0 {
			x.t.Errorf("%d sessions are open behind %s", n, how)
		}
	}
	var p *publish.Publication
	var want []byte
	err := x.rt.WithSession(func(s *publish.Session) error {
		var v *publish.Value
		v, want = x.produced(s, 64)
		p = get(x.publish(s, v))
		return nil
	})
	none("a publication")
	do(err)
	boom := errors.New("boom")
	err = x.rt.WithSession(func(s *publish.Session) error {
		if _, err := x.alloc(s, 64); err != nil {
			return err
		}
		return boom
	})
	none("an error")
	if !errors.Is(err, boom) {
		return err
	}
	err = func() (err error) {
		defer func() {
			if first, ok := recover().(met); ok { // and boom is none
				err = first.error
			}
		}()
		return x.rt.WithSession(func(s *publish.Session) error {
			v := get(x.alloc(s, 64))
			do(x.inced(s, v, v))
			panic(boom)
		})
	}()
	none("a panic")
	do(err)
	x.has("what a scoped session published", get(x.waited(get(x.downloaded(p)))), want)
	return nil
}

// hold makes sessions whose streams are held until let is called, or the workflow
// ends.
func (x *trial) hold(n int) (held []*publish.Session, let []func()) {
	// First: where a process has some hundred streams, a driver was seen to wait for a
	// held one when it made another.
	for range n {
		held = append(held, get(x.enter()))
	}
	for _, s := range held {
		release := x.rig.hold(s)
		x.closes = append(x.closes, release) // before the session's close, and behind all that follows
		let = append(let, release)
	}
	return held, let
}

// readyHeld makes the trial's held sessions.
func readyHeld(n int) func(x *trial) {
	return func(x *trial) {
		x.opened()
		must(x.t, x.rt.Reserve(3, 64))
		x.held, x.let = x.hold(n)
	}
}

// manyInFlight has publications and transfers in flight on three streams, which
// go on in another order, and are waited for and closed in yet others.
func manyInFlight(x *trial) error {
	type flight struct {
		p    *publish.Publication
		tr   *publish.Transfer
		want []byte
	}
	var all []flight
	for _, s := range x.held {
		for i := range 2 {
			f := flight{want: random(64)}
			v := get(x.alloc(s, 64))
			get(x.upload(s, v, get(x.filled(f.want))))
			f.p = get(x.publish(s, v))
			if i > 0 {
				f.tr = get(x.downloaded(f.p))
			}
			all = append(all, f)
		}
	}
	must(x.t, all[0].p.Close())
	must(x.t, all[3].tr.Close())
	for _, i := range []int{2, 0, 1} {
		x.let[i]()
	}
	for _, i := range []int{5, 1} {
		x.has("a flight", get(x.waited(all[i].tr)), all[i].want)
	}
	do(x.awaited(all[4].p))
	must(x.t, all[4].p.Close())
	do(x.awaited(all[2].p))
	x.has("the last flight", get(x.waited(get(x.downloaded(all[2].p)))), all[2].want)
	return nil
}

// cancelled waits end with their context while the stream is held, and change
// nothing.
func cancelled(x *trial) error {
	s := x.held[0]
	v, want := x.produced(s, 64)
	p := get(x.publish(s, v))
	w, _ := x.produced(s, 64)
	tr := get(x.downloaded(get(x.publish(s, w))))
	for _, wait := range []func(context.Context) error{
		p.AwaitFrontier,
		func(ctx context.Context) error { return second(tr.Wait(ctx)) },
	} {
		if err := wait(over()); !errors.Is(err, context.Canceled) {
			x.waits++
			return err
		}
	}
	x.let[0]()
	get(x.waited(tr))
	x.has("behind a cancelled wait", get(x.waited(get(x.downloaded(p)))), want)
	return nil
}

// parked waits are the watcher's to wake.
func parked(x *trial) error {
	s := x.held[0]
	v, want := x.produced(s, 64)
	p := get(x.publish(s, v))
	var errs [3]error
	ended := make(chan struct{})
	for i := range errs {
		go func() {
			errs[i] = p.AwaitFrontier(x.within())
			ended <- struct{}{}
		}()
	}
	for !x.watching() && len(ended) == 0 && p.Err() == nil {
		runtime.Gosched()
	}
	x.let[0]()
	for range errs {
		<-ended
	}
	for _, err := range errs {
		do(x.waitEnded("await frontier", err))
	}
	x.has("behind parked waits", get(x.waited(get(x.downloaded(p)))), want)
	return nil
}

// readyGrowth leaves the pools next to nothing.
func readyGrowth(x *trial) {
	x.opened()
	pool := event.PoolOf(wire.ContextOf(x.ctx))
	for pool.Stats().Idle > 2 {
		e, err := pool.Get()
		must(x.t, err)
		x.afterwards = append(x.afterwards, func() { pool.Put(e) })
	}
}

// growth takes streams, events, pinned and device memory of several sizes from
// the driver, and gives them back to the pools, which have them the second time.
func growth(x *trial) error {
	for range 2 {
		first := len(x.closes)
		for _, n := range []int{64, 5000, 70000} {
			s := get(x.enter())
			v, want := x.produced(s, n)
			x.has("what grew", get(x.waited(get(x.downloaded(get(x.publish(s, v)))))), want)
		}
		for i := len(x.closes) - 1; i >= first; i-- {
			x.closes[i]()
		}
		x.closes = x.closes[:first]
		x.settle()
	}
	return nil
}

// roomForOwners waits for a slot behind a held stream.
func roomForOwners(x *trial) error {
	s := x.held[0]
	a, b := get(x.alloc(s, 64)), get(x.alloc(s, 64))
	get(x.alloc(s, 64))
	if _, err := s.Alloc(publish.U8, 64); !errors.Is(err, publish.ErrQueueFull) {
		return err
	}
	do(x.inced(s, a, b))
	must(x.t, a.Close())
	if x.tainted[a] {
		x.t.Error("a launch that worked taints")
	}
	got := make(chan error)
	go func() {
		v, err := s.AllocContext(x.within(), publish.U8, 64)
		v.Close()
		got <- err
	}()
	for publish.Waiting(x.rt) == 0 && x.rt.Err() == nil && x.queue().Pending > 0 {
		runtime.Gosched()
	}
	x.let[0]()
	return <-got
}

// roomInMemory waits for memory that a closed value gives back.
func roomInMemory(x *trial) error {
	s := get(x.enter())
	const n = 40 << 20
	v := get(x.alloc(s, n))
	got := make(chan error)
	go func() {
		w, err := s.AllocContext(x.within(), publish.U8, n)
		w.Close()
		got <- err
	}()
	var err error
	for waits := false; !waits; {
		select {
		case err = <-got:
			return err
		default:
			waits = publish.Waiting(x.rt) > 0
			runtime.Gosched()
		}
	}
	must(x.t, v.Close())
	return <-got
}

// other allocates device memory as other code would, without faults.
func (x *trial) other(n int) (addr cuapi.DevicePtr, free func()) {
	raw := wire.ContextOf(x.ctx).Raw
	call := func(f func() cuapi.Result) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		res := x.beneath.CtxPushCurrent(raw)
		if res == cuapi.Success {
			res = f()
			x.beneath.CtxPopCurrent(new(cuapi.Context))
		}
		if res != cuapi.Success {
			x.t.Errorf("other code's call: %d", res)
		}
	}
	p := new(cuapi.DevicePtr)
	call(func() cuapi.Result { return x.beneath.MemAlloc(p, uintptr(n)) })
	return *p, func() { call(func() cuapi.Result { return x.beneath.MemFree(*p) }) }
}

func readyAdopt(x *trial) {
	x.opened()
	addr, free := x.other(128)
	x.adopted = uint64(addr)
	x.afterwards = append(x.afterwards, func() {
		if x.rt.Err() == nil && x.queue().Permanent == 0 { // or a copy may be under way
			free()
		}
	})
}

// noContext tells whether a driver does not know what context memory is of.
func noContext(hit fault.Injection) bool {
	return hit.Call == "cuPointerGetAttribute" && hit.Nth == 4 && hit.Code == driver.ErrInvalidValue
}

// adopt publishes other code's memory on the program's word. It is let go of
// once, or never.
func adopt(x *trial) error {
	s := get(x.enter())
	q := x.queue()
	var let atomic.Int64
	v, err := s.Adopt(x.adopted, publish.U8, []int{64}, func() { let.Add(1) })
	do(x.owners("adopt", q, err, 0, nil, nil))
	x.value(v)
	data := random(64)
	get(x.upload(s, v, get(x.filled(data))))
	q = x.queue()
	if _, err := s.Publish(v); !errors.Is(err, publish.ErrProvenance) {
		return err
	}
	p, err := s.PublishAsserted(v)
	do(x.owners("publish", q, err, 64, []any{v}, nil))
	x.later(p.Close)
	tr := get(x.downloaded(p))
	b := get(x.waited(tr))
	x.has("adopted memory", b, data)
	for let.Load() == 0 && x.rt.Err() == nil && x.queue().Permanent == 0 {
		runtime.Gosched()
	}
	x.settle()
	if n := let.Load(); n > 1 || n == 1 && x.queue().Permanent > 0 {
		x.t.Errorf("let go of %d times: %+v", n, x.queue())
	}
	return nil
}

// abandon drops a handle of each kind behind a held stream; the collector finds
// them.
func abandon(x *trial) error {
	err := x.drop(x.held[0])
	var e *driver.Error
	if errors.As(err, &e) {
		err = e // which has none of the owners that a rejection has
	}
	x.collected(func() bool { x.rt.Drain(); return x.queue().Reserved == 0 })
	x.let[0]()
	x.settle()
	return err
}

// drop makes handles and keeps none of them.
func (x *trial) drop(s *publish.Session) error {
	v, err := s.Alloc(publish.U8, 64)
	if err != nil {
		return err
	}
	b, err := x.rt.Pinned(64)
	if err != nil {
		return err
	}
	if _, err := s.Upload(v, b); err != nil {
		return err
	}
	for i := range 2 {
		w, err := s.Alloc(publish.U8, 64)
		if err != nil {
			return err
		}
		p, err := s.Publish(w)
		if err != nil {
			return err
		}
		if i == 0 {
			continue
		}
		if b, err = x.rt.Pinned(64); err != nil {
			return err
		}
		if _, err := p.DownloadInto(b); err != nil {
			return err
		}
	}
	_, err = x.rt.OpenSession(nil)
	return err
}
