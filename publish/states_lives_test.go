package publish_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// lives are the machines whose handles have a cell.
var lives = []life{publications, transfers, values, sessions}

// inside runs f in the outer call's next call of the entry point, which returns
// ret instead of being made unless that is 0.
func inside(e *env, id cuapi.ID, ret cuapi.Result, outer, f func()) {
	e.next(id, func() cuapi.Result { f(); return ret })
	outer()
	if e.armed() {
		e.t.Errorf("%v was not called", id)
	}
}

// asks is called before anything is enqueued in a stream that other code knows,
// and outside its enqueue lock.
const asks = cuapi.IDStreamIsCapturing

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func answer(err error) seen { return seen{err: err, said: err == nil} }

func channel(ch <-chan struct{}) seen { return seen{done: ch, said: ch != nil && closed(ch)} }

func (e *env) publish() {
	p, err := e.s.Publish(e.v)
	must(e.t, err)
	e.p = p
}

func (e *env) download() {
	tr, err := e.p.DownloadInto(e.out)
	must(e.t, err)
	e.tr = tr
}

// looked makes a look at the frontier or the copy: it is complete, or failed.
func (e *env) looked(ready bool, err error, done bool) {
	var unproven *publish.UnprovenError
	if ready != done || !done && !errors.As(err, &unproven) || !done && !errors.Is(err, e.code) || done && err != nil {
		e.t.Fatalf("a look: %v, %v", ready, err)
	}
	e.done = done
	e.doomed = e.doomed || !done
}

// progress are the conditions of a frontier or a copy; look looks at it.
func progress(look func(e *env) (bool, error)) []condition {
	complete := func(e *env) {
		e.release()
		ready, err := look(e)
		e.looked(ready, err, true)
	}
	failed := func(e *env) {
		e.code = driver.ErrInvalidHandle
		e.fail(cuapi.IDEventQuery, cuapi.InvalidHandle)
		ready, err := look(e)
		e.looked(ready, err, false)
	}
	return []condition{
		{name: "pending"},
		{name: "complete", column: 1, set: complete},
		{name: "failed", column: 2, alone: true, set: failed},
		{name: "failed,lost", column: 2, alone: true, set: failed, lose: true},
		{name: "lost", column: 2, lose: true},
		{name: "complete,lost", column: 2, lose: true, set: complete},
	}
}

func look(p *env) (bool, error) { return p.p.FrontierReady() }

func (e *env) downloads(f func() (*publish.Transfer, error)) seen {
	tr, err := f()
	if err == nil {
		e.tr = tr
	} else if tr != nil {
		e.t.Error("a transfer and an error")
	}
	return answer(err)
}

func consumed(e *env) bool {
	return errors.Is(e.p.Err(), own.ErrMoved) && errors.Is(e.out.Err(), own.ErrMoved) && e.tr.Err() == nil
}

func carries(e *env, r *publish.RejectedError) bool {
	return r.Publication == e.p && r.Buffer == e.out && r.Value == nil
}

var copyBack = []cuapi.ID{cuapi.IDMemcpyDtoHAsync, cuapi.IDEventRecord}

