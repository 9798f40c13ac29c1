package retirequeue_test

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"weak"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/purecuda/purecuda/retirequeue"
)

// owner counts what is asked of it. in, if not nil, runs inside of each call.
type owner struct {
	ticket   retirequeue.Ticket
	done     atomic.Bool
	fail     error // of Done
	stuck    error // of Release
	in       func(call string)
	looks    atomic.Int32
	released atomic.Int32
	kept     atomic.Int32
	early    atomic.Bool // a release before the fence was done
	cause    error       // of the first Kept
}

func (o *owner) call(what string) {
	if o.in != nil {
		o.in(what)
	}
}

func (o *owner) Done() (bool, error) {
	o.looks.Add(1)
	o.call("Done")
	return o.done.Load(), o.fail
}

func (o *owner) Release() error {
	o.released.Add(1)
	if !o.done.Load() {
		o.early.Store(true)
	}
	o.call("Release")
	return o.stuck
}

func (o *owner) Kept(cause error) {
	if o.kept.Add(1) == 1 {
		o.cause = cause
	}
	o.call("Kept")
}

// calls says how often each was called.
func (o *owner) calls() string {
	return fmt.Sprintf("%d looks, %d releases, %d kept", o.looks.Load(), o.released.Load(), o.kept.Load())
}

func admit(t testing.TB, q *retirequeue.Queue, o *owner, bytes int64) {
	t.Helper()
	if err := q.Admit(&o.ticket, bytes); err != nil {
		t.Fatal(err)
	}
}

func same(t testing.TB, q *retirequeue.Queue, want retirequeue.Stats) {
	t.Helper()
	if diff := cmp.Diff(want, q.Stats(), cmpopts.EquateErrors()); diff != "" {
		t.Fatalf("counters (-want +got):\n%s", diff)
	}
}

// What a refusal says: the figures of the bound that refused.
func TestRefusalsHaveTheFigures(t *testing.T) {
	q := retirequeue.New(retirequeue.Limits{Slots: 2, Bytes: 10})
	var a, b, c owner
	admit(t, q, &a, 6)
	a.ticket.Retire(&a)
	before := q.Stats()
	refused := func(err error, want string) {
		t.Helper()
		if !errors.Is(err, retirequeue.ErrFull) {
			t.Fatalf("%v does not match ErrFull", err)
		}
		if want = retirequeue.ErrFull.Error() + ": " + want; err.Error() != want {
			t.Errorf("the text is %q\nwant %q", err, want)
		}
		same(t, q, before)
	}
	refused(q.Admit(&b.ticket, 5), "5 bytes are asked for, 6 of 10 bytes are taken, 6 of them retired")
	refused(q.Admit(&b.ticket, 12), "an owner of 12 bytes is never admitted, the whole bound is 10 bytes")
	admit(t, q, &b, 1)
	before = q.Stats()
	refused(q.Admit(&c.ticket, 1), "2 of 2 entries are taken, 1 of them retired")
	refused(b.ticket.Grow(4), "4 bytes are asked for, 7 of 10 bytes are taken, 6 of them retired")
	refused(b.ticket.Grow(10), "an owner of 11 bytes is never admitted, the whole bound is 10 bytes")
	if err := b.ticket.Grow(3); err != nil {
		t.Error(err)
	}
}

// Sums that do not fit are refused, or stay at the most where nothing may be
// refused.
func TestSumsDoNotOverflow(t *testing.T) {
	q := retirequeue.New(retirequeue.Limits{Slots: 8})
	cause := errors.New("lost")
	for range 3 {
		var a, b owner
		admit(t, q, &a, math.MaxInt64-1)
		if err := q.Admit(&b.ticket, 2); !errors.Is(err, retirequeue.ErrFull) {
			t.Fatalf("a sum over the most is admitted: %v", err)
		}
		if err := a.ticket.Grow(math.MaxInt64); !errors.Is(err, retirequeue.ErrFull) {
			t.Fatalf("a ticket grows over the most: %v", err)
		}
		a.ticket.Keep(&a, cause)
	}
	same(t, q, retirequeue.Stats{Entered: 3, Permanent: 3, PermanentBytes: math.MaxInt64, Cause: cause})
}

