//go:build linux && !android && (amd64 || arm64) && !purecuda_portable

package cuload

import (
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// cgocall calls the C function fn with arg on the system stack and returns the
// low half of its result. It is the runtime function behind every cgo call;
// purego's runtime, which this package imports, makes it work without cgo.
//
// noescape is true: C does not keep the block. Without it every call would
// allocate its block.
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(fn uintptr, arg unsafe.Pointer) int32

// runList is the address of the trampoline that executes a list.
var runList uintptr

// run executes the list in one crossing.
func run(l *cuapi.List, addrs *[cuapi.NumEntries]uintptr) (int, cuapi.Result) {
	l.Resolve(addrs)
	// The index of the failed call stands above the 16 bits of its result.
	if stop := uint32(cgocall(runList, unsafe.Pointer(l.Block()))); stop != 0 {
		return int(stop >> 16), cuapi.Result(stop & 0xffff)
	}
	return l.Len(), cuapi.Success
}
