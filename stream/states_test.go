package stream_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/stream"
)

// promised says in words what becomes of a mark, apart from the table.
var promised = map[string]string{
	"unset":    "recorded:pending needless:complete seenDone:impossible seenNot:impossible seenBad:impossible",
	"pending":  "recorded:impossible needless:impossible seenDone:complete seenNot:pending seenBad:failed",
	"complete": "recorded:impossible needless:impossible seenDone:complete seenNot:complete seenBad:complete",
	"failed":   "recorded:impossible needless:impossible seenDone:failed seenNot:failed seenBad:failed",
}

// A drive makes an event happen to a mark in a state, through the lane: at the
// last moment before it, the mark is handed to at.
type drive func(r *rig, l *stream.Lane, at func(m *stream.Mark)) *stream.Mark

var drives = map[string][]drive{
	"unset/recorded": {
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
			m := new(stream.Mark)
			r.on(cuapi.IDEventRecord, 0, func() { at(m) })
			must(r.t, l.Record(m))
			return m
		},
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
			m := new(stream.Mark)
			must(r.t, r.fill(l))
			r.on(cuapi.IDEventRecord, 0, func() { at(m) })
			must(r.t, l.Fence(m, l.Issued()))
			return m
		},
	},
	"unset/needless": {func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
		m := new(stream.Mark)
		at(m)
		must(r.t, l.Fence(m, 0))
		return m
	}},
	"pending/seenDone": {
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
			m := r.upload(l)
			r.on(cuapi.IDEventQuery, 0, func() { at(m) })
			done, err := m.Poll()
			if !done || err != nil {
				r.t.Error(done, err)
			}
			return m
		},
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark { // by a later one
			m, later := r.upload(l), r.upload(l)
			r.on(cuapi.IDEventQuery, 0, func() { at(m) })
			later.Poll()
			return m
		},
	},
	"pending/seenNot": {func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
		r.hold(l)
		m := r.upload(l)
		r.on(cuapi.IDEventQuery, 0, func() { at(m) })
		if done, err := m.Poll(); done || err != nil {
			r.t.Error(done, err)
		}
		return m
	}},
	"pending/seenBad": {
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
			m := r.upload(l)
			r.on(cuapi.IDEventQuery, cuapi.InvalidHandle, func() { at(m) })
			if done, err := m.Poll(); done || !errors.Is(err, driver.ErrInvalidHandle) {
				r.t.Error(done, err)
			}
			return m
		},
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark { // by the loss that another one's query tells of
			m, other := r.upload(l), r.upload(l)
			r.on(cuapi.IDEventQuery, cuapi.LaunchFailed, func() { at(m) })
			other.Poll()
			return m
		},
		func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark { // by a loss found out elsewhere
			m := r.upload(l)
			r.core.Fail(cuapi.IDStreamQuery, cuapi.LaunchFailed, "")
			at(m)
			select {
			case <-m.Done():
			default:
				r.t.Error("not done, and lost")
			}
			return m
		},
	},
	// Two looks at once: the inner one settles the mark, the outer one comes late.
	"complete/seenDone": {late(0, 0)},
	"complete/seenNot":  {late(0, cuapi.NotReady)},
	"complete/seenBad":  {late(0, cuapi.InvalidValue)},
	"failed/seenDone":   {late(cuapi.InvalidHandle, 0)},
	"failed/seenNot":    {late(cuapi.InvalidHandle, cuapi.NotReady)},
	"failed/seenBad":    {late(cuapi.InvalidHandle, cuapi.InvalidValue)},
}

// late makes a look that comes to outer after another one came to inner.
func late(inner, outer cuapi.Result) drive {
	return func(r *rig, l *stream.Lane, at func(*stream.Mark)) *stream.Mark {
		m := r.upload(l)
		var want error
		r.on(cuapi.IDEventQuery, outer, func() {
			r.on(cuapi.IDEventQuery, inner, func() {})
			_, want = m.Poll()
			at(m)
		})
		if done, err := m.Poll(); err != want || done != (want == nil) || (inner != 0) != errors.Is(err, driver.ErrInvalidHandle) {
			r.t.Errorf("the later look says %v, %v, the first %v", done, err, want)
		}
		return m
	}
}

// on runs f in the next call of the entry point, which returns code instead of
// being made unless that is 0.
func (r *rig) on(id cuapi.ID, code cuapi.Result, f func()) {
	var spent atomic.Bool
	h := hook(func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID != id || !spent.CompareAndSwap(false, true) {
			return next()
		}
		f()
		if code != 0 {
			return code
		}
		return next()
	})
	r.hook.Store(&h)
}

// TestStates makes each event happen in each state of a mark in which it may.
func TestStates(t *testing.T) {
	table := stream.MarkTable()
	cells := 0
	for state, events := range promised {
		for _, cell := range strings.Fields(events) {
			cells++
			event, next, _ := strings.Cut(cell, ":")
			name := state + "/" + event
			t.Run("mark/"+name, func(t *testing.T) {
				if table[name] != next {
					t.Errorf("the table says %q, promised is %q", table[name], next)
				}
				if (next == "impossible") == (len(drives[name]) > 0) {
					t.Fatalf("driven in %d ways, and promised is %q", len(drives[name]), next)
				}
				for _, d := range drives[name] {
					r := newRig(t, cudasim.Config{})
					r.keep = true // the event of a failed mark is lost with the context
					met := false
					m := d(r, r.lane(), func(m *stream.Mark) {
						met = true
						if got := stream.StateOf(m); got != state {
							t.Errorf("driven in state %s", got)
						}
					})
					if got := stream.StateOf(m); !met || got != next {
						t.Errorf("met %v, and %s then, want %s", met, got, next)
					}
					done, err := m.Peek()
					if done != (next == "complete") || (err != nil) != (next == "failed") {
						t.Errorf("%s, and it says %v, %v", next, done, err)
					}
				}
			})
		}
	}
	if cells != len(table) {
		t.Errorf("%d of %d cells", cells, len(table))
	}
}
