package publish_test

import (
	"runtime"
	"strings"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A meter counts the allocations that the driver knows, and driver calls from
// cleanups. Reading it is no call of the library.
type meter struct {
	live      atomic.Int64
	inCleanup atomic.Int64
}

func (m *meter) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if inCleanup() {
		m.inCleanup.Add(1)
	}
	r := next()
	if r == cuapi.Success {
		switch c.ID {
		case cuapi.IDMemAllocFromPoolAsync:
			m.live.Add(1)
		case cuapi.IDMemFreeAsync:
			m.live.Add(-1)
		}
	}
	return r
}

// inCleanup tells whether the calling goroutine runs a cleanup.
func inCleanup() bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs[:])])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if strings.HasPrefix(f.Function, "runtime.") && strings.HasSuffix(f.Function, "runCleanups") {
			return true
		}
	}
	return false
}
