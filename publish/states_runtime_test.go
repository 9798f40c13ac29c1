package publish_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// begins are the methods of a runtime that begin something, and end it again.
var begins = map[string]func(rt *publish.Runtime) error{
	"OpenSession": func(rt *publish.Runtime) error {
		s, err := rt.OpenSession(nil)
		s.Close()
		return err
	},
	"WithSession": func(rt *publish.Runtime) error {
		ran := false
		err := rt.WithSession(func(*publish.Session) error { ran = true; return nil })
		if ran == (err != nil) {
			return fmt.Errorf("ran %v, and %w", ran, err)
		}
		return err
	},
	"Pinned": func(rt *publish.Runtime) error {
		b, err := rt.Pinned(1 << 14)
		b.Close()
		return err
	},
	"Reserve": func(rt *publish.Runtime) error { return rt.Reserve(1, 1<<15) },
}

// users are two runtimes on one context, each with a session, and of the first a
// publication that is pending.
type users struct {
	*env
	rt2 *publish.Runtime
	s2  *publish.Session
}

func newUsers(t *testing.T) *users {
	u := &users{env: newEnv(t)}
	var err error
	u.rt2, err = publish.New(u.ctx, publish.Config{})
	must(t, err)
	u.s2, err = u.rt2.OpenSession(nil)
	must(t, err)
	u.publish()
	return u
}

// ends checks that what the runtimes have alive pins the context, and nothing
// else does, however often each was closed.
func (u *users) ends() {
	u.t.Helper()
	must(u.t, u.rt.Close())
	must(u.t, u.rt2.Close())
	must(u.t, u.rt.Close())
	must(u.t, u.rt2.Close())
	if err := u.ctx.Shutdown(u.within()); !errors.Is(err, driver.ErrBusy) {
		u.t.Errorf("the context's shutdown while sessions are open: %v", err)
	}
	must(u.t, u.s2.Close())
	if err := u.rt2.Shutdown(u.within()); err != nil {
		u.t.Errorf("the other's shutdown: %v", err)
	}
	u.finish()
}

func TestStatesOfARuntime(t *testing.T) {
	conditions := []struct {
		name   string
		column int
		set    func(u *users)
	}{
		{"open", 0, func(u *users) {}},
		{"closed", 1, func(u *users) { must(u.t, u.rt.Close()) }},
		{"lost", 2, func(u *users) { u.lost() }},
		{"closed,lost", 1, func(u *users) { must(u.t, u.rt.Close()); u.lost() }},
	}
	for _, c := range conditions {
		in := func(method string, f func(u *users, act string)) {
			for _, row := range []string{"Begin", "Close", "Shutdown"} {
				if begins[method] != nil && row == "Begin" || row == method {
					t.Run(fmt.Sprintf("runtime/%s/%s", c.name, method), func(t *testing.T) {
						u := newUsers(t)
						c.set(u)
						f(u, ruleOf("runtime/" + row).at[c.column])
						if u.rt.Context() != u.ctx || (u.rt.Err() != nil) != u.doomed || closed(u.rt.Lost()) != u.doomed || u.rt.Drain() != 0 {
							t.Error("what answers always does not")
						}
						// The other user of the context goes on, unless that is lost.
						for name, begin := range begins {
							if err := begin(u.rt2); (err != nil) != u.doomed || u.doomed && !errors.Is(err, publish.ErrLost) {
								t.Errorf("the other runtime's %s: %v", name, err)
							}
						}
						u.ends()
					})
				}
			}
		}
		for name, begin := range begins {
			in(name, func(u *users, act string) {
				var err error
				calls := u.record(func() { err = begin(u.rt) })
				want := driver.ErrClosed
				if c.column == 2 {
					want = publish.ErrLost
				}
				switch {
				case act == "proceeds" && err != nil:
					u.t.Error(err)
				case act == "refuses" && (!errors.Is(err, want) || len(calls) != 0 || c.column == 2 && !errors.Is(err, u.code)):
					u.t.Errorf("%v, with the calls %v", err, calls)
				case act != "proceeds" && act != "refuses":
					u.t.Errorf("no such act: %s", act)
				}
			})
		}
		in("Close", func(u *users, act string) {
			must(u.t, u.rt.Close())
			if err := begins["OpenSession"](u.rt); !errors.Is(err, driver.ErrClosed) {
				u.t.Errorf("%s: a session of a closed runtime: %v", act, err)
			}
			if act != "ends" && act != "answers" {
				u.t.Errorf("no such act: %s", act)
			}
		})
		in("Shutdown", func(u *users, act string) {
			if act != "waits" {
				u.t.Fatalf("no such act: %s", act)
			}
			must(u.t, u.p.Close())
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			if err := u.rt.Shutdown(ended); u.code == 0 && err != context.Canceled {
				u.t.Errorf("a wait whose context ended: %v", err)
			}
			got := make(chan error, 1)
			go func() { got <- u.rt.Shutdown(u.within()) }()
			if u.code == 0 { // else nothing is to be waited for
				for range 100 {
					runtime.Gosched()
					u.rt.Drain()
				}
				if len(got) != 0 {
					u.t.Fatalf("did not wait: %v", <-got)
				}
				u.release()
			}
			err := <-got // sessions are open, and what is lost is retained
			if q := u.rt.Stats().Queue; !errors.Is(err, driver.ErrBusy) || u.doomed && !errors.Is(err, u.code) || q.Pending != 0 {
				u.t.Errorf("%v, with %+v", err, q)
			}
			if err := begins["Pinned"](u.rt); !errors.Is(err, driver.ErrClosed) {
				u.t.Errorf("a buffer of a runtime that is shut down: %v", err)
			}
		})
	}
}

// A Close during any driver call of a method takes effect behind it: what was
// begun goes on.
func TestStatesOfARuntimeDuringACall(t *testing.T) {
	for name, begin := range begins {
		t.Run("runtime/closed meanwhile/"+name, func(t *testing.T) {
			u := newUsers(t)
			inside(u.env, cuapi.IDCtxPushCurrent, 0, func() { must(t, begin(u.rt)) }, func() { must(t, u.rt.Close()) })
			if err := begin(u.rt); !errors.Is(err, driver.ErrClosed) {
				t.Errorf("afterwards: %v", err)
			}
			u.ends()
		})
	}
}

// A second Close ends nothing: what is open goes on to pin the context.
func TestStatesOfARuntimeClosedTwice(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("runtime/closed,lost %v/Close", lost), func(t *testing.T) {
			r := newRig(t, options{})
			r.keep = true
			s := r.session()
			must(t, r.rt.Close())
			if lost {
				wire.ContextOf(r.ctx).Fail(cuapi.IDStreamQuery, cuapi.LaunchFailed, "")
			}
			must(t, r.rt.Close())
			if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
				t.Errorf("the context's shutdown while a session is open: %v", err)
			}
			must(t, s.Close())
			must(t, r.rt.Shutdown(r.within()))
			must(t, r.ctx.Shutdown(r.within()))
		})
	}
}
