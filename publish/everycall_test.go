package publish_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/child"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

// A workflow is something that programs do with the library. Each of its driver
// calls fails, one at a time.
type workflow struct {
	name    string
	o       options
	simOnly bool // it needs a machine that only the simulator can be

	// ready is what does not fail: it comes before run, and may be nil.
	ready func(x *trial)
	// run is what fails. It stops at the first error that it meets: by get and
	// do, or by returning it. What it opened by the trial's methods is closed
	// behind it, while calls may still fail.
	run func(x *trial) error
	// end judges what is left, and ends it: nil means (*trial).end.
	end func(x *trial)

	// silent tells whether run need not tell of a failure, besides those that no
	// workflow tells of. It may be nil.
	silent func(hit fault.Injection) bool
	// varies are calls that it makes as often as somebody looks, besides those of
	// every workflow.
	varies []string
}

// codes are one of each class that the library tells apart.
var codes = []driver.Result{
	driver.ErrInvalidValue,   // a refusal; of some questions it is an answer
	driver.ErrOutOfMemory,    // a rejection, where memory was asked for
	driver.ErrNotReady,       // the answer of a query, and a failure elsewhere
	driver.ErrInvalidContext, // what the probe of a context asks for
	driver.ErrLaunchFailed,   // the context is lost
	9999,                     // nobody knows it
}

// exchange works on the thread alone: it tells nothing of the context.
const exchange = "cuThreadExchangeStreamCaptureMode"

// varies are the calls that are made as often as the watcher or a wait looks.
var varies = []string{"cuEventQuery", exchange}

// caseEnv has the line of one case: TestFault21EveryCallFails runs it alone, see
// CONTRIBUTING.md.
const caseEnv = "PURECUDA_FAULT_CASE"

// loops are what a machine's trials let fail: every call on the simulator, some
// of each entry point on a GPU. There "before" keeps a call from the driver, and
// "after" replaces the result of one that worked, so that no code is a true one
// and the GPU's own context stays sound.
func loops(w *workflow, m machine) []fault.Loop {
	all := fault.Loop{Codes: codes, Varies: append(w.varies, varies...), Sample: sample, SampleVaries: 3}
	if sample > 0 {
		all.Codes = []driver.Result{driver.ErrInvalidValue, driver.ErrOutOfMemory, driver.ErrLaunchFailed}
	}
	if m.name == "gpu" {
		all.Codes = []driver.Result{driver.ErrInvalidValue, driver.ErrLaunchFailed}
		all.Sample, all.SampleVaries = 2, 1
	}
	lost := all // for good, with all calls behind the first one
	lost.Codes, lost.Lose = []driver.Result{driver.ErrLaunchFailed}, true
	if m.name == "gpu" {
		return []fault.Loop{all}
	}
	return []fault.Loop{all, lost}
}

// Each driver call of each workflow fails: every one that the unfaulted workflow
// makes, by entry point and position, with each class of code, before and after
// its effect. After each, no rule of the driver is broken, the counters conserve,
// the error is told and names the call, owners are where law 3 puts them, what is
// retained is what the error says, and a context that is not lost goes on to
// work. The loop itself fails where it did not inject.
func TestFault21EveryCallFails(t *testing.T) {
	for i := range workflows {
		w := &workflows[i]
		t.Run(w.name, func(t *testing.T) {
			for _, m := range machines {
				if m.name == "gpu" && w.simOnly {
					continue
				}
				t.Run(m.name, func(t *testing.T) { w.everyCall(t, m) })
			}
		})
	}
}

// on returns the run of one case on a machine.
func (w *workflow) on(t testing.TB, m machine) func(*fault.Case) error {
	return func(c *fault.Case) error { return w.trial(t, m, c) }
}

