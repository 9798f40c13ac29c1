//go:build !linux && !windows

package osthread

import (
	"bytes"
	"runtime"
	"strconv"
)

// ID stands in for the OS thread: it is the goroutine's number, which
// is right for callers that lock their thread, as callers of a thread-bound
// API must.
func ID() int {
	var buf [64]byte
	f := bytes.Fields(buf[:runtime.Stack(buf[:], false)])
	id, _ := strconv.Atoi(string(f[1]))
	return id
}
