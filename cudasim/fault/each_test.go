package fault_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// workflow makes seven calls, three of them in a list, and stops at the first
// failure.
func (r *rig) workflow() error {
	l := cuapi.NewList()
	defer l.Free()
	l.MemsetD8Async(r.dev, 7, size, r.st)
	l.MemcpyDtoHAsync(r.host, r.dev, size, r.st)
	l.EventRecord(r.ev, r.st)
	for _, f := range []func() cuapi.Result{
		r.record, r.query,
		func() cuapi.Result { _, res := r.Table.Run(l); return res },
		r.query,
		func() cuapi.Result { return r.StreamSynchronize(r.st) },
	} {
		if res := f(); res != cuapi.Success {
			return driver.Result(res)
		}
	}
	return nil
}

var steps = map[string]int{"cuEventRecord": 2, "cuEventQuery": 2, "cuMemsetD8Async": 1, "cuMemcpyDtoHAsync_v2": 1, "cuStreamSynchronize": 1}

// Every call of a workflow fails, each code, before and after its effect.
func TestEach(t *testing.T) {
	codes := []driver.Result{driver.ErrInvalidValue, driver.ErrIllegalAddress}
	for _, loses := range []bool{false, true} {
		var lines []string
		seen := map[fault.Injection]bool{}
		report, err := fault.Each(fault.Loop{Codes: codes, Lose: loses}, func(c *fault.Case) error {
			r := newRig(t)
			if err := c.Arm(r.inj); err != nil {
				return err
			}
			var err error
			heard := r.heard(func() { err = r.workflow() })
			hit, faulted := c.Injected()
			if faulted != c.Faulted() || faulted != (c.Plan().String() != "nothing") {
				t.Errorf("%v: injected %v", c.Plan(), faulted)
			}
			if !faulted {
				r.end()
				return err
			}
			lines = append(lines, c.Plan().String())
			seen[hit] = true
			want := hit.Position - 1
			if hit.After {
				want++
			}
			if !errors.Is(err, hit.Code) || len(heard) != want || r.inj.Calls() != hit.Position || r.inj.Times() != 1 {
				t.Errorf("%v: %v: the driver heard %v", hit, err, heard)
			}
			if lost := loses && hit.Code.Sticky(); lost != (r.inj.Lost() != 0) {
				t.Errorf("%v: lost: %v", hit, lost)
			} else if !lost {
				r.end()
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]int{}
		for name, n := range steps {
			want[name] = n * 4
		}
		if report.Positions != 7 || report.Runs != 28 || report.Missed != 0 || !reflect.DeepEqual(report.Injected, want) {
			t.Errorf("%+v", report)
		}
		if s := report.String(); s != "7 positions of 5 entry points in 28 runs, 0 of which did not come to theirs" {
			t.Error(s)
		}
		var all []string
		for name, n := range steps {
			for i := range n {
				for _, code := range codes {
					verb := "fail"
					if loses && code.Sticky() {
						verb = "lose"
					}
					text, _, _ := strings.Cut(code.Error(), " ")
					line := fmt.Sprintf("%s %s #%d with %s", verb, name, i+1, text)
					all = append(all, line, line+" after")
				}
			}
		}
		slices.Sort(all)
		slices.Sort(lines)
		if !slices.Equal(lines, all) || len(seen) != len(all) {
			t.Errorf("%d injections, the cases are\n%s\nwant\n%s", len(seen), strings.Join(lines, "\n"), strings.Join(all, "\n"))
		}
	}
}

// The zero Loop takes a refusal, a shortage and a lost context.
func TestEachByDefault(t *testing.T) {
	codes := map[driver.Result]int{}
	_, err := fault.Each(fault.Loop{}, func(c *fault.Case) error {
		r := newRig(t)
		r.must(c.Arm(r.inj))
		r.record()
		hit, _ := c.Injected()
		codes[hit.Code]++
		return nil // not disarmed: Each does
	})
	if err != nil || !reflect.DeepEqual(codes, map[driver.Result]int{0: 1, 1: 2, 2: 2, 719: 2}) {
		t.Error(codes, err)
	}
}

// Only, Sample and Varies choose and excuse; nothing else does.
func TestEachChooses(t *testing.T) {
	for _, c := range []struct {
		what     string
		loop     fault.Loop
		injected map[string]int
		missed   int
		err      string
	}{
		{"only a name", fault.Loop{Only: fault.Name("cuMemcpyDtoHAsync")}, map[string]int{"cuMemcpyDtoHAsync_v2": 2}, 0, ""},
		{"only positions", fault.Loop{Only: fault.CallsFrom(9)}, map[string]int{"cuMemcpyDtoHAsync_v2": 2}, 0, ""},
		{"nothing", fault.Loop{Only: fault.Call(11)}, nil, 0, "made no driver call that is to fail"},
		{"all", fault.Loop{}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 8}, 0, "cuEventQuery #5"},
		{"sample", fault.Loop{Sample: 2}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 4}, 0, ""},
		{"sample of seven", fault.Loop{Sample: 4}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 6}, 0, "cuEventQuery #6"},
		{"varies", fault.Loop{Varies: []string{"cuEventQuery"}}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 8}, 6, ""},
		{"sample of what varies", fault.Loop{Varies: []string{"cuEventQuery"}, SampleVaries: 2}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 4}, 0, ""},
		{"more of what varies", fault.Loop{Varies: []string{"cuEventQuery"}, Sample: 1, SampleVaries: 7}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 8}, 6, ""},
		{"another varies", fault.Loop{Varies: []string{"cuEventRecord"}}, map[string]int{"cuMemcpyDtoHAsync_v2": 2, "cuEventRecord": 2, "cuEventQuery": 8}, 0, "cuEventQuery #5"},
		{"varies, and none comes", fault.Loop{Varies: []string{"cuEventQuery"}, Only: fault.Calls(7, 10)}, map[string]int{"cuMemcpyDtoHAsync_v2": 2}, 4, "cuEventQuery with CUDA_ERROR_INVALID_VALUE (1), after its effect true: injected in no run"},
	} {
		// The unfaulted run makes a record, seven queries and a copy; the others
		// four queries: somebody polls.
		c.loop.Codes = []driver.Result{driver.ErrInvalidValue}
		report, err := fault.Each(c.loop, func(k *fault.Case) error {
			r := newRig(t)
			r.must(k.Arm(r.inj))
			r.record()
			queries := 4
			if !k.Faulted() {
				queries = 7
			}
			for range queries {
				r.query()
			}
			r.MemcpyDtoHAsync(r.host, r.dev, size, r.st)
			r.inj.Disarm()
			return nil
		})
		if c.injected == nil {
			c.injected = map[string]int{}
		}
		if !reflect.DeepEqual(report.Injected, c.injected) || report.Missed != c.missed {
			t.Errorf("%s: %+v", c.what, report)
		}
		if (c.missed > 0 || c.err == "") && report.Runs != 2*report.Positions {
			t.Errorf("%s: runs again what varies: %v", c.what, report)
		}
		if (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", c.what, err, c.err)
		}
	}
}