func (w *workflow) everyCall(t *testing.T, m machine) {
	if m.name == "gpu" {
		if !child.Is() { // it leaves there what the library retains
			child.Run(t)
			return
		}
		// The driver's own context stays as long as the process.
		table := m.open(&rig{t: t}, w.o)
		if res := table.DevicePrimaryCtxRetain(new(cuapi.Context), 0); res != cuapi.Success {
			t.Fatal(res)
		}
	}
	run := w.on(t, m)
	if line := os.Getenv(caseEnv); line != "" {
		plan, err := fault.Parse(line)
		must(t, err)
		if err := fault.Replay(plan, run); err != nil {
			t.Error(err)
		}
		return
	}
	for _, l := range loops(w, m) {
		report, err := fault.Each(l, run)
		t.Logf("codes %v: %v", l.Codes, report)
		if err != nil {
			t.Errorf("%v\nOne of these lines alone: %s='LINE' go test ./publish -run '%s' -v", err, caseEnv, t.Name())
		}
	}
}

// A judge that finds nothing proves nothing: each of these breaks a law.
func TestEveryCallIsJudged(t *testing.T) {
	boom := errors.New("boom")
	unproven := &publish.UnprovenError{Op: "upload", Cause: boom}
	for finding, run := range map[string]func(x *trial) error{
		"the queue does not conserve":      func(x *trial) error { x.lasting = get(x.rt.OpenSession(nil)); return nil },
		"pinned buffers are in use":        func(x *trial) error { x.lasting = get(x.rt.Pinned(64)); return nil },
		"without a fault: boom":            func(x *trial) error { return boom },
		"retained without a fault":         func(x *trial) error { get(get(x.enter()).Alloc(publish.U8, 64)).Leak(); return nil },
		"violation of the workflow":        func(x *trial) error { x.beneath.EventQuery(77); return nil },
		"*pinned.Buffer is live":           func(x *trial) error { return x.owners("upload", x.queue(), nil, 0, []any{get(x.buffered(64))}, nil) },
		"neither rejected nor unproven":    func(x *trial) error { x.owners("upload", x.queue(), boom, 0, nil, nil); return nil },
		"nothing of 64 bytes was retained": func(x *trial) error { x.owners("upload", x.queue(), unproven, 64, nil, nil); return nil },
		"the errors say 1 of 64":           func(x *trial) error { x.owners("upload", x.queue(), unproven, 64, nil, nil); return nil },
		"1 allocations of pools are left":  func(x *trial) error { x.pool.Add(1); return nil },
		"the context is lost":              func(x *trial) error { wire.ContextOf(x.ctx).Fail(0, 700, ""); return nil },
		"things left alive": func(x *trial) error {
			x.rig.current(func() cuapi.Result { return x.beneath.EventCreate(new(cuapi.Event), 0) })
			return nil
		},
	} {
		w := &workflow{name: "broken", ready: (*trial).opened, run: run}
		if _, err := fault.Each(fault.Loop{}, w.on(t, machines[0])); err == nil || !strings.Contains(err.Error(), finding) {
			t.Errorf("%q was not found: %v", finding, err)
		}
	}
	for line, broken := range map[string]struct {
		finding string
		run     func(x *trial) error
	}{
		"fail cuStreamCreate #1 with 1": {"nobody tells", func(x *trial) error { x.rt.OpenSession(nil); return nil }},
		"fail cuStreamCreate #1 with 2": {"another error", func(x *trial) error { x.rt.OpenSession(nil); return boom }},
		"fail cuStreamCreate #1 with 3": {"blamed on cuEventQuery", func(x *trial) error {
			x.rt.OpenSession(nil)
			return &driver.Error{Op: "cuEventQuery", Code: 3}
		}},
		"fail cuDriverGetVersion #1 with 719": {"the context is not lost", func(x *trial) error {
			wire.Table(x.drv).DriverGetVersion(new(int32))
			return &driver.Error{Op: "cuDriverGetVersion", Code: 719}
		}},
	} {
		w := &workflow{name: "broken", ready: (*trial).opened, run: broken.run}
		plan, err := fault.Parse(line)
		must(t, err)
		if err := fault.Replay(plan, w.on(t, machines[0])); err == nil || !strings.Contains(err.Error(), broken.finding) {
			t.Errorf("%s: %q was not found: %v", line, broken.finding, err)
		}
	}
}
