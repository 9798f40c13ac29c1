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
}

func (r *rig) status(s cuapi.Stream, want int32) {
	r.Helper()
	got := new(int32)
	r.ok(r.StreamIsCapturing(s, got))
	if *got != want {
		r.Errorf("capture status %d, want %d", *got, want)
	}
}
