package publish_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/publish"
)

// A buffer that is closed while it is moved is the pool's again if the move is
// refused, and the transfer's if it goes on. Meanwhile nobody reaches it.
func TestStatesOfABufferInAMove(t *testing.T) {
	type move struct {
		name    string
		prepare func(e *env)
		do      func(e *env) (*publish.Transfer, error)
	}
	for _, m := range []move{
		{"DownloadInto", (*env).publish, func(e *env) (*publish.Transfer, error) { return e.p.DownloadInto(e.out) }},
		{"Upload", func(e *env) { copy(e.out.Bytes(), e.data) }, func(e *env) (*publish.Transfer, error) { return e.s.Upload(e.v, e.out) }},
	} {
		for _, c := range []struct {
			name  string
			code  cuapi.Result // refuses the move
			close bool
			left  int   // buffers that the pool has back
			err   error // of the buffer, at the end
		}{
			{"moving", 0, false, 0, own.ErrMoved},
			{"moving,refused", cuapi.InvalidValue, false, 0, nil},
			{"revoked", 0, true, 0, own.ErrMoved},
			{"revoked,refused", cuapi.InvalidValue, true, 1, own.ErrClosed},
		} {
			t.Run(fmt.Sprintf("buffer/%s/%s", c.name, m.name), func(t *testing.T) {
				e := newEnv(t)
				m.prepare(e)
				before := e.rt.Stats().Pinned.InUse
				var err error
				inside(e, asks, c.code, func() { e.tr, err = m.do(e) }, func() {
					if e.out.Bytes() != nil || e.out.Err() != nil {
						t.Errorf("reachable while it is moved: %v", e.out.Err())
					}
					if c.close {
						must(t, e.out.Close())
					}
					if e.rt.Stats().Pinned.InUse != before {
						t.Error("the pool has it while it is moved")
					}
				})
				if (err != nil) != (c.code != 0) || !errors.Is(e.out.Err(), c.err) || e.rt.Stats().Pinned.InUse != before-c.left {
					t.Errorf("%v, then %v: %+v", err, e.out.Err(), e.rt.Stats().Pinned)
				}
				e.finish()
			})
		}
	}
}

// things are what methods are called on at once: three lives on one stream.
type things struct {
	e  *env
	rt *publish.Runtime
	s  *publish.Session
	v  *publish.Value
	p  *publish.Publication
	tr *publish.Transfer

	mu    sync.Mutex
	owned []interface{ Close() error } // what calls handed out
	moved map[string]int               // how often each handle was moved
}

func (x *things) own(h interface{ Close() error }) {
	x.mu.Lock()
	x.owned = append(x.owned, h)
	x.mu.Unlock()
}

func (x *things) moves(what string, err error) {
	if err == nil {
		x.mu.Lock()
		x.moved[what]++
		x.mu.Unlock()
	}
}

// An op is a call of one method. Its rows are those whose words its outcome may
// be: the first thing that refuses does.
type op struct {
	name string
	rows string
	do   func(x *things, ctx context.Context) error
}

