package publish_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/child"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// A rig is a runtime on a machine. At the test's end everything must have been
// released and no rule of the driver broken, unless the test says so.
type rig struct {
	t    testing.TB
	sim  *cudasim.Sim // nil on a GPU
	drv  *driver.Driver
	ctx  *driver.Context
	rt   *publish.Runtime
	inc  *kernel.Function // adds 1 to each byte: inc(in, out, n)
	bad  *kernel.Function // faults
	keep bool             // something is retained for good

	rec *recorder // with options.trace
}

// testPTX is the device code. The simulator takes the names of its entries, and
// Go functions for what they do.
const testPTX = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry inc(.param .u64 src, .param .u64 dst, .param .u32 n)
{
	.reg .pred %p;
	.reg .u32 %i, %b, %t, %n, %v;
	.reg .u64 %s, %d, %o;
	mov.u32 %b, %ctaid.x;
	mov.u32 %t, %ntid.x;
	mov.u32 %i, %tid.x;
	mad.lo.u32 %i, %b, %t, %i;
	ld.param.u32 %n, [n];
	setp.ge.u32 %p, %i, %n;
	@%p bra END;
	cvt.u64.u32 %o, %i;
	ld.param.u64 %s, [src];
	cvta.to.global.u64 %s, %s;
	add.u64 %s, %s, %o;
	ld.param.u64 %d, [dst];
	cvta.to.global.u64 %d, %d;
	add.u64 %d, %d, %o;
	ld.global.u8 %v, [%s];
	add.u32 %v, %v, 1;
	st.global.u8 [%d], %v;
END:
	ret;
}
.visible .entry bad(.param .u64 dst)
{
	.reg .u32 %v;
	.reg .u64 %a;
	mov.u32 %v, 1;
	mov.u64 %a, 16;
	st.global.u32 [%a], %v;
	ret;
}
`

type options struct {
	sim    cudasim.Config
	cfg    publish.Config
	around func(c cuapi.Call, next func() cuapi.Result) cuapi.Result
	seen   func(*cuapi.Table) // the simulator's own table
	trace  bool               // record what trace asks for
	alone  bool               // on a GPU, in a process of its own: the test loses a context
}

// A machine is where the driver of a rig comes from.
type machine struct {
	name string
	open func(r *rig, o options) *cuapi.Table
}

// machines are the simulator and, with the build tag gpu, the GPU.
var machines = []machine{{"sim", openSim}}

// onEach runs a test on each machine: what holds on the simulator must hold on
// hardware. The test is named r.t.
func onEach(t *testing.T, o options, test func(r *rig)) {
	for _, m := range machines {
		t.Run(m.name, func(t *testing.T) {
			if o.alone && m.name == "gpu" && !child.Is() {
				child.Run(t)
				return
			}
			test(newRigOn(t, m, o))
		})
	}
}

func openSim(r *rig, o options) *cuapi.Table {
	r.sim = cudasim.New(o.sim)
	r.sim.Kernel("inc", func(l *cudasim.Launch) {
		src, dst := l.Bytes(0), l.Bytes(1)
		for i := range int(l.U32(2)) {
			dst[i] = src[i] + 1
		}
	})
	r.sim.Kernel("bad", func(l *cudasim.Launch) { l.Fault(int(cuapi.IllegalAddress)) })
	table := r.sim.Table()
	if res := table.Init(0); res != cuapi.Success {
		r.t.Fatal(res)
	}
	return table
}

// newRig makes a rig on the simulator.
func newRig(t testing.TB, o options) *rig {
	t.Helper()
	return newRigOn(t, machines[0], o)
}

func newRigOn(t testing.TB, m machine, o options) *rig {
	t.Helper()
	r := &rig{t: t, rec: &recorder{}}
	table := m.open(r, o)
	if o.seen != nil {
		o.seen(table)
	}
	if o.around != nil {
		table = cuapi.Intercept(table, o.around)
	}
	if o.trace {
		table = cuapi.Intercept(table, r.rec.note)
	}
	d, err := wire.NewDriver(table, m.name)
	must(t, err)
	r.drv = d.(*driver.Driver)
	dev, err := r.drv.Device(0)
	must(t, err)
	r.ctx, err = dev.Primary()
	must(t, err)
	r.rt, err = publish.New(r.ctx, o.cfg)
	must(t, err)
	mod, err := kernel.Load(r.ctx, []byte(testPTX))
	must(t, err)
	r.inc, err = mod.Function("inc")
	must(t, err)
	r.bad, err = mod.Function("bad")
	must(t, err)
	t.Cleanup(r.end)
	return r
}

// A recorder keeps the driver calls that are made while it is on.
type recorder struct {
	mu    sync.Mutex
	on    bool
	calls []cuapi.Call
}

func (r *recorder) note(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	r.mu.Lock()
	if r.on {
		r.calls = append(r.calls, c)
	}
	r.mu.Unlock()
	return next()
}

// trace returns the driver calls that f makes: the watcher must be quiet, see
// settle, or the caller looks over its queries.
func (r *rig) trace(f func()) []cuapi.Call {
	r.rec.mu.Lock()
	r.rec.on, r.rec.calls = true, nil
	r.rec.mu.Unlock()
	f()
	r.rec.mu.Lock()
	defer r.rec.mu.Unlock()
	r.rec.on = false
	return r.rec.calls
}

func (r *rig) end() {
	t := r.t
	if t.Failed() {
		return
	}
	if r.sim != nil {
		r.sim.ReleaseAll()
		for _, v := range r.sim.Violations() {
			t.Errorf("violation: %v", v)
		}
	}
	if r.keep {
		return
	}
	must(t, r.rt.Shutdown(r.within()))
	s := r.rt.Stats()
	if s.Queue.Entered != s.Queue.Released || s.Queue.Reserved != 0 {
		t.Errorf("the queue kept something: %+v", s.Queue)
	}
	must(t, r.ctx.Shutdown(r.within()))
	if r.sim != nil {
		must(t, r.sim.Close())
	}
}

// within bounds a wait that must end: reaching the bound fails the test.
func (r *rig) within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) session() *publish.Session {
	r.t.Helper()
	s, err := r.rt.OpenSession(nil)
	must(r.t, err)
	return s
}

// hold holds the session's stream: nothing enqueued from now on runs until the
// function that it returns is called.
func (r *rig) hold(s *publish.Session) (release func()) {
	r.t.Helper()
	raw, err := s.Raw()
	must(r.t, err)
	if r.sim == nil {
		release, err := hold.Stream(r.ctx, raw)
		must(r.t, err)
		r.t.Cleanup(release) // also where the test fails
		return release
	}
	r.sim.Hold(raw)
	return func() { r.sim.Release(raw) }
}

func (r *rig) buffer(data []byte) *pinned.Buffer {
	r.t.Helper()
	b, err := r.rt.Pinned(len(data))
	must(r.t, err)
	copy(b.Bytes(), data)
	return b
}

// produce uploads data and increments each byte, so that want is what a
// download of the returned value brings.
func (r *rig) produce(s *publish.Session, data []byte) (v *publish.Value, want []byte) {
	r.t.Helper()
	src, err := s.Alloc(publish.U8, len(data))
	must(r.t, err)
	up, err := s.Upload(src, r.buffer(data))
	must(r.t, err)
	v, err = s.Alloc(publish.U8, len(data))
	must(r.t, err)
	must(r.t, s.Launch(r.inc, kernel.Grid(len(data)), publish.In(src), publish.Out(v), kernel.U32(uint32(len(data)))))
	must(r.t, src.Close())
	must(r.t, up.Close())
	want = make([]byte, len(data))
	for i := range data {
		want[i] = data[i] + 1
	}
	return v, want
}

func (r *rig) publication(s *publish.Session, n int) (*publish.Publication, []byte) {
	r.t.Helper()
	v, want := r.produce(s, random(n))
	p, err := s.Publish(v)
	must(r.t, err)
	return p, want
}

// download consumes p and checks its bytes.
func (r *rig) download(p *publish.Publication, want []byte) {
	r.t.Helper()
	tr, err := p.DownloadInto(r.buffer(make([]byte, len(want))))
	must(r.t, err)
	r.finish(tr, want)
}

func (r *rig) finish(tr *publish.Transfer, want []byte) {
	r.t.Helper()
	out, err := tr.Wait(r.within())
	must(r.t, err)
	if !bytes.Equal(out.Bytes(), want) {
		r.t.Fatalf("downloaded %d bytes that differ", len(want))
	}
	must(r.t, out.Close())
}

func random(n int) []byte {
	p := make([]byte, n)
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rand.Uint32())
	}
	rand.NewChaCha8(seed).Read(p) // which never fails
	return p
}

// collect runs collections until ok: cleanups have run then.
func collect(t testing.TB, ok func() bool) {
	t.Helper()
	for range 10000 {
		if ok() {
			return
		}
		runtime.GC()
	}
	t.Fatal("never came true")
}

// current makes raw calls with the rig's context current.
func (r *rig) current(f func() cuapi.Result) cuapi.Result {
	return wire.ContextOf(r.ctx).Current(f)
}

// spare returns a buffer that is closed at the test's end.
func (r *rig) spare(n int) *pinned.Buffer {
	r.t.Helper()
	b := r.buffer(make([]byte, n))
	r.t.Cleanup(func() { b.Close() })
	return b
}
