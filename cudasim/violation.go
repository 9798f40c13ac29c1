package cudasim

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A Kind names what a violation is about.
type Kind string

// The kinds of violation.
const (
	FreeInFlight   Kind = "free in flight"          // memory freed that a pending operation uses
	UseAfterFree   Kind = "use after free"          // an operation enqueued on freed memory
	UseBeforeAlloc Kind = "use before allocation"   // an operation not ordered behind the allocation of its memory
	DoubleFree     Kind = "double free"             // memory freed that is free already
	BadFree        Kind = "bad free"                // an address that no allocation starts at
	DeadHandle     Kind = "dead handle"             // a destroyed handle, or none at all
	WrongContext   Kind = "wrong context"           // handles of two contexts in one call
	FromCallback   Kind = "driver call in callback" // by a host function or a kernel
	Captured       Kind = "captured"                // a captured event queried, or a capturing stream synchronized
	Pageable       Kind = "pageable memory"         // an asynchronous copy from or to memory that is not pinned
	NoFunction     Kind = "no function"             // a kernel or host function that the test did not register
	Panicked       Kind = "panic"                   // a kernel or host function panicked
	WildAddress    Kind = "wild address"            // a kernel's argument that is no memory of its context
	Blocks         Kind = "blocks"                  // Config.NoBlock, and the call would block
	Race           Kind = "race"                    // copies or fills of the same bytes that nothing orders
	HostAccess     Kind = "host access in flight"   // to pinned memory that a pending copy has
	Misuse         Kind = "misuse"                  // anything else that a real driver may not survive
)

// A Violation is one misuse of the driver that a real one might not report.
type Violation struct {
	Kind Kind
	Call string // C name of the driver call that did it or that uncovered it
	Text string

	stack stack
	other stack
}

func (v Violation) Error() string { return fmt.Sprintf("%s: %s: %s", v.Kind, v.Call, v.Text) }

// Stack returns where the offending call was made, or where a kernel or host
// function panicked. What shows when a pending operation runs has the call that
// let it run.
func (v Violation) Stack() string { return v.stack.String() }

// Other returns where the other side of the violation was: the free before a
// use, or the enqueue of the operation that still uses freed memory. It is
// empty where there is none, and, unless Config.Stacks is set, where that
// operation ran already.
func (v Violation) Other() string { return v.other.String() }

// Violations returns what was recorded so far, oldest first.
func (s *Sim) Violations() []Violation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allViolations()
}

func (s *Sim) allViolations() []Violation {
	s.callbacks.mu.Lock()
	defer s.callbacks.mu.Unlock()
	return append(slices.Clone(s.violations), s.callbacks.seen...)
}

func (s *Sim) violate(k Kind, text string, other *stack) {
	s.violateAt(k, text, callers(), other)
}

// violateAt is violate for what happened at another place than the call. Where
// an operation that was pending did it, the other side is its enqueue.
func (s *Sim) violateAt(k Kind, text string, at stack, other *stack) {
	v := Violation{Kind: k, Call: cuapi.Entries[s.cur.id].Symbol(), Text: text, stack: at, other: s.cur.asked}
	if other != nil {
		v.other = *other
	}
	s.violations = append(s.violations, v)
	s.reason = string(k) + ": " + text
	if s.cfg.Report != nil {
		s.cfg.Report(v)
	}
}

// A stack is a call stack, cheap to take and formatted only when asked.
type stack []uintptr

// callers keeps enough frames to leave some to the code under test: the way from
// it through purecuda, a fault's wrapper and the simulator takes some twenty.
func callers() stack {
	var pc [maxFrames]uintptr
	return slices.Clone(pc[:runtime.Callers(2, pc[:])])
}

const maxFrames = 64

// enqueuers is callers for the many short-lived stacks of operations: they share
// memory.
func (s *Sim) enqueuers() stack {
	if len(s.frames) < maxFrames {
		s.frames = make([]uintptr, 16*maxFrames)
	}
	n := runtime.Callers(2, s.frames[:maxFrames])
	out := s.frames[:n:n]
	s.frames = s.frames[n:]
	return out
}

