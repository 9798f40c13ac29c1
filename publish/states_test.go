package publish_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// promised says in words what DESIGN section 5 promises, apart from the tables:
// the action on the handle's cell, then the act in each condition. The tables
// must say the same, and each cell must be what is seen from outside.
var promised = map[string]string{
	//                           pending complete failed
	"publication/Err":           "ask: answers answers fails",
	"publication/FrontierReady": "borrow: looks answers fails",
	"publication/AwaitFrontier": "borrow: waits answers fails",
	"publication/Done":          "ask: waits answers answers",
	"publication/Download":      "take: proceeds proceeds refuses",
	"publication/Close":         "close: retires retires keeps",
	"publication/Leak":          "close: keeps keeps keeps",

	"transfer/Err":   "ask: answers answers fails",
	"transfer/Ready": "borrow: looks answers fails",
	"transfer/Wait":  "borrow: waits proceeds fails",
	"transfer/Done":  "ask: waits answers answers",
	"transfer/Close": "close: retires retires keeps",
	"transfer/Leak":  "close: keeps keeps keeps",

	//               sound tainted lost
	"value/Err":     "ask: answers answers answers",
	"value/Use":     "borrow: proceeds proceeds refuses",
	"value/Publish": "take: proceeds refuses refuses",
	"value/Close":   "close: retires keeps keeps",
	"value/Leak":    "close: keeps keeps keeps",

	//                 moving broken lost
	"session/Enqueue": "borrow: proceeds proceeds refuses",
	"session/Publish": "borrow: proceeds refuses refuses",
	"session/Close":   "close: ends ends ends",

	//                  open closed lost
	"runtime/Begin":    "proceeds refuses refuses",
	"runtime/Close":    "ends answers ends",
	"runtime/Shutdown": "waits waits waits",
}

// A rule is a row of promised.
type rule struct {
	does own.Action
	at   []string
}

func ruleOf(name string) (r rule) {
	does, acts, cell := strings.Cut(promised[name], ": ")
	if !cell {
		return rule{own.NumActions, strings.Fields(does)}
	}
	for r.does = own.Open; r.does < own.NumActions && r.does.String() != does; {
		r.does++
	}
	r.at = strings.Fields(acts)
	return r
}

// always are the methods that answer in every state, and have no row.
var always = map[string]string{
	"Publication": "Bytes DType Shape", "Transfer": "", "Value": "Bytes DType Shape",
	"Session": "Stats", "Runtime": "Context Drain Err Lost Stats",
}

// The tables say what is promised, have no cell that is impossible, and there is
// a case for each row and each exported method.
func TestStatesTables(t *testing.T) {
	rows := publish.Rows()
	for name, row := range rows {
		if row != promised[name] || strings.Contains(row, "impossible") {
			t.Errorf("%s: the table says %q, promised is %q", name, row, promised[name])
		}
	}
	have := map[string]bool{"runtime/Begin": true, "runtime/Close": true, "runtime/Shutdown": true}
	methods := map[string]bool{}
	for name := range begins {
		methods["Runtime."+name] = true
	}
	methods["Runtime.Close"], methods["Runtime.Shutdown"] = true, true
	for _, m := range lives {
		for row, calls := range m.rows {
			have[m.name+"/"+row] = true
			for _, c := range calls {
				methods[m.handle+"."+c.name] = true
			}
		}
	}
	for name := range promised {
		if rows[name] == "" || !have[name] {
			t.Errorf("%s: in a table %v, with a case %v", name, rows[name] != "", have[name])
		}
	}
	source, err := os.ReadFile("states.go")
	must(t, err)
	for _, m := range regexp.MustCompile(`(?m)^var (\w+)Table\b`).FindAllStringSubmatch(string(source), -1) {
		if !slices.Contains(publish.Tables(), m[1]) {
			t.Errorf("%sTable has no test", m[1])
		}
	}
	for _, h := range []any{(*publish.Publication)(nil), (*publish.Transfer)(nil), (*publish.Value)(nil), (*publish.Session)(nil), (*publish.Runtime)(nil)} {
		typ := reflect.TypeOf(h)
		for i := range typ.NumMethod() {
			name, on := typ.Method(i).Name, typ.Elem().Name()
			if !methods[on+"."+name] && !slices.Contains(strings.Fields(always[on]), name) {
				t.Errorf("(*%s).%s has neither a row nor answers always", on, name)
			}
		}
	}
}