var ops = []op{
	{"Value.Err", "value/Err", func(x *things, _ context.Context) error { return x.v.Err() }},
	{"Value.Close", "value/Close", func(x *things, _ context.Context) error { return x.v.Close() }},
	{"Value.Leak", "value/Leak", func(x *things, _ context.Context) error { x.v.Leak(); return nil }},
	{"Publication.Err", "publication/Err", func(x *things, _ context.Context) error { return x.p.Err() }},
	{"Publication.FrontierReady", "publication/FrontierReady", func(x *things, _ context.Context) error { _, err := x.p.FrontierReady(); return err }},
	{"Publication.AwaitFrontier", "publication/AwaitFrontier", func(x *things, ctx context.Context) error { return x.p.AwaitFrontier(ctx) }},
	{"Publication.Done", "publication/Done", func(x *things, _ context.Context) error { x.p.Done(); return nil }},
	{"Publication.DownloadInto", "publication/Download", func(x *things, _ context.Context) error {
		b, err := x.e.rt.Pinned(64)
		if err != nil {
			return err
		}
		x.own(b)
		tr, err := x.p.DownloadInto(b)
		x.own(tr)
		x.moves("publication", err)
		return err
	}},
	{"Publication.Close", "publication/Close", func(x *things, _ context.Context) error { return x.p.Close() }},
	{"Publication.Leak", "publication/Leak", func(x *things, _ context.Context) error { x.p.Leak(); return nil }},
	{"Transfer.Err", "transfer/Err", func(x *things, _ context.Context) error { return x.tr.Err() }},
	{"Transfer.Ready", "transfer/Ready", func(x *things, _ context.Context) error { _, err := x.tr.Ready(); return err }},
	{"Transfer.Wait", "transfer/Wait", func(x *things, ctx context.Context) error {
		b, err := x.tr.Wait(ctx)
		x.own(b)
		x.moves("transfer", err)
		return err
	}},
	{"Transfer.Done", "transfer/Done", func(x *things, _ context.Context) error { x.tr.Done(); return nil }},
	{"Transfer.Close", "transfer/Close", func(x *things, _ context.Context) error { return x.tr.Close() }},
	{"Transfer.Leak", "transfer/Leak", func(x *things, _ context.Context) error { x.tr.Leak(); return nil }},
	{"Session.Alloc", "session/Enqueue", func(x *things, _ context.Context) error {
		v, err := x.s.Alloc(publish.U8, 8)
		x.own(v)
		return err
	}},
	{"Session.Launch", "session/Enqueue value/Use", func(x *things, _ context.Context) error { return x.e.nothingIn(x.s, x.v) }},
	{"Session.Upload", "session/Enqueue value/Use", func(x *things, _ context.Context) error {
		b, err := x.e.rt.Pinned(64)
		if err != nil {
			return err
		}
		x.own(b)
		tr, err := x.s.Upload(x.v, b)
		x.own(tr)
		return err
	}},
	{"Session.Submit", "session/Enqueue", func(x *things, _ context.Context) error { return x.s.Submit() }},
	{"Session.Synchronize", "session/Enqueue", func(x *things, ctx context.Context) error { return x.s.Synchronize(ctx) }},
	{"Session.Raw", "session/Enqueue", func(x *things, _ context.Context) error { _, err := x.s.Raw(); return err }},
	{"Session.Publish", "session/Publish value/Publish", func(x *things, _ context.Context) error {
		p, err := x.s.Publish(x.v)
		x.own(p)
		x.moves("value", err)
		return err
	}},
	{"Session.Close", "session/Close", func(x *things, _ context.Context) error { return x.s.Close() }},
	{"Runtime.OpenSession", "runtime/Begin", func(x *things, _ context.Context) error {
		s, err := x.rt.OpenSession(nil)
		x.own(s)
		return err
	}},
	{"Runtime.Pinned", "runtime/Begin", func(x *things, _ context.Context) error {
		b, err := x.rt.Pinned(1 << 13)
		x.own(b)
		return err
	}},
	{"Runtime.Drain", "", func(x *things, _ context.Context) error { x.e.rt.Drain(); return nil }},
	{"Runtime.Close", "runtime/Close", func(x *things, _ context.Context) error { return x.rt.Close() }},
}

// allowed are the outcomes that the tables have for an op, in the conditions up
// to column. With faults, what the driver is asked may fail as well.
func (o op) allowed(columns int, faults bool) (set []string) {
	set = append(set, "ok")
	for _, name := range strings.Fields(o.rows) {
		r := ruleOf(name)
		if name == "runtime/Begin" {
			set = append(set, "closed")
		}
		if r.does < own.NumActions {
			for s := own.Live; s < own.NumStates; s++ {
				set = append(set, outcome(own.Table[s][r.does].Err))
			}
		}
		for _, act := range r.at[:columns] {
			switch {
			case act == "fails":
				set = append(set, "unproven")
			case act == "refuses":
				set = append(set, "lost", "stream failed", "injected")
			case faults && (act == "looks" || act == "proceeds" || act == "waits"):
				set = append(set, "unproven", "injected")
			}
		}
	}
	return set
}

