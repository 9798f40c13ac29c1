package fault_test

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// heard returns what the driver beneath hears while f runs.
func (r *rig) heard(f func()) (names []string) {
	r.Helper()
	r.sim.StartTrace()
	f()
	r.sim.StopTrace()
	for _, c := range r.sim.Trace() {
		names = append(names, c.Name)
	}
	return names
}

// Each plan is armed, eight calls are made, records and queries in turn, and
// their results are as told: "." is success, "x" the plan's code.
func TestWhichCallsFail(t *testing.T) {
	code := cuapi.NotFound
	fail := func(c fault.Cond) fault.Rule { return fault.Fail(c, driver.Result(code)) }
	odd := func(_ string, position int) bool { return position%2 == 1 }
	third := func(name string, position int) bool { return name == "cuEventQuery" && position >= 4 }
	for _, c := range []struct {
		plan any
		want string
	}{
		{"nothing", "........"},
		{fault.Plan{}, "........"},
		{fault.Sequence(), "........"},
		{"fail call 3 with 500", "..x....."},
		{"fail call 3..5 with 500", "..xxx..."},
		{"fail call 3.. with 500", "..xxxxxx"},
		{"fail any with 500", "xxxxxxxx"},
		{"fail any #2 with 500", ".x......"},
		{"fail cuEventRecord with 500", "x.x.x.x."},
		{"fail cuEventQuery with 500", ".x.x.x.x"},
		{"fail cuEventQuery #2 with 500", "...x...."},
		{"fail cuEventQuery #2..3 with 500", "...x.x.."},
		{"fail cuEventQuery #2.. with 500", "...x.x.x"},
		{"fail cuEventQuery #5 with 500", "........"},
		{"fail cuStreamQuery with 500", "........"},
		{"fail not cuEventQuery #2.. with 500", "..x.x.x."},
		{"fail (cuEventQuery and call 4..6) with 500", "...x.x.."},
		{"fail (cuEventQuery or call 3) with 500", ".xxx.x.x"},
		{"fail (cuEventQuery or call 3) #2 with 500", "..x....."},
		{"fail (cuEventRecord and call 5 or cuEventQuery and call 2) with 500", ".x..x..."},
		{"fail not (cuEventQuery or call 3) with 500", "x...x.x."},
		{"fail call 2 with 500; fail call 5 with 500", ".x..x..."},
		{"fail cuEventQuery #1 with 500 then fail cuEventRecord #2 with 500", ".x..x..."},
		{"fail cuEventQuery #1 with 500 then fail cuEventQuery #1 with 500 then fail any with 500", ".x.xxxxx"},
		{"fail cuEventQuery #1..2 with 500 then fail call 2..7 with 500", ".x.xxxx."},
		{fault.Rules(fail(fault.Call(1)), fail(fault.Any()).Nth(4)), "x..x...."},
		{fault.FirstOf(fault.Rules(fail(fault.CallsFrom(8))), fault.Sequence(fail(fault.Name("cuEventRecord")).From(4))), "......xx"},
		{fault.Rules(fail(fault.Name("cuEventRecord", "cuEventQuery")).Range(2, 3)), ".xx....."},
		{fault.Rules(fail(fault.Func("odd", odd))), "x.x.x.x."},
		{fault.Rules(fail(fault.Func("third", third)).Nth(2)), ".....x.."},
		{fault.Rules(fail(fault.And(fault.Func("odd", odd), fault.Not(fault.Call(5))))), "x.x...x."},
	} {
		r := newRig(t)
		plan, ok := c.plan.(fault.Plan)
		if !ok {
			plan = parse(t, c.plan.(string))
		}
		r.must(r.inj.Arm(plan))
		got := ""
		heard := r.heard(func() {
			for range 4 {
				for _, call := range []func() cuapi.Result{r.record, r.query} {
					switch res := call(); res {
					case cuapi.Success:
						got += "."
					case code:
						got += "x"
					default:
						t.Errorf("%v: a call returned %d", plan, res)
					}
				}
			}
		})
		if got != c.want {
			t.Errorf("%v: got %s, want %s", plan, got, c.want)
		}
		if n := strings.Count(got, "."); len(heard) != n {
			t.Errorf("%v: the driver heard %d calls, want %d", plan, len(heard), n)
		}
		if got := r.inj.Counts(); !reflect.DeepEqual(got, map[string]int{"cuEventRecord": 4, "cuEventQuery": 4}) || r.inj.Calls() != 8 {
			t.Errorf("%v: %d calls: %v", plan, r.inj.Calls(), got)
		}
		var where strings.Builder
		for i := range c.want {
			if c.want[i] == 'x' {
				fmt.Fprintln(&where, fault.Injection{
					Call: []string{"cuEventRecord", "cuEventQuery"}[i%2], Position: i + 1, Nth: i/2 + 1, Code: driver.Result(code),
				})
			}
		}
		var log strings.Builder
		for _, inj := range r.inj.Injected() {
			fmt.Fprintln(&log, inj)
		}
		if log.String() != where.String() || r.inj.Times() != strings.Count(c.want, "x") {
			t.Errorf("%v: log:\n%swant:\n%s", plan, &log, &where)
		}
		r.end()
	}
}

