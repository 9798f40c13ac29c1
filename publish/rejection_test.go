package publish_test

import (
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// An attempt is one operation with all that it is given: a refusal spoils a part
// of it, and mends it again.
type attempt struct {
	r     *rig
	st    *stream.Stream
	s     *publish.Session
	v     *publish.Value
	src   *publish.Value
	pub   *publish.Publication
	buf   *pinned.Buffer
	tr    *publish.Transfer
	off   int64
	n     int64
	dtype publish.DType
	shape []int
	f     *kernel.Function
	cfg   kernel.Config
	last  []kernel.Arg // behind In and Out
	addr  uint64
	free  func()
	gone  chan struct{}
	want  []byte // what the value holds in the end
	blind *atomic.Bool
}

const valueSize = 64

// An operation is one that may be refused.
type operation struct {
	prepare func(a *attempt)
	do      func(a *attempt) error
	owners  func(a *attempt) publish.RejectedError // the error's fields
	finish  func(a *attempt)                       // after it succeeded
}

var operations = map[string]operation{
	"publish": {
		prepare: func(a *attempt) { a.v, a.want = a.r.produce(a.s, random(valueSize)) },
		do:      func(a *attempt) (err error) { a.pub, err = a.s.Publish(a.v); return err },
		owners:  func(a *attempt) publish.RejectedError { return publish.RejectedError{Value: a.v} },
		finish:  func(a *attempt) { a.r.download(a.pub, a.want) },
	},
	"download": {
		prepare: func(a *attempt) {
			a.pub, a.want = a.r.publication(a.s, valueSize)
			a.buf, a.n = a.r.buffer(make([]byte, valueSize)), valueSize
		},
		do: func(a *attempt) (err error) { a.tr, err = a.pub.DownloadRange(a.buf, a.off, a.n); return err },
		owners: func(a *attempt) publish.RejectedError {
			return publish.RejectedError{Publication: a.pub, Buffer: a.buf}
		},
		finish: func(a *attempt) { a.r.finish(a.tr, a.want) },
	},
	"upload": {
		prepare: func(a *attempt) {
			a.v, a.want = a.alloc(), random(valueSize)
			a.buf = a.r.buffer(a.want)
		},
		do:     func(a *attempt) (err error) { a.tr, err = a.s.Upload(a.v, a.buf); return err },
		owners: func(a *attempt) publish.RejectedError { return publish.RejectedError{Value: a.v, Buffer: a.buf} },
		finish: func(a *attempt) {
			must(a.r.t, a.tr.Close())
			a.publishes()
		},
	},
	"alloc": {
		prepare: func(a *attempt) { a.dtype, a.shape, a.want = publish.U8, []int{8, valueSize / 8}, random(valueSize) },
		do:      func(a *attempt) (err error) { a.v, err = a.s.Alloc(a.dtype, a.shape...); return err },
		owners:  func(a *attempt) publish.RejectedError { return publish.RejectedError{} },
		finish: func(a *attempt) {
			a.fill()
			a.publishes()
		},
	},
	"launch": {
		prepare: func(a *attempt) {
			a.want = random(valueSize)
			a.src, a.v = a.r.uploaded(a.s, a.want), a.alloc()
			for i := range a.want {
				a.want[i]++
			}
			a.f, a.cfg, a.last = a.r.inc, kernel.Grid(valueSize), []kernel.Arg{kernel.U32(valueSize)}
		},
		do: func(a *attempt) error {
			return a.s.Launch(a.f, a.cfg, append([]kernel.Arg{publish.In(a.src), publish.Out(a.v)}, a.last...)...)
		},
		owners: func(a *attempt) publish.RejectedError { return publish.RejectedError{} },
		finish: func(a *attempt) {
			must(a.r.t, a.src.Close())
			a.publishes()
		},
	},
	"adopt": {
		prepare: func(a *attempt) {
			a.addr, a.free = a.r.deviceMemory(valueSize)
			a.dtype, a.shape, a.want = publish.U8, []int{valueSize}, random(valueSize)
			a.gone = make(chan struct{})
		},
		do: func(a *attempt) (err error) {
			a.v, err = a.s.Adopt(a.addr, a.dtype, a.shape, func() { close(a.gone) }) // once
			return err
		},
		owners: func(a *attempt) publish.RejectedError { return publish.RejectedError{} },
		finish: func(a *attempt) {
			a.fill()
			pub, err := a.s.PublishAsserted(a.v)
			must(a.r.t, err)
			a.r.download(pub, a.want)
			<-a.gone
			a.free()
		},
	},
}

func (a *attempt) alloc() *publish.Value {
	a.r.t.Helper()
	v, err := a.s.Alloc(publish.U8, valueSize)
	must(a.r.t, err)
	return v
}

func (a *attempt) fill() {
	a.r.t.Helper()
	up, err := a.s.Upload(a.v, a.r.buffer(a.want))
	must(a.r.t, err)
	must(a.r.t, up.Close())
}

func (a *attempt) publishes() {
	a.r.t.Helper()
	pub, err := a.s.Publish(a.v)
	must(a.r.t, err)
	a.r.download(pub, a.want)
}

func (a *attempt) run(c *kernel.Function, v *publish.Value) error {
	return a.s.Launch(c, kernel.Grid(1), publish.In(v), publish.Out(v), kernel.U32(1))
}

// raw makes one driver call, as other code would.
func (r *rig) raw(call func(t *cuapi.Table) cuapi.Result) {
	r.t.Helper()
	if res := r.current(func() cuapi.Result { return call(wire.ContextOf(r.ctx).Table) }); res != cuapi.Success {
		r.t.Fatal(res)
	}
}

// deviceMemory is what other code allocated.
func (r *rig) deviceMemory(n int) (addr uint64, free func()) {
	r.t.Helper()
	d := new(cuapi.DevicePtr)
	r.raw(func(t *cuapi.Table) cuapi.Result { return t.MemAlloc(d, uintptr(n)) })
	return uint64(*d), func() { r.raw(func(t *cuapi.Table) cuapi.Result { return t.MemFree(*d) }) }
}

// A refusal is one reason for which operations are refused. spoil brings it
// about; mend, which it returns, takes it away.
type refusal struct {
	name  string
	of    []string // operations
	want  error
	spoil func(a *attempt) (mend func())
}

// set spoils one part of an attempt, and mend puts it back.
func set[T any](part func(a *attempt) *T, to T) func(a *attempt) func() {
	return func(a *attempt) func() {
		p := part(a)
		was := *p
		*p = to
		return func() { *p = was }
	}
}

func partSession(a *attempt) **publish.Session  { return &a.s }
func partValue(a *attempt) **publish.Value      { return &a.v }
func partPub(a *attempt) **publish.Publication  { return &a.pub }
func partBuffer(a *attempt) **pinned.Buffer     { return &a.buf }
func partFunction(a *attempt) **kernel.Function { return &a.f }
func partShape(a *attempt) *[]int               { return &a.shape }
func partDtype(a *attempt) *publish.DType       { return &a.dtype }
func partAddress(a *attempt) *uint64            { return &a.addr }
func partConfig(a *attempt) *kernel.Config      { return &a.cfg }
func partLast(a *attempt) *[]kernel.Arg         { return &a.last }

// region spoils the range of a download.
func region(off, n int64) func(a *attempt) func() {
	return func(a *attempt) func() {
		a.off, a.n = off, n
		return func() { a.off, a.n = 0, valueSize }
	}
}

// swapped makes one part with f, and mend puts the old one back and ends the new.
func swapped[T any](part func(a *attempt) *T, f func(a *attempt) (T, func())) func(a *attempt) func() {
	return func(a *attempt) func() {
		with, end := f(a)
		mend := set(part, with)(a)
		return func() { mend(); end() }
	}
}

var (
	inSession     = []string{"publish", "upload", "alloc", "launch", "adopt"}
	enqueuing     = []string{"publish", "download", "upload", "alloc", "launch"}
	takesRoom     = []string{"download", "upload", "alloc", "launch"} // records take none
	takesSlot     = []string{"upload", "alloc", "adopt"}              // the others have theirs already
	valueRefusals = []string{"publish", "upload", "launch"}
	ofBuffer      = []string{"upload", "download"}
	downloads     = []string{"download"}
	allocs        = []string{"alloc", "adopt"}
	launches      = []string{"launch"}
	adopts        = []string{"adopt"}
	nothing       = func() {}
)

var refusals = []refusal{
	{"nil session", inSession, driver.ErrClosed, set(partSession, nil)},
	{"zero session", inSession, driver.ErrClosed, set(partSession, new(publish.Session))},
	{"closed session", inSession, driver.ErrClosed, func(a *attempt) func() {
		must(a.r.t, a.s.Close())
		return func() { a.open() } // on the same stream: what it holds is usable there
	}},
	{"capturing stream", enqueuing, publish.ErrCapturing, capturing},
	{"full stream", takesRoom, publish.ErrStreamFull, fullStream},
	{"full context", takesRoom, publish.ErrContextFull, fullContext},
	{"full queue", takesSlot, publish.ErrQueueFull, fullQueue},

	{"nil value", valueRefusals, driver.ErrClosed, set(partValue, nil)},
	{"zero value", valueRefusals, driver.ErrClosed, set(partValue, new(publish.Value))},
	{"moved value", valueRefusals, driver.ErrMoved, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
		v := a.alloc()
		p, err := a.s.Publish(v)
		must(a.r.t, err)
		return v, func() { must(a.r.t, p.Close()) }
	})},
	{"closed value", valueRefusals, driver.ErrClosed, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
		v := a.alloc()
		must(a.r.t, v.Close())
		return v, nothing
	})},
	{"value of another runtime", valueRefusals, publish.ErrForeign, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
		rt, err := publish.New(a.r.ctx, publish.Config{})
		must(a.r.t, err)
		s, err := rt.OpenSession(nil)
		must(a.r.t, err)
		v, err := s.Alloc(publish.U8, valueSize)
		must(a.r.t, err)
		return v, func() {
			must(a.r.t, v.Err())
			must(a.r.t, v.Close())
			must(a.r.t, s.Close())
			must(a.r.t, rt.Shutdown(a.r.within()))
		}
	})},
	{"value of another stream", valueRefusals, publish.ErrOtherStream, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
		s := a.r.session()
		v, want := a.r.produce(s, random(valueSize))
		return v, func() { // there it is usable
			p, err := s.Publish(v)
			must(a.r.t, err)
			a.r.download(p, want)
			must(a.r.t, s.Close())
		}
	})},
	{"adopted value", []string{"publish"}, publish.ErrProvenance, swapped(partValue, func(a *attempt) (*publish.Value, func()) {
		addr, free := a.r.deviceMemory(valueSize)
		gone := make(chan struct{})
		v, err := a.s.Adopt(addr, publish.U8, []int{valueSize}, func() { close(gone) })
		must(a.r.t, err)
		want := random(valueSize)
		up, err := a.s.Upload(v, a.r.buffer(want))
		must(a.r.t, err)
		must(a.r.t, up.Close())
		return v, func() { // on the program's word the same handle goes
			p, err := a.s.PublishAsserted(v)
			must(a.r.t, err)
			a.r.download(p, want)
			<-gone
			free()
		}
	})},

	{"nil buffer", ofBuffer, driver.ErrClosed, set(partBuffer, nil)},
	{"zero buffer", ofBuffer, driver.ErrClosed, set(partBuffer, new(pinned.Buffer))},
	{"short buffer", ofBuffer, publish.ErrLength, swapped(partBuffer, otherBuffer(valueSize-1))},
	{"long buffer", ofBuffer, publish.ErrLength, swapped(partBuffer, otherBuffer(valueSize+1))},
	{"closed buffer", ofBuffer, driver.ErrClosed, swapped(partBuffer, func(a *attempt) (*pinned.Buffer, func()) {
		b := a.r.buffer(make([]byte, valueSize))
		must(a.r.t, b.Close())
		return b, nothing
	})},
	{"moved buffer", ofBuffer, driver.ErrMoved, swapped(partBuffer, func(a *attempt) (*pinned.Buffer, func()) {
		b, v := a.r.buffer(make([]byte, valueSize)), a.alloc()
		tr, err := a.s.Upload(v, b)
		must(a.r.t, err)
		return b, func() { must(a.r.t, tr.Close()); must(a.r.t, v.Close()) }
	})},

	{"nil publication", downloads, driver.ErrClosed, set(partPub, nil)},
	{"zero publication", downloads, driver.ErrClosed, set(partPub, new(publish.Publication))},
	{"closed publication", downloads, driver.ErrClosed, swapped(partPub, func(a *attempt) (*publish.Publication, func()) {
		p, _ := a.r.publication(a.s, valueSize)
		must(a.r.t, p.Close())
		return p, nothing
	})},
	{"moved publication", downloads, driver.ErrMoved, swapped(partPub, func(a *attempt) (*publish.Publication, func()) {
		p, want := a.r.publication(a.s, valueSize)
		tr, err := p.DownloadInto(a.r.buffer(make([]byte, valueSize)))
		must(a.r.t, err)
		return p, func() { a.r.finish(tr, want) }
	})},
	{"a range before the start", downloads, publish.ErrLength, region(-1, valueSize)},
	{"a range past the end", downloads, publish.ErrLength, region(1, valueSize)},
	{"a range at the end", downloads, publish.ErrLength, region(valueSize, 1)},
	{"a range of nothing", downloads, publish.ErrLength, region(0, 0)},
	{"a negative range", downloads, publish.ErrLength, region(0, -valueSize)},
	{"a range that overflows", downloads, publish.ErrLength, region(1<<62, 1<<62)},
	{"an end that overflows", downloads, publish.ErrLength, region(math.MaxInt64-1, valueSize)},
	{"a range that the buffer is not", downloads, publish.ErrLength, region(0, valueSize-1)},

	{"no data type", allocs, publish.ErrDType, set(partDtype, 0)},
	{"unserved data type", allocs, publish.ErrDType, set(partDtype, 99)},
	{"no shape", allocs, publish.ErrShape, set(partShape, nil)},
	{"zero dimension", allocs, publish.ErrShape, set(partShape, []int{4, 0})},
	{"negative dimension", allocs, publish.ErrShape, set(partShape, []int{-4, -16})},
	{"nine dimensions", allocs, publish.ErrShape, set(partShape, []int{1, 1, 1, 1, 1, 1, 1, 1, valueSize})},
	{"overflowing shape", allocs, publish.ErrShape, set(partShape, []int{1 << 31, 1 << 31, 1 << 31})},
	{"out of memory", []string{"alloc"}, driver.ErrOutOfMemory, set(partShape, []int{1 << 40})}, // 1 TiB

	{"nil function", launches, driver.ErrClosed, set(partFunction, nil)},
	{"zero function", launches, driver.ErrClosed, set(partFunction, new(kernel.Function))},
	{"too few arguments", launches, kernel.ErrArguments, set(partLast, nil)},
	{"too many arguments", launches, kernel.ErrArguments, set(partLast, []kernel.Arg{kernel.U32(valueSize), kernel.U32(valueSize)})},
	{"a wide argument", launches, kernel.ErrArguments, set(partLast, []kernel.Arg{kernel.I64(valueSize)})},
	{"no threads", launches, kernel.ErrConfig, set(partConfig, kernel.Config{})},
	{"too many threads", launches, kernel.ErrConfig, set(partConfig, kernel.Config{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1 << 20, 1, 1}})},

	{"null address", adopts, publish.ErrNotDevice, set(partAddress, 0)},
	{"unknown address", adopts, publish.ErrNotDevice, set(partAddress, 12345)},
	{"host memory", adopts, publish.ErrNotDevice, swapped(partAddress, func(a *attempt) (uint64, func()) {
		b := a.r.buffer(make([]byte, valueSize))
		return uint64(addressOf(b.Bytes())), func() { must(a.r.t, b.Close()) }
	})},
	{"past the allocation", adopts, publish.ErrNotDevice, set(partShape, []int{valueSize + 1})},
}

