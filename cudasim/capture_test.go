package cudasim

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

func TestCapture(t *testing.T) {
	r := newRig(t, Config{})
	st, ev, dev := r.stream(), r.event(), r.device(8)
	var status int32
	var g cuapi.Graph
	r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeThreadLocal))
	r.ok(r.StreamIsCapturing(st, &status))
	r.ok(r.MemsetD8Async(dev, 1, 8, st))
	r.ok(r.StreamEndCapture(st, &g))
	if status != cuapi.CaptureStatusActive || r.sim.graphs[g].nodes != 1 {
		t.Errorf("status %d, %d nodes", status, r.sim.graphs[g].nodes)
	}
	r.ok(r.GraphDestroy(g))
	r.clean()

	r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeThreadLocal))
	r.ok(r.EventRecord(ev, st))
	r.want(cuapi.CapturedEvent, r.EventQuery(ev))
	r.want(cuapi.StreamCaptureInvalidated, r.StreamEndCapture(st, &g))

	// A capture in global mode and a thread that did not opt out.
	r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeGlobal))
	r.want(cuapi.StreamCaptureUnsupported, r.MemAlloc(&dev, 8))
	mode := int32(cuapi.CaptureModeRelaxed)
	r.ok(r.ThreadExchangeStreamCaptureMode(&mode))
	r.ok(r.MemAlloc(&dev, 8))
	r.want(cuapi.StreamCaptureInvalidated, r.StreamEndCapture(st, &g))
}

// A capture ends with its context, by its release or its loss: nobody can end it any
// more, and calls in other contexts are no longer beside one.
func TestCapturesEndWithTheirContext(t *testing.T) {
	for name, end := range map[string]func(*rig){
		"released": func(r *rig) { r.ok(r.DevicePrimaryCtxRelease(0)) },
		"lost":     func(r *rig) { r.sim.Lose(0, 700) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 2})
			var other cuapi.Context
			var p cuapi.DevicePtr
			r.ok(r.StreamBeginCapture(r.stream(), cuapi.CaptureModeGlobal))
			r.ok(r.DevicePrimaryCtxRetain(&other, 1))
			r.ok(r.CtxPushCurrent(other))
			r.want(cuapi.StreamCaptureUnsupported, r.MemAlloc(&p, 8))
			end(r)
			r.ok(r.MemAlloc(&p, 8))
		})
	}
}
