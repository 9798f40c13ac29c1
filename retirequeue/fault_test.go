package retirequeue_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/retirequeue"
)

// Every release fails, and all is closed: one by one, by drains beside each
// other, and by Keep. Nothing panics or hangs, and each cause is told once.
func TestFault01ReleasesFailEverywhere(t *testing.T) {
	const n = 60
	q := retirequeue.New(retirequeue.Limits{Slots: n, Bytes: n})
	var owners []*owner
	for i := range n {
		o := &owner{stuck: fmt.Errorf("release %d failed", i)}
		o.done.Store(true)
		admit(t, q, o, 1)
		owners = append(owners, o)
	}
	for i, o := range owners {
		if i%3 == 2 {
			o.ticket.Keep(o, o.stuck)
			continue
		}
		o.ticket.Retire(o)
		if i == 0 && q.Drain() != 0 {
			t.Error("a failed release counts as released")
		}
	}
	var drains sync.WaitGroup
	for range 8 {
		drains.Go(func() {
			if n := q.Drain(); n != 0 {
				t.Errorf("%d failed releases count as released", n)
			}
		})
	}
	drains.Wait()
	q.Drain()
	same(t, q, retirequeue.Stats{Entered: n, Permanent: n, PermanentBytes: n, Cause: owners[0].stuck})
	for i, o := range owners {
		want := "1 looks, 1 releases, 1 kept"
		if i%3 == 2 {
			want = "0 looks, 0 releases, 1 kept"
		}
		if got := o.calls(); got != want || o.cause != o.stuck {
			t.Errorf("owner %d: %s for %v, want %s for %v", i, got, o.cause, want, o.stuck)
		}
	}
	for range n { // what is kept takes nothing of the bounds
		admit(t, q, &owner{}, 1)
	}
}

// A fence that fails is not one that is not done yet.
func TestFault02FenceFails(t *testing.T) {
	for _, done := range []bool{false, true} {
		q := retirequeue.New(retirequeue.Limits{Slots: 3})
		lost, later := errors.New("lost"), errors.New("lost later")
		before, o, after := &owner{}, &owner{}, &owner{}
		for _, o := range []*owner{before, o, after} {
			admit(t, q, o, 7)
			o.ticket.Retire(o)
		}
		q.Drain()
		same(t, q, retirequeue.Stats{Entered: 3, Pending: 3, PendingBytes: 21})
		o.fail = lost
		o.done.Store(done)
		if n := q.Drain(); n != 0 {
			t.Errorf("drained %d", n)
		}
		want := retirequeue.Stats{Entered: 3, Pending: 2, PendingBytes: 14, Permanent: 1, PermanentBytes: 7, Cause: lost}
		same(t, q, want)
		// Now it would be done, or fail otherwise. Nobody asks.
		o.fail = later
		for range 3 {
			q.Drain()
		}
		o.fail = nil
		o.done.Store(true)
		q.Drain()
		same(t, q, want)
		if got := o.calls(); got != "2 looks, 0 releases, 1 kept" || o.cause != lost {
			t.Errorf("done %v: %s, for %v", done, got, o.cause)
		}
		if got := after.calls(); got != before.calls() || got != "6 looks, 0 releases, 0 kept" {
			t.Errorf("the entry behind it: %s", got)
		}
	}
}

// Fences complete in any order, and each drain releases what is done and
// nothing else.
func TestFault17ReleasedOnlyBehindTheFence(t *testing.T) {
	const n = 100
	random := rand.New(rand.NewPCG(17, 17))
	q := retirequeue.New(retirequeue.Limits{Slots: n})
	var owners []*owner
	for range n {
		o := &owner{}
		admit(t, q, o, 1)
		o.ticket.Retire(o)
		owners = append(owners, o)
	}
	if n := q.Drain(); n != 0 {
		t.Fatalf("released %d with no fence done", n)
	}
	for order := random.Perm(n); len(order) > 0; {
		step := min(len(order), 1+random.IntN(5))
		for _, i := range order[:step] {
			owners[i].done.Store(true)
		}
		order = order[step:]
		if n := q.Drain(); n != step {
			t.Fatalf("released %d, %d fences were done", n, step)
		}
		for i, o := range owners {
			if o.early.Load() || (o.released.Load() == 1) != o.done.Load() {
				t.Fatalf("entry %d, done %v: %s", i, o.done.Load(), o.calls())
			}
		}
	}
	same(t, q, retirequeue.Stats{Entered: n, Released: n})
}

// Many drains at once release each entry once, and leave none behind. The first
// owners hold their drains inside of the release until so many drains are there
// that a queue which lets one drain at a time would never get on.
func TestFault19DrainsOnManyGoroutines(t *testing.T) {
	const drains, n = 64, 500
	q := retirequeue.New(retirequeue.Limits{Slots: n, Bytes: n})
	var inside sync.WaitGroup
	inside.Add(drains)
	var owners []*owner
	for i := range n {
		o := &owner{}
		o.done.Store(true)
		if i < drains {
			o.in = func(call string) {
				if call == "Release" {
					inside.Done()
					inside.Wait()
				}
			}
		}
		admit(t, q, o, 1)
		o.ticket.Retire(o)
		owners = append(owners, o)
	}
	var sum atomic.Int64
	var all sync.WaitGroup
	for range drains {
		all.Go(func() {
			sum.Add(int64(q.Drain()))
			if err := broken(q.Stats(), n, n); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	same(t, q, retirequeue.Stats{Entered: n, Released: n})
	if sum.Load() != n {
		t.Errorf("the drains say that they released %d of %d", sum.Load(), n)
	}
	for i, o := range owners {
		if got := o.calls(); got != "1 looks, 1 releases, 0 kept" {
			t.Errorf("entry %d: %s", i, got)
		}
	}
}
