package cudasim

import (
	"slices"
	"testing"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// timed makes an event that has a time.
func (r *rig) timed() (h cuapi.Event) {
	r.Helper()
	r.ok(r.EventCreate(&h, 0))
	return h
}

// between returns the time between two events.
func (r *rig) between(a, b cuapi.Event) time.Duration {
	r.Helper()
	var ms float32
	r.ok(r.EventElapsedTime(&ms, a, b))
	return time.Duration(float64(ms)*1e6 + 0.5).Round(time.Microsecond)
}

// costs gives copies 10 ms, kernels and fills 100 ms, and nothing else any time.
func costs(o Operation) time.Duration {
	switch {
	case o.Kernel != "" || o.Call == "cuMemsetD8Async":
		return 100 * time.Millisecond
	case o.Bytes > 0:
		return 10 * time.Millisecond
	}
	return 0
}

// A program of two streams, and when its parts end. Both modes agree.
func TestTimeline(t *testing.T) {
	const ms = time.Millisecond
	type at struct {
		r         *rig
		a, b      cuapi.Stream
		dev, far  cuapi.DevicePtr
		up, down  cuapi.HostPtr
		kernel    cuapi.Function
		start     cuapi.Event
		otherSide cuapi.Context
	}
	upload := func(p *at, st cuapi.Stream) { p.r.ok(p.r.MemcpyHtoDAsync(p.dev, p.up, 8, st)) }
	download := func(p *at, st cuapi.Stream) { p.r.ok(p.r.MemcpyDtoHAsync(p.down, p.dev+64, 8, st)) }
	cases := []struct {
		name   string
		do     func(p *at)
		ea, eb time.Duration // when what is in each stream ends
	}{
		{"one behind the other", func(p *at) { upload(p, p.a); p.r.ok(p.r.launch(p.kernel, p.a)); download(p, p.a) }, 120 * ms, 0},
		{"kernels run beside each other", func(p *at) { p.r.ok(p.r.launch(p.kernel, p.a)); p.r.ok(p.r.launch(p.kernel, p.b)) }, 100 * ms, 100 * ms},
		{"two uploads share an engine", func(p *at) { upload(p, p.a); upload(p, p.b) }, 10 * ms, 20 * ms},
		{"two downloads share an engine", func(p *at) { download(p, p.a); download(p, p.b) }, 10 * ms, 20 * ms},
		{"an upload and a download do not", func(p *at) { upload(p, p.a); download(p, p.b) }, 10 * ms, 10 * ms},
		{"a download runs under a kernel", func(p *at) { p.r.ok(p.r.launch(p.kernel, p.a)); download(p, p.b) }, 100 * ms, 10 * ms},
		{"a copy takes the engine's gap before a later one", func(p *at) {
			p.r.ok(p.r.launch(p.kernel, p.a))
			download(p, p.a)
			download(p, p.b)
		}, 110 * ms, 10 * ms},
		{"a copy that does not fit a gap goes behind", func(p *at) {
			upload(p, p.a)
			download(p, p.a) // 10 to 20
			download(p, p.b) // 0 to 10
			download(p, p.b) // 20 to 30
		}, 20 * ms, 30 * ms},
		{"a wait for an event", func(p *at) {
			ev := p.r.event()
			p.r.ok(p.r.launch(p.kernel, p.a))
			p.r.ok(p.r.EventRecord(ev, p.a))
			p.r.ok(p.r.launch(p.kernel, p.a))
			p.r.ok(p.r.StreamWaitEvent(p.b, ev, 0))
			download(p, p.b)
		}, 200 * ms, 110 * ms},
		{"a wait for a word that the other stream writes", func(p *at) {
			flag, word := p.r.pinned(4)
			storeFlag(word, 0)
			addr := cuapi.DevicePtr(hostAddress(flag))
			p.r.ok(p.r.StreamWaitValue32(p.b, addr, 1, cuapi.StreamWaitValueEQ))
			download(p, p.b)
			p.r.ok(p.r.launch(p.kernel, p.a))
			p.r.ok(p.r.StreamWriteValue32(p.a, addr, 1, 0))
		}, 100 * ms, 110 * ms},
		{"what the host enqueues later starts later", func(p *at) {
			p.r.sim.Advance(7 * ms)
			upload(p, p.a)
		}, 17 * ms, 7 * ms},
		{"a held stream goes on at its release", func(p *at) {
			p.r.sim.Hold(uintptr(p.a))
			upload(p, p.a)
			p.r.ok(p.r.launch(p.kernel, p.a))
			upload(p, p.b)
			p.r.sim.Advance(50 * ms)
			p.r.sim.Release(uintptr(p.a))
		}, 160 * ms, 50 * ms},
		{"copies between devices share the source's engine", func(p *at) {
			download(p, p.b)
			p.r.ok(p.r.MemcpyPeerAsync(p.far, p.otherSide, p.dev, p.r.ctx, 8, p.a))
		}, 20 * ms, 10 * ms},
		{"copies inside a device share none", func(p *at) {
			p.r.ok(p.r.MemcpyDtoDAsync(p.dev+32, p.dev, 8, p.a))
			p.r.ok(p.r.MemcpyDtoDAsync(p.dev+48, p.dev, 8, p.b))
		}, 10 * ms, 10 * ms},
	}
	for _, c := range cases {
		for _, stepped := range []bool{false, true} {
			name := c.name
			if stepped {
				name += ", stepped"
			}
			t.Run(name, func(t *testing.T) {
				r := newRig(t, Config{Devices: 2, Cost: costs})
				r.sim.Kernel("none", func(*Launch) {})
				p := &at{r: r, a: r.stream(), b: r.stream(), dev: r.device(128), start: r.timed()}
				p.up, _ = r.pinned(8)
				p.down, _ = r.pinned(8)
				_, p.kernel = r.function(addPTX, "none")
				r.ok(r.DevicePrimaryCtxRetain(&p.otherSide, 1))
				r.ok(r.CtxPushCurrent(p.otherSide))
				p.far = r.device(8)
				r.ok(r.CtxPopCurrent(nil))
				r.ok(r.EventRecord(p.start, p.a))
				r.sim.SetStepped(stepped)
				ea, eb := r.timed(), r.timed()
				c.do(p)
				r.ok(r.EventRecord(ea, p.a))
				r.ok(r.EventRecord(eb, p.b))
				if ran := r.steps(); ran > 0 != stepped {
					t.Errorf("%d operations were left to step", ran)
				}
				if got := r.between(p.start, ea); got != c.ea {
					t.Errorf("the first stream ends at %v, want %v", got, c.ea)
				}
				if got := r.between(p.start, eb); got != c.eb {
					t.Errorf("the second stream ends at %v, want %v", got, c.eb)
				}
				if got := r.sim.Now(); got != max(c.ea, c.eb) {
					t.Errorf("the host's time is %v, and it saw the end of both", got)
				}
			})
		}
	}
}

// Blocking streams and the legacy stream are one behind the other in time too.
func TestTimelineOfTheLegacyStream(t *testing.T) {
	r := newRig(t, Config{Cost: costs})
	var blocking cuapi.Stream
	r.ok(r.StreamCreate(&blocking, 0))
	dev, free := r.device(8), r.stream()
	events := []cuapi.Event{r.timed(), r.timed(), r.timed(), r.timed()}
	r.ok(r.EventRecord(events[0], free))
	for i, st := range []cuapi.Stream{blocking, 0, blocking} {
		r.ok(r.MemsetD8Async(dev, 0, 8, st))
		r.ok(r.EventRecord(events[i+1], st))
	}
	for i, ev := range events {
		if got, want := r.between(events[0], ev), time.Duration(i)*100*time.Millisecond; got != want {
			t.Errorf("fill %d ends at %v, want %v", i, got, want)
		}
	}
}

// The host's time moves on when it sees something complete.
func TestTimeMovesOn(t *testing.T) {
	const each = 100 * time.Millisecond
	for name, see := range map[string]func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result{
		"event query":  func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.EventQuery(ev) },
		"event wait":   func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.EventSynchronize(ev) },
		"stream query": func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.StreamQuery(st) },
		"stream wait":  func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.StreamSynchronize(st) },
		"context wait": func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.CtxSynchronize() },
		"a stall":      func(r *rig, st cuapi.Stream, ev cuapi.Event) cuapi.Result { return r.MemFree(r.device(8)) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Cost: costs})
			st, ev, dev := r.stream(), r.timed(), r.device(8)
			r.ok(r.MemsetD8Async(dev, 0, 8, st))
			r.ok(r.EventRecord(ev, st))
			if got := r.sim.Now(); got != 0 {
				t.Errorf("an enqueue took %v", got)
			}
			r.ok(see(r, st, ev))
			if got := r.sim.Now(); got != each {
				t.Errorf("it is %v, want %v", got, each)
			}
		})
	}
}

