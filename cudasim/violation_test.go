package cudasim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A misdeed is a violation committed on purpose.
type misdeed struct {
	name  string
	kinds []Kind
	other bool // it names the other side
	do    func(r *rig)
}

// two makes two streams, of which one waits for nothing of the other.
func (r *rig) two() (a, b cuapi.Stream) { return r.stream(), r.stream() }

func misdeeds() []misdeed {
	return []misdeed{
		{"free of memory that a copy uses", []Kind{FreeInFlight}, true, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			r.sim.Hold(uintptr(st))
			r.ok(r.MemsetD8Async(dev, 0, 8, st))
			done := r.start(1, func() cuapi.Result { return r.MemFree(dev) })
			r.sim.ReleaseAll()
			r.ok(<-done)
		}},
		{"free of a pinned block that a copy uses", []Kind{FreeInFlight}, true, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			host, _ := r.pinned(8)
			r.sim.Hold(uintptr(st))
			r.ok(r.MemcpyDtoHAsync(host, dev, 8, st))
			done := r.start(1, func() cuapi.Result { return r.MemFreeHost(host) })
			r.sim.ReleaseAll()
			r.ok(<-done)
		}},
		{"asynchronous free on another stream", []Kind{FreeInFlight}, true, func(r *rig) {
			st, other, pl := r.stream(), r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.sim.Hold(uintptr(st))
			r.ok(r.MemsetD8Async(p, 0, 8, st))
			r.ok(r.MemFreeAsync(p, other))
			r.sim.ReleaseAll()
		}},
		{"kernel on memory freed meanwhile", []Kind{FreeInFlight}, true, func(r *rig) {
			_, f := r.function(addPTX, "add")
			st, other, pl := r.stream(), r.stream(), r.pool()
			r.sim.Kernel("add", func(*Launch) {})
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.sim.Hold(uintptr(st))
			r.ok(r.launch(f, st, arg(p), arg(uint32(1)), arg(float32(1))))
			r.ok(r.MemFreeAsync(p, other))
		}},
		{"free right behind a copy", []Kind{FreeInFlight}, false, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			r.ok(r.MemsetD8Async(dev, 0, 8, st))
			r.ok(r.MemFree(dev))
		}},
		{"free of pinned memory right behind a copy", []Kind{FreeInFlight}, false, func(r *rig) {
			st, ev, dev := r.stream(), r.event(), r.device(8)
			host, _ := r.pinned(8)
			r.ok(r.EventRecord(ev, st))
			r.ok(r.MemcpyDtoHAsync(host, dev, 8, st))
			r.ok(r.EventSynchronize(ev)) // recorded before the copy
			r.ok(r.MemFreeHost(host))
		}},
		{"asynchronous free on another stream, nothing held", []Kind{FreeInFlight}, false, func(r *rig) {
			st, other, pl := r.stream(), r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.ok(r.MemsetD8Async(p, 0, 8, st))
			r.ok(r.MemFreeAsync(p, other))
		}},
		{"use not ordered behind the allocation, nothing held", []Kind{UseBeforeAlloc}, true, func(r *rig) {
			st, other, pl := r.stream(), r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.ok(r.MemsetD8Async(p, 0, 8, other))
		}},
		{"module unloaded under a kernel", []Kind{FreeInFlight}, false, func(r *rig) {
			m, f := r.function(addPTX, "none")
			r.sim.Kernel("none", func(*Launch) {})
			r.ok(r.launch(f, r.stream()))
			r.ok(r.ModuleUnload(m))
		}},
		{"copy from freed memory", []Kind{UseAfterFree}, true, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			r.ok(r.MemFree(dev))
			r.want(cuapi.InvalidValue, r.MemsetD8Async(dev, 0, 8, st))
		}},
		{"copy into a freed pinned block", []Kind{UseAfterFree}, true, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			host, mem := r.pinned(8)
			r.ok(r.MemFreeHost(host))
			if mem[0] != freedByte {
				r.Errorf("freed memory holds %x", mem)
			}
			r.want(cuapi.InvalidValue, r.MemcpyDtoHAsync(host, dev, 8, st))
		}},
		{"use behind an asynchronous free", []Kind{UseAfterFree}, true, func(r *rig) {
			st, pl := r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.sim.Hold(uintptr(st))
			r.ok(r.MemFreeAsync(p, st))
			r.ok(r.MemsetD8Async(p, 0, 8, st))
			r.sim.ReleaseAll()
		}},
		{"kernel on freed memory", []Kind{UseAfterFree}, true, func(r *rig) {
			_, f := r.function(addPTX, "add")
			st, dev := r.stream(), r.device(8)
			r.sim.Kernel("add", func(l *Launch) { l.Bytes(0) })
			r.ok(r.MemFree(dev))
			r.ok(r.launch(f, st, arg(dev), arg(uint32(1)), arg(float32(1))))
			r.want(cuapi.IllegalAddress, r.StreamSynchronize(st))
		}},
		{"use not ordered behind the allocation", []Kind{UseBeforeAlloc}, true, func(r *rig) {
			st, other, pl := r.stream(), r.stream(), r.pool()
			r.sim.Hold(uintptr(st))
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.ok(r.MemsetD8Async(p, 0, 8, other))
		}},
		{"device memory freed twice", []Kind{DoubleFree}, true, func(r *rig) {
			dev := r.device(8)
			r.ok(r.MemFree(dev))
			r.want(cuapi.InvalidValue, r.MemFree(dev))
		}},
		{"pinned memory freed twice", []Kind{DoubleFree}, true, func(r *rig) {
			host, _ := r.pinned(8)
			r.ok(r.MemFreeHost(host))
			r.want(cuapi.InvalidValue, r.MemFreeHost(host))
		}},
		{"pool memory freed twice", []Kind{DoubleFree}, true, func(r *rig) {
			st, pl := r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, st))
			r.ok(r.MemFreeAsync(p, st))
			r.want(cuapi.InvalidValue, r.MemFreeAsync(p, st))
		}},
		{"free inside an allocation", []Kind{BadFree}, false, func(r *rig) {
			r.want(cuapi.InvalidValue, r.MemFree(r.device(8)+4))
		}},
		{"asynchronous free of other memory", []Kind{BadFree}, false, func(r *rig) {
			r.want(cuapi.InvalidValue, r.MemFreeAsync(r.device(8), r.stream()))
		}},
		{"event destroyed twice", []Kind{DeadHandle}, true, func(r *rig) {
			ev := r.event()
			r.ok(r.EventDestroy(ev))
			r.want(cuapi.InvalidHandle, r.EventDestroy(ev))
		}},
		{"destroyed handles", []Kind{DeadHandle, DeadHandle, DeadHandle, DeadHandle, DeadHandle}, true, func(r *rig) {
			st, ev, pl := r.stream(), r.event(), r.pool()
			m, f := r.function(addPTX, "none")
			r.ok(r.StreamDestroy(st))
			r.ok(r.ModuleUnload(m))
			r.ok(r.MemPoolDestroy(pl))
			r.want(cuapi.InvalidHandle, r.EventRecord(ev, st))
			r.want(cuapi.InvalidHandle, r.launch(f, r.stream()))
			r.want(cuapi.InvalidHandle, r.ModuleUnload(m))
			r.want(cuapi.InvalidValue, r.MemPoolTrimTo(pl, 0))
			r.ok(r.DevicePrimaryCtxRelease(0))
			r.want(cuapi.InvalidContext, r.CtxSetCurrent(r.ctx))
			r.want(cuapi.ContextIsDestroyed, r.EventCreate(&ev, 0))
		}},
		{"no handle at all", []Kind{DeadHandle}, false, func(r *rig) {
			r.want(cuapi.InvalidHandle, r.EventQuery(12345))
		}},
		{"event of another context", []Kind{WrongContext}, true, func(r *rig) {
			ev := r.event()
			var other cuapi.Context
			r.ok(r.DevicePrimaryCtxRetain(&other, 1))
			r.ok(r.CtxPushCurrent(other))
			r.want(cuapi.InvalidHandle, r.EventRecord(ev, r.stream()))
		}},
		{"kernel of another context", []Kind{WrongContext}, true, func(r *rig) {
			_, f := r.function(addPTX, "none")
			var other cuapi.Context
			r.ok(r.DevicePrimaryCtxRetain(&other, 1))
			r.ok(r.CtxPushCurrent(other))
			r.want(cuapi.InvalidHandle, r.launch(f, r.stream()))
		}},
		{"driver call from a host function", []Kind{FromCallback}, false, func(r *rig) {
			st, ev := r.stream(), r.event()
			r.ok(r.LaunchHostFunc(st, r.sim.HostFunc(func() { r.want(cuapi.NotPermitted, r.EventQuery(ev)) }), 0))
		}},
		{"driver call from a kernel", []Kind{FromCallback}, false, func(r *rig) {
			st, ev := r.stream(), r.event()
			_, f := r.function(addPTX, "none")
			r.sim.Kernel("none", func(*Launch) { r.want(cuapi.NotPermitted, r.EventQuery(ev)) })
			r.ok(r.launch(f, st))
		}},
		{"captured event queried", []Kind{Captured}, true, func(r *rig) {
			st, ev := r.stream(), r.event()
			r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeRelaxed))
			r.ok(r.EventRecord(ev, st))
			mode := int32(cuapi.CaptureModeRelaxed)
			r.ok(r.ThreadExchangeStreamCaptureMode(&mode))
			r.want(cuapi.CapturedEvent, r.EventQuery(ev))
		}},
		{"capturing stream synchronized", []Kind{Captured}, false, func(r *rig) {
			st := r.stream()
			r.ok(r.StreamBeginCapture(st, cuapi.CaptureModeRelaxed))
			r.want(cuapi.StreamCaptureUnsupported, r.StreamSynchronize(st))
		}},
		{"copy from ordinary memory", []Kind{Pageable}, false, func(r *rig) {
			st, dev := r.stream(), r.device(8)
			r.ok(r.MemcpyHtoDAsync(dev, arg(uint64(7)), 8, st))
		}},
		{"kernel without a Go function", []Kind{NoFunction}, false, func(r *rig) {
			_, f := r.function(addPTX, "none")
			r.want(cuapi.NotSupported, r.launch(f, r.stream()))
		}},
		{"unknown host function", []Kind{NoFunction}, false, func(r *rig) {
			r.want(cuapi.InvalidValue, r.LaunchHostFunc(r.stream(), 0x4242, 0))
		}},
		{"semaphore that is not in pinned memory, or none", []Kind{Misuse, Misuse, Misuse}, false, func(r *rig) {
			w, _ := r.HostWait()
			sem, _ := r.pinned(cuapi.SemaphoreBytes)
			r.want(cuapi.InvalidValue, r.LaunchHostFunc(r.stream(), w.Wait, uintptr(hostAddress(sem))))
			r.want(cuapi.InvalidValue, r.LaunchHostFunc(r.stream(), w.Wait, 0x4242))
			r.want(cuapi.InvalidValue, r.LaunchHostFunc(r.stream(), w.Wait, uintptr(r.device(64))))
		}},
		{"free of a semaphore that a stream waits for", []Kind{FreeInFlight}, false, func(r *rig) {
			w, _ := r.HostWait()
			sem, _ := r.pinned(cuapi.SemaphoreBytes)
			w.Init(sem)
			w.Post(sem)
			r.ok(r.LaunchHostFunc(r.stream(), w.Wait, uintptr(hostAddress(sem))))
			r.ok(r.MemFreeHost(sem))
		}},
		{"managed memory freed under a fill", []Kind{FreeInFlight}, false, func(r *rig) {
			p := r.managed(8)
			r.ok(r.MemsetD8Async(p, 0, 8, r.stream()))
			r.ok(r.MemFree(p))
		}},
		{"managed memory freed to a pool", []Kind{BadFree}, false, func(r *rig) {
			r.want(cuapi.InvalidValue, r.MemFreeAsync(r.managed(8), r.stream()))
		}},
		{"kernel panics", []Kind{Panicked}, false, func(r *rig) {
			st := r.stream()
			_, f := r.function(addPTX, "none")
			r.sim.Kernel("none", func(l *Launch) { l.U32(0) })
			r.ok(r.launch(f, st))
			r.want(cuapi.LaunchFailed, r.StreamSynchronize(st))
		}},
		{"context released too often", []Kind{Misuse}, false, func(r *rig) {
			r.ok(r.DevicePrimaryCtxRelease(0))
			r.want(cuapi.InvalidContext, r.DevicePrimaryCtxRelease(0))
		}},
		{"a wait that would block", []Kind{Blocks}, false, func(r *rig) {
			r.sim.cfg.NoBlock = true
			st := r.stream()
			r.sim.Hold(uintptr(st))
			r.want(cuapi.NotReady, r.StreamSynchronize(st))
		}},
		{"kernel panics when its stream is released", []Kind{Panicked}, true, func(r *rig) {
			st := r.stream()
			_, f := r.function(addPTX, "none")
			r.sim.Kernel("none", func(l *Launch) { panic("at last") })
			r.sim.Hold(uintptr(st))
			r.ok(r.launch(f, st))
			r.sim.ReleaseAll()
		}},
		{"host function panics", []Kind{Panicked}, true, func(r *rig) {
			r.ok(r.LaunchHostFunc(r.stream(), r.sim.HostFunc(func() { panic("no") }), 0))
		}},
		{"kernel on an address that is none", []Kind{WildAddress}, false, func(r *rig) {
			_, f := r.function(addPTX, "add")
			r.sim.Kernel("add", func(l *Launch) { l.Bytes(0) })
			r.ok(r.launch(f, r.stream(), arg(uint64(16)), arg(uint32(1)), arg(float32(1))))
		}},
		{"download of what another stream fills", []Kind{Race}, false, func(r *rig) {
			a, b := r.two()
			dev := r.device(64)
			host, _ := r.pinned(64)
			r.ok(r.MemsetD8Async(dev, 1, 64, a))
			r.ok(r.MemcpyDtoHAsync(host, dev+63, 1, b))
		}},
		{"upload over what another stream copies from", []Kind{Race}, true, func(r *rig) {
			a, b := r.two()
			x, y := r.device(64), r.device(64)
			host, _ := r.pinned(64)
			r.sim.Hold(uintptr(a))
			r.ok(r.MemcpyDtoDAsync(y, x, 64, a))
			r.ok(r.MemcpyHtoDAsync(x+32, host, 8, b))
			r.sim.ReleaseAll()
		}},
		{"the same, and the stack of what ran is kept", []Kind{Race}, true, func(r *rig) {
			r.sim.cfg.Stacks = true
			a, b := r.two()
			dev := r.device(64)
			host, _ := r.pinned(64)
			r.ok(r.MemsetD8Async(dev, 1, 64, a))
			r.ok(r.MemcpyDtoHAsync(host, dev, 64, b))
		}},
		{"two downloads into one buffer", []Kind{Race}, false, func(r *rig) {
			a, b := r.two()
			x, y := r.device(64), r.device(64)
			host, _ := r.pinned(64)
			r.ok(r.MemcpyDtoHAsync(host, x, 64, a))
			r.ok(r.MemcpyDtoHAsync(host, y, 64, b))
		}},
		{"download recorded too early", []Kind{Race}, false, func(r *rig) {
			a, b := r.two()
			ev, dev := r.event(), r.device(64)
			host, _ := r.pinned(64)
			r.ok(r.EventRecord(ev, a))
			r.ok(r.MemsetD8Async(dev, 1, 64, a))
			r.ok(r.StreamWaitEvent(b, ev, 0))
			r.ok(r.MemcpyDtoHAsync(host, dev, 64, b))
		}},
		{"source of a pending upload written", []Kind{HostAccess}, true, func(r *rig) {
			st, dev := r.stream(), r.device(1<<20)
			host, mem := r.pinned(1 << 20)
			r.sim.Hold(uintptr(st))
			r.ok(r.MemcpyHtoDAsync(dev, host, 1<<20, st))
			mem[1<<20-1]++
			r.sim.ReleaseAll()
		}},
		{"destination of a pending download written", []Kind{HostAccess}, true, func(r *rig) {
			r.sim.SetStepped(true)
			st, dev := r.stream(), r.device(8)
			host, mem := r.pinned(8)
			r.ok(r.MemcpyDtoHAsync(host, dev, 8, st))
			if mem[7] != flightByte {
				r.Errorf("an early reader sees %#x", mem[7])
			}
			mem[7] = 0
			r.sim.Step()
		}},
	}
}