func otherBuffer(n int) func(a *attempt) (*pinned.Buffer, func()) {
	return func(a *attempt) (*pinned.Buffer, func()) {
		b := a.r.buffer(make([]byte, n))
		return b, func() { must(a.r.t, b.Err()); must(a.r.t, b.Close()) }
	}
}

func (a *attempt) open() {
	a.r.t.Helper()
	s, err := a.r.rt.OpenSession(a.st)
	must(a.r.t, err)
	a.s = s
}

func capturing(a *attempt) func() {
	raw, err := a.s.Raw()
	must(a.r.t, err)
	a.r.raw(func(t *cuapi.Table) cuapi.Result {
		return t.StreamBeginCapture(cuapi.Stream(raw), cuapi.CaptureModeRelaxed)
	})
	return func() {
		g := new(cuapi.Graph)
		a.r.raw(func(t *cuapi.Table) cuapi.Result { return t.StreamEndCapture(cuapi.Stream(raw), g) })
		a.r.raw(func(t *cuapi.Table) cuapi.Result { return t.GraphDestroy(*g) })
	}
}

func fullStream(a *attempt) func() {
	v := a.alloc()
	release := a.r.hold(a.s)
	var err error
	for err == nil {
		err = a.run(a.r.inc, v)
	}
	if !errors.Is(err, publish.ErrStreamFull) {
		a.r.t.Fatal(err)
	}
	return func() {
		release()
		must(a.r.t, a.s.Synchronize(a.r.within()))
		must(a.r.t, v.Close())
	}
}

