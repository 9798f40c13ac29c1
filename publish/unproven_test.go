package publish_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/publish"
)

// A failing is an operation of which a driver call fails: from its first
// enqueue on, nothing proves what the driver did.
type failing struct {
	op    string
	at    cuapi.ID // the call that fails
	moved int64    // bytes that the operation owns by then
	begin func(a *attempt) *borrowed
}

// borrowed is what stays with the caller, tainted; run is the operation.
type borrowed struct {
	values []*publish.Value
	run    func() error
	moved  func() []error // of the handles that were moved: each matches ErrMoved
}

func beginUpload(a *attempt) *borrowed {
	v, buf := a.alloc(), a.r.buffer(random(valueSize))
	return &borrowed{[]*publish.Value{v},
		func() error {
			tr, err := a.s.Upload(v, buf)
			if tr != nil {
				a.r.t.Error("a transfer of what failed")
			}
			return err
		},
		func() []error {
			if buf.Bytes() != nil {
				a.r.t.Error("the buffer is within reach")
			}
			return []error{buf.Err()}
		}}
}

func beginDownload(a *attempt) *borrowed {
	p, _ := a.r.publication(a.s, valueSize)
	buf := a.r.buffer(make([]byte, valueSize))
	return &borrowed{nil,
		func() error {
			tr, err := p.DownloadInto(buf)
			if tr != nil {
				a.r.t.Error("a transfer of what failed")
			}
			return err
		},
		func() []error {
			if buf.Bytes() != nil {
				a.r.t.Error("the buffer is within reach")
			}
			return []error{buf.Err(), p.Err()}
		}}
}

func noneMoved() []error { return nil }

// failings has every call of every operation that enqueues.
var failings = []failing{
	{"upload", cuapi.IDMemcpyHtoDAsync, valueSize, beginUpload},
	{"upload", cuapi.IDEventRecord, valueSize, beginUpload}, // the copy is enqueued
	{"launch", cuapi.IDLaunchKernel, 0, func(a *attempt) *borrowed {
		v := a.alloc()
		return &borrowed{[]*publish.Value{v}, func() error { return a.run(a.r.inc, v) }, noneMoved}
	}},
	{"publish", cuapi.IDEventRecord, valueSize, func(a *attempt) *borrowed {
		v := a.alloc()
		return &borrowed{nil,
			func() error {
				p, err := a.s.Publish(v)
				if p != nil {
					a.r.t.Error("a publication of what failed")
				}
				return err
			},
			func() []error { return []error{v.Err()} }}
	}},
	{"download", cuapi.IDMemcpyDtoHAsync, 2 * valueSize, beginDownload},
	{"download", cuapi.IDEventRecord, 2 * valueSize, beginDownload}, // the copy is enqueued
	{"alloc", cuapi.IDMemAllocFromPoolAsync, valueSize, func(a *attempt) *borrowed {
		return &borrowed{nil, func() error {
			v, err := a.s.Alloc(publish.U8, valueSize)
			if v != nil {
				a.r.t.Error("a value of what failed")
			}
			return err
		}, noneMoved}
	}},
	{"synchronize", cuapi.IDEventRecord, 0, func(a *attempt) *borrowed {
		return &borrowed{nil, func() error { return a.s.Synchronize(a.r.within()) }, noneMoved}
	}},
}

// unprovenCases runs the test for each code and for each side of the effect. On
// a GPU the call has its effect, and the code loses no context, so that what the
// library is told is false but nothing is broken.
func unprovenCases(t *testing.T, name string, test func(r *rig, f *trip, code cuapi.Result)) {
	for _, code := range []cuapi.Result{cuapi.InvalidHandle, cuapi.OutOfMemory, cuapi.IllegalAddress, cuapi.LaunchFailed} {
		for _, after := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%d/after=%v", name, code, after), func(t *testing.T) {
				f := &trip{after: after}
				do := func(r *rig) {
					r.keep = true
					test(r, f, code)
				}
				if o := (options{around: f.around}); code.Sticky() || !after {
					do(newRig(t, o))
				} else {
					onEach(t, o, do)
				}
			})
		}
	}
}

// A failure at any point after the first: what was moved does not come back and
// is retained and counted, what was borrowed stays, tainted, and the first cause
// is kept.
func TestUnproven(t *testing.T) {
	for _, c := range failings {
		unprovenCases(t, c.op+"/"+cuapi.Entries[c.at].Symbol(), func(r *rig, f *trip, code cuapi.Result) {
			if c.op == "alloc" && code == cuapi.OutOfMemory {
				return // no memory is no damage: a rejection, see TestRejections
			}
			r.unproven(c, f, code)
		})
	}
}

