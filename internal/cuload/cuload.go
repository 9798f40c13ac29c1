// Package cuload finds the CUDA driver library, opens it and fills a
// cuapi.Table with calls into it, without cgo.
//
// The calls are generated from the manifest of package cuapi. On Linux on
// amd64 and arm64 a call puts its typed arguments into a block on the stack
// and crosses with runtime.cgocall into an assembly trampoline; elsewhere, and
// under the build tag purecuda_portable, it goes through SyscallN. Where there
// is no CUDA everything compiles and Open says so.
//
// Out-parameters must not live on the goroutine's stack: a callback from C
// into Go may move it. The Table's functions are called through variables, so
// the compiler moves what they are given to the heap.
package cuload

import "github.com/purecuda/purecuda/internal/cuapi"

// MinVersion is the oldest driver served: CUDA 11.0, which is branch R450.
const MinVersion = 11000

// A Library is an opened and initialized driver library. It stays loaded for
// the life of the process: the driver has threads of its own, and code that
// may still run cannot be unmapped.
type Library struct {
	Path    string                   // as it was opened: a path, or a name that the dynamic linker found
	Table   *cuapi.Table             // absent entry points are nil
	Key     uintptr                  // the address of cuInit: the same for the same library, by whatever path
	Version int                      // the CUDA version that the driver serves: 12020 is 12.2
	Symbols [cuapi.NumEntries]string // the versioned symbol behind each entry point, "" if absent
}

// Open opens the driver library at path, and no other, or with an empty path
// the first usable one of: the path in the environment variable
// PURECUDA_DRIVER, if it is set; the names that the dynamic linker knows; the
// usual places of this platform. A candidate that does not serve does not end
// the search. It calls cuInit, which may take seconds.
//
// A failure is an *Error that gives the reason for each path.
func Open(path string) (*Library, error) { return system.open(path) }