// inTest matches a stack that reaches a test of this package.
var inTest = regexp.MustCompile(`(violation|stall)_test.go`)

// Each violation, committed on purpose.
func TestViolations(t *testing.T) {
	for _, c := range misdeeds() {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 2})
			c.do(r)
			if got := r.kinds(); !slices.Equal(got, c.kinds) {
				t.Fatalf("violations %v, want %v: %v", got, c.kinds, r.sim.Violations())
			}
			for _, v := range r.sim.Violations() {
				if !inTest.MatchString(v.Stack()) {
					t.Errorf("%v: the stack does not reach the test:\n%s", v, v.Stack())
				}
				if got := v.Other() != ""; got != c.other || got && !inTest.MatchString(v.Other()) {
					t.Errorf("%v: other side %q", v, v.Other())
				}
			}
			if r.sim.Close() == nil {
				t.Error("Close does not report it")
			}
		})
	}
}

// Each kind that the source declares is committed on purpose above.
func TestEveryKindIsCommitted(t *testing.T) {
	committed := map[string]bool{}
	for _, c := range misdeeds() {
		for _, k := range c.kinds {
			committed[string(k)] = true
		}
	}
	file, err := parser.ParseFile(token.NewFileSet(), "violation.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	kinds := 0
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Kind" {
			kinds++
			text := strings.Trim(v.Values[0].(*ast.BasicLit).Value, `"`)
			if !committed[text] {
				t.Errorf("no test commits %s, %q", v.Names[0], text)
			}
		}
		return true
	})
	if kinds != len(committed) || kinds == 0 {
		t.Errorf("%d kinds are declared, %d committed", kinds, len(committed))
	}
}