// outcome is an error in one word.
func outcome(err error) string {
	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &rejected) && errors.As(err, &unproven):
		return "both: " + err.Error()
	case errors.As(err, &unproven):
		return "unproven"
	case errors.Is(err, publish.ErrLost):
		return "lost"
	case errors.Is(err, publish.ErrStreamFailed):
		return "stream failed"
	case errors.Is(err, own.ErrMoved):
		return "moved"
	case errors.Is(err, own.ErrClosed):
		return "closed"
	case errors.Is(err, own.ErrBusy):
		return "busy"
	case errors.Is(err, driver.ErrInvalidValue) || errors.Is(err, driver.ErrLaunchFailed):
		return "injected"
	}
	return "other: " + err.Error()
}

// things makes three lives: a value, a publication and a transfer. The runtime
// that ops close is a second one.
func (e *env) things(complete bool) *things {
	e.t.Helper()
	x := &things{e: e, s: e.session(), moved: map[string]int{}}
	var err error
	x.rt, err = publish.New(e.ctx, publish.Config{})
	must(e.t, err)
	value := func() *publish.Value {
		v, err := x.s.Alloc(publish.U8, 64)
		must(e.t, err)
		return v
	}
	x.v = value()
	x.p, err = x.s.Publish(value())
	must(e.t, err)
	p, err := x.s.Publish(value())
	must(e.t, err)
	x.tr, err = p.DownloadInto(e.buffer(make([]byte, 64)))
	must(e.t, err)
	_, err = x.s.Raw() // so that each enqueue asks first, outside its lock
	must(e.t, err)
	for done := !complete; !done; { // which tells of all before it in the stream
		done, err = x.tr.Ready()
		must(e.t, err)
	}
	return x
}

// end closes everything. Each handle was moved at most once.
func (x *things) end() {
	e := x.e
	e.t.Helper()
	for _, c := range append([]interface{ Close() error }{x.v, x.p, x.tr, x.s}, x.owned...) {
		must(e.t, c.Close())
	}
	if err := x.rt.Shutdown(e.within()); err != nil {
		e.t.Errorf("the second runtime's shutdown: %v", err)
	}
	for what, n := range x.moved {
		if n > 1 {
			e.t.Errorf("a %s was moved %d times", what, n)
		}
	}
	e.settle()
	st := e.rt.Stats()
	q := st.Queue
	// The env's own value and buffer are still there: all else is released or kept.
	if q.Entered != q.Released+q.Permanent || q.Pending != 0 || q.Reserved != 1 ||
		st.Pinned.InUse != st.Pinned.Kept+1 || st.Memory.InUse > q.PermanentBytes+64 || q.Permanent == 0 && st.Memory.InUse != 64 {
		e.t.Errorf("the counters do not conserve: %+v", st)
	}
}

// TestStatesInPairs runs each method inside each kind of driver call that each
// other one makes: the outcomes are ones that the tables have, and each owner is
// released or retained once.
func TestStatesInPairs(t *testing.T) {
	for _, outer := range ops {
		for _, complete := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/complete %v", outer.name, complete), func(t *testing.T) {
				e := newEnv(t)
				var ids []cuapi.ID
				for range 2 { // the pools are warm the second time
					x := e.things(complete)
					e.mu.Lock()
					e.kinds = map[cuapi.ID]bool{}
					e.mu.Unlock()
					must(t, outer.do(x, e.within()))
					e.mu.Lock()
					ids = slices.Sorted(maps.Keys(e.kinds)) // each kind once
					e.kinds = nil
					e.mu.Unlock()
					x.end()
				}
				for _, inner := range ops {
					met := 0
					for _, id := range ids {
						if pair(e, id, outer, inner, complete) {
							met++
						}
					}
					if met == 0 && slices.Contains(calling[complete], outer.name) {
						t.Errorf("%s never ran inside %s", inner.name, outer.name)
					}
				}
			})
		}
	}
}

// calling are the methods that make driver calls, of what is pending and of what
// is complete.
var calling = map[bool][]string{
	false: strings.Fields("Publication.FrontierReady Publication.AwaitFrontier Publication.DownloadInto Transfer.Ready Transfer.Wait " +
		"Session.Alloc Session.Launch Session.Upload Session.Submit Session.Synchronize Session.Publish"),
	true: strings.Fields("Value.Close Publication.DownloadInto Publication.Close Transfer.Wait Transfer.Close " +
		"Session.Alloc Session.Launch Session.Upload Session.Submit Session.Synchronize Session.Publish"),
}

