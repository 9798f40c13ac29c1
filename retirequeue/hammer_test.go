package retirequeue_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/retirequeue"
)

const (
	hammerSlots = 64
	hammerBytes = 300
)

// hammer is one goroutine's part in TestHammer.
type hammer struct {
	t      *testing.T
	q      *retirequeue.Queue
	random *rand.Rand
	lost   error
	used   []*owner // admitted
	ended  []*owner // retired or kept
}

// read checks the invariants at this instant.
func (h *hammer) read() {
	if s := h.q.Stats(); broken(s, hammerSlots, hammerBytes) != nil {
		h.t.Errorf("%v: %+v", broken(s, hammerSlots, hammerBytes), s)
	}
}

// step does something, and reads.
func (h *hammer) step() {
	defer h.read()
	if len(h.used) == 0 || h.random.IntN(3) == 0 {
		o := &owner{}
		switch h.random.IntN(10) {
		case 0:
			o.fail = h.lost
		case 1:
			o.stuck = h.lost
		case 2:
			o.in = func(string) { h.read() }
		}
		if err := h.q.Admit(&o.ticket, int64(h.random.IntN(12))); err == nil {
			h.used = append(h.used, o)
			return
		}
		h.q.Drain()
	}
	if len(h.ended) > 0 {
		h.ended[h.random.IntN(len(h.ended))].done.Store(true)
	}
	if len(h.used) == 0 {
		return
	}
	i := h.random.IntN(len(h.used))
	o := h.used[i]
	switch what := h.random.IntN(12); what {
	case 0:
		if o.ticket.Grow(3) == nil {
			o.ticket.Shrink(2)
		}
		return
	case 1:
		o.ticket.Cancel()
	case 2:
		o.ticket.Keep(o, h.lost)
		h.ended = append(h.ended, o)
	default:
		o.done.Store(what < 6)
		o.ticket.Retire(o)
		h.ended = append(h.ended, o)
	}
	h.used = append(h.used[:i], h.used[i+1:]...)
}

func TestHammer(t *testing.T) {
	t.Cleanup(retirequeue.Forget)
	var frees atomic.Int64
	lost := errors.New("lost")
	q := retirequeue.New(retirequeue.Limits{Slots: hammerSlots, Bytes: hammerBytes, Freed: func() { frees.Add(1) }})
	var workers, readers sync.WaitGroup
	var over atomic.Bool
	hammers := make([]*hammer, 12)
	for i := range hammers {
		h := &hammer{t: t, q: q, random: rand.New(rand.NewPCG(3, uint64(i))), lost: lost}
		hammers[i] = h
		workers.Go(func() {
			for range 1500 {
				h.step()
			}
		})
	}
	for i := range 3 {
		h := &hammer{t: t, q: q}
		readers.Go(func() {
			for !over.Load() {
				if i == 0 {
					q.Drain()
				}
				h.read()
				runtime.Gosched()
			}
		})
	}
	workers.Wait()
	over.Store(true)
	readers.Wait()

	entered, released, keeps := 0, 0, 0
	for _, h := range hammers {
		for _, o := range h.used {
			o.ticket.Cancel()
		}
		for _, o := range h.ended {
			o.done.Store(true)
		}
		entered += len(h.ended)
	}
	q.Drain()
	for _, h := range hammers {
		for _, o := range h.ended {
			switch n := o.calls(); {
			case o.early.Load():
				t.Errorf("released before its fence: %s", n)
			case o.kept.Load() == 1 && o.cause == lost:
				keeps++
			case o.kept.Load() == 0 && o.released.Load() == 1:
				released++
			default:
				t.Errorf("neither released once nor kept once: %s", n)
			}
		}
	}
	s := q.Stats()
	same(t, q, retirequeue.Stats{Entered: entered, Released: released, Permanent: keeps, PermanentBytes: s.PermanentBytes, Cause: lost})
	if released == 0 || keeps == 0 || frees.Load() < int64(released+keeps) {
		t.Errorf("%d released, %d kept, %d times something came free", released, keeps, frees.Load())
	}
	h := hammers[0]
	h.read()
}

// ready is an owner whose fence is done.
type ready struct{ ticket retirequeue.Ticket }

func (*ready) Done() (bool, error) { return true, nil }
func (*ready) Release() error      { return nil }
func (*ready) Kept(error)          {}

// BenchmarkEntry is an entry's way through the queue, with nothing beside it.
func BenchmarkEntry(b *testing.B) {
	q := retirequeue.New(retirequeue.Limits{Slots: 1, Bytes: 1, Freed: func() {}})
	o := &ready{}
	b.ReportAllocs()
	for b.Loop() {
		through(b, q, o)
	}
}

func through(tb testing.TB, q *retirequeue.Queue, o *ready) {
	o.ticket = retirequeue.Ticket{}
	if err := q.Admit(&o.ticket, 1); err != nil {
		tb.Fatal(err)
	}
	o.ticket.Retire(o)
	if q.Drain() != 1 {
		tb.Fatal("not released")
	}
}

func TestEntriesAllocateNothing(t *testing.T) {
	q := retirequeue.New(retirequeue.Limits{Slots: 1, Bytes: 1, Freed: func() {}})
	o := &ready{}
	if n := testing.AllocsPerRun(100, func() { through(t, q, o) }); n != 0 {
		t.Errorf("an entry's way through the queue allocates %v times", n)
	}
}
