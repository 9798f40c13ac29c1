package stream_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// Marks complete in their order in the stream, and only when a look saw it.
func TestMarksCompleteInOrderWhenObserved(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	release := r.hold(l)
	var marks []*stream.Mark
	for range 5 {
		marks = append(marks, r.upload(l))
	}
	for i, m := range marks {
		if done, err := m.Poll(); done || err != nil || !m.Recorded() {
			t.Fatalf("mark %d behind a held stream: %v, %v", i, done, err)
		}
	}
	release()
	for i, m := range marks {
		if state(t, m) {
			t.Fatalf("mark %d is complete, and nobody looked", i)
		}
	}
	r.sim.StartTrace()
	if done, err := marks[2].Poll(); !done || err != nil {
		t.Fatal(done, err)
	}
	for i, m := range marks {
		if state(t, m) != (i <= 2) {
			t.Errorf("mark %d: complete %v after a look at mark 2", i, state(t, m))
		}
	}
	if n := r.calls(cuapi.IDEventQuery); n != 1 || l.InFlight() != 2 {
		t.Errorf("%d queries, %d in flight", n, l.InFlight())
	}
	l.Poll()
	if !state(t, marks[4]) || l.InFlight() != 0 {
		t.Error("a look at the lane did not see the rest")
	}
	r.sim.StartTrace()
	for _, m := range marks { // known: no driver call
		if done, err := m.Poll(); !done || err != nil {
			t.Error(done, err)
		}
	}
	if n := len(r.sim.Trace()); n != 0 {
		t.Errorf("%d driver calls for what is known", n)
	}
}

// The driver says that an event which was never recorded is ready; a mark does
// not (law 6).
func TestAnUnsetMarkIsNeverReady(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true // an event is lost with the context
	l := r.lane()
	var failed stream.Mark
	r.fail(cuapi.IDEventRecord, 0, cuapi.InvalidValue, false)
	if err := l.Upload(r.dev, r.host, size, &failed); !isEnqueued(err) {
		t.Fatal(err)
	}
	r.hook.Store(nil)
	r.sim.StartTrace()
	for what, m := range map[string]*stream.Mark{"zero": {}, "its record failed": &failed} {
		done, err := m.Peek()
		polled, err2 := m.Poll()
		err3 := m.Wait(r.within())
		if done || polled || m.Recorded() || err == nil || err2 == nil || err3 == nil {
			t.Errorf("%s: %v %v, %v %v, %v", what, done, err, polled, err2, err3)
		}
	}
	<-failed.Done() // does not hang whoever waits for it
	if n := r.calls(cuapi.IDEventQuery); n != 0 {
		t.Errorf("%d queries of events that were never recorded", n)
	}
}

// An error of a query is terminal on that poll: never "not yet", never a retry.
func TestFault02AFailingQueryIsTerminal(t *testing.T) {
	for _, code := range []cuapi.Result{cuapi.InvalidHandle, cuapi.Unknown, cuapi.IllegalAddress} {
		r := newRig(t, cudasim.Config{})
		l := r.lane()
		release := r.hold(l)
		first, second := r.upload(l), r.upload(l)
		r.fail(cuapi.IDEventQuery, 0, code, false)
		if done, err := first.Poll(); done || !errors.Is(err, driver.Result(code)) || !strings.Contains(err.Error(), "cuEventQuery") {
			t.Fatalf("%v: %v, %v", code, done, err)
		}
		release()
		r.sim.StartTrace()
		for range 3 {
			if done, err := first.Poll(); done || !errors.Is(err, driver.Result(code)) {
				t.Errorf("%v: afterwards: %v, %v", code, done, err)
			}
		}
		if err := first.Wait(r.within()); !errors.Is(err, driver.Result(code)) {
			t.Errorf("%v: wait: %v", code, err)
		}
		if n := r.calls(cuapi.IDEventQuery); n != 0 {
			t.Errorf("%v: %d queries after the failure", code, n)
		}
		done, err := second.Poll()
		if lost := code.Sticky(); lost != (r.ctx.Err() != nil) || done == lost || lost != errors.Is(err, driver.Result(code)) {
			t.Errorf("%v: the next mark: %v, %v; lost: %v", code, done, err, r.ctx.Err())
		}
		if s := r.events(); s.InUse == 0 {
			t.Errorf("%v: the failed mark's event can be used again: %+v", code, s)
		}
		r.keep = true // the event is lost with the context
	}
}

