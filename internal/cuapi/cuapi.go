// Package cuapi holds the CUDA driver's ABI: its handle types, the constants
// that purecuda uses, and Table, one typed Go function for each entry point.
//
// manifest.txt is the one place that lists the entry points; Table, the list
// calls, the interceptor, the loader's trampolines and the C stub of the ABI
// test are generated from it. A Table is filled by internal/cuload from a real
// driver or by cudasim, and may be wrapped.
//
// Names and numbers follow NVIDIA's CUDA driver API reference and cuda.h.
package cuapi

import "runtime"

//go:generate go run ../gen -root ..

// Opaque handles of the driver. The zero value is no handle, except for
// Stream, where zero is the legacy default stream, which purecuda refuses.
type (
	Context   uintptr
	Stream    uintptr
	Event     uintptr
	Module    uintptr
	Function  uintptr
	Graph     uintptr
	MemPool   uintptr
	DevicePtr uint64 // an address in the unified address space
	Device    int32  // a device ordinal, as cuDeviceGet gives it
)

// UUID is a CUuuid: the 16 bytes that identify a device.
type UUID [16]byte

// MemLocation is a CUmemLocation.
type MemLocation struct {
	Type int32
	ID   int32
}

// MemPoolProps is a CUmemPoolProps: 88 bytes on 64-bit platforms.
type MemPoolProps struct {
	AllocType     int32
	HandleTypes   int32
	Location      MemLocation
	Win32Security uintptr
	MaxSize       uintptr
	Usage         uint16
	_             [54]byte
}

// MemAccessDesc is a CUmemAccessDesc.
type MemAccessDesc struct {
	Location MemLocation
	Flags    int32
}

// A Symbol is one name that the driver library may export an entry point
// under, with the CUDA version that introduced it (11020 is CUDA 11.2).
type Symbol struct {
	Name  string
	Since int
}

// An Entry describes one entry point of the manifest.
type Entry struct {
	ID       ID
	Name     string   // the Table's field
	Symbols  []Symbol // newest first
	Required bool
	Block    Block
	List     bool // may stand in a Table.Run list
	Args     int
}

// Since returns the first CUDA version with the entry point: 11020 is 11.2.
func (e Entry) Since() int { return e.Symbols[len(e.Symbols)-1].Since }

// Symbol returns the newest versioned name of the entry point.
func (e Entry) Symbol() string { return e.Symbols[0].Name }

// Block tells what a call may wait for, as measured.
type Block uint8

const (
	BlockNo    Block = iota // nothing
	BlockLock               // another thread inside a BlockHeld call
	BlockFull               // as BlockLock, and a full stream
	BlockHeld               // any stream of the process with work pending
	BlockWaits              // the work that it names
	BlockSetup              // unmeasured: taken for BlockHeld
)

func (b Block) String() string {
	return [...]string{"no", "lock", "full", "held", "waits", "setup"}[b]
}

// A Call is one intercepted driver call: its entry point and its argument
// words, widened to 64 bits. Words that are addresses of Go memory are for
// comparing and printing, not for following.
type Call struct {
	ID   ID
	N    int
	Args [MaxArgs]uint64
}

// Name returns the C name of the entry point.
func (c Call) Name() string { return Entries[c.ID].Symbol() }

// RunEach executes a list call by call through the table's own fields: what
// tables without a native Run use.
func RunEach(t *Table, l *List) (int, Result) {
	if l.relaxed {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		l.mode = CaptureModeRelaxed
		if r := t.ThreadExchangeStreamCaptureMode(&l.mode); r != Success {
			return 0, r
		}
		defer t.ThreadExchangeStreamCaptureMode(&l.mode)
	}
	for i := 0; i < l.Len(); i++ {
		if r := t.Step(l, i); r != Success {
			return i, r
		}
	}
	return l.Len(), Success
}
