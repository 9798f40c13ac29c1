package cudasim

import (
	"sync/atomic"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// aligned returns n bytes at a multiple of align.
func aligned(n, align int) []byte {
	b := make([]byte, n+align)
	off := align - int(uintptr(unsafe.Pointer(&b[0]))%uintptr(align))
	return b[off : off+n : off+n]
}

func hostPtr(b []byte) cuapi.HostPtr { return cuapi.HostPtr(unsafe.Pointer(unsafe.SliceData(b))) }

func addressOf(b []byte) uint64 { return hostAddress(hostPtr(b)) }

func hostAddress(p cuapi.HostPtr) uint64 { return uint64(uintptr(unsafe.Pointer(p))) }

func hostBytes(p cuapi.HostPtr, n uintptr) []byte { return unsafe.Slice((*byte)(p), n) }

func bytesAt(p *byte, n int) []byte { return unsafe.Slice(p, n) }

// poke writes an out-parameter whose type depends on another argument.
func poke[T any](p cuapi.HostPtr, v T) { *(*T)(unsafe.Pointer(p)) = v }

func peek[T any](p cuapi.HostPtr) T { return *(*T)(unsafe.Pointer(p)) }

// index returns the i-th element of a C array.
func index[T any](p *T, i int) *T { return &unsafe.Slice(p, i+1)[i] }

// cString reads a C string of at most limit bytes; false: it does not end.
func cString(p *byte, limit int) (string, bool) {
	if p == nil {
		return "", false
	}
	for n := range limit {
		if *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) == 0 {
			return string(unsafe.Slice(p, n)), true
		}
	}
	return "", false
}

// pointerIn reads a pointer out of an array of option values.
func pointerIn(values *uintptr, i int) *byte {
	return *(**byte)(unsafe.Add(unsafe.Pointer(values), uintptr(i)*unsafe.Sizeof(*values)))
}

// loadFlag, storeFlag and addFlag touch a word that a stream waits on, which the
// host may write at any time. The address is a multiple of 4.
func loadFlag(b []byte) uint32     { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&b[0]))) }
func storeFlag(b []byte, v uint32) { atomic.StoreUint32((*uint32)(unsafe.Pointer(&b[0])), v) }
func addFlag(b []byte, v uint32)   { atomic.AddUint32((*uint32)(unsafe.Pointer(&b[0])), v) }