func TestAdvanceRunsWhatEnds(t *testing.T) {
	const ms = time.Millisecond
	r := newRig(t, Config{Stepped: true, Cost: costs})
	a, b, dev, ev := r.stream(), r.stream(), r.device(16), r.event()
	host, _ := r.pinned(8)
	r.ok(r.MemsetD8Async(dev, 0, 8, a))
	r.ok(r.MemcpyDtoHAsync(host, dev+8, 8, b))
	r.ok(r.EventRecord(ev, b))
	for _, c := range []struct {
		by  time.Duration
		ran int
	}{{9 * ms, 0}, {ms, 2}, {89 * ms, 0}, {5 * ms, 1}, {-ms, 0}} {
		now := r.sim.Now()
		if ran := r.sim.Advance(c.by); ran != c.ran {
			t.Errorf("from %v, %v on: %d operations ran, want %d", now, c.by, ran, c.ran)
		}
		if got := r.sim.Now(); got != now+max(0, c.by) {
			t.Errorf("it is %v, %v on from %v", got, c.by, now)
		}
	}
	// What is stepped out of its turn took until then.
	first, last := r.timed(), r.timed()
	r.ok(r.EventRecord(first, b))
	r.ok(r.MemsetD8Async(dev, 0, 8, a))
	for r.sim.Step(uintptr(a)) {
	}
	r.ok(r.EventRecord(last, b))
	r.steps()
	if got := r.between(first, last); got != 0 {
		t.Errorf("%v passed from the late record to the next", got)
	}
}

