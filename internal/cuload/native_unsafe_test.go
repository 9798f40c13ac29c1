//go:build linux && !android && (amd64 || arm64) && !purecuda_portable

package cuload

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// The calls of the hot path allocate nothing.
func TestNoAllocation(t *testing.T) {
	s, lib := openStub(t)
	s.quiet = 1
	table := lib.Table
	host := cuapi.HostPtr(unsafe.Pointer(s.state)) // memory of C, as pinned memory is
	list := cuapi.NewList()
	list.MemcpyDtoHAsync(host, 1, 8, 2)
	list.EventRecord(3, 2)
	for name, f := range map[string]func(){
		"EventRecord":       func() { table.EventRecord(1, 2) },
		"EventQuery":        func() { table.EventQuery(1) },
		"EventSynchronize":  func() { table.EventSynchronize(1) },
		"StreamSynchronize": func() { table.StreamSynchronize(1) },
		"MemcpyDtoHAsync":   func() { table.MemcpyDtoHAsync(host, 1, 8, 2) },
		"LaunchKernel":      func() { table.LaunchKernel(1, 1, 1, 1, 1, 1, 1, 0, 2, nil, nil) },
		"Run":               func() { table.Run(list) },
	} {
		if n := testing.AllocsPerRun(200, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// The trampolines keep the registers that C code relies on, also where the
// runtime that calls them today would not notice.
func TestKeepsRegisters(t *testing.T) {
	s, lib := openStub(t)
	h, err := dlopen(s.path)
	if err != nil {
		t.Fatal(err)
	}
	keeps := dlsym(h, "stub_keeps")
	event := dlsym(h, "cuLaunchKernel")
	block := &struct {
		fn   uintptr
		args [cuapi.MaxArgs]uint64
	}{fn: event}
	for n, fn := range []uintptr{call0, call1, call2, call3, call4, call5, call6, call7, call8, call9, call10, call11} {
		if lost, _, _ := purego.SyscallN(keeps, fn, uintptr(unsafe.Pointer(block))); lost != 0 {
			t.Errorf("call%d: %d registers lost", n, lost)
		}
	}
	for _, fail := range []uint64{0, 1} {
		l := cuapi.NewList()
		for i := range cuapi.MaxList {
			appendCall(l, cuapi.IDLaunchKernel, i)
		}
		l.Relax()
		s.failAt, s.failCode = s.seq+2, fail
		lib.Table.Run(l) // resolves the addresses
		s.failAt = s.seq + 2
		if lost, _, _ := purego.SyscallN(keeps, runList, uintptr(unsafe.Pointer(l.Block()))); lost != 0 {
			t.Errorf("runList: %d registers lost", lost)
		}
		runtime.KeepAlive(l)
		l.Free()
	}
}

// A result that does not fit beside the index is Unknown, and never success.
func TestWideResult(t *testing.T) {
	s, lib := openStub(t)
	for _, code := range []uint64{0x10000, 0x80000000, 0xffffffff} {
		for at := range 2 {
			l := cuapi.NewList()
			l.EventRecord(1, 2)
			l.EventRecord(1, 2)
			s.failAt, s.failCode = s.seq+uint64(at)+1, code
			if n, r := lib.Table.Run(l); n != at || r != cuapi.Unknown {
				t.Errorf("%#x at %d: %d, %v", code, at, n, r)
			}
			l.Free()
		}
	}
}
