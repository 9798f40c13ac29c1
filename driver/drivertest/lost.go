package drivertest

import (
	"github.com/purecuda/purecuda/internal/cuapi"
)

var lostCases = []Case{
	{Name: "LostContext", Evidence: "Results and edge cases: a kernel that stores to address 16", Child: true, run: lostContext},
}

func lostContext(r *rig) {
	fn := r.function("wild")
	s, older, e, ev := r.stream(), r.event(), r.event(), new(cuapi.Event)
	d := r.device(4096, 0)
	h, _ := r.pinned(4096)
	r.ok(r.EventRecord(older, s))
	r.ok(r.StreamSynchronize(s))
	r.gone = true

	r.want(r.LaunchKernel(fn, 1, 1, 1, 1, 1, 1, 0, s, nil, nil), cuapi.Success, "the launch")
	r.want(r.EventRecord(e, s), cuapi.Success, "the record behind it")
	r.want(r.MemcpyDtoHAsync(h, d, 4096, s), cuapi.Success, "the copy behind it")
	const lost = cuapi.IllegalAddress
	for _, c := range []struct {
		what string
		call func() cuapi.Result
	}{
		{"cuEventSynchronize", func() cuapi.Result { return r.EventSynchronize(e) }}, // the first to tell
		{"cuEventQuery", func() cuapi.Result { return r.EventQuery(e) }},
		{"cuEventQuery of an older event, completed before", func() cuapi.Result { return r.EventQuery(older) }},
		{"cuStreamQuery", func() cuapi.Result { return r.StreamQuery(s) }},
		{"cuStreamSynchronize", func() cuapi.Result { return r.StreamSynchronize(s) }},
		{"a copy", func() cuapi.Result { return r.MemcpyDtoHAsync(h, d, 8, s) }},
		{"cuEventRecord", func() cuapi.Result { return r.EventRecord(older, s) }},
		{"cuEventCreate", func() cuapi.Result { return r.EventCreate(ev, cuapi.EventDisableTiming) }},
		{"cuEventDestroy", func() cuapi.Result { return r.EventDestroy(e) }},
		{"cuMemFreeHost", func() cuapi.Result { return r.MemFreeHost(h) }},
		{"cuMemHostAlloc", func() cuapi.Result { return r.MemHostAlloc(new(cuapi.HostPtr), 4096, 0) }},
		{"cuMemAlloc", func() cuapi.Result { return r.MemAlloc(new(cuapi.DevicePtr), 4096) }},
		{"cuMemFree", func() cuapi.Result { return r.MemFree(d) }},
		{"cuCtxSynchronize", func() cuapi.Result { return r.CtxSynchronize() }},
	} {
		r.want(c.call(), lost, c.what)
	}
	// The release of the context, at the end, succeeds.
}
