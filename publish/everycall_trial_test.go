package publish_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/retirequeue"
)

// A trial is one run of a workflow, with a fault or without, on a rig of its own.
type trial struct {
	*rig
	found   *findings
	w       *workflow
	c       *fault.Case
	inj     *fault.Injector
	beneath *cuapi.Table // without faults
	pool    *poolMeter

	err     error    // of run
	closes  []func() // of what was opened, the last one first
	lasting any      // kept alive

	// What ready leaves to run, and what is undone once nothing fails any more.
	held       []*publish.Session
	let        []func()
	adopted    uint64
	untidy     bool // something is left that the fault kept from its end
	afterwards []func()

	// What the errors so far say that is retained, and what was tainted.
	unproven int
	entries  int
	bytes    int64
	tainted  map[*publish.Value]bool
	waits    int // unproven waits: what they retain depends on who looked
}

// trial runs the workflow once and returns what it finds wrong.
func (w *workflow) trial(t testing.TB, m machine, c *fault.Case) error {
	f := &findings{TB: t}
	defer f.end()
	f.guard(func() {
		x := w.begin(f, m, c)
		if w.ready != nil {
			w.ready(x)
		}
		if x.rt != nil {
			x.settle()
		}
		must(f, c.Arm(x.inj))
		x.err = x.guard()
		x.closeAll()
		if x.rt != nil {
			x.settle()
		}
		x.inj.Disarm()
		x.judge()
		for _, f := range x.afterwards {
			f()
		}
		if w.end != nil {
			w.end(x)
		} else {
			x.end()
		}
		x.violations("at the end")
		runtime.KeepAlive(x)
	})
	return f.err()
}

// begin opens the machine, and a runtime unless the workflow does.
func (w *workflow) begin(f *findings, m machine, c *fault.Case) *trial {
	x := &trial{rig: &rig{t: f, rec: &recorder{}, keep: true}, found: f, w: w, c: c, pool: new(poolMeter), tainted: map[*publish.Value]bool{}}
	x.beneath = m.open(x.rig, w.o)
	table := cuapi.Intercept(x.beneath, x.pool.around)
	if w.o.around != nil {
		table = cuapi.Intercept(table, w.o.around)
	}
	d, err := wire.NewDriver(table, m.name)
	must(f, err)
	x.inj, err = fault.Wrap(d.(*driver.Driver), fault.Plan{})
	must(f, err)
	x.inj.Disarm()
	x.drv = x.inj.Driver()
	return x
}

// opened has the runtime and the kernels made that most workflows need.
func (x *trial) opened() {
	must(x.t, x.openAll())
}

// openAll goes on where it stopped before.
func (x *trial) openAll() (err error) {
	if x.ctx == nil {
		dev, err := x.drv.Device(0)
		if err != nil {
			return err
		}
		if x.ctx, err = dev.Primary(); err != nil {
			return err
		}
	}
	if x.rt == nil {
		if x.rt, err = publish.New(x.ctx, x.w.o.cfg); err != nil {
			return err
		}
	}
	if x.inc == nil {
		mod, err := kernel.Load(x.ctx, []byte(testPTX))
		if err != nil {
			return err
		}
		if x.inc, err = mod.Function("inc"); err != nil {
			return err
		}
	}
	return nil
}

// A poolMeter counts the allocations that the driver's pools have lent. It is
// apart from the trial: a driver that leads to its runtime would keep it alive.
type poolMeter struct{ atomic.Int64 }

func (m *poolMeter) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	res := next()
	if res == cuapi.Success {
		switch c.ID {
		case cuapi.IDMemAllocFromPoolAsync:
			m.Add(1)
		case cuapi.IDMemFreeAsync:
			m.Add(-1)
		}
	}
	return res
}

// Findings are a testing.TB that gathers what is wrong with one trial, so that
// each finding is told under the trial's line. Fatal ends the trial alone.
type findings struct {
	testing.TB
	mu   sync.Mutex
	errs []error
	ends []func()
}

type (
	giveUp struct{}        // Fatal's panic
	met    struct{ error } // that of get and do: the workflow's first error
)

func (f *findings) Helper()                   {}
func (f *findings) Error(a ...any)            { f.add(fmt.Sprint(a...)) }
func (f *findings) Errorf(s string, a ...any) { f.add(fmt.Sprintf(s, a...)) }
func (f *findings) Fatal(a ...any)            { f.add(fmt.Sprint(a...)); panic(giveUp{}) }
func (f *findings) Fatalf(s string, a ...any) { f.add(fmt.Sprintf(s, a...)); panic(giveUp{}) }
func (f *findings) Cleanup(end func())        { f.mu.Lock(); f.ends = append(f.ends, end); f.mu.Unlock() }

