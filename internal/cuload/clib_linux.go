//go:build !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"fmt"

	"github.com/ebitengine/purego"
)

// A cfunc is a function of the C library.
type cfunc uintptr

// lookupC finds a function of the C library that this program is linked with.
// It does not wait.
func lookupC(name string) (cfunc, error) {
	addr, err := purego.Dlsym(purego.RTLD_DEFAULT, name)
	if err != nil || addr == 0 {
		return 0, fmt.Errorf("the C library has no %s: %v", name, err)
	}
	return cfunc(addr), nil
}

// call calls the function and returns its result, an int; it waits as the
// function does. No argument may be an address of Go memory.
func (f cfunc) call(args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(uintptr(f), args...)
	return int32(r)
}
