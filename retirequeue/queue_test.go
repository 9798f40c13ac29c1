package retirequeue

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

type owner struct {
	done     atomic.Bool
	fail     error // of Done
	stuck    error // of Release
	looks    atomic.Int32
	released atomic.Int32
	kept     atomic.Int32
}

func (o *owner) Done() (bool, error) { o.looks.Add(1); return o.done.Load(), o.fail }
func (o *owner) Release() error      { o.released.Add(1); return o.stuck }
func (o *owner) Kept(error)          { o.kept.Add(1) }

func conserve(t *testing.T, q *Queue) {
	t.Helper()
	s := q.Stats()
	if s.Entered != s.Released+s.Permanent+s.Pending {
		t.Fatalf("entered %d != released %d + permanent %d + pending %d", s.Entered, s.Released, s.Permanent, s.Pending)
	}
}

func TestDrainReleasesBehindTheFenceOnly(t *testing.T) {
	q := New(4)
	var a, b owner
	var ta, tb Ticket
	for _, tk := range []*Ticket{&ta, &tb} {
		if err := q.Admit(tk); err != nil {
			t.Fatal(err)
		}
	}
	ta.Retire(&a, 10)
	tb.Retire(&b, 5)
	conserve(t, q)
	if n := q.Drain(); n != 0 || a.released.Load() != 0 {
		t.Fatalf("drained %d with no fence done", n)
	}
	b.done.Store(true)
	if n := q.Drain(); n != 1 || b.released.Load() != 1 || a.released.Load() != 0 {
		t.Fatalf("drained %d, want the second alone", n)
	}
	conserve(t, q)
	want := Stats{Entered: 2, Released: 1, Pending: 1, PendingBytes: 10}
	if diff := cmp.Diff(want, q.Stats()); diff != "" {
		t.Fatal(diff)
	}
}

func TestFailuresGoToThePermanentSideAndAreNeverLookedAtAgain(t *testing.T) {
	cause, stuck := errors.New("lost"), errors.New("free failed")
	q := New(4)
	fails, sticks, kept := &owner{fail: cause}, &owner{stuck: stuck}, &owner{}
	sticks.done.Store(true)
	for _, o := range []*owner{fails, sticks} {
		tk := new(Ticket)
		if err := q.Admit(tk); err != nil {
			t.Fatal(err)
		}
		tk.Retire(o, 7)
	}
	tk := new(Ticket)
	if err := q.Admit(tk); err != nil {
		t.Fatal(err)
	}
	tk.Keep(kept, 3, cause)
	for range 3 {
		q.Drain()
		conserve(t, q)
	}
	want := Stats{Entered: 3, Permanent: 3, PermanentBytes: 17, Cause: cause}
	if diff := cmp.Diff(want, q.Stats(), cmpopts.EquateErrors()); diff != "" {
		t.Fatal(diff)
	}
	if fails.looks.Load() != 1 || fails.released.Load() != 0 || kept.looks.Load() != 0 || kept.released.Load() != 0 || sticks.released.Load() != 1 {
		t.Fatal("a permanent entry was looked at or released again")
	}
	for _, o := range []*owner{fails, sticks, kept} {
		if n := o.kept.Load(); n != 1 {
			t.Errorf("told %d times that it is kept", n)
		}
	}
}

func TestAdmissionIsBounded(t *testing.T) {
	q := New(2)
	var a, b, c Ticket
	if q.Admit(&a) != nil || q.Admit(&b) != nil {
		t.Fatal("refused below the bound")
	}
	if err := q.Admit(&c); !errors.Is(err, ErrFull) {
		t.Fatalf("third admission: %v", err)
	}
	var o owner
	a.Retire(&o, 1)
	if err := q.Admit(&c); !errors.Is(err, ErrFull) {
		t.Fatalf("a retired entry still takes its slot: %v", err)
	}
	o.done.Store(true)
	q.Drain()
	if err := q.Admit(&c); err != nil {
		t.Fatal(err)
	}
	b.Cancel()
	c.Cancel()
	if s := q.Stats(); s.Reserved != 0 {
		t.Fatalf("%d slots stay reserved", s.Reserved)
	}
	conserve(t, q)
}

func TestHammer(t *testing.T) {
	q := New(64)
	var wg sync.WaitGroup
	var released, cancelled, refused atomic.Int64
	for g := range 8 {
		wg.Go(func() {
			for i := range 2000 {
				tk := new(Ticket)
				if err := q.Admit(tk); err != nil {
					refused.Add(1)
					q.Drain()
					continue
				}
				if i%7 == 0 {
					tk.Cancel()
					cancelled.Add(1)
					continue
				}
				o := &owner{}
				o.done.Store(true)
				tk.Retire(o, int64(g))
				if i%5 == 0 {
					q.Drain()
				}
			}
		})
	}
	wg.Wait()
	for q.Drain() > 0 {
	}
	s := q.Stats()
	released.Store(int64(s.Released))
	conserve(t, q)
	if s.Pending != 0 || s.Reserved != 0 || released.Load()+cancelled.Load()+refused.Load() != 8*2000 {
		t.Fatalf("%+v, cancelled %d, refused %d", s, cancelled.Load(), refused.Load())
	}
}

// hook is an owner whose release drains, or admits, in the middle of a drain.
type hook struct {
	owner
	in func()
}

func (h *hook) Release() error { h.in(); return h.owner.Release() }

// A drain in the middle of another one finds what the other did not reach yet,
// and a full queue is not full for the slots that it frees.
func TestDrainsDoNotHideWork(t *testing.T) {
	q := New(10)
	first := &hook{}
	first.done.Store(true)
	first.in = func() {
		if n := q.Drain(); n != 9 {
			t.Errorf("a drain beside another one released %d of 9", n)
		}
		if err := q.Admit(new(Ticket)); err != nil {
			t.Error(err)
		}
		conserve(t, q)
	}
	for i := range 10 {
		tk := new(Ticket)
		if err := q.Admit(tk); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			tk.Retire(first, 1)
			continue
		}
		o := &owner{}
		o.done.Store(true)
		tk.Retire(o, 1)
	}
	if n := q.Drain(); n != 1 {
		t.Errorf("released %d", n)
	}
	conserve(t, q)
}