func (r *rig) unproven(c failing, f *trip, code cuapi.Result) {
	t := r.t
	is := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, driver.Result(code)) {
			t.Errorf("%s: %v, want the first cause", what, err)
		}
	}
	a := &attempt{r: r, s: r.session()}
	complete, wantComplete := r.publication(a.s, valueSize)
	must(t, complete.AwaitFrontier(r.within()))
	pending, wantPending := r.publication(a.s, valueSize)
	spare := r.buffer(make([]byte, valueSize))
	b := c.begin(a)
	first := len(b.values) > 0
	if !code.Sticky() {
		r.settle()
	}
	q := r.rt.Stats().Queue

	f.next(c.at, code, f.after)
	err := b.run()
	f.stop(t)
	var unproven *publish.UnprovenError
	var rejected *publish.RejectedError
	if !errors.As(err, &unproven) || errors.As(err, &rejected) || unproven.Op != c.op {
		t.Fatalf("%v, want an unproven %s", err, c.op)
	}
	is(c.op, err)
	for _, err := range b.moved() {
		if !errors.Is(err, driver.ErrMoved) {
			t.Errorf("an owner came back: %v", err)
		}
	}
	kept := func(what string, bytes int64, n int, retains bool) {
		t.Helper()
		if code.Sticky() { // then so is all that was retired
			r.settle()
		}
		after := r.rt.Stats().Queue
		owners, size := after.Permanent-q.Permanent, after.PermanentBytes-q.PermanentBytes
		if owners < n || size < bytes || !code.Sticky() && (owners != n || size != bytes) {
			t.Errorf("%s: %+v, then %+v", what, q, after)
		}
		if retains {
			is(what, after.Cause)
		}
		if after.Entered != after.Released+after.Permanent+after.Pending {
			t.Errorf("%s: the counters do not conserve: %+v", what, after)
		}
	}
	n, retains := 0, c.moved > 0
	if retains {
		n = 1
	}
	kept("what was moved", c.moved, n, retains)

	if code.Sticky() {
		is("the runtime", r.rt.Err())
		for _, p := range []*publish.Publication{complete, pending} {
			ready, err := p.FrontierReady()
			if ready {
				t.Error("ready on a lost context")
			}
			is("an earlier publication", err)
			must(t, p.Close())
		}
	} else {
		must(t, r.rt.Err())
		// A second failure, with another code, does not replace the first.
		var x *publish.Value
		if len(b.values) > 0 {
			x = b.values[0]
		} else {
			x = r.uploaded(a.s, random(valueSize))
			b.values = append(b.values, x)
		}
		f.next(cuapi.IDLaunchKernel, cuapi.NotPermitted, true)
		if err := a.run(r.inc, x); !errors.Is(err, driver.ErrNotPermitted) {
			t.Errorf("a second failure: %v", err)
		}
		f.stop(t)
		_, err := a.s.Publish(x)
		if !errors.Is(err, publish.ErrStreamFailed) {
			t.Errorf("publish on a stream that failed: %v", err)
		}
		is("a second failure", err)
		// Earlier publications are unharmed.
		if ready, err := complete.FrontierReady(); !ready || err != nil {
			t.Errorf("an earlier publication: %v, %v", ready, err)
		}
		r.download(complete, wantComplete)
		tr, err := pending.DownloadInto(spare)
		must(t, err)
		r.finish(tr, wantPending)
	}
	for _, v := range b.values {
		must(t, v.Err()) // the caller's
		must(t, v.Close())
		n++
		c.moved += v.Bytes()
	}
	retains = retains || first
	kept("with what was borrowed", c.moved, n, retains)
	must(t, a.s.Close())
	if !code.Sticky() { // other streams go on
		must(t, r.workflow(random(valueSize)))
		r.settle()
		kept("in the end", c.moved, n, retains)
	}
	if q := r.rt.Stats().Queue; q.Reserved != 0 {
		t.Errorf("in the end: %+v", q)
	}
	if retains {
		is("shutdown", r.rt.Shutdown(r.within()))
	}
}

// The fence of a value that is closed fails: the value is retained, close tells
// nothing, and the stream, of which no work failed, publishes on.
func TestUnprovenFenceOfAClosedValue(t *testing.T) {
	unprovenCases(t, "fence", func(r *rig, f *trip, code cuapi.Result) {
		t := r.t
		a := &attempt{r: r, s: r.session()}
		v := a.alloc()
		must(t, a.run(r.inc, v)) // behind which there is no mark
		f.next(cuapi.IDEventRecord, code, f.after)
		must(t, v.Close())
		f.stop(t)
		q := r.rt.Stats().Queue
		if q.Permanent != 1 || q.PermanentBytes != valueSize || !errors.Is(q.Cause, driver.Result(code)) || q.Reserved != 0 {
			t.Errorf("%+v", q)
		}
		must(t, v.Close())
		if !code.Sticky() {
			p, want := r.publication(a.s, valueSize)
			r.download(p, want)
			r.settle()
			if q := r.rt.Stats().Queue; q.Permanent != 1 {
				t.Errorf("%+v", q)
			}
		} else if !errors.Is(r.rt.Err(), driver.Result(code)) {
			t.Error(r.rt.Err())
		}
		must(t, a.s.Close())
	})
}

// The release of what was retired fails: it is retained, and nothing else is.
func TestUnprovenRelease(t *testing.T) {
	unprovenCases(t, "release", func(r *rig, f *trip, code cuapi.Result) {
		t := r.t
		s := r.session()
		p, _ := r.publication(s, valueSize)
		must(t, p.AwaitFrontier(r.within()))
		r.settle()
		f.next(cuapi.IDMemFreeAsync, code, f.after)
		must(t, p.Close())
		f.stop(t)
		must(t, s.Close())
		q := r.rt.Stats().Queue
		if q.Permanent != 1 || q.PermanentBytes != valueSize || !errors.Is(q.Cause, driver.Result(code)) || q.Reserved != 0 {
			t.Errorf("%+v", q)
		}
		if code.Sticky() != (r.rt.Err() != nil) {
			t.Error(r.rt.Err())
		}
	})
}
