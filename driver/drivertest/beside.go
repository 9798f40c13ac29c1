package drivertest

import (
	"runtime"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// besideCases make calls on another thread while a stream captures in global
// mode. What the driver forbids there answers 900 and spoils the capture,
// which then ends with 901; a thread in relaxed mode is let through.
var besideCases = func() (cases []Case) {
	for _, c := range besideCalls {
		e := cuapi.Entries[c.id]
		cases = append(cases, Case{Name: "Beside_" + e.Symbol(), Evidence: onHardware, run: func(r *rig) {
			want, end := cuapi.Success, cuapi.Success
			if c.forbidden {
				want, end = cuapi.StreamCaptureUnsupported, cuapi.StreamCaptureInvalidated
			}
			f := c.prepare(r)
			r.besideCapture(e.Symbol(), f, want, end)
			r.besideCapture(e.Symbol()+" in relaxed mode", func() cuapi.Result {
				mode := new(int32)
				*mode = cuapi.CaptureModeRelaxed
				r.ThreadExchangeStreamCaptureMode(mode)
				defer r.ThreadExchangeStreamCaptureMode(mode) // what it was
				return f()
			}, cuapi.Success, cuapi.Success)
		}})
	}
	return cases
}()

// besideCapture makes a call on another thread while a stream captures, and
// checks its result and that of the capture's end.
func (r *rig) besideCapture(what string, f func() cuapi.Result, want, wantEnd cuapi.Result) {
	r.Helper()
	s, d, g := r.stream(), r.device(64, 0), new(cuapi.Graph)
	r.ok(r.StreamBeginCapture(s, cuapi.CaptureModeGlobal))
	r.ok(r.MemsetD8Async(d, 1, 64, s))
	c := &call{what: what, done: make(chan struct{})}
	go func() { // in the thread's own mode, which start would relax
		defer close(c.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		r.CtxPushCurrent(r.core.Raw)
		defer r.CtxPopCurrent(new(cuapi.Context))
		c.result = f()
	}()
	r.mustReturn(c, want)
	end := r.StreamEndCapture(s, g)
	r.want(end, wantEnd, "the end of the capture beside "+what)
	if end == cuapi.Success {
		r.ok(r.GraphDestroy(*g))
	}
}

// A besideCall prepares a call that can be made twice.
type besideCall struct {
	id        cuapi.ID
	forbidden bool
	prepare   func(*rig) func() cuapi.Result
}

var besideCalls = []besideCall{
	{cuapi.IDEventQuery, true, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result { return r.EventQuery(r.witness) }
	}},
	{cuapi.IDEventSynchronize, true, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result { return r.EventSynchronize(r.witness) }
	}},
	{cuapi.IDStreamQuery, true, func(r *rig) func() cuapi.Result {
		s := r.stream()
		return func() cuapi.Result { return r.StreamQuery(s) }
	}},
	{cuapi.IDStreamSynchronize, true, func(r *rig) func() cuapi.Result {
		s := r.stream()
		return func() cuapi.Result { return r.StreamSynchronize(s) }
	}},
	{cuapi.IDStreamIsCapturing, false, func(r *rig) func() cuapi.Result {
		s, status := r.stream(), new(int32)
		return func() cuapi.Result { return r.StreamIsCapturing(s, status) }
	}},
	{cuapi.IDEventRecord, false, func(r *rig) func() cuapi.Result {
		s, e := r.stream(), r.event()
		return func() cuapi.Result { return r.EventRecord(e, s) }
	}},
	{cuapi.IDEventCreate, false, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result {
			e := new(cuapi.Event)
			r.onEnd(func() cuapi.Result { return r.EventDestroy(*e) })
			return r.EventCreate(e, cuapi.EventDisableTiming)
		}
	}},
	{cuapi.IDEventDestroy, false, func(r *rig) func() cuapi.Result {
		es := []*cuapi.Event{new(cuapi.Event), new(cuapi.Event)}
		for _, e := range es {
			r.ok(r.EventCreate(e, cuapi.EventDisableTiming))
		}
		return func() cuapi.Result {
			e := es[0]
			es = es[1:]
			return r.EventDestroy(*e)
		}
	}},
	{cuapi.IDStreamCreate, false, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result {
			s := new(cuapi.Stream)
			r.onEnd(func() cuapi.Result { return r.StreamDestroy(*s) })
			return r.StreamCreate(s, cuapi.StreamNonBlocking)
		}
	}},
	{cuapi.IDStreamWaitEvent, false, func(r *rig) func() cuapi.Result {
		s := r.stream()
		return func() cuapi.Result { return r.StreamWaitEvent(s, r.witness, 0) }
	}},
	{cuapi.IDMemcpyDtoHAsync, false, func(r *rig) func() cuapi.Result {
		s, d := r.stream(), r.device(64, 0)
		h, _ := r.pinned(64)
		return func() cuapi.Result { return r.MemcpyDtoHAsync(h, d, 64, s) }
	}},
	{cuapi.IDMemcpyHtoDAsync, false, func(r *rig) func() cuapi.Result {
		s, d := r.stream(), r.device(64, 0)
		h, _ := r.pinned(64)
		return func() cuapi.Result { return r.MemcpyHtoDAsync(d, h, 64, s) }
	}},
	{cuapi.IDMemsetD8Async, false, func(r *rig) func() cuapi.Result {
		s, d := r.stream(), r.device(64, 0)
		return func() cuapi.Result { return r.MemsetD8Async(d, 1, 64, s) }
	}},
	{cuapi.IDLaunchKernel, false, func(r *rig) func() cuapi.Result {
		s, f := r.stream(), r.function("nop")
		r.ok(r.launch(f, s, 1)) // loads it
		return func() cuapi.Result { return r.launch(f, s, 1) }
	}},
	{cuapi.IDMemAllocFromPoolAsync, true, func(r *rig) func() cuapi.Result {
		p, s := r.usedPool(), r.stream()
		return func() cuapi.Result {
			d := new(cuapi.DevicePtr)
			res := r.MemAllocFromPoolAsync(d, 64, p, s)
			if res == cuapi.Success {
				r.onEnd(func() cuapi.Result { return r.StreamSynchronize(s) })
				r.onEnd(func() cuapi.Result { return r.MemFreeAsync(*d, s) })
			}
			return res
		}
	}},
	{cuapi.IDMemFreeAsync, true, func(r *rig) func() cuapi.Result {
		p, s := r.usedPool(), r.stream()
		d := new(cuapi.DevicePtr) // freed by the second call, the first is refused
		r.ok(r.MemAllocFromPoolAsync(d, 64, p, s))
		r.ok(r.StreamSynchronize(s))
		r.onEnd(func() cuapi.Result { return r.StreamSynchronize(s) })
		return func() cuapi.Result { return r.MemFreeAsync(*d, s) }
	}},
	{cuapi.IDMemHostAlloc, true, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result {
			h := new(cuapi.HostPtr)
			res := r.MemHostAlloc(h, 4096, 0)
			if res == cuapi.Success {
				r.onEnd(func() cuapi.Result { return r.MemFreeHost(*h) })
			}
			return res
		}
	}},
	{cuapi.IDMemAlloc, true, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result {
			d := new(cuapi.DevicePtr)
			res := r.MemAlloc(d, 4096)
			if res == cuapi.Success {
				r.onEnd(func() cuapi.Result { return r.MemFree(*d) })
			}
			return res
		}
	}},
	{cuapi.IDCtxPushCurrent, false, func(r *rig) func() cuapi.Result {
		return func() cuapi.Result {
			if res := r.CtxPushCurrent(r.core.Raw); res != cuapi.Success {
				return res
			}
			return r.CtxPopCurrent(new(cuapi.Context))
		}
	}},
	{cuapi.IDPointerGetAttribute, false, func(r *rig) func() cuapi.Result {
		d, kind := r.device(64, 0), new(uint32)
		return func() cuapi.Result { return r.PointerGetAttribute(out(kind), cuapi.PointerMemoryType, d) }
	}},
}
