//go:build (linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)) || (windows && (amd64 || arm64))

package cuload

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// valueAt is where sem_getvalue writes, behind a sem_t: that has 32 bytes in
// the C libraries of 64-bit Linux.
const valueAt = cuapi.SemaphoreBytes - 8

// hostWait gives the C library's semaphores. The driver's thread calls sem_wait
// itself: it is no Go thread, and needs none. A signal does not end the wait:
// Go installs its handlers with SA_RESTART.
var hostWait = sync.OnceValues(func() (*cuapi.HostWait, error) {
	var f [4]cfunc
	for i, name := range []string{"sem_init", "sem_wait", "sem_post", "sem_getvalue"} {
		var err error
		if f[i], err = lookupC(name); err != nil {
			return nil, err
		}
	}
	init, wait, post, value := f[0], f[1], f[2], f[3]
	return &cuapi.HostWait{
		Wait: uintptr(wait),
		Init: func(sem cuapi.HostPtr) { init.call(uintptr(sem), 0, 0) }, // of this process, no posts
		Post: func(sem cuapi.HostPtr) { post.call(uintptr(sem)) },
		Taken: func(sem cuapi.HostPtr) bool {
			n := (*int32)(unsafe.Add(unsafe.Pointer(sem), valueAt))
			return value.call(uintptr(sem), uintptr(unsafe.Pointer(n))) == 0 && atomic.LoadInt32(n) <= 0
		},
	}, nil
})