// fullContext fills the context with what is done but is not seen to be done, so
// that no stream is held.
func fullContext(a *attempt) func() {
	type one struct {
		attempt
		v *publish.Value
	}
	var all []one
	for range 16 {
		other := attempt{r: a.r, s: a.r.session()}
		all = append(all, one{other, other.alloc()})
		must(a.r.t, other.s.Synchronize(a.r.within()))
	}
	a.blind.Store(true)
	var err error
	for _, o := range all {
		for err = nil; err == nil; {
			err = o.run(a.r.inc, o.v)
		}
		if errors.Is(err, publish.ErrContextFull) {
			break
		}
	}
	if !errors.Is(err, publish.ErrContextFull) {
		a.r.t.Fatal(err)
	}
	return func() {
		a.blind.Store(false)
		for _, o := range all {
			must(a.r.t, o.s.Synchronize(a.r.within()))
			must(a.r.t, o.v.Close())
			must(a.r.t, o.s.Close())
		}
	}
}

func fullQueue(a *attempt) func() {
	var all []*publish.Value
	for {
		v, err := a.s.Alloc(publish.U8, valueSize)
		if errors.Is(err, publish.ErrQueueFull) {
			break
		}
		must(a.r.t, err)
		all = append(all, v)
	}
	return func() {
		for _, v := range all {
			must(a.r.t, v.Close())
		}
		must(a.r.t, a.s.Synchronize(a.r.within()))
	}
}