// The first rule that matches wins; the others count all the same.
func TestFirstRuleWins(t *testing.T) {
	r := newRig(t)
	r.arm("fail cuEventRecord #1 with 1; fail cuEventRecord #1..2 with 2; fail any #3.. with 3")
	for _, want := range []cuapi.Result{1, 2, 3, 3} {
		r.want(want, r.record())
	}
	r.end()
}

// After its effect a call has been made, and its own failure is replaced too.
func TestBeforeAndAfter(t *testing.T) {
	r := newRig(t)
	r.sim.Hold(uintptr(r.st))
	r.arm("fail cuEventRecord #1 with 999; fail cuEventRecord #2 after with 999; fail cuMemAlloc with 700 after; fail cuEventQuery #3 with 999 after")
	r.want(cuapi.Unknown, r.record())
	r.ok(r.query()) // never recorded
	r.want(cuapi.Unknown, r.record())
	r.want(cuapi.NotReady, r.query()) // recorded
	r.want(cuapi.Unknown, r.query())  // the driver said 600
	p := new(cuapi.DevicePtr)
	r.want(cuapi.IllegalAddress, r.MemAlloc(p, size))
	if *p == 0 {
		t.Error("nothing was allocated")
	}
	log := r.inj.Injected()
	if len(log) != 4 || log[0].After || !log[1].After || log[3].Call != "cuMemAlloc_v2" {
		t.Errorf("%v", log)
	}
	if s := log[1].String(); s != "call 3, cuEventRecord #2: CUDA_ERROR_UNKNOWN (999), after its effect" {
		t.Error(s)
	}
	r.sim.ReleaseAll()
	r.inj.Disarm()
	r.ok(r.MemFree(*p))
	r.end()
}

// A name means all its versions, or the one that it has.
func TestNamesOfEveryEntryPoint(t *testing.T) {
	for _, e := range cuapi.Entries {
		if e.ID == cuapi.IDGetErrorName || e.ID == cuapi.IDGetErrorString {
			continue
		}
		base, _, _ := strings.Cut(e.Symbol(), "_v")
		names := []string{base}
		for _, s := range e.Symbols {
			names = append(names, s.Name)
		}
		for _, name := range names {
			p := parse(t, "fail "+name+" with 1")
			if p.String() != "fail "+name+" with CUDA_ERROR_INVALID_VALUE" {
				t.Error(p)
			}
			if !fault.Matches(fault.Name(name), e.ID) {
				t.Errorf("%s does not mean %s", name, e.Symbol())
			}
			for _, other := range cuapi.Entries {
				also, _, _ := strings.Cut(other.Symbol(), "_v")
				if other.ID != e.ID && also != name && fault.Matches(fault.Name(name), other.ID) {
					t.Errorf("%s means %s", name, other.Symbol())
				}
			}
		}
		for _, other := range cuapi.Entries {
			if got := fault.Matches(fault.Exactly(e.ID), other.ID); got != (e.ID == other.ID) {
				t.Errorf("exactly %s and %s: %v", e.Symbol(), other.Symbol(), got)
			}
		}
	}
	for _, name := range []string{"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"} {
		r := newRig(t)
		r.arm("fail " + name + " with 1")
		r.want(cuapi.InvalidValue, r.MemcpyDtoHAsync(r.host, r.dev, size, r.st))
		r.end()
	}
}

func TestCallsThatTellErrorsAreNeverInjected(t *testing.T) {
	r := newRig(t)
	r.arm("fail any with 1")
	p := new(*byte)
	r.ok(r.GetErrorName(700, p))
	r.ok(r.GetErrorString(700, p))
	if r.inj.Calls() != 0 || r.inj.Times() != 0 {
		t.Error("they count")
	}
	r.inj.Disarm()
	r.arm("lose any with 719")
	r.want(cuapi.LaunchFailed, r.record())
	r.ok(r.GetErrorName(700, p))
	r.ok(r.GetErrorString(700, p))
}