// Misuse panics with a text that names it, changes nothing, and leaves no lock.
func TestMisusePanics(t *testing.T) {
	q := retirequeue.New(retirequeue.Limits{Slots: 8, Bytes: 100})
	o := &owner{}
	states := map[string]func() *retirequeue.Ticket{
		"was not admitted": func() *retirequeue.Ticket { return new(retirequeue.Ticket) },
		"is used up": func() *retirequeue.Ticket {
			o := &owner{}
			o.done.Store(true)
			admit(t, q, o, 1)
			o.ticket.Retire(o)
			q.Drain()
			return &o.ticket
		},
		"used up": func() *retirequeue.Ticket {
			o := &owner{}
			admit(t, q, o, 1)
			o.ticket.Keep(o, errors.New("kept"))
			return &o.ticket
		},
	}
	uses := map[string]func(*retirequeue.Ticket){
		"Grow":   func(tk *retirequeue.Ticket) { _ = tk.Grow(1) },
		"Shrink": func(tk *retirequeue.Ticket) { tk.Shrink(0) },
		"Cancel": func(tk *retirequeue.Ticket) { tk.Cancel() },
		"Retire": func(tk *retirequeue.Ticket) { tk.Retire(o) },
		"Keep":   func(tk *retirequeue.Ticket) { tk.Keep(o, nil) },
	}
	panics := func(name string, want string, f func()) {
		t.Helper()
		before := q.Stats()
		defer func() {
			t.Helper()
			if text := fmt.Sprint(recover()); !strings.HasPrefix(text, "retirequeue: ") || !strings.Contains(text, want) {
				t.Errorf("%s panics with %q, want a text with %q", name, text, want)
			}
			if retirequeue.Locked(q) {
				t.Fatal("the lock stays held")
			}
			same(t, q, before)
		}()
		f()
	}
	for state, make := range states {
		for name, use := range uses {
			tk := make()
			panics(name, name+" of a ticket that", func() { use(tk) })
			panics(name, state, func() { use(tk) })
		}
	}
	var a, b owner
	admit(t, q, &a, 5)
	panics("Admit", "twice", func() { _ = q.Admit(&a.ticket, 1) })
	panics("Admit", "-1", func() { _ = q.Admit(&b.ticket, -1) })
	panics("Grow", "-2", func() { _ = a.ticket.Grow(-2) })
	panics("Shrink", "-3", func() { a.ticket.Shrink(-3) })
	panics("Shrink", "5 bytes shrinks by 6", func() { a.ticket.Shrink(6) })
	panics("New", "negative limits", func() { retirequeue.New(retirequeue.Limits{Slots: -1}) })
	panics("New", "negative limits", func() { retirequeue.New(retirequeue.Limits{Bytes: -1}) })
	if n := o.calls(); n != "0 looks, 0 releases, 0 kept" {
		t.Errorf("the owner of a misused ticket: %s", n)
	}
}

// nest is a queue of owners each of which drains, admits, retires and reads
// from inside of each of its calls.
func nest(t *testing.T, n int, prepare func(i int, o *owner)) (*retirequeue.Queue, []*owner) {
	var q *retirequeue.Queue
	var owners []*owner
	looks := 0
	within := func(call string) {
		if looks++; looks > 100*n*n {
			t.Fatal("drains in each other do not end")
		}
		if retirequeue.Locked(q) {
			t.Fatalf("a lock is held over %s", call)
		}
		if err := broken(q.Stats(), 2*n, 0); err != nil {
			t.Errorf("inside of %s: %v", call, err)
		}
		q.Drain()
		o := &owner{}
		if err := q.Admit(&o.ticket, 1); err == nil {
			o.ticket.Retire(o)
		}
	}
	q = retirequeue.New(retirequeue.Limits{Slots: 2 * n, Freed: func() { within("Freed") }})
	for i := range n {
		o := &owner{in: within}
		prepare(i, o)
		admit(t, q, o, 1)
		owners = append(owners, o)
	}
	for _, o := range owners {
		o.ticket.Retire(o)
	}
	return q, owners
}

func TestOwnersCallBack(t *testing.T) {
	const n = 12
	cause := errors.New("lost")
	for name, c := range map[string]struct {
		prepare func(i int, o *owner)
		calls   string
	}{
		"released": {func(_ int, o *owner) { o.done.Store(true) }, "1 looks, 1 releases, 0 kept"},
		"fails":    {func(_ int, o *owner) { o.fail = cause }, "1 looks, 0 releases, 1 kept"},
		"stuck":    {func(_ int, o *owner) { o.done.Store(true); o.stuck = cause }, "1 looks, 1 releases, 1 kept"},
	} {
		t.Run(name, func(t *testing.T) {
			q, owners := nest(t, n, c.prepare)
			q.Drain()
			for _, o := range owners {
				if got := o.calls(); got != c.calls {
					t.Errorf("%s, want %s", got, c.calls)
				}
			}
		})
	}
	t.Run("not yet", func(t *testing.T) {
		q, owners := nest(t, n, func(int, *owner) {})
		q.Drain()
		for _, o := range owners {
			if o.looks.Load() == 0 || o.released.Load() != 0 {
				t.Errorf("an entry whose fence is not done: %s", o.calls())
			}
		}
		if s := q.Stats(); s.Released != 0 || s.Permanent != 0 || q.Draining() {
			t.Errorf("%+v", s)
		}
	})
}

