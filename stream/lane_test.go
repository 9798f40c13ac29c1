package stream_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/stream"
)

// Operations in flight are bounded; the next is refused with the numbers, and
// nothing blocks. Every 64 operations without a fence the lane records a mark
// of its own, so that their credits return.
func TestCredits(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	r.sim.StartTrace()
	release := r.hold(l)
	for i := range stream.Credits {
		if err := r.fill(l); err != nil {
			t.Fatalf("operation %d: %v", i, err)
		}
	}
	if n := r.calls(cuapi.IDEventRecord); n != stream.Credits/64 || l.InFlight() != stream.Credits {
		t.Errorf("%d marks of the lane's own, %d in flight", n, l.InFlight())
	}
	sets, issued := r.calls(cuapi.IDMemsetD8Async), l.Issued()
	for what, err := range map[string]error{
		"fill": r.fill(l), "upload": l.Upload(r.dev, r.host, size, new(stream.Mark)),
		"download": l.Download(r.host, r.dev, size, new(stream.Mark)),
	} {
		if !errors.Is(err, stream.ErrFull) || isEnqueued(err) || !strings.Contains(err.Error(), fmt.Sprintf("%d operations are in flight", stream.Credits)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if r.calls(cuapi.IDMemsetD8Async, cuapi.IDMemcpyHtoDAsync, cuapi.IDMemcpyDtoHAsync) != sets || l.Issued() != issued || r.sim.Blocked() != 0 {
		t.Error("a refused operation was enqueued")
	}
	must(t, l.Record(new(stream.Mark))) // a record takes none
	release()
	must(t, r.fill(l))
	l.Poll()
	if n := l.InFlight(); n != 1 {
		t.Errorf("%d in flight", n)
	}
	for range 10 * stream.Credits { // steady, without a fence
		must(t, r.fill(l))
	}
	if s := r.events(); s.Created > 16 {
		t.Errorf("steady work creates events: %+v", s)
	}
}

// A steady cycle creates no event: each goes back once its completion was
// observed, and not before.
func TestEventsGoBackWhenObserved(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	for range 200 {
		release := r.hold(l)
		a, b := r.upload(l), r.upload(l)
		if s := r.events(); s.InUse != 2 {
			t.Fatalf("%+v", s)
		}
		a.Poll()
		release()
		if s := r.events(); s.InUse != 2 {
			t.Fatalf("back before it was observed: %+v", s)
		}
		must(t, b.Wait(r.within()))
		if s := r.events(); s.InUse != 0 || s.Created != 2 {
			t.Fatalf("%+v", s)
		}
	}
}

// The list of copy and record stops at each position, before and after the
// failing call's effect: the mark stays unset, the lane is broken, and an event
// whose record failed is never used again.
func TestFault21EachPositionOfAnUploadFails(t *testing.T) {
	for _, id := range []cuapi.ID{cuapi.IDMemcpyHtoDAsync, cuapi.IDEventRecord} {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, after %v", cuapi.Entries[id].Name, after), func(t *testing.T) {
				r := newRig(t, cudasim.Config{})
				l := r.lane()
				warm := r.upload(l)
				must(t, warm.Wait(r.within())) // its event is idle now
				hit := r.fail(id, 0, cuapi.InvalidValue, after)
				r.sim.StartTrace()
				m := new(stream.Mark)
				err := l.Upload(r.dev, r.host, size, m)
				if !hit() || !isEnqueued(err) || !errors.Is(err, driver.ErrInvalidValue) || m.Recorded() {
					t.Fatalf("%v, recorded %v", err, m.Recorded())
				}
				if copied := id == cuapi.IDMemcpyHtoDAsync; copied != strings.Contains(err.Error(), "64 bytes") || !strings.Contains(err.Error(), cuapi.Entries[id].Symbol()) {
					t.Errorf("%q", err)
				}
				if !errors.Is(l.Failed(), driver.ErrInvalidValue) {
					t.Errorf("the lane is as before: %v", l.Failed())
				}
				// The copy's failure leaves the event as it was; a record's does not.
				recorded := id == cuapi.IDEventRecord
				if s := r.events(); (s.InUse == 1) != recorded || s.Created != 1 {
					t.Errorf("%+v", s)
				}
				next := r.upload(l)
				must(t, next.Wait(r.within()))
				if s := r.events(); recorded != (s.Created == 2) {
					t.Errorf("the event was used again: %+v", s)
				}
				if _, err := m.Poll(); err == nil || l.InFlight() != 0 {
					t.Errorf("%v, %d in flight", err, l.InFlight())
				}
				r.keep = recorded // the event is lost with the context
			})
		}
	}
}

