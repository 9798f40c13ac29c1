package cudasim

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Programs that are right and look like races or accesses in flight. Each runs
// with its work pending, and with all of it run at once.
func TestNoFalseAlarm(t *testing.T) {
	type rightful struct {
		r          *rig
		a, b       cuapi.Stream
		ev         cuapi.Event
		add        cuapi.Function
		x, y       cuapi.DevicePtr
		host, flag cuapi.HostPtr
		mem, word  []byte
	}
	const n = 64
	hostPtr := func(p cuapi.HostPtr) cuapi.DevicePtr { return cuapi.DevicePtr(hostAddress(p)) }
	cases := map[string]func(r *rightful){
		"a download, and an upload of it on the same stream": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.MemcpyHtoDAsync(p.y, p.host, n, p.a))
		},
		"an upload, and a download into its source": func(p *rightful) {
			p.mem[0] = 7
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.y, n, p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.flag, p.x, n, p.a))
			p.r.steps()
			if p.word[0] != 7 {
				p.r.Errorf("the upload took %#x", p.word[0])
			}
		},
		"a download, and an upload of it behind an event": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.EventRecord(p.ev, p.a))
			p.r.ok(p.r.StreamWaitEvent(p.b, p.ev, 0))
			p.r.ok(p.r.MemcpyHtoDAsync(p.y, p.host, n, p.b))
		},
		"copies of bytes side by side": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n/2, p.a))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x+n/2, p.flag, n/2, p.b))
		},
		"two downloads of one block": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.flag, p.x, n, p.b))
		},
		"the same bytes downloaded twice into one place": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.b))
		},
		"fills that nothing reads": func(p *rightful) {
			p.r.ok(p.r.MemsetD8Async(p.x, 0, n, p.a))
			p.r.ok(p.r.MemsetD8Async(p.x, 0, n, p.b))
		},
		"the host saw the first copy complete": func(p *rightful) {
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.EventRecord(p.ev, p.a))
			p.r.steps()
			p.r.ok(p.r.EventQuery(p.ev))
			p.mem[0]++
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.b))
		},
		"a stream writes a word of the source": func(p *rightful) {
			p.r.ok(p.r.StreamWriteValue32(p.a, hostPtr(p.host), 5, 0))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
		},
		"the host writes a word that a stream waits for, in the source": func(p *rightful) {
			storeFlag(p.mem, 0)
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.b))
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.host), 1, cuapi.StreamWaitValueEQ))
			storeFlag(p.mem, 1)
		},
		"the host writes the source, and lets the stream go on by a word": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 1, cuapi.StreamWaitValueEQ))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.y, n, p.a))
			if p.mem[1] == flightByte {
				p.r.Error("the destination changed before the host let the stream go on")
			}
			p.mem[1]++
			storeFlag(p.word, 1)
		},
		"the same, seen through an event": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 1, cuapi.StreamWaitValueEQ))
			p.r.ok(p.r.EventRecord(p.ev, p.a))
			p.r.ok(p.r.StreamWaitEvent(p.b, p.ev, 0))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.b))
			p.mem[1]++
			storeFlag(p.word, 1)
		},
		"a stream that waits is enqueued first and runs last": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 1, cuapi.StreamWaitValueEQ))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
			p.r.ok(p.r.MemsetD8Async(p.x, 3, n, p.b))
			p.r.ok(p.r.StreamWriteValue32(p.b, hostPtr(p.flag), 1, 0))
		},
		"the host sees a stream that waited for the other by a word": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.MemsetD8Async(p.x, 3, n, p.b))
			p.r.ok(p.r.StreamWriteValue32(p.b, hostPtr(p.flag), 1, 0))
			p.r.ok(p.r.MemsetD8Async(p.y, 3, n, p.b))
			p.r.ok(p.r.StreamWriteValue32(p.b, hostPtr(p.flag), 2, 0))
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 2, cuapi.StreamWaitValueEQ))
			p.r.steps()
			p.r.ok(p.r.StreamSynchronize(p.a))
			c := p.r.stream()
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.y, n, c))
		},
		"the same by a word that a kernel writes": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.MemsetD8Async(p.y, 3, n, p.b))
			p.r.ok(p.r.launch(p.add, p.b, arg(hostPtr(p.flag)), arg(uint32(1)), arg(float32(1))))
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 1, cuapi.StreamWaitValueGEQ))
			p.r.ok(p.r.EventRecord(p.ev, p.a))
			p.r.steps()
			p.r.ok(p.r.EventQuery(p.ev))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.y, n, p.r.stream()))
		},
		"the same, and the host waits for the stream": func(p *rightful) {
			storeFlag(p.word, 0)
			p.r.ok(p.r.MemsetD8Async(p.y, 3, n, p.b))
			p.r.ok(p.r.launch(p.add, p.b, arg(hostPtr(p.flag)), arg(uint32(1)), arg(float32(1))))
			p.r.ok(p.r.StreamWaitValue32(p.a, hostPtr(p.flag), 1, cuapi.StreamWaitValueGEQ))
			p.r.steps()
			p.r.ok(p.r.StreamSynchronize(p.a))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.y, n, p.r.stream()))
		},
		"a host function writes the source": func(p *rightful) {
			p.r.ok(p.r.LaunchHostFunc(p.b, p.r.sim.HostFunc(func() { p.mem[2]++ }), 0))
			p.r.ok(p.r.EventRecord(p.ev, p.b))
			p.r.ok(p.r.StreamWaitEvent(p.a, p.ev, 0))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
		},
		"a host function reads what a download gave": func(p *rightful) {
			p.mem[0] = 1
			p.r.ok(p.r.LaunchHostFunc(p.a, p.r.sim.HostFunc(func() {
				if p.mem[0] == flightByte {
					p.r.Error("the destination changed before the host function read it")
				}
			}), 0))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.a))
		},
		"a kernel writes the source": func(p *rightful) {
			p.r.ok(p.r.launch(p.add, p.a, arg(hostPtr(p.host)), arg(uint32(1)), arg(float32(1))))
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
		},
		"a kernel writes what another stream copies, for all that is known": func(p *rightful) {
			p.r.ok(p.r.launch(p.add, p.a, arg(p.x), arg(uint32(1)), arg(float32(1))))
			p.r.ok(p.r.MemcpyDtoHAsync(p.host, p.x, n, p.b))
		},
		"a host reads and writes before it asks for the copy": func(p *rightful) {
			p.mem[3]++
			p.r.ok(p.r.MemcpyHtoDAsync(p.x, p.host, n, p.a))
		},
	}
	for name, do := range cases {
		for _, stepped := range []bool{false, true} {
			mode := "at once"
			if stepped {
				mode = "pending"
			}
			t.Run(name+", "+mode, func(t *testing.T) {
				r := newRig(t, Config{})
				r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0]++ })
				_, add := r.function(addPTX, "add")
				p := &rightful{r: r, add: add, a: r.stream(), b: r.stream(), ev: r.event(), x: r.device(n), y: r.device(n)}
				p.host, p.mem = r.pinned(n)
				p.flag, p.word = r.pinned(n)
				r.sim.SetStepped(stepped)
				do(p)
				r.steps()
				r.ok(r.CtxSynchronize())
				r.clean()
			})
		}
	}
}

