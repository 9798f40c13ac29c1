package publish_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// hooks stand about every driver call of a rig, but for those of the watcher.
type hooks struct {
	mu    sync.Mutex
	once  map[cuapi.ID]hook
	on    bool
	calls []cuapi.ID        // made while on
	kinds map[cuapi.ID]bool // of all calls, while it is there

	// any stands about each call instead, the watcher's too.
	any func(id cuapi.ID, next func() cuapi.Result) cuapi.Result
}

// A hook runs before a call. What it returns is returned instead of making the
// call, unless it is 0.
type hook func() cuapi.Result

func (h *hooks) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	h.mu.Lock()
	if any := h.any; any != nil {
		h.mu.Unlock()
		return any(c.ID, next)
	}
	f := h.once[c.ID]
	if f == nil && !h.on && h.kinds == nil || byWatcher() {
		h.mu.Unlock()
		return next()
	}
	delete(h.once, c.ID)
	if h.kinds != nil && c.ID != cuapi.IDGetErrorName && c.ID != cuapi.IDGetErrorString {
		h.kinds[c.ID] = true
	}
	if h.on && !slices.Contains(bookkeeping, c.ID) {
		h.calls = append(h.calls, c.ID)
	}
	h.mu.Unlock()
	if f != nil {
		if r := f(); r != cuapi.Success {
			return r
		}
	}
	return next()
}

// bookkeeping are calls that ask or change nothing of the work.
var bookkeeping = []cuapi.ID{
	cuapi.IDStreamIsCapturing, cuapi.IDThreadExchangeStreamCaptureMode, cuapi.IDCtxPushCurrent, cuapi.IDCtxPopCurrent, cuapi.IDGetErrorName, cuapi.IDGetErrorString,
}

func byWatcher() bool {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, "watch.(*Watcher).run") {
			return true
		}
		if !more {
			return false
		}
	}
}

// next has f run in the next call of the entry point.
func (h *hooks) next(id cuapi.ID, f hook) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.once == nil {
		h.once = map[cuapi.ID]hook{}
	}
	h.once[id] = f
}

func (h *hooks) fail(id cuapi.ID, code cuapi.Result) { h.next(id, func() cuapi.Result { return code }) }

// armed tells whether a hook did not run yet.
func (h *hooks) armed() bool { h.mu.Lock(); defer h.mu.Unlock(); return len(h.once) > 0 }

// record returns the driver calls that f makes on its goroutine.
func (h *hooks) record(f func()) []cuapi.ID {
	h.mu.Lock()
	h.on, h.calls = true, nil
	h.mu.Unlock()
	f()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.on = false
	return h.calls
}

// An env is one life on a held stream.
type env struct {
	*rig
	hooks
	st       *stream.Stream
	s, other *publish.Session
	v, w     *publish.Value // w: what a call made besides
	p        *publish.Publication
	tr       *publish.Transfer
	out      *pinned.Buffer // for a transfer
	data     []byte
	release  func() // of the stream
	held     bool

	code   driver.Result // of the first failure
	doomed bool          // the life ends on the permanent side
	done   bool          // the work of the life is known to be done
	later  []func()      // checks behind the call that this one is in
	ends   []func()      // and behind all
}

func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{data: random(64)}
	e.rig = newRig(t, options{around: e.around})
	e.keep = true // finish sees to it
	var err error
	e.st, err = stream.New(e.ctx)
	must(t, err)
	e.s, err = e.rt.OpenSession(e.st)
	must(t, err)
	e.other = e.session()
	e.v, err = e.s.Alloc(publish.U8, len(e.data))
	must(t, err)
	up, err := e.s.Upload(e.v, e.buffer(e.data))
	must(t, err)
	buf, err := up.Wait(e.within())
	must(t, err)
	must(t, buf.Close())
	e.out = e.buffer(make([]byte, len(e.data)))
	e.settle() // no watcher looks before the test does
	release := e.hold(e.s)
	e.held = true
	e.release = func() { e.held = false; release() }
	return e
}

// finish goes on with what is left and not doomed, and ends the rest. Then the
// counters conserve, and nothing is retained but the doomed.
func (e *env) finish() {
	t := e.t
	t.Helper()
	e.release()
	e.wait()
	if !e.doomed && publish.StateOf(e.v) == own.Live && publish.StateOf(e.s) == own.Live {
		if p, err := e.s.Publish(e.v); err == nil {
			e.p = p
		} else if !errors.Is(err, publish.ErrStreamFailed) {
			t.Errorf("afterwards: %v", err)
		}
	}
	if !e.doomed && publish.StateOf(e.p) == own.Live {
		if e.out.Err() != nil {
			e.out = e.buffer(make([]byte, len(e.data)))
		}
		tr, err := e.p.DownloadInto(e.out)
		must(t, err)
		e.tr = tr
		e.wait()
	}
	for _, end := range []func() error{e.v.Close, e.w.Close, e.p.Close, e.tr.Close, e.out.Close, e.s.Close, e.other.Close, e.st.Close} {
		must(t, end())
	}
	e.settle()
	st := e.rt.Stats()
	if q := st.Queue; q.Entered != q.Released+q.Permanent || q.Pending != 0 || q.Reserved != 0 ||
		(q.Permanent > 0) != e.doomed || q.Permanent > 1 || (st.Memory.InUse > 0) != e.doomed || st.Sessions != 0 {
		t.Errorf("at the end of what is doomed %v: %+v", e.doomed, st)
	}
	for _, err := range []error{e.rt.Shutdown(e.within()), e.ctx.Shutdown(e.within())} {
		if (err != nil) != e.doomed || errors.Is(err, driver.ErrBusy) {
			t.Errorf("shutdown of what is doomed %v: %v", e.doomed, err)
		}
	}
	for _, f := range e.ends {
		f()
	}
}

// wait ends the transfer, which brings the bytes.
func (e *env) wait() {
	if e.doomed || publish.StateOf(e.tr) != own.Live {
		return
	}
	buf, err := e.tr.Wait(e.within())
	must(e.t, err)
	if !bytes.Equal(buf.Bytes(), e.data) {
		e.t.Error("the bytes differ")
	}
	must(e.t, buf.Close())
}

// owners tells who owns what, as the program sees it.
func (e *env) owners() string {
	return fmt.Sprint(e.v.Err(), e.p.Err(), e.tr.Err(), e.out.Err())
}