func TestArmAndDisarm(t *testing.T) {
	r := newRig(t)
	r.ok(r.record()) // disarmed
	if r.inj.Calls() != 0 || len(r.inj.Counts()) != 0 {
		t.Error("a disarmed Injector counts")
	}
	r.arm("fail call 2 with 1")
	r.ok(r.record())
	r.want(cuapi.InvalidValue, r.record())
	r.inj.Disarm()
	r.inj.Disarm()
	r.ok(r.record())
	if r.inj.Calls() != 2 || r.inj.Times() != 1 || len(r.inj.Injected()) != 1 {
		t.Error("Disarm forgets, or what follows counts")
	}
	r.arm("fail call 2 with 2")
	if r.inj.Calls() != 0 || r.inj.Times() != 0 || r.inj.Injected() != nil {
		t.Error("Arm does not begin anew")
	}
	r.ok(r.record())
	r.want(cuapi.OutOfMemory, r.record())
	r.end()
}

// Wrap's own calls do not count; a driver that is wrapped twice has both
// plans, and its own calls fail by the inner one.
func TestWrap(t *testing.T) {
	r := newRig(t)
	drv := r.inj.Driver()
	if drv != r.inj.Driver() || drv.Source() != "simulator, with faults" || drv.DeviceCount() != 1 {
		t.Errorf("%v %s", drv, drv.Source())
	}
	outer, err := fault.Wrap(drv, parse(t, "fail call 1 with 1"))
	r.must(err)
	if outer.Calls() != 0 {
		t.Error("Wrap counts its own calls")
	}
	r.arm("fail cuEventRecord #1 with 2")
	table := wire.Table(outer.Driver())
	r.want(cuapi.InvalidValue, table.EventRecord(r.ev, r.st))
	r.want(cuapi.OutOfMemory, table.EventRecord(r.ev, r.st))
	r.ok(table.EventRecord(r.ev, r.st))
	r.arm("fail cuDeviceGetCount with 100")
	if _, err := fault.Wrap(drv, fault.Plan{}); !errors.Is(err, driver.ErrNoDevice) {
		t.Error(err)
	}
	r.end()
}

// A zero Injector is none, and panics nowhere.
func TestZeroInjector(t *testing.T) {
	i := new(fault.Injector)
	i.Disarm()
	if i.Driver() != nil || i.Calls() != 0 || len(i.Counts()) != 0 || i.Injected() != nil || i.Times() != 0 || i.Lost() != 0 {
		t.Error("a zero Injector has something")
	}
	if _, err := i.Gate("g"); err == nil {
		t.Error("it has a gate")
	}
	for _, i := range []*fault.Injector{i, nil} {
		if err := i.Arm(fault.Plan{}); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if err := new(fault.Case).Arm(i); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
	}
}

// The library above sees the fault as the driver's own error.
func TestThroughTheLibrary(t *testing.T) {
	r := newRig(t)
	r.arm("fail cuDeviceGetName with CUDA_ERROR_SYSTEM_NOT_READY")
	_, err := r.inj.Driver().Device(0)
	var e *driver.Error
	if !errors.As(err, &e) || e.Op != "cuDeviceGetName" || e.Code != driver.ErrSystemNotReady || e.Text == "" {
		t.Error(err)
	}
	r.end()
}

// list makes a list of as many calls as one has room for: an allocation, a
// fill, a copy, a record.
func (r *rig) list(pool cuapi.MemPool, relaxed bool) (p *cuapi.DevicePtr, n int, res cuapi.Result) {
	p = new(cuapi.DevicePtr)
	l := cuapi.NewList()
	defer l.Free()
	l.MemAllocFromPoolAsync(p, size, pool, r.st)
	l.MemsetD8Async(r.dev, 7, size, r.st)
	l.MemcpyDtoHAsync(r.host, r.dev, size, r.st)
	l.EventRecord(r.ev, r.st)
	if relaxed {
		l.Relax()
	}
	n, res = r.Table.Run(l)
	return p, n, res
}

var listed = []string{"cuMemAllocFromPoolAsync", "cuMemsetD8Async", "cuMemcpyDtoHAsync_v2", "cuEventRecord"}

const exchange = "cuThreadExchangeStreamCaptureMode"

