package publish_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
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

// A condition is a column of a table, and how a life comes there.
type condition struct {
	name   string
	column int
	set    func(e *env) // by the handle: it must be usable
	lose   bool         // then the context is lost
	alone  bool         // fails this handle alone, so that it can not be moved
}

// lost loses the context: a call of somebody else fails.
func (e *env) lost() {
	e.fail(cuapi.IDStreamQuery, cuapi.LaunchFailed)
	e.other.Submit()
	if e.doomed = true; e.code == 0 { // else the first cause stays
		e.code = driver.ErrLaunchFailed
	}
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
			e.inert(k, step.Err, en.state, l.over && c.column == 2 && en.state == own.Moved)
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

// fate checks what became of an owner that was let go of.
func (e *env) fate(before publish.Stats, act string, done bool) {
	e.t.Helper()
	st := e.rt.Stats()
	want := before.Queue
	want.Cause = st.Queue.Cause
	bytes := want.ReservedBytes - st.Queue.ReservedBytes // of the one owner that the call lets go of
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
		want.ReservedBytes -= bytes
		want.PermanentBytes += bytes
	case act == "retires" && !done:
		want.Entered++
		want.Pending++
		want.Reserved--
		want.ReservedBytes -= bytes
		want.PendingBytes += bytes
	case act == "retires":
		want.Reserved--
		want.ReservedBytes -= bytes
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
		for range 5000 { // longer than the cell's own patience
			runtime.Gosched()
		}
		if len(got) != 0 {
			t.Errorf("ended while another call uses the handle: %+v", <-got)
			return
		}
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
		if lost := errors.Is(o.err, publish.ErrLost); lost != (e.rt.Err() != nil) || !lost && e.code != 0 && !errors.Is(o.err, e.code) || lost && !errors.Is(o.err, driver.ErrLaunchFailed) {
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