// The panic's own stack, not that of the call that ran the kernel.
func TestPanicsHaveTheirStack(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	st := r.stream()
	_, f := r.function(addPTX, "none")
	r.sim.Kernel("none", func(l *Launch) { blame() })
	r.ok(r.launch(f, st))
	r.ok(r.LaunchHostFunc(r.newContextStream(), r.sim.HostFunc(blame), 0))
	got := r.sim.Violations()
	if len(got) != 2 {
		t.Fatalf("violations %v", got)
	}
	for _, v := range got {
		if !strings.Contains(v.Stack(), "cudasim.blame") {
			t.Errorf("%v: the stack does not reach the panic:\n%s", v, v.Stack())
		}
	}
}

func blame() { panic("here") }

// newContextStream makes a stream of the second device, and leaves its context
// current.
func (r *rig) newContextStream() cuapi.Stream {
	r.Helper()
	var other cuapi.Context
	r.ok(r.DevicePrimaryCtxRetain(&other, 1))
	r.ok(r.CtxSetCurrent(other))
	return r.stream()
}

// A call that comes through many frames, of the simulator too, leaves some of
// its own in the stack.
func TestStacksAreDeepEnough(t *testing.T) {
	r := newRig(t, Config{})
	ev := r.event()
	r.ok(r.EventDestroy(ev))
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result { return next() }
	table := r.Table
	for range 6 {
		table = cuapi.Intercept(table, around)
	}
	r.want(cuapi.InvalidHandle, table.EventDestroy(ev))
	if got := r.sim.Violations()[0].Stack(); !strings.Contains(got, "TestStacksAreDeepEnough") {
		t.Errorf("the stack ends too early:\n%s", got)
	}
}

