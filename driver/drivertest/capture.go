package drivertest

import "github.com/purecuda/purecuda/internal/cuapi"

var captureCases = []Case{
	{Name: "Capture", Evidence: onHardware, run: func(r *rig) {
		s, e, d := r.stream(), r.event(), r.device(64, 0)
		r.status(s, cuapi.CaptureStatusNone)
		r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeThreadLocal))
		r.status(s, cuapi.CaptureStatusActive)
		r.ok(r.MemsetD8Async(d, 1, 64, s))
		r.ok(r.EventRecord(e, s))
		g := new(cuapi.Graph)
		r.ok(r.StreamEndCapture(s, g))
		r.status(s, cuapi.CaptureStatusNone)
		r.ok(r.GraphDestroy(*g))
		r.want(r.StreamQuery(s), cuapi.Success, "the stream after: nothing ran")
	}},
	{Name: "CapturedEvent", Evidence: "Results and edge cases: a captured event must not be queried or synchronized (907)", Misuse: true, run: func(r *rig) {
		s, e := r.stream(), r.event()
		r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeThreadLocal))
		r.ok(r.EventRecord(e, s))
		r.want(r.EventQuery(e), cuapi.CapturedEvent, "query of a captured event")
		r.want(r.StreamEndCapture(s, new(cuapi.Graph)), cuapi.StreamCaptureInvalidated, "the end of the capture")
		r.status(s, cuapi.CaptureStatusNone)
	}},
	// A capture in global mode forbids calls on every thread that might disturb
	// it; a thread that says it knows what it does is let through.
	{Name: "QueryBesideGlobalCapture", Evidence: onHardware, Child: true, run: func(r *rig) {
		query := r.besideCapture(func() cuapi.Result { return r.EventQuery(r.witness) })
		r.Logf("a query on another thread: %d", query)
	}},
	{Name: "RelaxedQueryBesideGlobalCapture", Evidence: onHardware, Child: true, run: func(r *rig) {
		mode := new(int32)
		r.want(r.besideCapture(func() cuapi.Result {
			*mode = cuapi.CaptureModeRelaxed
			if res := r.ThreadExchangeStreamCaptureMode(mode); res != cuapi.Success {
				return res
			}
			defer r.ThreadExchangeStreamCaptureMode(mode) // what it was
			return r.EventQuery(r.witness)
		}), cuapi.Success, "a query on another thread in relaxed mode")
	}},
}

// besideCapture makes a call on another thread while a stream captures in
// global mode, and checks that the capture goes on.
func (r *rig) besideCapture(f func() cuapi.Result) cuapi.Result {
	r.Helper()
	s, d := r.stream(), r.device(64, 0)
	r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeGlobal))
	r.ok(r.MemsetD8Async(d, 1, 64, s))
	c := r.start("the call beside a capture", f)
	<-c.done
	g := new(cuapi.Graph)
	end := r.StreamEndCapture(s, g)
	r.Logf("the call %d, the end of the capture %d", c.result, end)
	if end == cuapi.Success {
		r.ok(r.GraphDestroy(*g))
	}
	return c.result
}

func (r *rig) status(s cuapi.Stream, want int32) {
	r.Helper()
	got := new(int32)
	r.ok(r.StreamIsCapturing(s, got))
	if *got != want {
		r.Errorf("capture status %d, want %d", *got, want)
	}
}
