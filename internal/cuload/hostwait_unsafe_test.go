//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// semaphores are places for n semaphores, outside of Go's memory as pinned
// memory is, that hold what nobody cleared.
func semaphores(t *testing.T, n int) []cuapi.HostPtr {
	t.Helper()
	mem, err := syscall.Mmap(-1, 0, n*cuapi.SemaphoreBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Munmap(mem) })
	var list []cuapi.HostPtr
	for i := range n {
		part := mem[i*cuapi.SemaphoreBytes:][:cuapi.SemaphoreBytes]
		for j := range part {
			part[j] = 0xA5
		}
		list = append(list, cuapi.HostPtr(unsafe.SliceData(part)))
	}
	return list
}

// The C library's own functions: a wait returns for a post, before or after it,
// and each post serves one.
func TestHostWait(t *testing.T) {
	_, lib := openStub(t)
	w, err := lib.Table.HostWait()
	if err != nil {
		t.Fatal(err)
	}
	wait := func(sem cuapi.HostPtr) { cfunc(w.Wait).call(uintptr(sem)) }
	taken := func(sem cuapi.HostPtr, want bool, when string) {
		t.Helper()
		if w.Taken(sem) != want {
			t.Errorf("%s: taken %v, want %v", when, !want, want)
		}
	}
	for _, sem := range semaphores(t, 4) {
		w.Init(sem)
		taken(sem, true, "nothing posted")
		w.Post(sem)
		w.Post(sem)
		taken(sem, false, "posted twice")
		wait(sem)
		taken(sem, false, "one of two taken")
		wait(sem)
		taken(sem, true, "both taken")

		var posted atomic.Bool
		early := make(chan bool, 1)
		go func() {
			wait(sem)
			early <- !posted.Load()
		}()
		for range 1000 { // a wait that does not wait has every chance to show
			select {
			case <-early:
				t.Fatal("the wait returned before the post")
			default:
				runtime.Gosched()
			}
		}
		posted.Store(true)
		w.Post(sem)
		if <-early {
			t.Error("the wait returned before the post")
		}
		taken(sem, true, "the waiter returned")
	}
}

func TestNoSuchCFunction(t *testing.T) {
	const name = "purecuda_has_no_such_function"
	if f, err := lookupC(name); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("%#x, %v", f, err)
	}
}