// The text of an error tells what the last call did wrong, until the next call.
func TestErrorTextsTellTheReason(t *testing.T) {
	r := newRig(t, Config{})
	st := r.stream()
	_, f := r.function(addPTX, "none")
	r.want(cuapi.NotSupported, r.launch(f, st))
	text := func() string {
		var p *byte
		r.ok(r.GetErrorString(cuapi.NotSupported, &p))
		s, _ := cString(p, 4096)
		return s
	}
	if got := text(); !strings.Contains(got, "operation not supported (simulated driver: no function: kernel none") {
		t.Errorf("text %q", got)
	}
	r.ok(r.StreamQuery(st))
	if got := text(); got != "operation not supported" {
		t.Errorf("text %q after a call that did nothing wrong", got)
	}
}

func TestReportIsCalledAtOnce(t *testing.T) {
	var got []Violation
	r := newRig(t, Config{Report: func(v Violation) { got = append(got, v) }})
	r.want(cuapi.InvalidHandle, r.EventQuery(12345))
	r.ok(r.LaunchHostFunc(r.stream(), r.sim.HostFunc(func() { r.EventQuery(0) }), 0))
	if len(got) != 2 || got[0].Kind != DeadHandle || got[1].Kind != FromCallback {
		t.Errorf("reported %v", got)
	}
}