// Each call of a list fails, before and after its effect: the list stops there.
func TestLists(t *testing.T) {
	if len(listed) != cuapi.MaxList {
		t.Fatal("a list has room for more")
	}
	for _, relaxed := range []bool{false, true} {
		all := slices.Clone(listed)
		if relaxed {
			all = slices.Concat([]string{exchange}, listed, []string{exchange})
		}
		for at := 0; at <= len(all)+1; at++ { // the first and the last fail nothing
			for _, after := range []bool{false, true} {
				r := newRig(t)
				pool := new(cuapi.MemPool)
				r.ok(r.DeviceGetDefaultMemPool(pool, 0))
				if at > 0 {
					rule := fault.Fail(fault.Call(at), driver.ErrNotSupported)
					if after {
						rule = rule.After()
					}
					r.must(r.inj.Arm(fault.Rules(rule)))
				} else {
					r.arm("nothing")
				}
				var p *cuapi.DevicePtr
				var n int
				var res cuapi.Result
				heard := r.heard(func() { p, n, res = r.list(*pool, relaxed) })
				r.inj.Disarm()

				// In the list the call has the index k; before it, -1, is the exchange.
				k, want := at-1, cuapi.NotSupported
				if relaxed {
					k--
				}
				var wantHeard []string
				switch {
				case at == 0 || at > len(all):
					k, want, wantHeard = len(listed), cuapi.Success, all
				case relaxed && at == len(all): // putting the mode back fails unseen
					k, want, wantHeard = len(listed), cuapi.Success, all[:at-1]
				default:
					wantHeard = slices.Clone(all[:at-1])
					if relaxed && k >= 0 {
						wantHeard = append(wantHeard, exchange)
					}
				}
				if after && 0 < at && at <= len(all) {
					wantHeard = slices.Insert(slices.Clone(wantHeard), at-1, all[at-1])
				}
				if n != max(k, 0) || res != want || !slices.Equal(heard, wantHeard) {
					t.Errorf("relaxed %v, call %d, after %v: stopped at %d with %d, the driver heard %v, want %d, %d, %v",
						relaxed, at, after, n, res, heard, max(k, 0), want, wantHeard)
				}
				log := r.inj.Injected()
				if hit := 0 < at && at <= len(all); hit != (len(log) == 1) || hit && (log[0].Call != all[at-1] || log[0].Position != at) {
					t.Errorf("relaxed %v, call %d: %v", relaxed, at, log)
				}
				mode := new(int32)
				r.ThreadExchangeStreamCaptureMode(mode) // back to global, whatever it was
				if *p != 0 {
					r.ok(r.MemFreeAsync(*p, r.st))
				}
				r.end()
			}
		}
	}
}

// at returns the gate of that name.
func (r *rig) at(name string) *fault.Gate {
	r.Helper()
	g, err := r.inj.Gate(name)
	r.must(err)
	return g
}

// A call waits at its gate, before it is made or after, until it opens; what a
// rule does besides follows then.
func TestGates(t *testing.T) {
	for _, c := range []struct {
		text            string
		made            bool // when the call is at the gate
		result, flagged cuapi.Result
	}{
		{"delay cuEventRecord #1 at g", false, cuapi.Success, 0},
		{"delay cuEventRecord #1 after at g", true, cuapi.Success, 0},
		{"fail cuEventRecord #1 with 2 at g", false, cuapi.OutOfMemory, 0},
		{"fail cuEventRecord #1 with 2 after at g", true, cuapi.OutOfMemory, 0},
		{"lose cuEventRecord #1 with 719 at g", false, cuapi.LaunchFailed, 719},
		{"lose cuEventRecord #1 with 719 after at g", true, cuapi.LaunchFailed, 719},
	} {
		for _, open := range []string{"open", "disarm", "arm"} {
			r := newRig(t)
			r.sim.Hold(uintptr(r.st))
			r.arm(c.text)
			g := r.at("g")
			select {
			case <-g.Reached():
				t.Error("reached by nobody")
			default:
			}
			done := make(chan cuapi.Result)
			go func() { done <- r.record() }()
			<-g.Reached()
			if g.Waiting() != 1 {
				t.Errorf("%d wait", g.Waiting())
			}
			want := cuapi.Success // while the stream is held: 600 where the record was made
			if c.made {
				want = cuapi.NotReady
			}
			r.want(want, r.query())
			if r.inj.Lost() != 0 {
				t.Error("lost too early")
			}
			if log := r.inj.Injected(); len(log) != 1 || log[0].Gate != "g" || log[0].Call != "cuEventRecord" {
				t.Error(log)
			}
			switch open {
			case "open":
				g.Open()
				g.Open()
			case "disarm":
				r.inj.Disarm()
			case "arm":
				r.arm("delay any #100 at g") // another gate
			}
			r.want(c.result, <-done)
			if g.Waiting() != 0 {
				t.Errorf("%d wait", g.Waiting())
			}
			if r.inj.Lost() != driver.Result(c.flagged) {
				t.Error(r.inj.Lost())
			}
			r.sim.ReleaseAll()
			if c.flagged == 0 {
				r.end()
			}
		}
	}
}