// A drain in the middle of another one finds what the other did not reach yet,
// in the middle of a call of any kind.
func TestDrainsDoNotHideWork(t *testing.T) {
	for _, call := range []string{"Done", "Release"} {
		q := retirequeue.New(retirequeue.Limits{Slots: 10})
		var inside, done sync.WaitGroup
		inside.Add(1)
		free := make(chan struct{})
		for i := range 10 {
			o := &owner{}
			o.done.Store(true)
			if i == 0 {
				o.in = func(c string) {
					if c == call {
						inside.Done()
						<-free
					}
				}
			}
			admit(t, q, o, 1)
			o.ticket.Retire(o)
		}
		first := 0
		done.Go(func() { first = q.Drain() })
		inside.Wait()
		if !q.Draining() {
			t.Errorf("%s: nobody drains", call)
		}
		if n := q.Drain(); n != 9 {
			t.Errorf("%s: a drain beside another one released %d of 9", call, n)
		}
		same(t, q, retirequeue.Stats{Entered: 10, Released: 9, Pending: 1, PendingBytes: 1})
		close(free)
		done.Wait()
		if first != 1 || q.Draining() {
			t.Errorf("%s: the first drain released %d", call, first)
		}
	}
}

// What an owner retires while it is released, another drain looks at: else a
// drain of owners that do so would never end.
func TestDrainEndsBeforeWhatCameInMeanwhile(t *testing.T) {
	q := retirequeue.New(retirequeue.Limits{Slots: 4})
	made := 0
	var retire func()
	retire = func() {
		if made++; made > 10 {
			t.Fatal("the drain does not end")
		}
		o := &owner{in: func(call string) {
			if call == "Release" {
				retire()
			}
		}}
		o.done.Store(true)
		admit(t, q, o, 1)
		o.ticket.Retire(o)
	}
	retire()
	for i := range 3 {
		if n := q.Drain(); n != 1 {
			t.Errorf("drain %d released %d", i, n)
		}
	}
	same(t, q, retirequeue.Stats{Entered: 4, Released: 3, Pending: 1, PendingBytes: 1})
}

// Freed comes once for each thing that came free, after it came free.
func TestFreedTells(t *testing.T) {
	var q *retirequeue.Queue
	var seen []retirequeue.Stats
	q = retirequeue.New(retirequeue.Limits{Slots: 1, Bytes: 8, Freed: func() {
		s := q.Stats()
		s.Cause = nil
		seen = append(seen, s)
		if retirequeue.Locked(q) {
			t.Error("a lock is held")
		}
	}})
	told := func(what string, want ...retirequeue.Stats) {
		t.Helper()
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		seen = nil
	}
	cause := errors.New("lost")
	var a, b, c, d owner
	b.done.Store(true)
	c.fail = cause

	admit(t, q, &a, 8)
	_ = q.Admit(&b.ticket, 1)
	a.ticket.Shrink(0)
	told("nothing came free")
	a.ticket.Shrink(5)
	told("Shrink", retirequeue.Stats{Reserved: 1, ReservedBytes: 3})
	a.ticket.Cancel()
	told("Cancel", retirequeue.Stats{})
	admit(t, q, &b, 2)
	b.ticket.Retire(&b)
	told("Retire")
	q.Drain()
	q.Drain()
	told("a release", retirequeue.Stats{Entered: 1, Released: 1})
	admit(t, q, &c, 3)
	c.ticket.Retire(&c)
	q.Drain()
	told("a fence failed", retirequeue.Stats{Entered: 2, Released: 1, Permanent: 1, PermanentBytes: 3})
	admit(t, q, &d, 4)
	d.ticket.Keep(&d, cause)
	told("Keep", retirequeue.Stats{Entered: 3, Released: 1, Permanent: 2, PermanentBytes: 7})
}

// lose makes owners that nobody else refers to, one released and the others
// kept, and lets go of them and of the queue.
//
//go:noinline
func lose(t *testing.T) (released weak.Pointer[owner], kept []weak.Pointer[owner]) {
	q := retirequeue.New(retirequeue.Limits{Slots: 4})
	cause := errors.New("lost")
	free, fails, stuck, keeps := &owner{}, &owner{fail: cause}, &owner{stuck: cause}, &owner{}
	for _, o := range []*owner{free, fails, stuck, keeps} {
		admit(t, q, o, 1)
		o.done.Store(true)
		if o == keeps {
			o.ticket.Keep(o, cause)
			continue
		}
		o.ticket.Retire(o)
	}
	q.Drain()
	return weak.Make(free), []weak.Pointer[owner]{weak.Make(fails), weak.Make(stuck), weak.Make(keeps)}
}

func TestKeptStaysReachable(t *testing.T) {
	released, kept := lose(t)
	runtime.GC()
	runtime.GC()
	if released.Value() != nil {
		t.Error("what was released is still reachable: the test proves nothing")
	}
	for i, p := range kept {
		if p.Value() == nil {
			t.Errorf("kept owner %d was collected", i)
		}
	}
}