func (f *findings) add(text string) {
	f.mu.Lock()
	f.errs = append(f.errs, errors.New(text))
	f.mu.Unlock()
}

func (f *findings) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.errs...)
}

func (f *findings) end() {
	for i := len(f.ends) - 1; i >= 0; i-- {
		f.ends[i]()
	}
}

// guard calls g, which Fatal ends.
func (f *findings) guard(g func()) {
	defer func() {
		switch p := recover().(type) {
		case nil, giveUp:
		case met: // outside of the workflow
			f.add(p.Error())
		default:
			panic(p)
		}
	}()
	g()
}

// guard runs the workflow until its first error.
func (x *trial) guard() (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case met:
			err = p.error
		default:
			panic(p)
		}
	}()
	return x.w.run(x)
}

// get and do end the workflow with its first error.
func get[T any](v T, err error) T {
	do(err)
	return v
}

func do(err error) {
	if err != nil {
		panic(met{err})
	}
}

// later closes what the workflow opened, at its end.
func (x *trial) later(close func() error) {
	x.closes = append(x.closes, func() {
		if err := close(); err != nil {
			x.t.Errorf("a close has an error: %v", err)
		}
	})
}

func (x *trial) queue() retirequeue.Stats { return x.rt.Stats().Queue }

// stateOf returns the state of a handle.
func stateOf(handle any) own.State {
	b, ok := handle.(*pinned.Buffer)
	switch {
	case !ok:
		return publish.StateOf(handle)
	case b.Err() == nil:
		return own.Live
	case errors.Is(b.Err(), own.ErrMoved):
		return own.Moved
	}
	return own.Closed
}

// owners checks law 3 behind an operation: whether what it moves went with it,
// and what it borrows stayed. bytes are those that it owned if it is unproven.
// It returns err.
func (x *trial) owners(op string, before retirequeue.Stats, err error, bytes int64, moves, borrows []any) error {
	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	want := own.Moved
	switch {
	case err == nil:
	case errors.As(err, &rejected):
		want = own.Live
		if rejected.Op != op {
			x.t.Errorf("%s: the error is of %q: %v", op, rejected.Op, err)
		}
		for _, m := range moves {
			if !names(rejected, m) {
				x.t.Errorf("%s: the error lacks %T: %v", op, m, err)
			}
		}
	case errors.As(err, &unproven):
		if unproven.Op != op {
			x.t.Errorf("%s: the error is of %q: %v", op, unproven.Op, err)
		}
		q := x.queue()
		if grown := q.Permanent - before.Permanent; bytes > 0 && (grown < 1 || q.PermanentBytes-before.PermanentBytes < bytes) {
			x.t.Errorf("%s is unproven, and nothing of %d bytes was retained: %+v, then %+v", op, bytes, before, q)
		}
		x.unproven++
		if bytes > 0 {
			x.entries++
			x.bytes += bytes
		}
		for _, b := range borrows {
			if v, ok := b.(*publish.Value); ok {
				x.tainted[v] = true
			}
		}
	default:
		x.t.Errorf("%s: neither rejected nor unproven: %v", op, err)
	}
	for _, m := range moves {
		if got := stateOf(m); got != want {
			x.t.Errorf("%s: %T is %v, want %v: %v", op, m, got, want, err)
		}
	}
	for _, b := range borrows {
		if got := stateOf(b); got != own.Live {
			x.t.Errorf("%s: %T that it borrowed is %v: %v", op, b, got, err)
		}
	}
	return err
}

// names tells whether a rejection has the owner.
func names(e *publish.RejectedError, owner any) bool {
	switch o := owner.(type) {
	case *publish.Value:
		return e.Value == o
	case *publish.Publication:
		return e.Publication == o
	case *pinned.Buffer:
		return e.Buffer == o
	}
	return false
}

// enter opens a session, until the workflow's end.
func (x *trial) enter() (*publish.Session, error) {
	s, err := x.rt.OpenSession(nil)
	if err == nil {
		x.later(s.Close)
	}
	return s, err
}

// buffered takes a pinned buffer.
func (x *trial) buffered(n int) (*pinned.Buffer, error) {
	b, err := x.rt.Pinned(n)
	if err == nil {
		x.later(b.Close)
	}
	return b, err
}

