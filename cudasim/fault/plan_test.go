package fault_test

import (
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// texts are lines with what they print as; empty: themselves.
var texts = []struct{ text, canonical string }{
	{"", "nothing"},
	{" \n", "nothing"},
	{"nothing", ""},
	{"fail call 7 with CUDA_ERROR_ILLEGAL_ADDRESS", ""},
	{"fail call 7 after with 700", "fail call 7 with CUDA_ERROR_ILLEGAL_ADDRESS after"},
	{"fail call 7 with 700 before", "fail call 7 with CUDA_ERROR_ILLEGAL_ADDRESS"},
	{"fail cuMemcpyDtoHAsync #2 with 12345", ""},
	{"fail cuMemcpyDtoHAsync_v2#2..with 12345", "fail cuMemcpyDtoHAsync_v2 #2.. with 12345"},
	{"fail cuEventRecord #2..4 with CUDA_ERROR_UNKNOWN after at g", ""},
	{"fail cuEventRecord #4..4 with 1", "fail cuEventRecord #4 with CUDA_ERROR_INVALID_VALUE"},
	{"fail any at g after with 1", "fail any with CUDA_ERROR_INVALID_VALUE after at g"},
	{"delay any #1.. at gate_2", ""},
	{"delay cuEventRecord after at g", ""},
	{"lose cuEventSynchronize #1 with CUDA_ERROR_LAUNCH_FAILED", ""},
	{"fail (cuEventRecord or cuEventQuery) #3 with CUDA_ERROR_NOT_READY", ""},
	{"fail (cuEventRecord or(cuEventQuery or call 9..)) with 600", "fail (cuEventRecord or cuEventQuery or call 9..) with CUDA_ERROR_NOT_READY"},
	{"fail (cuEventRecord and call 3 or cuEventQuery) with 600", "fail ((cuEventRecord and call 3) or cuEventQuery) with CUDA_ERROR_NOT_READY"},
	{"fail (cuEventRecord and (call 3 or any)) with CUDA_ERROR_NOT_READY", ""},
	{"fail not (cuEventRecord and not call 3..5) with CUDA_ERROR_NOT_READY", ""},
	{"fail ((((cuEventRecord)))) with 600", "fail cuEventRecord with CUDA_ERROR_NOT_READY"},
	{"fail any #1 with CUDA_ERROR_NOT_READY then delay any at g; fail call 2 with CUDA_ERROR_NOT_FOUND", ""},
}

func TestText(t *testing.T) {
	for _, c := range texts {
		want := c.canonical
		if want == "" {
			want = c.text
		}
		p := parse(t, c.text)
		if got := p.String(); got != want {
			t.Errorf("%q prints as %q, want %q", c.text, got, want)
		}
		again := parse(t, p.String())
		if !reflect.DeepEqual(p, again) {
			t.Errorf("%q: another plan comes back: %v", c.text, again)
		}
	}
}

func TestBadText(t *testing.T) {
	for text, reason := range map[string]string{
		"fall call 7 with 700":                                 `byte 1: "fall" instead of "fail", "lose" or "delay"`,
		"fail call 7":                                          `"with" and a code is missing`,
		"fail call 0 with 1":                                   `"0" instead of a number from 1 to`,
		"fail call 7.8 with 1":                                 `byte 12: "." instead of`,
		"fail call 7..6 with 1":                                "the range 7..6 is none",
		"fail call 10000000000 with 1":                         "instead of a number",
		"fail any #0 with 1":                                   "instead of a number",
		"fail any # with 1":                                    "instead of a number",
		"fail any #2..1 with 1":                                "the range 2..1 is none",
		"fail cuEventRekord with 1":                            `no entry point "cuEventRekord"`,
		"fail eventRecord with 1":                              `"eventRecord" instead of a condition`,
		"fail cuGetErrorName with 1":                           "never injected",
		"fail any with 0":                                      "instead of a code",
		"fail any with 65536":                                  "instead of a code",
		"fail any with CUDA_SUCCESS":                           "instead of a code",
		"fail any with":                                        "a code, as 700 or CUDA_ERROR_ILLEGAL_ADDRESS is missing",
		"fail any with 1 with 2":                               `"with" instead of ";"`,
		"fail any with 1 after after":                          `"after" instead of ";"`,
		"fail any with 1 after before":                         `"before" instead of ";"`,
		"fail any with 1 at g at h":                            `"at" instead of ";"`,
		"fail any with 1;":                                     `"fail", "lose" or "delay" is missing`,
		"fail any with 1 then":                                 `"fail", "lose" or "delay" is missing`,
		"nothing; fail any with 1":                             `";" instead of the end`,
		"lose any with 1":                                      "loses no context",
		"delay any":                                            `"at" and a gate is missing`,
		"delay any at after":                                   `"after" instead of the name of a gate`,
		"delay any at 3g":                                      "instead of the name of a gate",
		"delay any at g with 1":                                "a delay has no code",
		"fail any with 1 then fail any with 2":                 "never ends",
		"fail any #3.. with 1 then fail any with 2":            "never ends",
		"fail cuEventRecord or any with 1":                     `"or" instead of`,
		"fail (cuEventRecord with 1":                           `"with" instead of ")", "and" or "or"`,
		"fail () with 1":                                       `")" instead of a condition`,
		"fail (any and) with 1":                                `")" instead of a condition`,
		"fail func odd with 1":                                 "is no text to parse",
		"fail any with 1 \xff":                                 "instead of",
		"fail " + strings.Repeat("(", 1e5):                     "too many parentheses",
		"fail " + strings.Repeat("not ", 50) + "any with 1":    "more than 32 deep",
		"fail " + strings.Repeat("not ", 1e5) + "any with 999": "too many parentheses",
	} {
		p, err := fault.Parse(text)
		if err == nil {
			t.Errorf("%.60q became %.60q", text, p.String())
		} else if !strings.Contains(err.Error(), reason) || !strings.HasPrefix(err.Error(), "fault: ") {
			t.Errorf("%.60q: %.300v: want %s", text, err, reason)
		}
	}
}

// What the constructors refuse comes out when the plan is armed.
func TestBadPlan(t *testing.T) {
	r := newRig(t)
	r.arm("fail cuEventRecord with 600")
	deep := fault.Any()
	for range 40 {
		deep = fault.Not(deep)
	}
	all := fault.Any()
	yes := func(string, int) bool { return true }
	for name, p := range map[string]fault.Plan{
		"no names":       fault.Rules(fault.Fail(fault.Name(), 1)),
		"a wrong name":   fault.Rules(fault.Fail(fault.Name("cuEventRecord", "cuEventRekord"), 1)),
		"and of nothing": fault.Rules(fault.Fail(fault.And(), 1)),
		"or of nothing":  fault.Rules(fault.Fail(fault.Not(fault.Or()), 1)),
		"no success":     fault.Rules(fault.Fail(all, 0)),
		"negative":       fault.Rules(fault.Fail(all, -1)),
		"not sticky":     fault.Rules(fault.Lose(all, 2)),
		"0th":            fault.Rules(fault.Fail(all, 1).Nth(0)),
		"from 0":         fault.Rules(fault.Fail(all, 1).From(0)),
		"backwards":      fault.Rules(fault.Fail(all, 1).Range(2, 1)),
		"call 0":         fault.Rules(fault.Fail(fault.Call(0), 1)),
		"calls none":     fault.Rules(fault.Fail(fault.Calls(0, 0), 1)),
		"no gate":        fault.Rules(fault.Delay(all, "")),
		"bad gate":       fault.Rules(fault.Fail(all, 1).At("a b")),
		"endless":        fault.Sequence(fault.Fail(all, 1), fault.Fail(all, 2)),
		"deep":           fault.Rules(fault.Fail(deep, 1)),
		"no func":        fault.Rules(fault.Fail(fault.Func("f", nil), 1)),
		"no label":       fault.Rules(fault.Fail(fault.Func("a-b", yes), 1)),
	} {
		if err := r.inj.Arm(p); err == nil {
			t.Errorf("%s: %v was armed", name, p)
		}
		if _, err := fault.Parse(p.String()); err == nil {
			t.Errorf("%s: %v is parsed", name, p)
		}
	}
	r.want(cuapi.NotReady, r.record()) // the plan before them is still there
	if _, err := fault.Wrap(nil, fault.Plan{}); err == nil {
		t.Error("no driver was wrapped")
	}
	if _, err := fault.Wrap(new(driver.Driver), fault.Plan{}); err == nil {
		t.Error("a driver that never opened was wrapped")
	}
	if _, err := fault.Wrap(r.inj.Driver(), fault.Rules(fault.Fail(all, 0))); err == nil {
		t.Error("Wrap takes any plan")
	}
	r.end()
}

// randomPlan makes plans of everything that prints and parses.
func randomPlan(r *rand.Rand) fault.Plan {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	var cond func(depth int) fault.Cond
	list := func(depth int) (l []fault.Cond) {
		for range 1 + r.IntN(3) {
			l = append(l, cond(depth+1))
		}
		return l
	}
	cond = func(depth int) fault.Cond {
		switch k := r.IntN(9); {
		case k < 2 || depth > 4:
			return fault.Name(pick("cuEventRecord", "cuMemcpyDtoHAsync", "cuMemFree_v2", "cuGetProcAddress"))
		case k == 2:
			return fault.Call(1 + r.IntN(50))
		case k == 3:
			return fault.Calls(1+r.IntN(9), 9+r.IntN(9))
		case k == 4:
			return fault.CallsFrom(1 + r.IntN(9))
		case k == 5:
			return fault.And(list(depth)...)
		case k == 6:
			return fault.Or(list(depth)...)
		case k == 7:
			return fault.Not(cond(depth + 1))
		}
		return fault.Any()
	}
	rule := func(last bool) (u fault.Rule) {
		c := cond(0)
		switch r.IntN(3) {
		case 0:
			u = fault.Fail(c, driver.Result(1+r.IntN(999)))
		case 1:
			u = fault.Lose(c, driver.ErrIllegalAddress)
		default:
			u = fault.Delay(c, pick("g", "H_2"))
		}
		switch k := r.IntN(4); {
		case k == 0 && last:
		case k == 1 && last:
			u = u.From(1 + r.IntN(5))
		case k == 2:
			u = u.Nth(1 + r.IntN(5))
		default:
			u = u.Range(1+r.IntN(3), 3+r.IntN(3))
		}
		if r.IntN(2) == 0 {
			u = u.After()
		}
		if r.IntN(3) == 0 {
			u = u.At("other")
		}
		return u
	}
	var plans []fault.Plan
	for range r.IntN(4) {
		var seq []fault.Rule
		for n := r.IntN(3); n >= 0; n-- {
			seq = append(seq, rule(n == 0))
		}
		plans = append(plans, fault.Sequence(seq...))
	}
	return fault.FirstOf(plans...)
}

func TestEveryPlanComesBack(t *testing.T) {
	for seed := range uint64(5000) {
		p := randomPlan(rand.New(rand.NewPCG(seed, 1)))
		text := p.String()
		again, err := fault.Parse(text)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(p, again) || again.String() != text || strings.Contains(text, "\n") {
			t.Fatalf("seed %d: %q became %q", seed, text, again)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, c := range texts {
		f.Add(c.text)
	}
	for seed := range uint64(20) {
		f.Add(randomPlan(rand.New(rand.NewPCG(seed, 2))).String())
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := fault.Parse(text)
		if err != nil {
			if p.String() != "nothing" {
				t.Errorf("%q comes with an error: %v", p, err)
			}
			return
		}
		again, err := fault.Parse(p.String())
		if err != nil || !reflect.DeepEqual(p, again) || again.String() != p.String() {
			t.Errorf("%q became %q: %v", p, again, err)
		}
	})
}
