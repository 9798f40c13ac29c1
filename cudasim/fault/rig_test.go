package fault_test

import (
	"runtime"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// A rig is a wrapped simulated driver with a context current on the test's
// thread, a stream and what else calls need. Its Injector is disarmed.
type rig struct {
	*testing.T
	*cuapi.Table // the Injector's
	sim          *cudasim.Sim
	inj          *fault.Injector
	ctx          cuapi.Context
	st           cuapi.Stream
	ev           cuapi.Event
	dev          cuapi.DevicePtr
	host         cuapi.HostPtr
	registered   cuapi.HostPtr // where a test asks for it
}

const size = 64

func newRig(t *testing.T) *rig {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	r := &rig{T: t, sim: cudasim.New(cudasim.Config{})}
	drv, err := r.sim.Driver()
	r.must(err)
	r.inj, err = fault.Wrap(drv, fault.Plan{})
	r.must(err)
	r.inj.Disarm()
	r.Table = wire.Table(r.inj.Driver())
	r.ok(r.DevicePrimaryCtxRetain(&r.ctx, 0))
	r.ok(r.CtxSetCurrent(r.ctx))
	r.ok(r.StreamCreate(&r.st, cuapi.StreamNonBlocking))
	r.ok(r.EventCreate(&r.ev, cuapi.EventDisableTiming))
	r.ok(r.MemAlloc(&r.dev, size))
	r.ok(r.MemHostAlloc(&r.host, size, 0))
	return r
}

// end closes everything and the simulator: a fault before the effect has none,
// one after has it.
func (r *rig) end() {
	r.Helper()
	r.inj.Disarm()
	r.ok(r.StreamSynchronize(r.st))
	r.ok(r.MemFreeHost(r.host))
	r.ok(r.MemFree(r.dev))
	r.ok(r.EventDestroy(r.ev))
	r.ok(r.StreamDestroy(r.st))
	r.ok(r.CtxSetCurrent(0))
	r.ok(r.DevicePrimaryCtxRelease(0))
	r.must(r.sim.Close())
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) ok(got cuapi.Result) { r.Helper(); r.want(cuapi.Success, got) }

func (r *rig) want(want, got cuapi.Result) {
	r.Helper()
	if got != want {
		r.Fatalf("got %d, want %d", got, want)
	}
}

func parse(t testing.TB, text string) fault.Plan {
	t.Helper()
	p, err := fault.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (r *rig) arm(text string) { r.Helper(); r.must(r.inj.Arm(parse(r, text))) }

// record and query are calls that always succeed when nothing fails.
func (r *rig) record() cuapi.Result { return r.EventRecord(r.ev, r.st) }
func (r *rig) query() cuapi.Result  { return r.EventQuery(r.ev) }

// What is public takes and gives public types.
var _ func(*driver.Driver, fault.Plan) (*fault.Injector, error) = fault.Wrap