func TestDefaultCosts(t *testing.T) {
	for _, c := range []struct {
		o    Operation
		want time.Duration
	}{
		{Operation{Call: "cuMemcpyDtoHAsync_v2", Bytes: 55_000_000, ToHost: true}, time.Millisecond + 1500},
		{Operation{Call: "cuMemcpyHtoDAsync_v2", Bytes: 55_000_000, FromHost: true}, time.Millisecond + 1500},
		{Operation{Call: "cuMemcpyPeerAsync", Bytes: 55_000_000, Peer: true}, time.Millisecond + 1500},
		{Operation{Call: "cuMemcpyDtoDAsync_v2", Bytes: 1_200_000_000}, time.Millisecond + 1500},
		{Operation{Call: "cuMemsetD8Async", Bytes: 2_400_000_000}, time.Millisecond + 1000},
		{Operation{Call: "cuLaunchKernel", Kernel: "k"}, 5000},
		{Operation{Call: "cuEventRecord"}, 1000},
		{Operation{Call: "cuStreamWaitEvent"}, 0},
		{Operation{Call: "cuStreamWaitValue32_v2"}, 0},
	} {
		if got := DefaultCost(c.o); got != c.want {
			t.Errorf("%+v: %v, want %v", c.o, got, c.want)
		}
	}
}

