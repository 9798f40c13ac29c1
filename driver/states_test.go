package driver_test

import (
	"context"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// promised says in words what a context does, apart from the table.
var promised = map[string]string{
	//          open     ending  gone    stuck
	"Primary":  "proceeds waits renews refuses",
	"Pin":      "proceeds refuses refuses refuses",
	"Shutdown": "proceeds waits answers answers",
}

// A life is a context whose release is held up and fails as the test says.
type life struct {
	t       *testing.T
	dev     *driver.Device
	ctx     *driver.Context
	calls   atomic.Int64  // driver calls
	hold    atomic.Bool   // the release is held up
	in, out chan struct{} // it was reached; it may go on
	code    cuapi.Result  // what it returns instead, unless 0
	ended   chan error    // what the Shutdown in progress came to
	result  error         // of the last Shutdown
}

func newLife(t *testing.T) *life {
	l := &life{t: t, in: make(chan struct{}), out: make(chan struct{}), ended: make(chan error, 1)}
	sim := cudasim.New(cudasim.Config{})
	sim.Table().Init(0)
	d := over(t, cuapi.Intercept(sim.Table(), func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		l.calls.Add(1)
		if c.ID == cuapi.IDDevicePrimaryCtxRelease {
			if l.hold.Load() {
				l.in <- struct{}{}
				<-l.out
			}
			if l.code != 0 {
				return l.code
			}
		}
		return next()
	}))
	l.ctx = primary(t, d, 0)
	l.dev = l.ctx.Device()
	t.Cleanup(func() {
		for _, v := range sim.Violations() {
			t.Errorf("violation: %v", v)
		}
	})
	return l
}

func (l *life) lose() {
	wire.ContextOf(l.ctx).Fail(cuapi.IDStreamQuery, cuapi.LaunchFailed, "")
}

// goOn ends the Shutdown in progress.
func (l *life) goOn() {
	l.hold.Store(false)
	l.out <- struct{}{}
	l.result = <-l.ended
}

// A situation is a state of a context, and how one comes there.
type situation struct {
	name, state string
	set         func(l *life)
	after       string // what a Shutdown in progress leads to
}

func ending(prepare func(l *life)) func(l *life) {
	return func(l *life) {
		prepare(l)
		l.hold.Store(true)
		go func() { l.ended <- l.ctx.Shutdown(within(l.t)) }()
		<-l.in
	}
}

func through(l *life) { l.result = l.ctx.Shutdown(within(l.t)) }
func stick(l *life)   { l.lose(); l.code = cuapi.LaunchFailed }
func refused(l *life) { l.code = cuapi.InvalidValue }
func nothing(*life)   {}
func lost(l *life)    { l.lose() }
func both(f ...func(*life)) func(*life) {
	return func(l *life) {
		for _, f := range f {
			f(l)
		}
	}
}

var situations = []situation{
	{name: "open", state: "open", set: nothing},
	{name: "open,lost", state: "open", set: lost},
	{name: "ending", state: "ending", set: ending(nothing), after: "gone"},
	{name: "ending,lost", state: "ending", set: ending(lost), after: "gone"},
	{name: "ending,sticking", state: "ending", set: ending(stick), after: "stuck"},
	{name: "gone", state: "gone", set: through},
	{name: "gone,retained", state: "gone", set: both(refused, through, func(l *life) { l.code = 0 })},
	{name: "stuck", state: "stuck", set: both(stick, through)},
}

func TestStates(t *testing.T) {
	table := driver.ContextTable()
	states := []string{"open", "ending", "gone", "stuck"}
	for method, words := range promised {
		if table[method] != words {
			t.Errorf("%s: the table says %q, promised is %q", method, table[method], words)
		}
		for _, s := range situations {
			act := strings.Fields(words)[slices.Index(states, s.state)]
			t.Run("context/"+s.name+"/"+method, func(t *testing.T) {
				l := newLife(t)
				s.set(l)
				if got := driver.StateOf(l.ctx); got != s.state {
					t.Fatalf("the context is %s", got)
				}
				methods[method](l, act, s)
				// What answers in every state.
				isLost := slices.Contains([]string{"open,lost", "ending,lost", "ending,sticking", "stuck"}, s.name)
				if (l.ctx.Err() != nil) != isLost || l.ctx.Device() != l.dev || l.ctx.Supports("cuInit") != nil {
					t.Errorf("lost %v: %v", isLost, l.ctx.Err())
				}
				select {
				case <-l.ctx.Lost():
				default:
					if isLost {
						t.Error("Lost is open")
					}
				}
			})
		}
	}
	if len(table) != len(promised) {
		t.Errorf("rows without a promise: %v", table)
	}
	typ := reflect.TypeFor[*driver.Context]()
	for i := range typ.NumMethod() {
		if name := typ.Method(i).Name; promised[name] == "" && !slices.Contains([]string{"Device", "Err", "Lost", "Supports"}, name) {
			t.Errorf("%s has neither a row nor answers always", name)
		}
	}
}