// hooks stand about every driver call of a rig, but for those of the watcher.
type hooks struct {
	mu    sync.Mutex
	once  map[cuapi.ID]hook
	on    bool
	calls []cuapi.ID
	kinds map[cuapi.ID]bool                                        // of all calls, while it is there
	any   func(id cuapi.ID, next func() cuapi.Result) cuapi.Result // stands about each call, the watcher's too
}

// A hook runs before a call. What it returns is returned instead of making the
// call, unless it is 0.
type hook func() cuapi.Result

func (h *hooks) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	h.mu.Lock()
	f := h.once[c.ID]
	if h.any != nil {
		f := h.any
		h.mu.Unlock()
		return f(c.ID, next)
	}
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
var bookkeeping = []cuapi.ID{cuapi.IDStreamIsCapturing, cuapi.IDThreadExchangeStreamCaptureMode, cuapi.IDCtxPushCurrent, cuapi.IDCtxPopCurrent, cuapi.IDGetErrorName, cuapi.IDGetErrorString}

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

// A condition is a column of a table, and how a life comes there.
type condition struct {
	name   string
	column int
	set    func(e *env) // by the handle: it must be usable
	lose   bool         // then the context is lost
	alone  bool         // fails this handle alone, so that it can not be moved
}

// lost is what a loss of the context is made of: a call of somebody else fails.
func (e *env) lost() {
	e.fail(cuapi.IDStreamQuery, cuapi.LaunchFailed)
	e.other.Submit()
	e.code, e.doomed = driver.ErrLaunchFailed, true
	e.tr.Err() // a transfer that fails tells of it after its end, too: it found out
}

// An entry brings a cell into a state and runs f there. set and late make the
// condition: set by the handle, late may be in the middle of a move.
type entry struct {
	name  string
	state own.State
	in    func(e *env, set, late, f func())
	moves bool   // a handle that failed alone does not get there
	gives bool   // the move goes on: what is closed meanwhile is another owner's
	uses  bool   // with work that is not known to be done
	skip  string // conditions that can not be met there
}

// A call is a method of a row.
type call struct {
	name  string
	do    func(e *env, ctx context.Context) seen
	makes []cuapi.ID                                  // the driver calls, when it proceeds
	after func(e *env) bool                           // what holds then
	carry func(e *env, r *publish.RejectedError) bool // what a rejection carries
	moves bool                                        // it moves the handle, when it proceeds
	asks  bool                                        // the session first, which refuses on a lost context
	takes bool                                        // it does so behind the calls in progress, and also where it fails
}

// seen is what a call returned, and the driver calls that it made.
type seen struct {
	err   error
	said  bool            // its answer
	done  <-chan struct{} // a channel
	calls []cuapi.ID
}

// A life is a machine whose handles have a cell.
type life struct {
	name, handle string
	setup        func(e *env)
	cell         func(e *env) any // the handle
	conditions   []condition
	entries      []entry
	rows         map[string][]call
	always       func(e *env) string // what answers in every state
	none         string              // and without a handle
	over         bool                // after the end it tells the failure
}

// TestStates brings a handle into each state of its cell and each condition,
// calls each method there, and sees that it does what is promised.
func TestStates(t *testing.T) {
	for _, l := range lives {
		for _, c := range l.conditions {
			for _, en := range l.entries {
				if c.alone && en.moves || slices.Contains(strings.Fields(en.skip), c.name) {
					continue
				}
				for row, calls := range l.rows {
					for _, k := range calls {
						t.Run(fmt.Sprintf("%s/%s-%s/%s", l.name, en.name, c.name, k.name), func(t *testing.T) {
							meet(t, l, c, en, ruleOf(l.name+"/"+row), k)
						})
					}
				}
			}
		}
	}
}