// No cost means the default one, by whichever call a copy is made.
func TestDefaultCostOfCopies(t *testing.T) {
	run := func(cfg Config) (at []time.Duration) {
		cfg.Devices = 2
		r := newRig(t, cfg)
		st, here := r.stream(), r.device(1<<20)
		host, _ := r.pinned(1 << 20)
		var other cuapi.Context
		r.ok(r.DevicePrimaryCtxRetain(&other, 1))
		r.ok(r.CtxPushCurrent(other))
		there := r.device(1 << 20)
		pinned := cuapi.DevicePtr(hostAddress(host))
		for _, copies := range []func() cuapi.Result{
			func() cuapi.Result { return r.MemcpyPeerAsync(there, other, here, r.ctx, 1<<20, st) },
			func() cuapi.Result { return r.MemcpyPeerAsync(here, r.ctx, here+1<<19, r.ctx, 1<<19, st) },
			func() cuapi.Result { return r.MemcpyDtoDAsync(there, here, 1<<20, st) },
			func() cuapi.Result { return r.MemcpyAsync(there, here, 1<<20, st) },
			func() cuapi.Result { return r.MemcpyAsync(pinned, here, 1<<20, st) },
			func() cuapi.Result { return r.MemcpyAsync(pinned, pinned+1<<19, 1<<19, st) },
		} {
			r.ok(copies())
			r.ok(r.StreamSynchronize(st))
			at = append(at, r.sim.Now())
		}
		return at
	}
	want, got := run(Config{}), run(Config{Cost: DefaultCost})
	if !slices.Equal(got, want) {
		t.Errorf("%v with the default cost told, %v with none", got, want)
	}
}

// What Config.Cost is told, and that no cost means the default one.
func TestCostIsAsked(t *testing.T) {
	var asked []Operation
	run := func(cfg Config) time.Duration {
		r := newRig(t, cfg)
		st, dev := r.stream(), r.device(64)
		host, _ := r.pinned(64)
		_, f := r.function(addPTX, "none")
		r.sim.Kernel("none", func(*Launch) {})
		a, b := r.timed(), r.timed()
		r.ok(r.EventRecord(a, st))
		r.ok(r.MemcpyHtoDAsync(dev, host, 64, st))
		r.ok(r.MemcpyAsync(dev, dev+32, 16, st))
		r.ok(r.LaunchKernel(f, 2, 3, 4, 5, 6, 7, 0, st, nil, nil))
		r.ok(r.MemsetD8Async(dev, 0, 16, st))
		r.ok(r.MemcpyDtoHAsync(host, dev, 64, st))
		r.ok(r.EventRecord(b, st))
		for i := range asked {
			if asked[i].Stream == uintptr(st) {
				asked[i].Stream = 1
			}
		}
		return r.between(a, b)
	}
	got := run(Config{Cost: func(o Operation) time.Duration {
		asked = append(asked, o)
		return DefaultCost(o)
	}})
	if want := run(Config{}); got != want || want == 0 {
		t.Errorf("%v with the default cost told, %v with none", got, want)
	}
	want := []Operation{
		{Call: "cuEventRecord"},
		{Call: "cuMemcpyHtoDAsync_v2", Bytes: 64, FromHost: true},
		{Call: "cuMemcpyAsync", Bytes: 16},
		{Call: "cuLaunchKernel", Kernel: "none", Grid: [3]uint32{2, 3, 4}, Block: [3]uint32{5, 6, 7}},
		{Call: "cuMemsetD8Async", Bytes: 16},
		{Call: "cuMemcpyDtoHAsync_v2", Bytes: 64, ToHost: true},
		{Call: "cuEventRecord"},
	}
	if len(asked) != len(want) {
		t.Fatalf("asked for %+v", asked)
	}
	for i := range want {
		want[i].Stream = 1
		if asked[i] != want[i] {
			t.Errorf("asked for %+v, want %+v", asked[i], want[i])
		}
	}
}

// An engine never copies two ranges at once, however they come.
func TestEngine(t *testing.T) {
	var e engine
	seed := uint32(1)
	next := func(n uint32) moment {
		seed = seed*1664525 + 1013904223
		return moment(seed >> 16 % n)
	}
	var taken []period
	for range 5 * maxPeriods {
		from, length := next(5000), 1+next(50)
		at := e.fit(from, length)
		if at < from {
			t.Fatalf("asked for %d, got %d", from, at)
		}
		for _, p := range taken {
			if at < p.to && p.from < at+length {
				t.Fatalf("%d to %d is taken by %v", at, at+length, p)
			}
		}
		taken = append(taken, period{at, at + length})
		if len(e.busy) >= 2*maxPeriods {
			t.Fatalf("%d periods are kept", len(e.busy))
		}
	}
}
