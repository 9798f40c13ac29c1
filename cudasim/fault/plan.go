package fault

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// A Plan says which calls fail, wait or lose the context. The zero Plan does
// nothing. Plans are values: none changes after it was made.
type Plan struct {
	chains [][]Rule
}

// Rules returns a plan of independent rules: of those that match a call the
// first one wins.
func Rules(rules ...Rule) Plan {
	var p Plan
	for _, r := range rules {
		p.chains = append(p.chains, []Rule{r})
	}
	return p
}

// Sequence returns a plan of rules that follow each other: each begins to count
// when the one before it is through. All but the last need a range that ends:
// Arm refuses others.
func Sequence(rules ...Rule) Plan {
	if len(rules) == 0 {
		return Plan{}
	}
	return Plan{chains: [][]Rule{slices.Clone(rules)}}
}

// FirstOf returns a plan that asks each plan for every call: of those that
// match it the first one wins.
func FirstOf(plans ...Plan) Plan {
	var p Plan
	for _, q := range plans {
		p.chains = append(p.chains, q.chains...)
	}
	return p
}

type verb uint8

const (
	fail verb = iota
	delay
	lose
)

var verbs = [...]string{fail: "fail", delay: "delay", lose: "lose"}

// A Rule is one thing that goes wrong. The methods return changed copies.
type Rule struct {
	verb    verb
	cond    Cond
	bounded bool // to nth; else every call that matches
	nth     span // among the calls that match
	code    driver.Result
	after   bool
	gate    string
}

// Fail returns the rule that every call that matches returns code and has no
// effect.
func Fail(c Cond, code driver.Result) Rule { return Rule{verb: fail, cond: c, code: code} }

// Lose returns the rule that the first call that matches loses the context: it
// and all later calls that touch a context return code, which must be one that
// is [driver.Result.Sticky].
func Lose(c Cond, code driver.Result) Rule { return Rule{verb: lose, cond: c, code: code} }

// Delay returns the rule that every call that matches waits until the test
// opens the gate, see [Injector.Gate], and then goes on. A gate's name is a
// word of letters, digits and underscores, and none of the grammar.
func Delay(c Cond, gate string) Rule { return Rule{verb: delay, cond: c, gate: gate} }

// Nth bounds the rule to the n-th call that matches, from 1.
func (r Rule) Nth(n int) Rule { return r.Range(n, n) }

// Range bounds the rule to the calls that match from the first-th to the
// last-th, from 1.
func (r Rule) Range(first, last int) Rule { r.bounded, r.nth = true, span{first, last}; return r }

// From bounds the rule to the n-th call that matches and all that follow.
func (r Rule) From(n int) Rule { return r.Range(n, open) }

// After lets the call have its effect: it is made, and its result replaced. A
// delay then waits behind the call.
func (r Rule) After() Rule { r.after = true; return r }

// At lets the call wait at a gate first, see [Delay].
func (r Rule) At(gate string) Rule { r.gate = gate; return r }

type op uint8

const (
	opAny op = iota
	opName
	opCall
	opAnd
	opOr
	opNot
	opFunc
)

// A Cond matches driver calls. The zero Cond matches each.
type Cond struct {
	op   op
	name string // of opName and opFunc
	span span   // of opCall
	sub  []Cond // of opAnd, opOr and opNot
	f    func(name string, position int) bool
	ids  *[cuapi.NumEntries]bool // of opName; nil: no such entry point
}

// Any returns the condition that every call matches.
func Any() Cond { return Cond{} }

// Name returns the condition that the calls of these entry points match, by
// their names in C: "cuMemcpyDtoHAsync" means each of its versions,
// "cuMemcpyDtoHAsync_v2" that one. Arm refuses a name that purecuda does not
// know, and none at all.
func Name(names ...string) Cond {
	sub := make([]Cond, len(names))
	for i, n := range names {
		sub[i] = Cond{op: opName, name: n, ids: entryPoints()[n]}
	}
	return Or(sub...)
}

// Call returns the condition that the n-th of all calls since Arm matches, from
// 1.
func Call(n int) Cond { return Calls(n, n) }

// Calls returns the condition that the calls since Arm match from the first-th
// to the last-th, from 1.
func Calls(first, last int) Cond { return Cond{op: opCall, span: span{first, last}} }

// CallsFrom returns the condition that the n-th of all calls since Arm and all
// that follow match.
func CallsFrom(n int) Cond { return Calls(n, open) }

// And returns the condition that all of them match. Arm refuses none at all.
func And(conds ...Cond) Cond { return join(opAnd, conds) }

// Or returns the condition that one of them matches. Arm refuses none at all.
func Or(conds ...Cond) Cond { return join(opOr, conds) }

// Not returns the condition that what c does not match matches.
func Not(c Cond) Cond { return Cond{op: opNot, sub: []Cond{c}} }

// Func returns the condition that f decides: by a call's versioned name in C
// and its position among all calls since Arm, from 1. It prints as its label,
// a word; [Parse] refuses it. f is called by one goroutine at a time, under the
// Injector's lock: it must call neither the driver nor the Injector.
func Func(label string, f func(name string, position int) bool) Cond {
	return Cond{op: opFunc, name: label, f: f}
}