var publications = life{
	name: "publication", handle: "Publication",
	setup:      (*env).publish,
	cell:       func(e *env) any { return e.p },
	conditions: progress(look),
	none:       "0 DType(0) []",
	always:     func(e *env) string { return fmt.Sprint(e.p.Bytes(), e.p.DType(), e.p.Shape()) },
	entries: []entry{
		{name: "live", state: own.Live, in: func(e *env, set, late, f func()) { set(); late(); f() }},
		{name: "busy", state: own.Busy, in: func(e *env, set, late, f func()) {
			inside(e, cuapi.IDEventQuery, 0, func() { look(e) }, func() { set(); late(); f() })
		}},
		{name: "closing", state: own.Closing, in: func(e *env, set, late, f func()) {
			inside(e, cuapi.IDEventQuery, 0, func() { look(e) }, func() { set(); late(); e.p.Close(); f() })
		}},
		{name: "moving", state: own.Moving, moves: true, gives: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, 0, e.download, func() { late(); f() })
		}},
		{name: "moving,copying", state: own.Moving, moves: true, gives: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, cuapi.IDMemcpyDtoHAsync, 0, e.download, func() { late(); f() })
		}},
		{name: "moving,refused", state: own.Moving, moves: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, cuapi.InvalidValue, e.refusedDownload, func() { late(); f() })
		}},
		{name: "revoked", state: own.Revoked, moves: true, gives: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, 0, e.download, func() { late(); e.p.Close(); f() })
		}},
		{name: "revoked,refused", state: own.Revoked, moves: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, cuapi.InvalidValue, e.refusedDownload, func() { late(); e.p.Close(); f() })
		}},
		{name: "moved", state: own.Moved, moves: true, in: func(e *env, set, late, f func()) { set(); e.download(); late(); f() }},
		{name: "closed", state: own.Closed, in: func(e *env, set, late, f func()) { set(); late(); e.p.Close(); f() }},
		{name: "nil", in: func(e *env, set, late, f func()) {
			p := e.p
			set()
			late()
			e.p = nil
			f()
			e.p = p
		}},
		{name: "zero", in: func(e *env, set, late, f func()) {
			p := e.p
			set()
			late()
			e.p = &publish.Publication{}
			f()
			e.p = p
		}},
	},
	rows: map[string][]call{
		"Err":           {{name: "Err", do: func(e *env, _ context.Context) seen { return answer(e.p.Err()) }}},
		"FrontierReady": {{name: "FrontierReady", do: func(e *env, _ context.Context) seen { ready, err := look(e); return seen{err: err, said: ready} }}},
		"AwaitFrontier": {{name: "AwaitFrontier", do: func(e *env, ctx context.Context) seen { return answer(e.p.AwaitFrontier(ctx)) }}},
		"Done":          {{name: "Done", do: func(e *env, _ context.Context) seen { return channel(e.p.Done()) }}},
		"Download": {
			{name: "DownloadInto", makes: copyBack, moves: true, after: consumed, carry: carries, do: func(e *env, _ context.Context) seen {
				return e.downloads(func() (*publish.Transfer, error) { return e.p.DownloadInto(e.out) })
			}},
			{name: "DownloadRange", makes: copyBack, moves: true, after: consumed, carry: carries, do: func(e *env, _ context.Context) seen {
				return e.downloads(func() (*publish.Transfer, error) { return e.p.DownloadRange(e.out, 0, int64(len(e.data))) })
			}},
			{name: "DownloadIntoContext", makes: copyBack, moves: true, after: consumed, carry: carries, do: func(e *env, _ context.Context) seen {
				return e.downloads(func() (*publish.Transfer, error) { return e.p.DownloadIntoContext(atOnce, e.out) })
			}},
			{name: "DownloadRangeContext", makes: copyBack, moves: true, after: consumed, carry: carries, do: func(e *env, _ context.Context) seen {
				return e.downloads(func() (*publish.Transfer, error) {
					return e.p.DownloadRangeContext(atOnce, e.out, 0, int64(len(e.data)))
				})
			}},
		},
		"Close": {{name: "Close", do: func(e *env, _ context.Context) seen { return answer(e.p.Close()) }}},
		"Leak":  {{name: "Leak", do: func(e *env, _ context.Context) seen { e.p.Leak(); return seen{} }}},
	},
}

// refusedDownload is one that the driver's answer to a question refuses.
func (e *env) refusedDownload() {
	tr, err := e.p.DownloadInto(e.out)
	var rejected *publish.RejectedError
	if tr != nil || !errors.As(err, &rejected) || e.out.Err() != nil {
		e.t.Errorf("not refused: %v", err)
	}
}

func ready(e *env) (bool, error) { return e.tr.Ready() }

