package difftest

import (
	"runtime"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// tooMuch is more memory than a device has: 1 TiB. On 32-bit platforms, for which
// there is no driver, it only compiles.
const tooMuch = ^uintptr(0)>>24 + 1

// bytesOf is pinned memory as a slice.
func bytesOf(p cuapi.HostPtr, n int) []byte { return unsafe.Slice((*byte)(p), n) }

// address is the unified address of pinned memory.
func address(p cuapi.HostPtr) cuapi.DevicePtr { return cuapi.DevicePtr(uintptr(p)) }

// out makes an out-parameter that the driver writes without a type.
func out[T any](p *T) cuapi.HostPtr { return cuapi.HostPtr(p) }

func cstring(s string) *byte { return &append([]byte(s), 0)[0] }

// load loads an image that is text.
func load(t *cuapi.Table, m *cuapi.Module, image string) cuapi.Result {
	text := append([]byte(image), 0)
	r := t.ModuleLoadDataEx(m, cuapi.HostPtr(&text[0]), 0, nil, nil)
	runtime.KeepAlive(text)
	return r
}