// Each fails itself where a run does not do what the unfaulted one did, and
// passes on what the runs find.
func TestEachFailsItself(t *testing.T) {
	runs := 0
	arm := func(c *fault.Case) *rig {
		r := newRig(t)
		r.must(c.Arm(r.inj))
		return r
	}
	broken := errors.New("broken")
	for _, c := range []struct {
		what string
		loop fault.Loop
		run  func(*fault.Case) error
		want []string
		runs int
	}{
		{"never arms", fault.Loop{}, func(*fault.Case) error { return nil }, []string{"the unfaulted run: the run did not arm"}, 1},
		{"never calls", fault.Loop{}, func(c *fault.Case) error { arm(c); return nil }, []string{"made no driver call"}, 1},
		{"fails unfaulted", fault.Loop{}, func(c *fault.Case) error { arm(c).record(); return broken }, []string{"the unfaulted run: broken"}, 1},
		{"arms only unfaulted", fault.Loop{}, func(c *fault.Case) error {
			if r := newRig(t); !c.Faulted() {
				r.must(c.Arm(r.inj))
				r.record()
			}
			return nil
		}, []string{"fail cuEventRecord #1 with CUDA_ERROR_OUT_OF_MEMORY after: the run did not arm", "after: never injected"}, 7},
		{"arms twice", fault.Loop{}, func(c *fault.Case) error {
			r := arm(c)
			r.record()
			if c.Faulted() {
				if err := c.Arm(r.inj); err == nil {
					t.Error("armed twice")
				}
			}
			return nil
		}, []string{"fail cuEventRecord #1 with CUDA_ERROR_LAUNCH_FAILED: the run armed twice"}, 7},
		{"disarms too early", fault.Loop{}, func(c *fault.Case) error {
			r := arm(c)
			if c.Faulted() {
				r.inj.Disarm()
			}
			r.record()
			return nil
		}, []string{"fail cuEventRecord #1 with CUDA_ERROR_INVALID_VALUE: never injected, though the unfaulted run made that call"}, 61},
		{"arms another plan meanwhile", fault.Loop{}, func(c *fault.Case) error {
			r := arm(c)
			if c.Faulted() {
				r.arm("nothing")
			}
			r.record()
			return nil
		}, []string{"never injected"}, 61},
		{"finds something", fault.Loop{}, func(c *fault.Case) error {
			arm(c).record()
			if c.Plan().String() == "fail cuEventRecord #1 with CUDA_ERROR_OUT_OF_MEMORY after" {
				return broken
			}
			return nil
		}, []string{"fault: fail cuEventRecord #1 with CUDA_ERROR_OUT_OF_MEMORY after: broken"}, 7},
		{"a code of no failure", fault.Loop{Codes: []driver.Result{0}}, nil, []string{"Loop.Codes: 0 is no code"}, 0},
		{"no entry point varies", fault.Loop{Varies: []string{"cuEventKwery"}}, nil, []string{`Loop.Varies: purecuda knows no entry point "cuEventKwery"`}, 0},
		{"only nothing", fault.Loop{Only: fault.Or()}, nil, []string{"Loop.Only: "}, 0},
	} {
		runs = 0
		_, err := fault.Each(c.loop, func(k *fault.Case) error { runs++; return c.run(k) })
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", c.what, err, want)
			}
		}
		if runs != c.runs {
			t.Errorf("%s: %d runs, want %d", c.what, runs, c.runs)
		}
	}
}

