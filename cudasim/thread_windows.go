package cudasim

import "syscall"

var getCurrentThreadID = syscall.NewLazyDLL("kernel32.dll").NewProc("GetCurrentThreadId")

// threadID identifies the OS thread that the caller runs on.
func threadID() int {
	id, _, _ := getCurrentThreadID.Call()
	return int(id)
}