// value notes a value that is closed at the end, to the permanent side where an
// operation that borrowed it is unproven.
func (x *trial) value(v *publish.Value) {
	x.closes = append(x.closes, func() {
		if x.tainted[v] && stateOf(v) == own.Live {
			x.entries++
			x.bytes += v.Bytes()
		}
		if err := v.Close(); err != nil {
			x.t.Errorf("closing a value: %v", err)
		}
	})
}

func (x *trial) alloc(s *publish.Session, n int) (*publish.Value, error) {
	q := x.queue()
	v, err := s.Alloc(publish.U8, n)
	if x.owners("alloc", q, err, int64(n), nil, nil) == nil {
		x.value(v)
	}
	return v, err
}

func (x *trial) upload(s *publish.Session, v *publish.Value, b *pinned.Buffer) (*publish.Transfer, error) {
	q := x.queue()
	tr, err := s.Upload(v, b)
	if x.owners("upload", q, err, int64(b.Len()), []any{b}, []any{v}) == nil {
		x.later(tr.Close)
	}
	return tr, err
}

// inced launches a kernel that increments each byte.
func (x *trial) inced(s *publish.Session, from, to *publish.Value) error {
	n := int(from.Bytes())
	err := s.Launch(x.inc, kernel.Grid(n), publish.In(from), publish.Out(to), kernel.U32(uint32(n)))
	return x.owners("launch", x.queue(), err, 0, nil, []any{from, to})
}

func (x *trial) publish(s *publish.Session, v *publish.Value) (*publish.Publication, error) {
	q := x.queue()
	p, err := s.Publish(v)
	if x.owners("publish", q, err, v.Bytes(), []any{v}, nil) == nil {
		x.later(p.Close)
	}
	return p, err
}

func (x *trial) downloaded(p *publish.Publication) (*publish.Transfer, error) {
	b, err := x.buffered(int(p.Bytes()))
	if err != nil {
		return nil, err
	}
	q := x.queue()
	tr, err := p.DownloadInto(b)
	if x.owners("download", q, err, 2*p.Bytes(), []any{p, b}, nil) == nil {
		x.later(tr.Close)
	}
	return tr, err
}

// waited waits for a transfer's buffer.
func (x *trial) waited(tr *publish.Transfer) (*pinned.Buffer, error) {
	b, err := tr.Wait(x.within())
	if got := stateOf(tr); got != own.Moved {
		x.t.Errorf("a transfer that was waited for is %v: %v", got, err)
	}
	x.waitEnded("wait", err)
	if err == nil {
		x.later(b.Close)
	}
	return b, err
}

// awaited waits for a publication's frontier: the caller keeps it either way.
func (x *trial) awaited(p *publish.Publication) error {
	err := p.AwaitFrontier(x.within())
	if got := stateOf(p); got != own.Live {
		x.t.Errorf("a publication that was waited for is %v: %v", got, err)
	}
	return x.waitEnded("await frontier", err)
}

func (x *trial) waitEnded(op string, err error) error {
	var unproven *publish.UnprovenError
	if err != nil {
		x.waits++
		if !errors.As(err, &unproven) || unproven.Op != op {
			x.t.Errorf("%s: it failed, and is not unproven: %v", op, err)
		}
	}
	return err
}

// synced waits for all of a session.
func (x *trial) synced(s *publish.Session) error {
	err := s.Synchronize(x.within())
	var unproven *publish.UnprovenError
	if errors.As(err, &unproven) {
		x.unproven++ // and it owns nothing
	}
	if errors.Is(err, context.DeadlineExceeded) {
		x.t.Errorf("synchronize never ends: %v", err)
	}
	return err
}

// has checks what a download brought.
func (x *trial) has(what string, b *pinned.Buffer, want []byte) {
	if string(b.Bytes()) != string(want) {
		x.t.Errorf("%s: %d bytes that differ", what, b.Len())
	}
}

// filled takes a buffer of the data.
func (x *trial) filled(data []byte) (*pinned.Buffer, error) {
	b, err := x.buffered(len(data))
	if err == nil {
		copy(b.Bytes(), data)
	}
	return b, err
}

// produced allocates, uploads and increments; want is what its download brings.
func (x *trial) produced(s *publish.Session, n int) (v *publish.Value, want []byte) {
	data := random(n)
	src := get(x.alloc(s, n))
	get(x.upload(s, src, get(x.filled(data))))
	v = get(x.alloc(s, n))
	do(x.inced(s, src, v))
	want = make([]byte, n)
	for i := range data {
		want[i] = data[i] + 1
	}
	return v, want
}