// join flattens, so that what prints alike is alike.
func join(o op, conds []Cond) Cond {
	c := Cond{op: o}
	for _, s := range conds {
		if s.op == o {
			c.sub = append(c.sub, s.sub...)
		} else {
			c.sub = append(c.sub, s)
		}
	}
	if len(c.sub) == 1 {
		return c.sub[0]
	}
	return c
}

// matches tells whether the call does. It asks every Func beneath, whatever
// the others say.
func (c Cond) matches(id cuapi.ID, position int) bool {
	switch c.op {
	case opName:
		return c.ids[id]
	case opCall:
		return c.span.has(position)
	case opNot:
		return !c.sub[0].matches(id, position)
	case opFunc:
		return c.f(cuapi.Entries[id].Symbol(), position)
	case opAnd, opOr:
		n := 0
		for _, s := range c.sub {
			if s.matches(id, position) {
				n++
			}
		}
		return n == len(c.sub) || c.op == opOr && n > 0
	}
	return true
}

// entryPoints are the entry points that a name means: by its versioned names,
// and by those without their version.
var entryPoints = sync.OnceValue(func() map[string]*[cuapi.NumEntries]bool {
	m := map[string]*[cuapi.NumEntries]bool{}
	add := func(name string, id cuapi.ID) {
		if m[name] == nil {
			m[name] = new([cuapi.NumEntries]bool)
		}
		m[name][id] = true
	}
	for _, e := range cuapi.Entries {
		for _, s := range e.Symbols {
			add(s.Name, e.ID)
			if i := strings.LastIndex(s.Name, "_v"); i > 0 {
				add(s.Name[:i], e.ID)
			}
		}
	}
	return m
})

// A span is a range of numbers from 1.
type span struct{ first, last int }

// open is the last number of a span without an end.
const open = math.MaxInt

func (s span) has(n int) bool { return s.first <= n && n <= s.last }

func (s span) String() string {
	switch s.last {
	case s.first:
		return strconv.Itoa(s.first)
	case open:
		return strconv.Itoa(s.first) + ".."
	}
	return fmt.Sprintf("%d..%d", s.first, s.last)
}

func (s span) check() error {
	if s.first < 1 || s.last < s.first || s.first > maxNumber || s.last != open && s.last > maxNumber {
		return fmt.Errorf("the range %d..%d is none: ranges count from 1", s.first, s.last)
	}
	return nil
}

const (
	maxNumber = 1e9
	maxCode   = 0xffff
	maxDepth  = 32 // of conditions
)

// check tells what is wrong with a plan that Parse would refuse, or that
// nothing could come of.
func (p Plan) check() error {
	for _, chain := range p.chains {
		for i, r := range chain {
			if err := r.check(); err != nil {
				return fmt.Errorf("fault: %q: %w", r.String(), err)
			}
			if i < len(chain)-1 && (!r.bounded || r.nth.last == open) {
				return fmt.Errorf("fault: %q: it never ends, so that what follows never begins: give it a range, as #1", r.String())
			}
		}
	}
	return nil
}

func (r Rule) check() error {
	if r.bounded {
		if err := r.nth.check(); err != nil {
			return err
		}
	}
	switch {
	case r.verb == delay && r.code != 0:
		return fmt.Errorf("a delay has no code")
	case r.verb != delay && (r.code < 1 || r.code > maxCode):
		return fmt.Errorf("%d is no code of a failure", int(r.code))
	case r.verb == lose && !r.code.Sticky():
		return fmt.Errorf("%v loses no context", r.code)
	case (r.verb == delay || r.gate != "") && !isWord(r.gate):
		return fmt.Errorf("%q is no name of a gate", r.gate)
	}
	return r.cond.check(1)
}

func (c Cond) check(depth int) error {
	switch {
	case depth > maxDepth:
		return fmt.Errorf("conditions in conditions, more than %d deep", maxDepth)
	case c.op == opName && c.ids == nil:
		return fmt.Errorf("purecuda knows no entry point %q", c.name)
	case c.op == opName && c.tellsErrors():
		return fmt.Errorf("%s is never injected: it only tells about errors", c.name)
	case c.op == opFunc && (c.f == nil || !isWord(c.name)):
		return fmt.Errorf("a condition needs a Go function and a word to print, not %q", c.name)
	case c.op == opCall:
		return c.span.check()
	case (c.op == opAnd || c.op == opOr) && len(c.sub) == 0:
		return fmt.Errorf("a condition of no conditions")
	}
	for _, s := range c.sub {
		if err := s.check(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

func (c Cond) tellsErrors() bool {
	return c.ids[cuapi.IDGetErrorName] || c.ids[cuapi.IDGetErrorString]
}

// words are those of the grammar: no gate and no label may be one.
var words = []string{
	"fail", "lose", "delay", "any", "call", "func", "not", "and", "or", "with", "after", "before", "at", "then", "nothing",
}

func isWord(s string) bool {
	if s == "" || len(s) > 100 || '0' <= s[0] && s[0] <= '9' || slices.Contains(words, s) {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return !inWord(r) }) < 0
}

func inWord(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '_'
}
