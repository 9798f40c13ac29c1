//go:build amd64 || arm64

package cuload

import (
	"errors"
	"fmt"
)

// A cfunc is a function of the C library.
type cfunc uintptr

// lookupC fails: Windows' C library has no semaphores, and what waits in its
// kernel takes more arguments than a host function is given.
func lookupC(name string) (cfunc, error) {
	return 0, fmt.Errorf("there is no %s on Windows: %w", name, errors.ErrUnsupported)
}

func (f cfunc) call(...uintptr) int32 { return -1 }