var transfers = life{
	name: "transfer", handle: "Transfer",
	setup:      func(e *env) { e.publish(); e.download() },
	cell:       func(e *env) any { return e.tr },
	conditions: progress(ready),
	always:     func(e *env) string { return "" },
	over:       true,
	entries: []entry{
		{name: "live", state: own.Live, in: func(e *env, set, late, f func()) { set(); late(); f() }},
		{name: "busy", state: own.Busy, in: func(e *env, set, late, f func()) {
			inside(e, cuapi.IDEventQuery, 0, func() { ready(e) }, func() { set(); late(); f() })
		}},
		{name: "closing", state: own.Closing, in: func(e *env, set, late, f func()) {
			inside(e, cuapi.IDEventQuery, 0, func() { ready(e) }, func() { set(); late(); e.tr.Close(); f() })
		}},
		// No driver call is made while Wait takes it.
		{name: "moving,refused", state: own.Moving, in: func(e *env, set, late, f func()) { set(); late(); publish.MovingTransfer(e.tr, f) }},
		{name: "revoked,refused", state: own.Revoked, in: func(e *env, set, late, f func()) {
			set()
			late()
			publish.MovingTransfer(e.tr, func() { e.tr.Close(); f() })
		}},
		{name: "moved", state: own.Moved, skip: "pending", in: func(e *env, set, late, f func()) {
			set()
			late()
			if buf, err := e.tr.Wait(e.within()); (err != nil) != e.doomed {
				e.t.Errorf("wait: %v", err)
			} else {
				buf.Close()
			}
			f()
		}},
		{name: "closed", state: own.Closed, in: func(e *env, set, late, f func()) { set(); late(); e.tr.Close(); f() }},
		{name: "nil", in: func(e *env, set, late, f func()) {
			tr := e.tr
			set()
			late()
			e.tr = nil
			f()
			e.tr = tr
		}},
		{name: "zero", in: func(e *env, set, late, f func()) {
			tr := e.tr
			set()
			late()
			e.tr = &publish.Transfer{}
			f()
			e.tr = tr
		}},
	},
	rows: map[string][]call{
		"Err":   {{name: "Err", do: func(e *env, _ context.Context) seen { return answer(e.tr.Err()) }}},
		"Ready": {{name: "Ready", do: func(e *env, _ context.Context) seen { ready, err := ready(e); return seen{err: err, said: ready} }}},
		"Wait": {{name: "Wait", makes: []cuapi.ID{cuapi.IDMemFreeAsync}, moves: true, takes: true,
			after: func(e *env) bool {
				q := e.rt.Stats().Queue
				return errors.Is(e.tr.Err(), own.ErrMoved) && q.Reserved == 0 && q.Entered == q.Released
			},
			do: func(e *env, ctx context.Context) seen {
				buf, err := e.tr.Wait(ctx)
				if err == nil {
					e.out = buf // closed at the end
				} else if buf != nil {
					e.t.Error("a buffer and an error")
				}
				return answer(err)
			}}},
		"Done":  {{name: "Done", do: func(e *env, _ context.Context) seen { return channel(e.tr.Done()) }}},
		"Close": {{name: "Close", do: func(e *env, _ context.Context) seen { return answer(e.tr.Close()) }}},
		"Leak":  {{name: "Leak", do: func(e *env, _ context.Context) seen { e.tr.Leak(); return seen{} }}},
	},
}

// nothing starts a kernel that does nothing with the value.
func (e *env) nothing(v *publish.Value) error { return e.nothingIn(e.s, v) }

func (e *env) nothingIn(s *publish.Session, v *publish.Value) error {
	return s.Launch(e.inc, kernel.Grid(1), publish.In(v), publish.Out(v), kernel.U32(0))
}

func (e *env) publishes(f func() (*publish.Publication, error)) seen {
	p, err := f()
	if err == nil {
		e.p = p
	} else if p != nil {
		e.t.Error("a publication and an error")
	}
	return answer(err)
}

func published(e *env) bool { return errors.Is(e.v.Err(), own.ErrMoved) && e.p.Err() == nil }

func carriesValue(e *env, r *publish.RejectedError) bool { return r.Value == e.v }

var publishing = []call{
	{name: "Publish", makes: []cuapi.ID{cuapi.IDEventRecord}, after: published, carry: carriesValue, do: func(e *env, _ context.Context) seen {
		return e.publishes(func() (*publish.Publication, error) { return e.s.Publish(e.v) })
	}},
	{name: "PublishAsserted", makes: []cuapi.ID{cuapi.IDEventRecord}, after: published, carry: carriesValue, do: func(e *env, _ context.Context) seen {
		return e.publishes(func() (*publish.Publication, error) { return e.s.PublishAsserted(e.v) })
	}},
}

// ofValue are calls as the value's cell meets them, behind the session's.
func ofValue(moves bool, calls ...call) (m []call) {
	for _, k := range calls {
		k.moves, k.asks = moves, true
		m = append(m, k)
	}
	return m
}

func anyOwner(*env, *publish.RejectedError) bool { return true }

// launching and uploading use the value.
var launching = call{name: "Launch", makes: []cuapi.ID{cuapi.IDLaunchKernel, cuapi.IDEventRecord}, carry: anyOwner,
	after: func(e *env) bool { return e.v.Err() == nil },
	do:    func(e *env, _ context.Context) seen { return answer(e.nothing(e.v)) }}