// An open gate lets everybody pass, a shut one holds everybody.
func TestAGateOfMany(t *testing.T) {
	r := newRig(t)
	r.arm("delay (cuEventRecord and call 1..4) at g; delay cuEventQuery at h")
	if _, err := r.inj.Gate("i"); err == nil || !strings.Contains(err.Error(), `no gate "i"`) {
		t.Error(err)
	}
	r.at("h").Open()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if res := r.record(); res != cuapi.Success {
				t.Error(res)
			}
		})
	}
	for r.at("g").Waiting() < 4 {
		runtime.Gosched()
	}
	r.ok(r.record())
	r.ok(r.query()) // through the open gate
	if s := r.inj.Injected()[4].String(); s != "call 6, cuEventQuery #1, at gate h" {
		t.Error(s)
	}
	r.at("g").Open()
	wg.Wait()
	r.end()
}

// A gate serves calls inside and outside of a bubble of testing/synctest.
func TestGatesInABubble(t *testing.T) {
	r := newRig(t)
	ask, done := make(chan struct{}), make(chan cuapi.Result, 1)
	go func() { <-ask; done <- r.record() }()
	synctest.Test(t, func(t *testing.T) {
		r.arm("delay any at g")
		g := r.at("g")
		close(ask)
		<-g.Reached()
		g.Open()
	})
	r.want(cuapi.Success, <-done)
	r.end()
}

// A log is bounded, the count is not.
func TestLogIsBounded(t *testing.T) {
	r := newRig(t)
	r.arm("fail any with 1")
	for range 10100 {
		r.record()
	}
	if n, times := len(r.inj.Injected()), r.inj.Times(); n != 10000 || times != 10100 {
		t.Errorf("%d kept of %d", n, times)
	}
	r.end()
}

// Many goroutines call, one arms, disarms and reads. No call is counted twice
// or lost, and each position is injected once.
func TestHammer(t *testing.T) {
	r := newRig(t)
	const goroutines, each = 8, 500
	r.arm("fail any #1..1000 with 2 then fail any #1.. with 1 after; delay call 7 at g")
	var twos, ones, rest atomic.Int64
	var wg sync.WaitGroup
	calls := func() {
		for k := range each {
			var res cuapi.Result
			if k%4 == 0 {
				l := cuapi.NewList()
				l.EventRecord(r.ev, r.st)
				_, res = r.Table.Run(l)
				l.Free()
			} else {
				res = r.query()
			}
			switch res {
			case cuapi.OutOfMemory:
				twos.Add(1)
			case cuapi.InvalidValue:
				ones.Add(1)
			default:
				rest.Add(1)
			}
		}
	}
	for range goroutines {
		wg.Go(calls)
	}
	wg.Wait()
	if twos.Load() != 1000 || ones.Load() != goroutines*each-1000 || rest.Load() != 0 || r.inj.Calls() != goroutines*each {
		t.Errorf("%d, %d and %d of %d calls", twos.Load(), ones.Load(), rest.Load(), r.inj.Calls())
	}
	seen := map[int]bool{}
	for i, inj := range r.inj.Injected() {
		if seen[inj.Position] || inj.Position != i+1 {
			t.Fatalf("position %d at %d", inj.Position, i)
		}
		seen[inj.Position] = true
	}

	stop := make(chan struct{})
	var armer sync.WaitGroup
	plan := parse(t, "delay any #3.. at g; fail cuEventQuery #2.. with 2")
	armer.Go(func() {
		for {
			if err := r.inj.Arm(plan); err != nil {
				t.Error(err)
			}
			r.inj.Injected()
			r.inj.Counts()
			if g, err := r.inj.Gate("g"); err == nil {
				g.Waiting()
			}
			runtime.Gosched()
			select {
			case <-stop:
				r.inj.Disarm()
				return
			default:
			}
		}
	})
	for range goroutines {
		wg.Go(calls)
	}
	wg.Wait()
	close(stop)
	armer.Wait()
	r.end()
}
