package osthread

import "syscall"

var getCurrentThreadID = syscall.NewLazyDLL("kernel32.dll").NewProc("GetCurrentThreadId")

// ID identifies the OS thread that the caller runs on.
func ID() int {
	id, _, _ := getCurrentThreadID.Call()
	return int(id)
}