// The line of a case runs it again. A call that still waits at a gate when the
// run ends goes on.
func TestReplay(t *testing.T) {
	var line string
	_, err := fault.Each(fault.Loop{}, func(c *fault.Case) error {
		r := newRig(t)
		r.must(c.Arm(r.inj))
		err := r.workflow()
		if hit, ok := c.Injected(); ok && hit.Call == "cuMemsetD8Async" && hit.After && hit.Code == driver.ErrOutOfMemory {
			line = c.Plan().String()
		} else if ok {
			return nil
		}
		return err
	})
	want := "fault: " + line + ": " + driver.ErrOutOfMemory.Error()
	if err == nil || err.Error() != want || !errors.Is(err, driver.ErrOutOfMemory) {
		t.Fatal(err)
	}
	run := func(c *fault.Case) error {
		r := newRig(t)
		r.must(c.Arm(r.inj))
		return r.workflow()
	}
	if again := fault.Replay(parse(t, line), run); fmt.Sprint(again) != want {
		t.Errorf("%v, want %s", again, want)
	}
	if err := fault.Replay(parse(t, "fail call 100 with 1"), run); err == nil || !strings.Contains(err.Error(), "never injected") {
		t.Error(err)
	}
	if err := fault.Replay(fault.Rules(fault.Fail(fault.Any(), 0)), func(c *fault.Case) error { return c.Arm(newRig(t).inj) }); err == nil {
		t.Error("a plan that is none was run")
	}
	done := make(chan cuapi.Result)
	err = fault.Replay(parse(t, "delay cuEventRecord at g"), func(c *fault.Case) error {
		r := newRig(t)
		r.must(c.Arm(r.inj))
		go func() { done <- r.record() }()
		<-r.at("g").Reached()
		return nil
	})
	if got := <-done; err != nil || got != cuapi.Success {
		t.Error(err, got)
	}
}
