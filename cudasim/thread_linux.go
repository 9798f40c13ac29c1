package cudasim

import "syscall"

// threadID identifies the OS thread that the caller runs on.
func threadID() int { return syscall.Gettid() }
