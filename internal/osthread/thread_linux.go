package osthread

import "syscall"

// ID identifies the OS thread that the caller runs on.
func ID() int { return syscall.Gettid() }