var uploading = call{name: "Upload", makes: []cuapi.ID{cuapi.IDMemcpyHtoDAsync, cuapi.IDEventRecord},
	after: func(e *env) bool {
		return e.v.Err() == nil && errors.Is(e.out.Err(), own.ErrMoved) && e.tr.Err() == nil
	},
	carry: func(e *env, r *publish.RejectedError) bool { return r.Value == e.v && r.Buffer == e.out },
	do: func(e *env, _ context.Context) seen {
		copy(e.out.Bytes(), e.data)
		return e.downloads(func() (*publish.Transfer, error) { return e.s.Upload(e.v, e.out) })
	}}

// atOnce is over: the forms that wait for room do so no more, and try once.
var atOnce = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// inTime is the form of a call that waits for room.
func inTime(c call) call {
	switch c.name {
	case "Launch":
		c.do = func(e *env, _ context.Context) seen {
			return answer(e.s.LaunchContext(atOnce, e.inc, kernel.Grid(1), publish.In(e.v), publish.Out(e.v), kernel.U32(0)))
		}
	case "Upload":
		c.do = func(e *env, _ context.Context) seen {
			copy(e.out.Bytes(), e.data)
			return e.downloads(func() (*publish.Transfer, error) { return e.s.UploadContext(atOnce, e.v, e.out) })
		}
	}
	c.name += "Context"
	return c
}

// broken is what an enqueue that fails makes of the stream, and of the value that
// it used.
func (e *env) broken(args ...kernel.Arg) {
	e.code = driver.ErrInvalidValue
	e.fail(cuapi.IDLaunchKernel, cuapi.InvalidValue)
	var unproven *publish.UnprovenError
	if err := e.s.Launch(e.inc, kernel.Grid(1), args...); !errors.As(err, &unproven) || !errors.Is(err, e.code) {
		e.t.Fatal(err)
	}
}

func (e *env) refusedPublish() {
	p, err := e.s.Publish(e.v)
	var rejected *publish.RejectedError
	if p != nil || !errors.As(err, &rejected) {
		e.t.Errorf("not refused: %v", err)
	}
}

var values = life{
	name: "value", handle: "Value",
	setup: func(e *env) { e.done = true },
	cell:  func(e *env) any { return e.v },
	conditions: []condition{
		{name: "sound"},
		{name: "in use", set: func(e *env) { must(e.t, e.nothing(e.v)); e.done = false }},
		{name: "tainted", column: 1, alone: true, set: func(e *env) { e.broken(publish.In(e.v), publish.Out(e.v), kernel.U32(0)); e.doomed = true }},
		{name: "lost", column: 2, lose: true},
	},
	none:   "0 DType(0) []",
	always: func(e *env) string { return fmt.Sprint(e.v.Bytes(), e.v.DType(), e.v.Shape()) },
	entries: []entry{
		{name: "live", state: own.Live, in: func(e *env, set, late, f func()) { set(); late(); f() }},
		{name: "busy", state: own.Busy, uses: true, in: func(e *env, set, late, f func()) {
			inside(e, asks, 0, func() { must(e.t, e.nothing(e.v)) }, func() { set(); late(); f() })
		}},
		{name: "closing", state: own.Closing, uses: true, in: func(e *env, set, late, f func()) {
			inside(e, asks, 0, func() { must(e.t, e.nothing(e.v)) }, func() { set(); late(); e.v.Close(); f() })
		}},
		{name: "moving", state: own.Moving, moves: true, gives: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, 0, e.publish, func() { late(); f() })
		}},
		{name: "moving,refused", state: own.Moving, moves: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, cuapi.InvalidValue, e.refusedPublish, func() { late(); f() })
		}},
		{name: "revoked", state: own.Revoked, moves: true, gives: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, 0, e.publish, func() { late(); e.v.Close(); f() })
		}},
		{name: "revoked,refused", state: own.Revoked, moves: true, in: func(e *env, set, late, f func()) {
			set()
			inside(e, asks, cuapi.InvalidValue, e.refusedPublish, func() { late(); e.v.Close(); f() })
		}},
		{name: "moved", state: own.Moved, moves: true, in: func(e *env, set, late, f func()) { set(); e.publish(); late(); f() }},
		{name: "closed", state: own.Closed, in: func(e *env, set, late, f func()) { set(); late(); e.v.Close(); f() }},
		{name: "nil", in: func(e *env, set, late, f func()) {
			v := e.v
			set()
			late()
			e.v = nil
			f()
			e.v = v
		}},
		{name: "zero", in: func(e *env, set, late, f func()) {
			v := e.v
			set()
			late()
			e.v = &publish.Value{}
			f()
			e.v = v
		}},
	},
	rows: map[string][]call{
		"Err":     {{name: "Err", do: func(e *env, _ context.Context) seen { return answer(e.v.Err()) }}},
		"Use":     ofValue(false, launching, uploading),
		"Publish": ofValue(true, publishing...),
		"Close":   {{name: "Close", do: func(e *env, _ context.Context) seen { return answer(e.v.Close()) }}},
		"Leak":    {{name: "Leak", do: func(e *env, _ context.Context) seen { e.v.Leak(); return seen{} }}},
	},
}