// What orders a use and a free on two streams.
func TestOrderedFrees(t *testing.T) {
	cases := map[string]func(r *rig, from, to cuapi.Stream){
		"an event": func(r *rig, from, to cuapi.Stream) {
			ev := r.event()
			r.ok(r.EventRecord(ev, from))
			r.ok(r.StreamWaitEvent(to, ev, 0))
		},
		"a chain of events": func(r *rig, from, to cuapi.Stream) {
			a, b, middle := r.event(), r.event(), r.stream()
			r.ok(r.EventRecord(a, from))
			r.ok(r.StreamWaitEvent(middle, a, 0))
			r.ok(r.EventRecord(b, middle))
			r.ok(r.StreamWaitEvent(to, b, 0))
		},
		"an event query": func(r *rig, from, to cuapi.Stream) {
			ev := r.event()
			r.ok(r.EventRecord(ev, from))
			r.ok(r.EventQuery(ev))
		},
		"an event synchronized": func(r *rig, from, to cuapi.Stream) {
			ev := r.event()
			r.ok(r.EventRecord(ev, from))
			r.ok(r.EventSynchronize(ev))
		},
		"a stream query":        func(r *rig, from, to cuapi.Stream) { r.ok(r.StreamQuery(from)) },
		"a stream synchronized": func(r *rig, from, to cuapi.Stream) { r.ok(r.StreamSynchronize(from)) },
		"the context synchronized": func(r *rig, from, to cuapi.Stream) {
			r.ok(r.StreamDestroy(from))
			r.ok(r.CtxSynchronize())
		},
		"a host function": func(r *rig, from, to cuapi.Stream) {
			r.ok(r.LaunchHostFunc(from, r.sim.HostFunc(func() {}), 0))
		},
		"a word that the host reads": func(r *rig, from, to cuapi.Stream) {
			flag, _ := r.pinned(4)
			r.ok(r.StreamWriteValue32(from, cuapi.DevicePtr(hostAddress(flag)), 1, 0))
		},
		"a word that a stream waits for": func(r *rig, from, to cuapi.Stream) {
			flag, _ := r.pinned(4)
			r.ok(r.StreamWaitValue32(to, cuapi.DevicePtr(hostAddress(flag)), 0xA5A5A5A5, cuapi.StreamWaitValueEQ))
		},
	}
	for name, order := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{})
			from, to, pl := r.stream(), r.stream(), r.pool()
			var p cuapi.DevicePtr
			r.ok(r.MemAllocFromPoolAsync(&p, 8, pl, from))
			r.ok(r.MemsetD8Async(p, 0, 8, from))
			order(r, from, to)
			r.ok(r.MemsetD8Async(p, 1, 8, to))
			r.ok(r.MemFreeAsync(p, to))
			r.clean()
		})
	}
}
