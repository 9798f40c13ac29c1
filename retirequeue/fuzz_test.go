package retirequeue_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/purecuda/purecuda/retirequeue"
)

// pair is a queue and the model of it, which are told the same.
type pair struct {
	tb      testing.TB
	q       *retirequeue.Queue
	m       model
	tickets []*retirequeue.Ticket
	log     []event // what the queue calls, as the model's log
}

func newPair(tb testing.TB, slots int, bound int64) *pair {
	p := &pair{tb: tb, m: model{slots: slots, bound: bound}}
	p.q = retirequeue.New(retirequeue.Limits{Slots: slots, Bytes: bound, Freed: func() { p.note("freed", -1, nil) }})
	return p
}

// note takes down a call by the queue, in the middle of which the invariants
// hold too.
func (p *pair) note(what string, id int, cause error) {
	p.log = append(p.log, event{what, id, cause})
	if retirequeue.Locked(p.q) {
		p.tb.Fatalf("a lock is held over %s of entry %d", what, id)
	}
	p.conserve(what)
}

func (p *pair) conserve(when string) {
	if s := p.q.Stats(); broken(s, p.m.slots, p.m.bound) != nil {
		p.tb.Fatalf("%s: %v: %+v", when, broken(s, p.m.slots, p.m.bound), s)
	}
}

// part is an owner. Its fate stands in the model.
type part struct {
	p  *pair
	id int
}

func (o *part) Done() (bool, error) {
	o.p.note("look", o.id, nil)
	f := o.p.m.entries[o.id].fate
	return f.done, f.fails
}

func (o *part) Release() error {
	o.p.note("release", o.id, nil)
	return o.p.m.entries[o.id].stuck
}

func (o *part) Kept(cause error) { o.p.note("kept", o.id, cause) }

// try runs an operation and says what came of it, in the model's words.
func (p *pair) try(f func() error) (what string) {
	defer func() {
		if r := recover(); r != nil {
			what = "panic"
			if text, ok := r.(string); !ok || !strings.HasPrefix(text, "retirequeue: ") {
				p.tb.Fatalf("panic without a clear text: %v", r)
			}
		}
	}()
	err := f()
	if err == nil {
		return ""
	}
	if !errors.Is(err, retirequeue.ErrFull) {
		p.tb.Fatalf("the error does not match ErrFull: %v", err)
	}
	for _, word := range []string{"never", "entries", "bytes"} {
		if strings.Contains(err.Error(), word) {
			return word
		}
	}
	return err.Error()
}

// agree fails the test where queue and model differ.
func (p *pair) agree(op string, got, want any) {
	p.tb.Helper()
	if retirequeue.Locked(p.q) {
		p.tb.Fatalf("%s leaves a lock held", op)
	}
	if got != want {
		p.tb.Fatalf("%s: %v, the model says %v", op, got, want)
	}
	p.conserve(op)
	if got, want := p.q.Stats(), p.m.stats(); got != want {
		p.tb.Fatalf("%s: counters (-model +queue):\n%s", op, cmp.Diff(want, got, cmpopts.EquateErrors()))
	}
	if p.q.Draining() {
		p.tb.Fatalf("%s: a drain goes on without end", op)
	}
	if !slices.Equal(p.log, p.m.log) {
		p.tb.Fatalf("%s: calls (-model +queue):\n%s", op, cmp.Diff(p.m.log, p.log, cmp.AllowUnexported(event{}), cmpopts.EquateErrors()))
	}
	p.log, p.m.log = p.log[:0], p.m.log[:0]
}

// reader takes a sequence of operations from bytes.
type reader struct{ data []byte }

func (r *reader) next() byte {
	if len(r.data) == 0 {
		return 0
	}
	b := r.data[0]
	r.data = r.data[1:]
	return b
}

// bytes are mostly small, and sometimes at an edge.
func (r *reader) bytes(bound int64) int64 {
	switch b := int64(r.next()); {
	case b < 200:
		return b % 16
	case b < 248:
		return []int64{bound, bound + 1, bound / 2, math.MaxInt64, math.MaxInt64/2 + 1, math.MaxInt64 - 3}[b%6]
	default:
		return []int64{-1, math.MinInt64}[b%2]
	}
}

// pick is mostly an entry in use, and sometimes one that is not.
func (r *reader) pick(p *pair) int {
	b := int(r.next())
	var used []int
	for id, e := range p.m.entries {
		if b >= 230 || e.state == "used" || e.state == "pending" {
			used = append(used, id)
		}
	}
	if len(used) == 0 {
		return b % len(p.m.entries)
	}
	return used[b%len(used)]
}

var (
	operations = []string{
		"admit", "admit", "admit", "admit", "grow", "grow", "shrink", "retire", "retire", "retire",
		"cancel", "keep", "complete", "complete", "complete", "fail", "stick", "drain", "drain", "limits", "again",
	}
	bounds = []int64{0, 1, 16, 40, 1000, math.MaxInt64 - 1, math.MaxInt64}
)

func (r *reader) pair(tb testing.TB) *pair {
	return newPair(tb, int(r.next()%9), bounds[int(r.next())%len(bounds)])
}

