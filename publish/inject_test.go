package publish_test

import (
	"sync"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A trip makes calls of one entry point fail, on whichever machine.
type trip struct {
	mu    sync.Mutex
	id    cuapi.ID
	left  int // calls that are to fail; below 0: each
	code  cuapi.Result
	after bool // the call has its effect and fails all the same
	hits  int
}

func (f *trip) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	f.mu.Lock()
	hit := c.ID == f.id && f.left != 0
	if hit {
		f.left--
		f.hits++
	}
	code, after := f.code, f.after
	f.mu.Unlock()
	if !hit {
		return next()
	}
	if after {
		if r := next(); r != cuapi.Success && r != cuapi.NotReady {
			return r
		}
	}
	return code
}

// next lets the next call of the entry point fail.
func (f *trip) next(id cuapi.ID, code cuapi.Result, after bool) { f.arm(id, 1, code, after) }

// each lets every call of the entry point answer with the code, and have no
// effect, until stop.
func (f *trip) each(id cuapi.ID, code cuapi.Result) { f.arm(id, -1, code, false) }

func (f *trip) arm(id cuapi.ID, n int, code cuapi.Result, after bool) {
	f.mu.Lock()
	f.id, f.left, f.code, f.after, f.hits = id, n, code, after, 0
	f.mu.Unlock()
}

// stop ends it, and fails the test if it never met a call.
func (f *trip) stop(t testing.TB) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left = 0; f.hits == 0 {
		t.Errorf("no call of %s was there to fail", cuapi.Entries[f.id].Symbol())
	}
}

// stalls reports calls that may wait for work of the device or for a stream:
// those that the manifest does not list as returning at once, but for a thread
// that is inside such a call, or for a full stream, which the library counts.
func stalls(t testing.TB, calls []cuapi.Call) {
	t.Helper()
	for _, c := range calls {
		switch b := cuapi.Entries[c.ID].Block; b {
		case cuapi.BlockNo, cuapi.BlockLock, cuapi.BlockFull:
		default:
			t.Errorf("%s may stall: %v", c.Name(), b)
		}
	}
}

// enqueues returns the calls that enqueue in a stream, those that a drain
// makes apart.
func enqueues(calls []cuapi.Call) (names []string) {
	for _, c := range calls {
		switch c.ID {
		case cuapi.IDEventQuery, cuapi.IDStreamQuery, cuapi.IDMemFreeAsync:
		default:
			if cuapi.Entries[c.ID].List {
				names = append(names, c.Name())
			}
		}
	}
	return names
}

// callsOf returns how many of the calls are of that entry point.
func callsOf(calls []cuapi.Call, id cuapi.ID) (n int) {
	for _, c := range calls {
		if c.ID == id {
			n++
		}
	}
	return n
}
