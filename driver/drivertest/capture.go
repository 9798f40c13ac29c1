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
	{Name: "CaptureForbidsItsThread", Evidence: beside + "A thread that captures in global or thread-local mode may not make these calls itself either", run: func(r *rig) {
		s, e := r.stream(), r.event()
		r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeThreadLocal))
		r.want(r.EventQuery(e), cuapi.StreamCaptureUnsupported, "query of an event that is not captured")
		r.want(r.MemAlloc(new(cuapi.DevicePtr), 64), cuapi.StreamCaptureUnsupported, "cuMemAlloc")
		r.want(r.MemFree(0), cuapi.StreamCaptureUnsupported, "cuMemFree of nothing")
		r.status(s, cuapi.CaptureStatusInvalidated)
		r.want(r.StreamEndCapture(s, new(cuapi.Graph)), cuapi.StreamCaptureInvalidated, "the end of the capture")
	}},
	{Name: "SpoiltCapture", Evidence: beside + "operations return 901, before their arguments are looked at", run: func(r *rig) {
		s, e, d := r.stream(), r.event(), r.device(64, 0)
		r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeRelaxed))
		r.want(r.MemcpyPeerAsync(d, r.core.Raw, d+32, r.core.Raw, 8, s), cuapi.StreamCaptureUnsupported, "a peer copy in a capture")
		r.status(s, cuapi.CaptureStatusInvalidated)
		r.want(r.MemsetD8Async(d, 1, 64, s), cuapi.StreamCaptureInvalidated, "a fill")
		r.want(r.MemcpyDtoDAsync(16, d, 8, s), cuapi.StreamCaptureInvalidated, "a copy to address 16")
		r.want(r.EventRecord(e, s), cuapi.StreamCaptureInvalidated, "a record")
		r.want(r.StreamGetCtx(s, new(cuapi.Context)), cuapi.StreamCaptureInvalidated, "cuStreamGetCtx")
		r.want(r.StreamEndCapture(s, new(cuapi.Graph)), cuapi.StreamCaptureInvalidated, "the end of the capture")
		r.want(r.MemsetD8Async(d, 1, 64, s), cuapi.Success, "a fill afterwards")
	}},
	{Name: "CaptureOfTwoStreams", Evidence: beside + "A capture ends with 903 in a stream that joined, which spoils it, and with 904", run: func(r *rig) {
		s, joined, e, back, d := r.stream(), r.stream(), r.event(), r.event(), r.device(64, 0)
		fork := func() {
			r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeRelaxed))
			r.ok(r.EventRecord(e, s))
			r.ok(r.StreamWaitEvent(joined, e, 0))
			r.status(joined, cuapi.CaptureStatusActive)
			r.ok(r.MemsetD8Async(d, 1, 64, joined))
		}
		g := new(cuapi.Graph)
		fork()
		r.want(r.StreamEndCapture(s, g), cuapi.StreamCaptureUnjoined, "the end without the other stream")
		r.status(joined, cuapi.CaptureStatusNone)
		fork()
		r.want(r.StreamEndCapture(joined, g), cuapi.StreamCaptureUnmatched, "the end in the other stream")
		r.want(r.StreamEndCapture(s, g), cuapi.StreamCaptureInvalidated, "the end after that")
		fork()
		r.ok(r.EventRecord(back, joined))
		r.ok(r.StreamWaitEvent(s, back, 0))
		r.ok(r.StreamEndCapture(s, g))
		r.ok(r.GraphDestroy(*g))
	}},
	{Name: "TwoCaptures", Evidence: beside + "where the stream captures by itself it returns 902", run: func(r *rig) {
		s, other, e := r.stream(), r.stream(), r.event()
		r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeRelaxed))
		r.ok(r.StreamBeginCapture(other, cuapi.CaptureModeRelaxed))
		r.ok(r.EventRecord(e, s))
		r.want(r.StreamWaitEvent(other, e, 0), cuapi.StreamCaptureMerge, "a wait across two captures")
		for _, st := range []cuapi.Stream{s, other} {
			if g := new(cuapi.Graph); r.StreamEndCapture(st, g) == cuapi.Success {
				r.ok(r.GraphDestroy(*g))
			}
		}
	}},
	{Name: "LegacyStreamBesideCapture", Evidence: beside + "uses of the legacy stream return 906 and spoil it", run: func(r *rig) {
		s, e := new(cuapi.Stream), r.event()
		r.ok(r.StreamCreate(s, 0))
		r.onEnd(func() cuapi.Result { return r.StreamDestroy(*s) })
		r.ok(r.StreamBeginCapture(*s, cuapi.CaptureModeRelaxed))
		status := new(int32)
		r.want(r.StreamIsCapturing(0, status), cuapi.StreamCaptureImplicit, "cuStreamIsCapturing of the legacy stream")
		r.status(*s, cuapi.CaptureStatusActive)
		r.want(r.EventRecord(e, 0), cuapi.StreamCaptureImplicit, "a record in the legacy stream")
		r.status(*s, cuapi.CaptureStatusInvalidated)
		r.want(r.StreamEndCapture(*s, new(cuapi.Graph)), cuapi.StreamCaptureInvalidated, "the end of the capture")
		r.ok(r.EventRecord(e, 0))
	}},
}

// beside is the section of docs/driver-facts.md on captures.
const beside = "Beside a capture (measured): "

func (r *rig) status(s cuapi.Stream, want int32) {
	r.Helper()
	got := new(int32)
	r.ok(r.StreamIsCapturing(s, got))
	if *got != want {
		r.Errorf("capture status %d, want %d", *got, want)
	}
}