var methods = map[string]func(l *life, act string, s situation){
	"Primary": func(l *life, act string, s situation) {
		t := l.t
		before := l.calls.Load()
		got := make(chan error, 1)
		var next *driver.Context
		go func() {
			var err error
			next, err = l.dev.Primary()
			got <- err
		}()
		if act == "waits" {
			for range 200 {
				runtime.Gosched()
			}
			if len(got) != 0 {
				t.Error("did not wait")
			}
			l.goOn()
			if driver.StateOf(l.ctx) != s.after {
				t.Errorf("%s after the end", driver.StateOf(l.ctx))
			}
			act = map[string]string{"gone": "renews", "stuck": "refuses"}[s.after]
		}
		err := <-got
		switch act {
		case "proceeds":
			if err != nil || next != l.ctx || l.calls.Load() != before {
				t.Errorf("another context, or a driver call: %v", err)
			}
			must(t, next.Shutdown(within(t))) // of two uses
			if s := driver.StateOf(l.ctx); s != "open" {
				t.Errorf("%s after one Shutdown of two", s)
			}
			must(t, l.ctx.Shutdown(within(t)))
			if s := driver.StateOf(l.ctx); s != "gone" {
				t.Errorf("%s after both", s)
			}
		case "renews":
			must(t, err)
			if next == l.ctx || next.Err() != nil || driver.StateOf(next) != "open" {
				t.Error("not a fresh context")
			}
			_, err := roundTrip(next, within(t))
			must(t, err)
			must(t, next.Shutdown(within(t)))
		case "refuses":
			if next != nil || !errors.Is(err, driver.ErrLaunchFailed) {
				t.Errorf("%v, want the cause of the loss", err)
			}
		default:
			t.Errorf("no such act: %s", act)
		}
	},
	"Pin": func(l *life, act string, s situation) {
		t := l.t
		err := wire.ContextOf(l.ctx).Retain()
		switch act {
		case "proceeds":
			must(t, err)
			if err := l.ctx.Shutdown(within(t)); !errors.Is(err, driver.ErrBusy) || driver.StateOf(l.ctx) != "open" {
				t.Errorf("while it is pinned: %v", err)
			}
			wire.ContextOf(l.ctx).Release()
			must(t, l.ctx.Shutdown(within(t)))
		case "refuses":
			if !errors.Is(err, own.ErrClosed) {
				t.Error(err)
			}
			if rt, err := publish.New(l.ctx, publish.Config{}); rt != nil || l.ctx.Err() == nil && !errors.Is(err, driver.ErrClosed) {
				t.Errorf("a runtime on what is %s: %v", s.name, err)
			}
		default:
			t.Errorf("no such act: %s", act)
		}
		if s.state == "ending" {
			l.goOn()
		}
	},
	"Shutdown": func(l *life, act string, s situation) {
		t := l.t
		before := l.calls.Load()
		switch act {
		case "proceeds":
			must(t, l.ctx.Shutdown(within(t)))
			if l.calls.Load() == before || driver.StateOf(l.ctx) != "gone" {
				t.Errorf("%s after the last Shutdown", driver.StateOf(l.ctx))
			}
		case "waits":
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			if err := l.ctx.Shutdown(ended); err != context.Canceled {
				t.Errorf("a wait whose context ended: %v", err)
			}
			got := make(chan error, 1)
			go func() { got <- l.ctx.Shutdown(within(t)) }()
			for range 200 {
				runtime.Gosched()
			}
			if len(got) != 0 {
				t.Error("did not wait")
			}
			l.goOn()
			if err := <-got; err != l.result || driver.StateOf(l.ctx) != s.after || (err != nil) != (s.after == "stuck") {
				t.Errorf("%v, and the first says %v, and it is %s", err, l.result, driver.StateOf(l.ctx))
			}
		case "answers":
			if err := l.ctx.Shutdown(within(t)); err != l.result || (err != nil) != (s.name != "gone") || l.calls.Load() != before {
				t.Errorf("%v, and the first says %v", err, l.result)
			}
		default:
			t.Errorf("no such act: %s", act)
		}
	},
}
