package publish

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// An Origin tells where things were made that have one fate. A runtime keeps
// origins with [Config].Stacks alone.
type Origin struct {
	What  string // session, value, publication, download or upload
	Fate  string // open, abandoned (it became garbage) or leaked
	Count int
	Stack string // where it was made: function and file:line of each caller
}

func (o Origin) String() string {
	return fmt.Sprintf("%d x %s, %s, made at\n%s", o.Count, o.What, o.Fate, o.Stack)
}

// An origin is one thing's.
type origin struct {
	what string
	pcs  [24]uintptr
	n    int
}

// stack returns the callers, but for those of this package that are innermost.
func (o *origin) stack() string {
	var b strings.Builder
	frames := runtime.CallersFrames(o.pcs[:o.n])
	for more := o.n > 0; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if b.Len() == 0 && strings.HasPrefix(f.Function, "github.com/purecuda/purecuda/publish.") {
			continue
		}
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// origins are those of a runtime: of what is open, and of what was not closed.
// A nil one keeps nothing.
type origins struct {
	mu   sync.Mutex
	open map[*origin]bool
	lost map[Origin]int // by origin with a count of 0
}

func newOrigins(stacks bool) *origins {
	if !stacks {
		return nil
	}
	return &origins{open: map[*origin]bool{}, lost: map[Origin]int{}}
}

// born notes that a handle of that kind is handed out.
func (os *origins) born(what string) *origin {
	if os == nil {
		return nil
	}
	o := &origin{what: what}
	o.n = runtime.Callers(2, o.pcs[:])
	os.mu.Lock()
	os.open[o] = true
	os.mu.Unlock()
	return o
}

// end notes that the caller has it no more; fate is empty where that is as it
// should be.
func (os *origins) end(o *origin, fate string) {
	if o == nil {
		return
	}
	os.mu.Lock()
	open := os.open[o]
	delete(os.open, o)
	if open && fate != "" {
		os.lost[Origin{What: o.what, Fate: fate, Stack: o.stack()}]++
	}
	os.mu.Unlock()
}

// list returns all, those that are open first.
func (os *origins) list() []Origin {
	if os == nil {
		return nil
	}
	os.mu.Lock()
	defer os.mu.Unlock()
	count := map[Origin]int{}
	for o := range os.open {
		count[Origin{What: o.what, Fate: "open", Stack: o.stack()}]++
	}
	for o, n := range os.lost {
		count[o] = n
	}
	var all []Origin
	for o, n := range count {
		o.Count = n
		all = append(all, o)
	}
	order := func(o Origin) string { return map[string]string{"open": "0"}[o.Fate] + o.Fate + o.What + o.Stack }
	slices.SortFunc(all, func(a, b Origin) int { return strings.Compare(order(a), order(b)) })
	return all
}