// When the record of the lane's own mark fails, the operation before it did
// not: it is no error, and a later operation tries again.
func TestAFailedMarkOfTheLanesOwn(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	r.keep = true // an event is lost with the context
	l := r.lane()
	hit := r.fail(cuapi.IDEventRecord, 0, cuapi.InvalidValue, false)
	for range 3 * stream.Credits {
		must(t, r.fill(l))
	}
	if !hit() || l.Failed() != nil || r.events().InUse > 9 {
		t.Errorf("%v, %+v", l.Failed(), r.events())
	}
	// No event to be had is no error either.
	none := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventCreate {
			return cuapi.OutOfMemory
		}
		return next()
	})
	q := newRig(t, cudasim.Config{})
	m := q.lane()
	q.hook.Store(&none)
	for range stream.Credits {
		must(t, q.fill(m))
	}
	must(t, q.fill(m)) // a look at the stream itself returned the credits
	if err := m.Upload(q.dev, q.host, size, new(stream.Mark)); !errors.Is(err, driver.ErrOutOfMemory) {
		t.Error(err)
	}
	q.hook.Store(nil)
	must(t, q.fill(m)) // finds its way back
	must(t, q.upload(m).Wait(q.within()))
}

// Where there is no event for a mark that was asked for, nothing was enqueued.
func TestNoEventIsARejection(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	r.fail(cuapi.IDEventCreate, 0, cuapi.OutOfMemory, false)
	r.sim.StartTrace()
	m := new(stream.Mark)
	err := l.Upload(r.dev, r.host, size, m)
	if !errors.Is(err, driver.ErrOutOfMemory) || isEnqueued(err) || m.Recorded() || l.InFlight() != 0 || l.Issued() != 0 || l.Failed() != nil {
		t.Errorf("%v, %d in flight", err, l.InFlight())
	}
	if r.calls(cuapi.IDMemcpyHtoDAsync, cuapi.IDEventRecord) != 0 {
		t.Error("something was enqueued")
	}
	must(t, r.upload(l).Wait(r.within()))
}

// A lane that nobody uses is taken again only once its work is known to be
// done, also work without a mark behind it.
func TestIdleLanesAreProvenBeforeReuse(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l, err := stream.Take(r.core)
	must(t, err)
	release := r.hold(l)
	for range 3 {
		must(t, r.fill(l))
	}
	l.Drop()
	for range 4 {
		if next := r.lane(); next == l || next.Handle() == l.Handle() {
			t.Fatal("taken with work pending")
		}
	}
	release()
	again, err := stream.Take(r.core)
	must(t, err)
	if again != l || l.InFlight() != 0 {
		t.Errorf("the idle lane was not taken, or not proven: %d in flight", l.InFlight())
	}
	again.Drop()
	r.sim.StartTrace()
	for range 10 {
		same, err := stream.Take(r.core)
		must(t, err)
		same.Drop()
	}
	if n := len(r.sim.Trace()); n != 0 {
		t.Errorf("%d driver calls for an idle lane that is known to be done", n)
	}
}

// A lane on which an enqueue failed is for no new user.
func TestABrokenLaneIsNotTaken(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l, err := stream.Take(r.core)
	must(t, err)
	r.fail(cuapi.IDMemsetD8Async, 0, cuapi.InvalidValue, false)
	if err := r.fill(l); !isEnqueued(err) {
		t.Fatal(err)
	}
	r.hook.Store(nil)
	l.Drop()
	for range 20 {
		next, err := stream.Take(r.core)
		must(t, err)
		if next == l {
			t.Fatal("a broken lane was taken")
		}
		next.Drop()
	}
}

func TestHoldIsForOne(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	if !l.Hold() || l.Hold() {
		t.Error("two sessions hold one stream")
	}
	l.Unhold()
	if !l.Hold() {
		t.Error("held by nobody, and refused")
	}
}

func TestSubmitNeverWaits(t *testing.T) {
	r := newRig(t, cudasim.Config{})
	l := r.lane()
	r.hold(l)
	r.upload(l)
	must(t, l.Submit())
	r.fail(cuapi.IDStreamQuery, 0, cuapi.InvalidHandle, false)
	if err := l.Submit(); !errors.Is(err, driver.ErrInvalidHandle) {
		t.Error(err)
	}
}