// A loss fails every pending mark of every lane with the first cause and wakes
// who waits, though the driver told it only once.
func TestALossWakesEveryWaiter(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true
	l, other := r.lane(), r.lane()
	r.hold(l)
	r.hold(other)
	var marks []*stream.Mark
	for range 3 {
		marks = append(marks, r.upload(l), r.upload(other))
	}
	for range 2 {
		m := new(stream.Mark)
		must(t, l.Fence(m, l.Issued()))
		marks = append(marks, m)
	}
	var wg sync.WaitGroup
	for _, m := range marks {
		m.Want()
		wg.Go(func() {
			if err := m.Wait(r.within()); !errors.Is(err, driver.ErrLaunchFailed) {
				t.Errorf("a waiter: %v", err)
			}
		})
		wg.Go(func() { <-m.Done() })
	}
	hit := r.fail(cuapi.IDEventQuery, 40, cuapi.LaunchFailed, false)
	wg.Wait()
	if !hit() {
		t.Fatal("nothing was injected")
	}
	for i, m := range marks {
		if done, err := m.Peek(); done || !errors.Is(err, driver.ErrLaunchFailed) {
			t.Errorf("mark %d: %v, %v", i, done, err)
		}
	}
	r.sim.StartTrace()
	for what, err := range map[string]error{
		"upload": l.Upload(r.dev, r.host, size, new(stream.Mark)), "fill": r.fill(other),
		"record": other.Record(new(stream.Mark)), "fence": l.Fence(new(stream.Mark), l.Issued()), "submit": l.Submit(),
	} {
		if !errors.Is(err, driver.ErrLaunchFailed) || isEnqueued(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := stream.Take(r.core); !errors.Is(err, driver.ErrLaunchFailed) {
		t.Error(err)
	}
	if n := len(r.sim.Trace()); n != 0 {
		t.Errorf("%d driver calls on a lost context", n)
	}
	until(t, func() bool { return !stream.WatcherOf(r.core).Running() })
}

// A cancelled wait leaves everything as it was, and a second one delivers.
func TestFault09ACancelledWaitChangesNothing(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	release := r.hold(l)
	m := r.upload(l)
	before := r.events()
	for range 3 {
		ctx, cancel := context.WithCancel(context.Background())
		got := make(chan error)
		go func() { got <- m.Wait(ctx) }()
		until(t, stream.WatcherOf(r.core).Running) // it is parked or about to be
		cancel()
		if err := <-got; err != context.Canceled {
			t.Fatal(err)
		}
		if err := m.Wait(ctx); err != context.Canceled {
			t.Fatal(err)
		}
		if state(t, m) || l.InFlight() != 1 || r.events() != before {
			t.Fatalf("a cancelled wait changed something: %d in flight, %+v", l.InFlight(), r.events())
		}
	}
	release()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.Wait(ended); err != nil { // one look, also with a ctx that ended
		t.Errorf("complete, and the wait says %v", err)
	}
	must(t, m.Wait(r.within()))
}

// Fences stand for themselves: each completes by its own event, whatever the
// order in which they and the lane's marks are looked at.
func TestFencesOverlapAndCompleteOutOfOrder(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {2, 0, 1}} {
		r := newRig(t, cudasim.Config{})
		st, err := stream.New(r.ctx)
		must(t, err)
		pinned, err := wire.PinLane(st)
		must(t, err)
		l := pinned.(*stream.Lane)
		r.used = append(r.used, l)
		var marks, fences [3]*stream.Mark
		var release [3]func()
		for i := range 3 {
			release[i], err = hold.Stream(r.ctx, uintptr(l.Handle()))
			must(t, err)
			marks[i] = r.upload(l)
			fences[i] = new(stream.Mark)
			must(t, l.Fence(fences[i], l.Issued()))
		}
		for i := range 3 {
			release[i]()
			for j := range 3 {
				if done, err := fences[j].Poll(); err != nil || done != (j <= i) {
					t.Errorf("fence %d with %d released: %v, %v", j, i+1, done, err)
				}
			}
		}
		if state(t, marks[0]) || state(t, marks[2]) {
			t.Error("a fence settled a mark of the lane")
		}
		for _, i := range order {
			if done, err := marks[i].Poll(); !done || err != nil {
				t.Errorf("mark %d: %v, %v", i, done, err)
			}
		}
		r.sim.StartTrace()
		known := new(stream.Mark)
		must(t, l.Fence(known, l.Issued()))
		if !state(t, known) || len(r.sim.Trace()) != 0 {
			t.Error("a fence behind what is known to be done asks the driver")
		}
		if l.InFlight() != 0 || r.events().InUse != 0 {
			t.Errorf("%d in flight, %+v", l.InFlight(), r.events())
		}
		must(t, st.Close())
	}
}

// A fence that could not be recorded proves nothing.
func TestAFailedFence(t *testing.T) {
	for _, after := range []bool{false, true} {
		r := newRig(t, cudasim.Config{})
		l := r.lane()
		r.hold(l)
		r.upload(l)
		r.fail(cuapi.IDEventRecord, 0, cuapi.InvalidValue, after)
		m := new(stream.Mark)
		if err := l.Fence(m, l.Issued()); !isEnqueued(err) || !errors.Is(err, driver.ErrInvalidValue) || m.Recorded() {
			t.Errorf("after %v: %v, recorded %v", after, err, m.Recorded())
		}
		r.sim.ReleaseAll()
		l.Poll()
		if m.Recorded() || r.events().InUse != 1 {
			t.Errorf("after %v: %+v", after, r.events())
		}
		r.keep = true // the event is lost with the context
	}
}
