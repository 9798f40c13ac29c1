package drivertest

import (
	"bytes"
	"runtime"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// bytesOf is pinned memory as a slice.
func bytesOf(p cuapi.HostPtr, n int) []byte { return unsafe.Slice((*byte)(p), n) }

// address is the unified address of pinned memory.
func address(p cuapi.HostPtr) cuapi.DevicePtr { return cuapi.DevicePtr(uintptr(p)) }

// goAddress is an address that no driver knows.
func goAddress() cuapi.DevicePtr { return address(cuapi.HostPtr(new([4096]byte))) }

// out makes an out-parameter that the driver writes without a type.
func out[T any](p *T) cuapi.HostPtr { return cuapi.HostPtr(p) }

func cstring(s string) *byte { return &append([]byte(s), 0)[0] }

// load loads an image and returns what the compiler had to say of errors.
func (r *rig) load(m *cuapi.Module, image []byte) (log string, res cuapi.Result) {
	text := append(bytes.Clone(image), 0)
	buf := new([8192]byte)
	options := []int32{cuapi.JITErrorLogBuffer, cuapi.JITErrorLogBufferSize}
	values := []uintptr{uintptr(unsafe.Pointer(buf)), uintptr(len(buf))}
	res = r.ModuleLoadDataEx(m, cuapi.HostPtr(&text[0]), uint32(len(options)), &options[0], &values[0])
	runtime.KeepAlive(text)
	head, _, _ := bytes.Cut(buf[:], []byte{0})
	return string(head), res
}