var sessions = life{
	name: "session", handle: "Session",
	cell: func(e *env) any { return e.s },
	conditions: []condition{
		{name: "moving"},
		{name: "broken", column: 1, set: func(e *env) { e.broken(kernel.U64(0), kernel.U64(0), kernel.U32(0)) }},
		{name: "lost", column: 2, lose: true},
	},
	none:   "false false",
	always: func(e *env) string { return fmt.Sprint(e.s.Stats().Values > 0, e.s.Stats().Uploads > 0) },
	entries: []entry{
		{name: "live", state: own.Live, in: func(e *env, set, late, f func()) { set(); late(); f() }},
		{name: "busy", state: own.Busy, in: func(e *env, set, late, f func()) {
			inside(e, asks, 0, func() { e.s.Submit() }, func() { set(); late(); f() })
		}},
		{name: "closing", state: own.Closing, in: func(e *env, set, late, f func()) {
			inside(e, asks, 0, func() { e.s.Submit() }, func() { set(); late(); e.s.Close(); f() })
		}},
		{name: "closed", state: own.Closed, in: func(e *env, set, late, f func()) { set(); late(); e.s.Close(); f() }},
		{name: "nil", in: func(e *env, set, late, f func()) {
			s := e.s
			set()
			late()
			e.s = nil
			f()
			e.s = s
		}},
		{name: "zero", in: func(e *env, set, late, f func()) {
			s := e.s
			set()
			late()
			e.s = &publish.Session{}
			f()
			e.s = s
		}},
	},
	rows: map[string][]call{
		"Enqueue": {
			launching, uploading, inTime(launching), inTime(uploading),
			{name: "Adopt", makes: []cuapi.ID{cuapi.IDPointerGetAttribute}, carry: anyOwner, do: func(e *env, _ context.Context) seen {
				addr, _ := e.foreign(64)
				return e.makesValue(func() (*publish.Value, error) { return e.s.Adopt(addr, publish.U8, []int{64}, nil) })
			}},
			{name: "Alloc", makes: []cuapi.ID{cuapi.IDMemAllocFromPoolAsync, cuapi.IDEventRecord}, carry: anyOwner, do: func(e *env, _ context.Context) seen {
				return e.makesValue(func() (*publish.Value, error) { return e.s.Alloc(publish.U8, 64) })
			}},
			{name: "AllocContext", makes: []cuapi.ID{cuapi.IDMemAllocFromPoolAsync, cuapi.IDEventRecord}, carry: anyOwner, do: func(e *env, _ context.Context) seen {
				return e.makesValue(func() (*publish.Value, error) { return e.s.AllocContext(atOnce, publish.U8, 64) })
			}},
			{name: "Submit", makes: []cuapi.ID{cuapi.IDStreamQuery}, do: func(e *env, _ context.Context) seen { return answer(e.s.Submit()) }},
			{name: "Synchronize", makes: []cuapi.ID{cuapi.IDEventRecord, cuapi.IDEventQuery}, do: func(e *env, ctx context.Context) seen {
				e.release() // it waits
				return answer(e.s.Synchronize(ctx))
			}},
			{name: "Raw", do: func(e *env, _ context.Context) seen {
				raw, err := e.s.Raw()
				return seen{err: err, said: raw != 0}
			}},
		},
		"Publish": publishing,
		"Close":   {{name: "Close", do: func(e *env, _ context.Context) seen { return answer(e.s.Close()) }}},
	},
}

func (e *env) makesValue(f func() (*publish.Value, error)) seen {
	v, err := f()
	if err == nil {
		e.w = v
	} else if v != nil {
		e.t.Error("a value and an error")
	}
	return answer(err)
}