// pair tells whether the outer one made such a call.
func pair(e *env, id cuapi.ID, outer, inner op, complete bool) bool {
	x := e.things(complete)
	where := fmt.Sprintf("%s inside %s of %s", inner.name, cuapi.Entries[id].Symbol(), outer.name)
	got := make(chan error, 1)
	e.next(id, func() cuapi.Result {
		go func() { got <- inner.do(x, e.within()) }()
		// It may have to wait for the outer call, which has the stream's lock.
		for i := 0; i < 400 && len(got) == 0; i++ {
			runtime.Gosched()
		}
		return 0
	})
	out := outer.do(x, e.within())
	if e.armed() { // that was a call of the watcher, or of the end
		e.mu.Lock()
		e.once = nil
		e.mu.Unlock()
		x.end()
		return false
	}
	in := <-got
	// A frontier may be seen complete meanwhile, and a runtime closed.
	for _, o := range []struct {
		op
		err error
	}{{outer, out}, {inner, in}} {
		if set := o.allowed(1, false); !slices.Contains(set, outcome(o.err)) {
			e.t.Errorf("%s: %s: %v, the tables have %v", where, o.name, o.err, set)
		}
	}
	x.end()
	return true
}

// failable are the calls that the hammer fails.
var failable = []cuapi.ID{cuapi.IDEventQuery, cuapi.IDEventRecord, cuapi.IDMemcpyDtoHAsync, cuapi.IDMemcpyHtoDAsync, cuapi.IDLaunchKernel,
	cuapi.IDMemAllocFromPoolAsync, cuapi.IDMemFreeAsync, cuapi.IDStreamIsCapturing, cuapi.IDStreamQuery}

// TestStatesHammer calls all methods of three lives at random on many
// goroutines, while driver calls fail at random: before their effect or after
// it, now and then with a code that loses the context.
func TestStatesHammer(t *testing.T) {
	var words sync.Map
	for round := range 40 {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { // round tells how often calls fail
			hammer(t, seed, round%4, &words)
		})
	}
	for _, word := range []string{"ok", "moved", "closed", "unproven", "injected"} {
		if _, seen := words.Load(word); !seen {
			t.Errorf("no outcome was %q", word)
		}
	}
}

func hammer(t *testing.T, seed uint64, faults int, words *sync.Map) {
	e := newEnv(t)
	var on atomic.Bool
	var mu sync.Mutex
	dice := rand.New(rand.NewPCG(seed, 0))
	f := func(id cuapi.ID, next func() cuapi.Result) cuapi.Result {
		if !on.Load() || !slices.Contains(failable, id) {
			return next()
		}
		mu.Lock()
		hit, after, code := dice.IntN(100) < faults*faults, dice.IntN(2) == 0, cuapi.InvalidValue
		if dice.IntN(10) == 0 {
			code = cuapi.LaunchFailed
		}
		mu.Unlock()
		if !hit {
			return next()
		}
		if after {
			next()
		}
		return code
	}
	e.mu.Lock()
	e.any = f
	e.mu.Unlock()
	for range 10 {
		if e.rt.Err() != nil {
			break
		}
		x := e.things(false)
		raw, err := x.s.Raw()
		must(t, err)
		e.sim.Hold(raw)
		on.Store(true)
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(g+1)))
				for range 12 {
					o := ops[r.IntN(len(ops))]
					if strings.HasSuffix(o.name, ".Close") && r.IntN(4) != 0 {
						continue // so that much is met alive
					}
					err := o.do(x, ctx)
					set, word := o.allowed(1, false), outcome(err)
					if faults > 0 {
						set = o.allowed(3, true)
					}
					if !slices.Contains(set, word) && err != context.Canceled {
						t.Errorf("%s: %v, the tables have %v", o.name, err, set)
					}
					words.Store(word, true)
				}
			})
		}
		wg.Go(func() {
			for range 50 {
				runtime.Gosched()
			}
			e.sim.Release(raw)
		})
		wg.Go(func() {
			for range 200 {
				runtime.Gosched()
			}
			cancel()
		})
		wg.Wait()
		on.Store(false)
		x.end()
		cancel()
	}
}