// String leaves out the frames of the simulator and of the table.
func (k stack) String() string {
	if len(k) == 0 {
		return ""
	}
	var b strings.Builder
	frames := runtime.CallersFrames(k)
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if strings.Contains(f.Function, "/cudasim.") && !strings.HasSuffix(f.File, "_test.go") ||
			strings.Contains(f.Function, "/internal/cuapi.") {
			continue
		}
		fmt.Fprintf(&b, "%s\n\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// tombstones remember where the last destroyed handles were destroyed.
type tombstones struct {
	where map[uintptr]stack
	order []uintptr
}

const maxTombstones = 4096

func (t *tombstones) add(h uintptr) {
	if t.where == nil {
		t.where = map[uintptr]stack{}
	}
	t.where[h] = callers()
	t.order = append(t.order, h)
	if len(t.order) >= 2*maxTombstones {
		for _, old := range t.order[:maxTombstones] {
			delete(t.where, old)
		}
		t.order = slices.Clone(t.order[maxTombstones:])
	}
}

// find looks a handle up, and records a violation when nothing lives there.
func find[H ~uintptr, T any](s *Sim, in map[H]T, h H, what string) (T, bool) {
	v, ok := in[h]
	if !ok {
		s.dead(uintptr(h), what)
	}
	return v, ok
}

func (s *Sim) dead(h uintptr, what string) {
	if k, ok := s.gone.where[h]; ok {
		s.violate(DeadHandle, fmt.Sprintf("%s %#x was destroyed", what, h), &k)
		return
	}
	text := "is not a handle of this driver"
	if h > 0x10000 && h <= s.lastID && h%0x10 == 0 {
		text = "was destroyed long ago, or is of another kind"
	}
	s.violate(DeadHandle, fmt.Sprintf("%s %#x %s", what, h, text), nil)
}

// A leftover is something that was never destroyed, and who made it.
type leftover struct {
	what string
	made stack
}

// A CloseError is what Close found.
type CloseError struct {
	Violations []Violation
	Left       []string // what is still alive, each with its creation stack
}

// shown is how many violations and leftovers the text of a CloseError has in full.
const shown = 5

// Error begins with a line that counts all and is bounded: the fields have the
// rest.
func (e *CloseError) Error() string {
	var b strings.Builder
	kinds := make([]string, len(e.Violations))
	for i, v := range e.Violations {
		kinds[i] = string(v.Kind)
	}
	things := make([]string, len(e.Left))
	for i, l := range e.Left {
		things[i], _, _ = strings.Cut(l, " 0x")
		things[i], _, _ = strings.Cut(things[i], " of ")
	}
	fmt.Fprintf(&b, "cudasim: %d violations%s, %d things left alive%s", len(e.Violations), counts(kinds), len(e.Left), counts(things))
	if len(e.Violations) == 0 && slices.Contains(things, "primary context") {
		b.WriteString("; a context is still retained: shut it down before Close")
	}
	for i, v := range e.Violations {
		if i == shown {
			fmt.Fprintf(&b, "\n... and %d violations more", len(e.Violations)-i)
			break
		}
		fmt.Fprintf(&b, "\n%s", v.full())
	}
	for i, l := range e.Left {
		if i == shown {
			fmt.Fprintf(&b, "\n... and %d things more", len(e.Left)-i)
			break
		}
		fmt.Fprintf(&b, "\nleft: %s", l)
	}
	return b.String()
}

// counts tells how often each word occurs, in order of occurrence.
func counts(words []string) string {
	var order []string
	n := map[string]int{}
	for _, w := range words {
		if n[w]++; n[w] == 1 {
			order = append(order, w)
		}
	}
	if len(order) == 0 {
		return ""
	}
	for i, w := range order {
		order[i] = fmt.Sprintf("%d %s", n[w], w)
	}
	return " (" + strings.Join(order, ", ") + ")"
}

// full returns a violation with the stacks of both sides.
func (v Violation) full() string {
	text := v.Error() + "\n" + indent(v.Stack())
	if o := v.Other(); o != "" {
		text += "  the other side:\n" + indent(o)
	}
	return text
}

func indent(s string) string {
	var b strings.Builder
	for l := range strings.Lines(s) {
		b.WriteString("    " + l)
	}
	return b.String()
}

// Close ends the simulated driver: callers that block return, later calls are
// answered with Deinitialized. It returns a *CloseError when there were
// violations or when anything is still alive. What belonged to a lost context
// does not count, since nothing can free it.
func (s *Sim) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.moved.Broadcast()
	e := &CloseError{Violations: s.allViolations()}
	left := append(s.lost, s.left(func(*context) bool { return true })...)
	for _, p := range sorted(s.pools) { // a pool belongs to its device, not to a context
		if p != p.dev.pool && p.dev.fault == cuapi.Success {
			left = append(left, leftover{fmt.Sprintf("memory pool %#x with %d bytes in use", p.h, p.used), p.made})
		}
	}
	for _, l := range left {
		e.Left = append(e.Left, l.what+"\n"+indent(l.made.String()))
	}
	if len(e.Violations)+len(e.Left) == 0 {
		return nil
	}
	s.found = e
	return e
}

// TB is what ForTest needs of a *testing.T, B or F.
type TB interface {
	Helper()
	Errorf(format string, args ...any)
	Cleanup(func())
}

// ForTest returns a simulated driver that is closed when the test ends, and fails
// the test with each violation, with the stacks of both sides, and each thing
// that was left alive, those made in one place together. Cleanups run last in,
// first out: so call it before what registers cleanups that use the driver.
//
// A test that holds streams or steps, and ends early, leaves work that a Shutdown
// in a cleanup waits for. Register another cleanup behind that one, so that it runs
// first: it calls SetStepped(false) and ReleaseAll. The context of testing.T.Context
// has ended by then: shut down with another.
func ForTest(t TB, cfg Config) *Sim {
	t.Helper()
	s := New(cfg)
	t.Cleanup(func() {
		t.Helper()
		s.Close()
		s.mu.Lock()
		e := s.found // also by a Close of the test's own, whose error it may have dropped
		s.found = nil
		s.mu.Unlock()
		if e == nil {
			return
		}
		for _, v := range e.Violations {
			t.Errorf("cudasim: %s", v.full())
		}
		for _, l := range grouped(e.Left) {
			t.Errorf("cudasim: left alive: %s", l)
		}
	})
	return s
}

// grouped joins what was made in one place: a pool of events is one thing to read.
func grouped(left []string) (out []string) {
	count := map[string]int{}
	for _, l := range left {
		_, where, _ := strings.Cut(l, "\n")
		count[where]++
	}
	for _, l := range left {
		what, where, _ := strings.Cut(l, "\n")
		switch n := count[where]; {
		case n > 1:
			out = append(out, fmt.Sprintf("%s, and %d more things made there:\n%s", what, n-1, where))
		case n == 1:
			out = append(out, l)
		}
		delete(count, where)
	}
	return out
}

// left lists what is alive in the contexts that match, in order of creation.
func (s *Sim) left(match func(*context) bool) (out []leftover) {
	add := func(ctx *context, made stack, format string, args ...any) {
		if match(ctx) && ctx.fault == 0 {
			out = append(out, leftover{fmt.Sprintf(format, args...), made})
		}
	}
	for _, c := range sorted(s.contexts) {
		add(c, c.made, "primary context of device %d, retained %d times", c.dev.ordinal, c.dev.retained)
	}
	for _, st := range sorted(s.streams) {
		if !st.legacy {
			add(st.ctx, st.made, "stream %#x with %d operations pending", st.h, st.pending())
		}
	}
	for _, e := range sorted(s.events) {
		add(e.ctx, e.made, "event %#x", e.h)
	}
	for _, m := range sorted(s.modules) {
		add(m.ctx, m.made, "module %#x", m.h)
	}
	for _, g := range sorted(s.graphs) {
		add(g.ctx, g.made, "graph %#x", g.h)
	}
	for _, b := range s.mem.blocks() {
		if !b.freed && b.module == nil {
			add(b.ctx, b.made, "%v", b)
		}
	}
	return out
}

func sorted[H ~uintptr, T any](m map[H]T) []T {
	out := make([]T, 0, len(m))
	for _, h := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[h])
	}
	return out
}

// A Call is one traced driver call.
type Call struct {
	ID       cuapi.ID
	Name     string // C name
	Args     []uint64
	Result   cuapi.Result
	Crossing int // the calls of one list share it; it grows
}

// StartTrace forgets the trace and records from here on.
func (s *Sim) StartTrace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracing, s.trace = true, nil
}

// StopTrace ends the recording; the trace stays readable.
func (s *Sim) StopTrace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracing = false
}

// Trace returns the calls recorded since StartTrace, in the order in which
// they began. A call that still blocks has the result 0.
func (s *Sim) Trace() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Call, len(s.trace))
	for i, c := range s.trace {
		out[i] = *c
	}
	return out
}