// A context's stream may have waited for another context's, by a word of memory: who
// waits for the one context knows the other's work complete too.
func TestAWordOrdersContexts(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	var other cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&other, 1))
	flag, _ := r.pinned(4)
	word := cuapi.DevicePtr(hostAddress(flag))
	waits := r.stream()
	r.ok(r.CtxPushCurrent(other))
	mem, writes := r.device(64), r.stream()
	r.ok(r.MemsetD8Async(mem, 1, 64, writes))
	r.ok(r.MemsetD8Async(word, 7, 4, writes))
	r.ok(r.CtxPopCurrent(&other))
	r.ok(r.StreamWaitValue32(waits, word, 0x07070707, 1))
	r.ok(r.CtxSynchronize())
	r.ok(r.MemFree(mem))
	r.clean()
}

// Large copies are looked at in part: their ends.
func TestWatchedEnds(t *testing.T) {
	const n = 4 * maxWatched
	for at, want := range map[int]int{0: 1, maxWatched - 1: 1, maxWatched: 0, n - maxWatched - 1: 0, n - maxWatched: 1, n - 1: 1} {
		r := newRig(t, Config{Stepped: true})
		st, dev := r.stream(), r.device(n)
		up, source := r.pinned(n)
		down, target := r.pinned(n)
		r.ok(r.MemcpyHtoDAsync(dev, up, n, st))
		r.ok(r.MemcpyDtoHAsync(down, dev, n, st))
		source[at]++
		target[at]++
		r.steps()
		if got := len(r.kinds()); got != 2*want {
			t.Errorf("byte %d of %d: violations %v", at, n, r.kinds())
		}
	}
}

// What is remembered of a block is bounded, and forgets what the host saw.
func TestTouchesAreBounded(t *testing.T) {
	r := newRig(t, Config{})
	dev := r.device(64)
	host, _ := r.pinned(64)
	for i := range 4 * maxTouches {
		r.ok(r.MemcpyDtoHAsync(host, dev, uintptr(1+i%64), r.stream()))
	}
	b := r.sim.mem.at(uint64(dev))
	if n := len(b.touches); n > maxTouches {
		t.Errorf("%d touches are kept", n)
	}
	r.ok(r.CtxSynchronize())
	r.ok(r.MemsetD8Async(dev, 0, 64, r.stream()))
	if n := len(b.touches); n != 1 {
		t.Errorf("%d touches are kept after the host saw all but one complete", n)
	}
	r.clean()
}

// A kernel that can write pinned memory may tell the host of what is before it in its
// stream: the host that looks for a flag has an order that no driver call gives. The
// kernel itself is not known to be complete.
func TestKernelsTellTheHost(t *testing.T) {
	r := newRig(t, Config{})
	_, f := r.function(addPTX, "add")
	r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0] = 1 })
	a, b := r.stream(), r.stream()
	dev := r.device(64)
	from, _ := r.pinned(64)
	to, _ := r.pinned(64)
	flag, word := r.pinned(8)
	r.ok(r.MemcpyHtoDAsync(dev, from, 64, a))
	r.ok(r.launch(f, a, arg(hostAddress(flag)), arg(uint32(1)), arg(float32(0))))
	if word[0] != 1 {
		t.Fatal("the kernel did not write its flag")
	}
	r.ok(r.MemcpyDtoHAsync(to, dev, 64, b))
	r.ok(r.MemFreeHost(from))
	r.clean()
	r.ok(r.MemFreeHost(flag))
	if got := r.kinds(); len(got) != 1 || got[0] != FreeInFlight {
		t.Errorf("the kernel's own memory was freed under it: %v", got)
	}
}