// play runs the operations that the bytes say on a queue and on its model, and
// returns how often each went well.
func play(tb testing.TB, data []byte) map[string]int {
	defer func() {
		if tb.Failed() {
			tb.Logf("the sequence is %x", data)
			return
		}
		retirequeue.Forget()
	}()
	r := &reader{data}
	p := r.pair(tb)
	did := map[string]int{}
	for step := 0; len(r.data) > 0; step++ {
		what := operations[int(r.next())%len(operations)]
		if len(p.m.entries) == 0 && what != "limits" {
			what = "admit"
		}
		id, n := len(p.m.entries), int64(0)
		switch what {
		case "limits":
			p = r.pair(tb)
			did[what]++
			continue
		case "admit":
			p.m.entries = append(p.m.entries, &entry{state: "new"})
			p.tickets = append(p.tickets, new(retirequeue.Ticket))
		case "drain":
			p.agree(fmt.Sprintf("step %d, drain", step), p.q.Drain(), p.m.drain())
			did[what]++
			continue
		default:
			id = r.pick(p)
		}
		if what == "admit" || what == "again" || what == "grow" || what == "shrink" {
			n = r.bytes(p.m.bound)
		}
		got, want := p.step(what, id, n, fmt.Errorf("cause %d", step))
		p.agree(fmt.Sprintf("step %d, %s of entry %d, %d bytes", step, what, id, n), got, want)
		if want == "" {
			did[what]++
		} else {
			did[what+" "+want]++
		}
	}
	return did
}

// step tells queue and model one operation on a ticket.
func (p *pair) step(what string, id int, n int64, cause error) (got, want string) {
	t, o, e := p.tickets[id], &part{p, id}, p.m.entries[id]
	run := func(f func()) string { return p.try(func() error { f(); return nil }) }
	switch what {
	case "admit", "again":
		return p.try(func() error { return p.q.Admit(t, n) }), p.m.admit(id, n)
	case "grow":
		return p.try(func() error { return t.Grow(n) }), p.m.grow(id, n)
	case "shrink":
		return run(func() { t.Shrink(n) }), p.m.shrink(id, n)
	case "cancel":
		return run(t.Cancel), p.m.cancel(id)
	case "retire":
		return run(func() { t.Retire(o) }), p.m.retire(id)
	case "keep":
		return run(func() { t.Keep(o, cause) }), p.m.keep(id, cause)
	case "complete":
		e.done = true
	case "fail":
		e.fails = cause
	case "stick":
		e.stuck = cause
	}
	return "", ""
}

// script makes the bytes of a sequence: two of limits, then operations by name,
// each with its arguments.
func script(slots, bound byte, ops ...any) []byte {
	data := []byte{slots, bound}
	for _, op := range ops {
		switch op := op.(type) {
		case string:
			data = append(data, byte(slices.Index(operations, op)))
		case int:
			data = append(data, byte(op))
		}
	}
	return data
}

// seeds are sequences that reach what chance reaches seldom.
func seeds() [][]byte {
	return [][]byte{
		// Retired, looked at, completed, released.
		script(4, 3, "admit", 5, "admit", 6, "retire", 0, "retire", 1, "drain", "complete", 1, "drain", "complete", 0, "drain", "drain"),
		// A fence fails, a release fails, one is kept at once; then all is looked at again.
		script(4, 3, "admit", 5, "admit", 6, "admit", 7, "retire", 0, "retire", 1, "fail", 0, "stick", 1, "complete", 1, "drain", "keep", 0, "drain"),
		// The slots are full, also with what is retired, and come free.
		script(2, 0, "admit", 1, "admit", 1, "admit", 1, "retire", 0, "admit", 1, "complete", 0, "drain", "admit", 1, "cancel", 0, "admit", 1),
		// The bytes are full, shrink, grow, and grow past the bound.
		script(8, 2, "admit", 15, "grow", 0, 2, "grow", 0, 1, "admit", 1, "shrink", 0, 4, "admit", 4, "grow", 1, 1, "shrink", 1, 9),
		// Sums that overflow, with a bound and without.
		script(8, 0, "admit", 5, "admit", 243, "grow", 0, 243, "admit", 244, "admit", 244, "keep", 1, "admit", 244, "keep", 1),
		script(8, 6, "admit", 243, "admit", 1, "grow", 0, 1, "shrink", 0, 3, "admit", 3, "retire", 0, "admit", 1),
		// Misuse: used up twice, admitted twice, negative.
		script(4, 3, "admit", 5, "retire", 0, "retire", 230, "cancel", 230, "grow", 230, 1, "again", 230, 1, "admit", 248, "admit", 249),
		script(4, 3, "admit", 5, "cancel", 0, "cancel", 0, "again", 0, 3, "shrink", 0, 248, "grow", 0, 249, "keep", 0, "keep", 230),
	}
}

func FuzzQueue(f *testing.F) {
	for _, seed := range seeds() {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) { play(t, data[:min(len(data), 600)]) })
}

// All kinds of outcomes come up, so that the sequences test what they seem to.
func TestRandomSequences(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	did := map[string]int{}
	for range 3000 {
		data := make([]byte, 20+random.IntN(130))
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		for what, n := range play(t, data) {
			did[what] += n
		}
	}
	for _, what := range []string{
		"admit", "admit never", "admit bytes", "admit entries", "admit panic", "again", "again panic",
		"grow", "grow never", "grow bytes", "grow panic", "shrink", "shrink panic", "cancel", "cancel panic",
		"retire", "retire panic", "keep", "keep panic", "complete", "fail", "stick", "drain", "limits",
	} {
		if did[what] < 20 {
			t.Errorf("%q came up %d times", what, did[what])
		}
	}
}
