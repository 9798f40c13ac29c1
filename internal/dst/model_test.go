package dst

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// The model: what an actor knows of its own things, and so what the library may
// answer.

type session struct {
	id     int
	s      *publish.Session
	rt     *runtimeOf
	lane   *lane
	closed bool
}

// A stage is which handle of a life is live.
type stage uint8

const (
	value stage = iota
	publication
	download
	upload
	over
)

func (s stage) String() string {
	return [...]string{"value", "publication", "download", "upload", "over"}[s]
}

// A life is a value, then its publication, then its download; or an upload.
type life struct {
	id    int
	rt    *runtimeOf
	lane  *lane
	stage stage
	v     *publish.Value
	p     *publish.Publication
	t     *publish.Transfer

	size   int
	data   []byte // what the device holds once all is done; nil: unknown
	moved  []byte // what the buffer of a transfer holds then
	buf    int    // its bytes
	needs  uint64 // launches of the lane that are before its publication, or its last use
	ready  bool   // its work was seen complete
	memory *foreign

	tainted bool // an operation that borrowed it is unproven
	waiting bool // a wait with it has begun
	busy    int  // calls that are in the midst of using it
	moving  bool // by one of them
	revoked bool // closed meanwhile
}

type buffer struct {
	id      int
	b       *pinned.Buffer
	dev     *device
	data    []byte
	shown   bool
	moving  bool
	revoked bool
	gone    bool
}

func (w *world) id() int { w.ids++; return w.ids }

// An outcome is how a call ended.
type outcome uint8

const (
	done outcome = iota
	rejected
	unproven
)

// A call is one call of the library as the model follows it.
type call struct {
	w        *world
	dev      *device
	rt       *runtimeOf
	op       string
	injected int
	nested   int
	failed   int     // enqueues of its kind that failed before
	enqueues *int    // these
	allow    []error // reasons of a refusal that are to be expected
	must     error   // it must be refused, for this if it is not nil
	late     bool    // it reports what failed before
	refused  bool    // it must be refused
}

func (w *world) call(rt *runtimeOf, op string) *call {
	w.guard.dev = rt.dev
	c := &call{w: w, dev: rt.dev, rt: rt, op: op, injected: w.guard.injected, nested: w.stats.nested}
	if id, ok := enqueueOf[op]; ok {
		c.enqueues = &w.guard.failed[w.guard.depth][id]
		c.failed = *c.enqueues
	}
	return c
}

// enqueueOf is the first call by which an operation enqueues: once it was made,
// there is no refusal any more.
var enqueueOf = map[string]cuapi.ID{
	"launch": cuapi.IDLaunchKernel, "upload": cuapi.IDMemcpyHtoDAsync, "download": cuapi.IDMemcpyDtoHAsync, "publish": cuapi.IDEventRecord,
}

// expect notes that the call must be refused when it holds, for that reason or
// another one that holds.
func (c *call) expect(holds bool, reason error) *call {
	if holds {
		c.refused, c.must = true, reason
		c.allow = append(c.allow, reason)
	}
	return c
}

// may notes a reason that a refusal may have.
func (c *call) may(holds bool, reasons ...error) *call {
	if holds {
		c.allow = append(c.allow, reasons...)
	}
	return c
}

// earlier notes that what it looks at may have failed before.
func (c *call) earlier() *call { c.late = true; return c }

func (c *call) faulted() bool {
	if c.late && c.rt.hurt {
		return true
	}
	return c.w.guard.injected > c.injected || c.dev.sticky
}