func meet(t *testing.T, l life, c condition, en entry, r rule, k call) {
	e := newEnv(t)
	if l.setup != nil {
		l.setup(e)
	}
	same := l.always(e)
	before := e.rt.Stats()
	step := own.Table[en.state][r.does]
	act := r.at[c.column]
	set := func() {
		if c.set != nil {
			c.set(e)
		}
	}
	late := func() {
		if c.lose {
			e.lost()
		}
	}
	met := false
	en.in(e, set, late, func() {
		met = true
		if s := publish.StateOf(l.cell(e)); s != en.state {
			t.Fatalf("the cell is %v", s)
		}
		if en.state == own.Absent {
			same = l.none
		}
		if got := l.always(e); got != same {
			t.Errorf("always: %s, then %s", same, got)
		}
		next := en.state
		switch {
		case k.asks && c.lose:
			e.acts(k, "refuses", en.state)
		case step.Err != nil:
			e.inert(k, step.Err, en.state, l.over && c.column == 2 && en.state != own.Absent)
		case r.does == own.Close && !step.Release: // remembered, or nothing to close
			e.quiet(k)
			next = step.Next
		default:
			next = e.acts(k, act, en.state)
		}
		if s := publish.StateOf(l.cell(e)); s != next && !(k.takes && en.state == own.Busy) {
			t.Errorf("the cell is %v then, want %v", s, next)
		}
	})
	if !met {
		t.Fatal("never got there")
	}
	for _, f := range e.later {
		f()
	}
	// A close that was remembered takes effect behind the last use.
	closed := ruleOf(l.name + "/Close").at[c.column]
	switch {
	case en.gives, step.Err == nil && r.does != own.Close && en.state != own.Closing && en.state != own.Revoked:
	case en.state == own.Closing || en.state == own.Revoked:
		e.fate(before, closed, e.done && !en.uses)
	case step.Next == own.Closing || step.Next == own.Revoked:
		e.fate(before, act, e.done && !en.uses)
	}
	if got := l.always(e); got != same && en.state != own.Absent {
		t.Errorf("always: %s, at the end %s", same, got)
	}
	e.finish()
}

// see makes the call and returns what was seen of it.
func (e *env) see(k call) (o seen) {
	calls := e.record(func() { o = k.do(e, e.within()) })
	o.calls = calls
	return o
}

// quiet is a call that does nothing and has no error.
func (e *env) quiet(k call) {
	before := e.rt.Stats()
	if o := e.see(k); o.err != nil || len(o.calls) != 0 {
		e.t.Errorf("not quiet: %+v", o)
	}
	e.fate(before, "", false)
}

// inert is a call that the cell refuses: with its error, without a driver call,
// and everything stays as it was.
func (e *env) inert(k call, cause error, state own.State, over bool) {
	before, owners := e.rt.Stats().Queue, e.owners()
	o := e.see(k)
	switch {
	case k.name == "Done" && (cause == own.ErrMoved || state == own.Absent):
		if o.done != nil {
			e.t.Error("a channel of what is not there")
		}
	case k.name == "Done": // it closes with the close that is remembered, or with the work
		e.ends = append(e.ends, func() { <-o.done })
		if state == own.Closed && !o.said {
			e.t.Error("the channel of what is closed is open")
		}
	case over:
		e.failed(o)
	case !errors.Is(o.err, cause) || o.said:
		e.t.Errorf("got %v, want %v", o.err, cause)
	case k.carry != nil:
		e.rejected(k, o)
	}
	if len(o.calls) != 0 || e.rt.Stats().Queue != before || e.owners() != owners {
		e.t.Errorf("not inert: %v, %s, then %s", o.calls, owners, e.owners())
	}
}

func (e *env) failed(o seen) {
	e.t.Helper()
	var unproven *publish.UnprovenError
	if !errors.As(o.err, &unproven) || !errors.Is(o.err, e.code) || o.said || len(o.calls) != 0 {
		e.t.Errorf("got %+v, want the failure %v", o, e.code)
	}
}

func (e *env) rejected(k call, o seen) {
	e.t.Helper()
	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	if !errors.As(o.err, &rejected) || errors.As(o.err, &unproven) || !k.carry(e, rejected) {
		e.t.Errorf("got %v, want a rejection that carries the owners", o.err)
	}
}

