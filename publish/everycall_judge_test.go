package publish_test

import (
	"errors"
	"runtime"
	"slices"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// violations reports broken rules of the driver.
func (x *trial) violations(when string) {
	if x.sim == nil {
		return
	}
	for _, v := range x.sim.Violations() {
		x.t.Errorf("violation %s: %v", when, v)
	}
}

// silent tells whether a workflow need not tell that this call failed.
func (x *trial) silent(hit fault.Injection) bool {
	switch hit.Call {
	case "cuMemFreeAsync": // what it frees is retained
		return true
	case "cuEventRecord": // a fence: what is behind it is retained
		return true
	case "cuEventQuery", "cuStreamQuery": // a look: what waits for it is retained
		return true
	case "cuCtxPopCurrent_v2", exchange: // these restore the thread, behind what was asked for
		return true
	case "cuMemAllocFromPoolAsync": // tried again behind a drain
		return hit.Code == driver.ErrOutOfMemory
	}
	return x.w.silent != nil && x.w.silent(hit)
}

// proven are the calls whose failure an operation tells of at once: what is
// retained is then what its error says.
var proven = []string{"cuMemAllocFromPoolAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuLaunchKernel", "cuEventRecord"}

// judge looks at what a workflow left, once all is closed and settled.
func (x *trial) judge() {
	x.violations("of the workflow")
	hit, faulted := x.c.Injected()
	x.judgeError(hit, faulted)
	if x.rt == nil {
		return
	}
	s := x.rt.Stats()
	q := s.Queue
	if q.Entered != q.Released+q.Permanent+q.Pending || q.Reserved != 0 || q.ReservedBytes != 0 || q.Pending != 0 || q.PendingBytes != 0 || s.Sessions != 0 {
		x.t.Errorf("the queue does not conserve: %+v", s)
	}
	lost := x.rt.Err()
	x.judgeLoss(hit, faulted, lost)
	switch {
	case q.Permanent == 0:
	case !faulted:
		x.t.Errorf("retained without a fault: %+v", q)
	case !errors.Is(q.Cause, hit.Code):
		x.t.Errorf("retained for another cause: %+v", q)
	}
	exact := lost == nil && x.unproven == 1 && x.waits == 0 && slices.Contains(proven, hit.Call)
	if q.Permanent < x.entries || q.PermanentBytes < x.bytes || exact && (q.Permanent != x.entries || q.PermanentBytes != x.bytes) {
		x.t.Errorf("%d owners of %d bytes are retained, the errors say %d of %d: %v", q.Permanent, q.PermanentBytes, x.entries, x.bytes, x.err)
	}
	// Device memory is retained, or free, and nothing else has any.
	if int64(s.Memory.InUse) > q.PermanentBytes {
		x.t.Errorf("%d bytes of device memory are in use, %d retained", s.Memory.InUse, q.PermanentBytes)
	}
	if s.Pinned.InUse != s.Pinned.Kept+s.Pinned.Abandoned {
		x.t.Errorf("pinned buffers are in use: %+v", s.Pinned)
	}
	unknown := hit.After && hit.Call == "cuMemAllocFromPoolAsync" && hit.Code == driver.ErrOutOfMemory // there is some, says nobody
	if n := x.pool.Load(); n > int64(q.Permanent) && !unknown {
		x.t.Errorf("%d allocations of pools are left, %d owners retained", n, q.Permanent)
	}
	if q.Permanent == 0 && lost == nil && x.pool.Load() < 0 {
		x.t.Errorf("freed more often than allocated: %d", x.pool.Load())
	}
}

// judgeError checks that the first error is the injected one, and that there is
// one.
func (x *trial) judgeError(hit fault.Injection, faulted bool) {
	var e *driver.Error
	switch err := x.err; {
	case !faulted && err != nil:
		x.t.Errorf("without a fault: %v", err)
	case !faulted:
	case err == nil && !x.silent(hit):
		x.t.Errorf("%v: nobody tells", hit)
	case err == nil:
	case x.answered(hit, err):
	case !errors.Is(err, hit.Code) || !errors.As(err, &e):
		x.t.Errorf("%v: another error: %v", hit, err)
	case e.Op != hit.Call && hit.Call != exchange && x.inj.Lost() == 0:
		// The exchange is part of a list; a loss is told by whoever meets it.
		x.t.Errorf("%v: blamed on %s: %v", hit, e.Op, err)
	}
}

// answered tells whether the failure only took an answer away, so that the error
// is what the library makes of not knowing.
func (x *trial) answered(hit fault.Injection, err error) bool {
	return x.w.silent != nil && x.w.silent(hit) && (errors.Is(err, driver.ErrOutOfMemory) || errors.Is(err, hit.Code))
}

// judgeLoss checks that a context is held for lost when a code says so, and only
// then.
func (x *trial) judgeLoss(hit fault.Injection, faulted bool, lost error) {
	var e *driver.Error
	want := faulted && hit.Code.Sticky()
	switch {
	case lost == nil && want && hit.Call != exchange && (x.w.silent == nil || !x.w.silent(hit)):
		x.t.Errorf("%v: the context is not lost", hit)
	case lost != nil && !want:
		x.t.Errorf("%v: the context is lost: %v", hit, lost)
	case lost == nil:
	case !errors.Is(lost, hit.Code) || !errors.As(lost, &e):
		x.t.Errorf("%v: lost for another cause: %v", hit, lost)
	case e.Op != hit.Call && hit.Call != exchange && x.inj.Lost() == 0:
		x.t.Errorf("%v: the loss is blamed on %s", hit, e.Op)
	}
}

// end is the end of a workflow that leaves the runtime open: a context that is
// not lost goes on to work, and an end is clean unless something is retained.
func (x *trial) end() {
	if x.rt.Err() == nil {
		switch err, lost := x.workflow(random(64)), x.inj.Lost(); {
		case lost != 0 && !errors.Is(err, lost): // and nobody had met the loss so far
			x.t.Errorf("afterwards, on a lost context: %v", err)
		case lost == 0 && err != nil:
			x.t.Errorf("afterwards: %v", err)
		case lost == 0:
			x.credits()
		}
	}
	x.settle()
	x.shutdown()
}

// shutdown ends runtime and context.
func (x *trial) shutdown() {
	hit, _ := x.c.Injected()
	q := x.queue()
	for what, err := range map[string]error{"runtime": x.rt.Shutdown(x.within()), "context": x.ctx.Shutdown(x.within())} {
		switch {
		case (err != nil) != (q.Permanent > 0) || errors.Is(err, driver.ErrBusy):
			x.t.Errorf("the %s's shutdown with %d retained: %v", what, q.Permanent, err)
		case err != nil && !errors.Is(err, hit.Code):
			x.t.Errorf("the %s's shutdown does not tell why: %v", what, err)
		}
	}
	if q.Permanent == 0 && x.rt.Err() == nil {
		x.clean()
	}
}

// clean checks that the driver has nothing of ours any more.
func (x *trial) clean() {
	hit, _ := x.c.Injected()
	if x.sim == nil || hit.After && slices.Contains(makes, hit.Call) {
		return
	}
	if x.untidy || slices.Contains(unmakes, hit.Call) {
		return
	}
	if err := x.sim.Close(); err != nil {
		x.t.Errorf("%v: at the end: %v", hit, err)
	}
}

// makes are calls that make something: where one fails behind its effect nobody
// knows what.
var makes = []string{
	"cuEventCreate", "cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc_v2", "cuMemAllocFromPoolAsync", "cuMemPoolCreate",
	"cuModuleLoadDataEx", "cuDevicePrimaryCtxRetain",
}

// unmakes are calls that end what opening a context and a runtime makes for itself
// alone. Where one fails nothing ends it again: the opening tells.
var unmakes = []string{"cuMemFreeAsync", "cuEventDestroy_v2", "cuStreamDestroy_v2"}

// credits checks that all credits come back.
func (x *trial) credits() {
	core := wire.ContextOf(x.ctx)
	_, stop := stream.AwaitCredits(core) // the watcher looks for them meanwhile
	defer stop()
	for range 1000000 {
		if stream.InFlight(core) == 0 {
			return
		}
		runtime.Gosched()
	}
	x.t.Errorf("%d credits never come back", stream.InFlight(core))
}