// end judges the result.
func (c *call) end(err error) (o outcome) {
	defer func() { c.w.stats.ends[o]++ }()
	w := c.w
	var un *publish.UnprovenError
	var re *publish.RejectedError
	switch {
	case err == nil:
		if c.refused && c.w.stats.nested == c.nested {
			w.fail("%s succeeded, and must be refused: %v", c.op, c.must)
		}
		w.log.add(entry{step: w.step, depth: w.guard.depth, what: "ok", name: c.op})
		return done
	case errors.As(err, &un):
		w.log.add(entry{step: w.step, depth: w.guard.depth, what: "unproven", name: c.op, err: err})
		if !c.faulted() {
			w.fail("%s is unproven, and nothing failed: %v", c.op, err)
		}
		return unproven
	}
	w.log.add(entry{step: w.step, depth: w.guard.depth, what: "refused", name: c.op, err: err})
	if !errors.As(err, &re) && !c.late && !strings.HasPrefix(c.op, "runtime") && !strings.HasPrefix(c.op, "session") {
		w.fail("%s: an error of no known kind: %v", c.op, err)
	}
	if c.enqueues != nil && *c.enqueues > c.failed {
		w.fail("%s was refused, and something may have been enqueued: %v", c.op, err)
	}
	if !c.plausible(err) {
		w.fail("%s was refused for no reason: %v; expected: %v", c.op, err, c.allow)
	}
	return rejected
}

// plausible tells whether there is a reason for such a refusal.
func (c *call) plausible(err error) bool {
	var de *driver.Error
	switch {
	case c.w.guard.injected > c.injected: // whatever it made of it
		return true
	case slices.ContainsFunc(c.allow, func(a error) bool { return a == errAny || errors.Is(err, a) }):
		return true
	case errors.Is(err, publish.ErrLost):
		return c.dev.sticky
	case errors.Is(err, publish.ErrQueueFull):
		return c.full(err)
	case errors.Is(err, publish.ErrStreamFull), errors.Is(err, publish.ErrContextFull):
		return true // promised only to end: see drained
	case errors.Is(err, driver.ErrOutOfMemory):
		return c.w.tight || c.w.guard.injected > 0
	case errors.Is(err, pinned.ErrLimit):
		return true
	}
	return c.dev.sticky && errors.As(err, &de)
}

// errAny stands for whatever reason.
var errAny = errors.New("any")

// full tells whether a runtime may refuse for want of slots or bytes.
func (c *call) full(err error) bool {
	if c.rt == nil {
		return false
	}
	if c.w.guard.depth > 0 || c.w.stats.nested > c.nested {
		return true // others let go meanwhile
	}
	q := c.rt.rt.Stats().Queue
	return errors.Is(err, publish.ErrTooLarge) && c.rt.cfg.Bytes > 0 || q.Reserved+q.Pending >= c.rt.cfg.Slots ||
		c.rt.cfg.Bytes > 0 && strings.Contains(err.Error(), "bytes are asked for")
}

// A ring keeps the last actions.
type ring struct {
	list [48]entry
	n    int
}

type entry struct {
	step, depth int
	what, name  string
	a, b        int
	err         error
}

func (r *ring) add(e entry) {
	r.list[r.n%len(r.list)] = e
	r.n++
}

func (r *ring) String() string {
	var b strings.Builder
	for i := max(0, r.n-len(r.list)); i < r.n; i++ {
		e := r.list[i%len(r.list)]
		fmt.Fprintf(&b, "  %6d %s%s %s", e.step, strings.Repeat("    ", e.depth), e.what, e.name)
		if e.a != 0 || e.b != 0 {
			fmt.Fprintf(&b, " %d", e.a)
		}
		if e.b != 0 {
			fmt.Fprintf(&b, " %d", e.b)
		}
		if e.err != nil {
			fmt.Fprintf(&b, ": %v", e.err)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// A failure is the first thing that went wrong in a world.
type failure struct {
	seed, index uint64
	step        int
	text, last  string
}

func (f *failure) Error() string {
	return fmt.Sprintf("world %d of seed %d, step %d: %s\nthe last actions:\n%sreplay: go test ./internal/dst -run TestReplay -args -seed %d -world %d",
		f.index, f.seed, f.step, f.text, f.last, f.seed, f.index)
}

// fail notes what went wrong, the first time. The world ends behind this action.
func (w *world) fail(format string, args ...any) {
	if w.found == nil {
		w.found = &failure{w.seed, w.index, w.step, fmt.Sprintf(format, args...), w.log.String()}
	}
}

// A stop ends a world at once.
type stop struct{}