// Every rejection comes before any driver call that enqueues, names its reason,
// has the owners in its fields and leaves them usable: the same handles go on
// once the reason is gone.
func TestRejections(t *testing.T) {
	blind := new(atomic.Bool)
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if blind.Load() && (c.ID == cuapi.IDEventQuery || c.ID == cuapi.IDStreamQuery) {
			return cuapi.NotReady
		}
		return next()
	}
	onEach(t, options{around: around, trace: true, cfg: publish.Config{Slots: 100}}, func(r *rig) {
		seen := map[string]bool{}
		for _, c := range refusals {
			for _, name := range c.of {
				seen[name] = true
				r.t.(*testing.T).Run(name+"/"+c.name, func(t *testing.T) {
					own := *r
					own.t = t
					own.refused(operations[name], name, c, blind)
				})
			}
		}
		if len(seen) != len(operations) {
			r.t.Errorf("refusals of %d operations, there are %d", len(seen), len(operations))
		}
	})
}

func (r *rig) refused(op operation, name string, c refusal, blind *atomic.Bool) {
	t := r.t
	st, err := stream.New(r.ctx)
	must(t, err)
	a := &attempt{r: r, st: st, blind: blind}
	a.open()
	op.prepare(a)
	mend := c.spoil(a)
	state := func() []error { return []error{a.v.Err(), a.src.Err(), a.pub.Err(), a.buf.Err()} }
	v, src, pub, buf := a.v, a.src, a.pub, a.buf
	before, q := state(), r.rt.Stats().Queue
	want := op.owners(a)
	calls := r.trace(func() { err = op.do(a) })
	a.v, a.src, a.pub, a.buf = v, src, pub, buf // but for what it returned, which is nil

	var rejected *publish.RejectedError
	var unproven *publish.UnprovenError
	switch {
	case !errors.As(err, &rejected) || errors.As(err, &unproven) || !errors.Is(err, c.want) || !errors.Is(rejected.Reason, c.want):
		t.Errorf("%v, want a rejection for %v", err, c.want)
	case rejected.Op != name || rejected.Value != want.Value || rejected.Publication != want.Publication || rejected.Buffer != want.Buffer:
		t.Errorf("owners: %+v, want %+v", *rejected, want)
	}
	asks := c.want == driver.ErrOutOfMemory // only the driver knows
	if n := enqueues(calls); len(n) > 0 && !asks || asks && !onlyAllocs(n) {
		t.Errorf("enqueued %v", n)
	}
	stalls(t, calls)
	if after := state(); !slices.EqualFunc(before, after, func(a, b error) bool { return (a == nil) == (b == nil) }) {
		t.Errorf("owners were usable so: %v, and are so: %v", before, after)
	}
	if after := r.rt.Stats().Queue; after.Reserved != q.Reserved || after.Permanent != 0 {
		t.Errorf("%+v, then %+v", q, after)
	}
	mend()
	must(t, op.do(a)) // the same handles
	op.finish(a)
	must(t, a.s.Close())
	must(t, st.Close())
	must(t, a.buf.Close())
	r.settle()
	if q := r.rt.Stats().Queue; q.Reserved != 0 || q.Permanent != 0 {
		t.Errorf("in the end: %+v", q)
	}
}

func onlyAllocs(names []string) bool {
	return !slices.ContainsFunc(names, func(n string) bool { return n != "cuMemAllocFromPoolAsync" })
}
