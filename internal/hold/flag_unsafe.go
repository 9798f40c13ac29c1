package hold

import (
	"sync/atomic"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// split makes flags of a block of pinned memory, cleared.
func split(block cuapi.HostPtr) []*flag {
	var fs []*flag
	for at := 0; at < blockBytes; at += flagBytes {
		f := &flag{at: cuapi.HostPtr(unsafe.Add(unsafe.Pointer(block), at))}
		atomic.StoreUint32((*uint32)(f.at), 0)
		fs = append(fs, f)
	}
	return fs
}

// addr is the flag's address for the device, which is the host's: with unified
// addressing the two agree for portable memory.
func (f *flag) addr() cuapi.DevicePtr { return cuapi.DevicePtr(uintptr(f.at)) }

// set lets the stream go on that waits for the next value.
func (f *flag) set() {
	f.value++
	atomic.StoreUint32((*uint32)(f.at), f.value)
}