// fate tells what must have become of an owner that was let go of.
func (e *env) fate(before publish.Stats, act string, done bool) {
	e.t.Helper()
	st := e.rt.Stats()
	want := before.Queue
	want.Cause = st.Queue.Cause
	switch {
	case act == "ends":
		before.Sessions--
		if e.rt.Err() == nil { // the stream is another session's to hold
			s, err := e.rt.OpenSession(e.st)
			must(e.t, err)
			must(e.t, s.Close())
		}
	case act == "keeps":
		e.doomed = true
		want.Entered++
		want.Permanent++
		want.Reserved--
		want.PermanentBytes = st.Queue.PermanentBytes
	case act == "retires" && !done:
		want.Entered++
		want.Pending++
		want.Reserved--
		want.PendingBytes = st.Queue.PendingBytes
	case act == "retires":
		want.Reserved--
	}
	if st.Queue != want || st.Sessions != before.Sessions {
		e.t.Errorf("%s: %+v, want %+v", act, st, want)
	}
}

// acts makes the call, checks that it does what the table's word means, and
// returns the state of the cell behind it.
func (e *env) acts(k call, act string, state own.State) (next own.State) {
	t := e.t
	before, owners := e.rt.Stats(), e.owners()
	unchanged := func(o seen) {
		t.Helper()
		if e.rt.Stats().Queue != before.Queue || e.owners() != owners {
			t.Errorf("%s changed something: %+v", act, o)
		}
	}
	proceeded := func(o seen) {
		t.Helper()
		if o.err != nil || k.after != nil && !k.after(e) {
			t.Errorf("did not proceed: %+v, %s", o, e.owners())
		}
	}
	// What ends behind the calls in progress is begun here and seen later.
	seeNow := func(judge func(o seen)) {
		if !k.takes || state != own.Busy {
			judge(e.see(k))
			return
		}
		got := make(chan seen, 1)
		go func() { got <- k.do(e, e.within()) }()
		e.later = append(e.later, func() { judge(<-got) })
	}
	switch act {
	case "answers":
		o := e.see(k)
		if o.err != nil || !o.said || len(o.calls) != 0 {
			t.Errorf("got %+v, want an answer without a driver call", o)
		}
		unchanged(o)
	case "looks":
		query := []cuapi.ID{cuapi.IDEventQuery}
		for _, ready := range []bool{false, true} {
			if ready {
				e.release()
				e.done = true
			}
			if o := e.see(k); o.err != nil || o.said != ready || !slices.Equal(o.calls, query) {
				t.Errorf("got %+v, want one look that says %v", o, ready)
			} else {
				unchanged(o)
			}
		}
	case "waits":
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		o := k.do(e, ended)
		if o.done == nil && o.err != context.Canceled {
			t.Errorf("a wait whose context ended: %v", o.err)
		}
		if o.done != nil && o.said {
			t.Error("the channel is closed")
		}
		unchanged(o)
		got := make(chan seen, 1)
		go func() {
			if o.done != nil {
				<-o.done
				got <- o
				return
			}
			got <- k.do(e, e.within())
		}()
		for !stream.WatcherOf(wire.ContextOf(e.ctx)).Running() && len(got) == 0 {
			runtime.Gosched()
		}
		if len(got) != 0 {
			t.Errorf("did not wait: %+v", <-got)
			break
		}
		e.release()
		e.done = true
		e.later = append(e.later, func() { proceeded(<-got) })
	case "proceeds":
		seeNow(func(o seen) {
			proceeded(o)
			if o.calls != nil && !slices.Equal(o.calls[:min(len(o.calls), len(k.makes))], k.makes) {
				t.Errorf("made %v, want %v", o.calls, k.makes)
			}
		})
		if k.moves {
			return own.Moved
		}
	case "fails":
		seeNow(func(o seen) {
			e.failed(o)
			if k.takes {
				e.fate(before, "keeps", false)
			} else {
				unchanged(o)
			}
		})
		if k.takes {
			return own.Moved
		}
	case "refuses":
		o := e.see(k)
		if len(o.calls) != 0 || o.err == nil {
			t.Errorf("got %+v, want a refusal without a driver call", o)
		} else if k.carry != nil {
			e.rejected(k, o)
		}
		if e.code != 0 && !errors.Is(o.err, e.code) || (e.rt.Err() != nil) != errors.Is(o.err, publish.ErrLost) {
			t.Errorf("got %v, want the cause %v", o.err, e.code)
		}
		unchanged(o)
	case "retires", "keeps", "ends":
		if o := e.see(k); o.err != nil {
			t.Error(o.err)
		}
		e.fate(before, act, e.done)
		return own.Closed
	default:
		t.Fatalf("no such act: %q", act)
	}
	return state
}
