package publish

import (
	"cmp"
	"fmt"
	"maps"
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

// A made tells what was made, and by whom.
type made struct {
	what string
	pcs  [24]uintptr
	n    int
}

// stack returns the callers, but for those of this package that are innermost.
func (m *made) stack() string {
	var b strings.Builder
	frames := runtime.CallersFrames(m.pcs[:m.n])
	for more := m.n > 0; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if b.Len() == 0 && strings.HasPrefix(f.Function, "github.com/purecuda/purecuda/publish.") {
			continue
		}
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// An origin is one thing's.
type origin struct{ made }

// A fate is what became of things that were made alike.
type fate struct {
	made
	name string
}

// origins are those of a runtime: of what is open, and of what was not closed.
// A nil one keeps nothing.
type origins struct {
	mu    sync.Mutex
	open  map[*origin]bool
	fates map[fate]int
}

func newOrigins(stacks bool) *origins {
	if !stacks {
		return nil
	}
	return &origins{open: map[*origin]bool{}, fates: map[fate]int{}}
}

// born notes that a handle of that kind is handed out.
func (os *origins) born(what string) *origin {
	if os == nil {
		return nil
	}
	o := &origin{made{what: what}}
	o.n = runtime.Callers(2, o.pcs[:])
	os.mu.Lock()
	os.open[o] = true
	os.mu.Unlock()
	return o
}

// end notes that the caller has it no more; name is its fate, and empty where
// that is as it should be.
func (os *origins) end(o *origin, name string) {
	if o == nil {
		return
	}
	os.mu.Lock()
	if os.open[o] && name != "" {
		os.fates[fate{o.made, name}]++
	}
	delete(os.open, o)
	os.mu.Unlock()
}

// list returns all, those that are open first.
func (os *origins) list() []Origin {
	if os == nil {
		return nil
	}
	os.mu.Lock()
	fates := maps.Clone(os.fates)
	for o := range os.open {
		fates[fate{o.made, "open"}]++
	}
	os.mu.Unlock()
	var all []Origin
	for f, n := range fates { // the words take their time: outside the lock
		all = append(all, Origin{What: f.what, Fate: f.name, Count: n, Stack: f.stack()})
	}
	slices.SortFunc(all, func(a, b Origin) int {
		return cmp.Or(-cmp.Compare(a.Fate, b.Fate), cmp.Compare(a.What, b.What), cmp.Compare(a.Stack, b.Stack))
	})
	return all
}
