package fault

import (
	"errors"
	"fmt"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// A Loop says what [Each] lets fail. The zero Loop has every call fail with
// [driver.ErrInvalidValue], [driver.ErrOutOfMemory] and
// [driver.ErrLaunchFailed]: a refusal, a shortage, a lost context.
type Loop struct {
	// Codes are what the calls fail with; none means the three that the zero Loop has.
	Codes []driver.Result
	// Lose has codes that are sticky lose the context for good, as on hardware,
	// where the calls behind the first one fail as well.
	Lose bool
	// Only are the calls of the unfaulted run that are to fail. The zero Cond
	// means all.
	Only Cond
	// Varies names entry points that are called as often as somebody polls, so
	// that a run need not come to each of their positions. One of them must be
	// injected with each code, before and after, all the same. For code on
	// package publish these are cuEventQuery and cuThreadExchangeStreamCaptureMode,
	// by which it looks, and cuMemFreeAsync, by which what was closed is released
	// when somebody gets to it.
	Varies []string
	// Sample bounds how many positions of one entry point are taken, spread
	// evenly, the first one among them; 0 means all.
	Sample int
	// SampleVaries is Sample for the entry points of Varies: a run may have
	// hundreds of looks, each like the next. 0 means as Sample.
	SampleVaries int
}

// A Report says what [Each] did.
type Report struct {
	Positions int            // of the unfaulted run, that were to fail
	Runs      int            // with a fault
	Injected  map[string]int // runs in which a call of the entry point was injected, by its versioned name in C
	Missed    int            // runs that did not come to a position of Loop.Varies
}

func (r Report) String() string {
	return fmt.Sprintf("%d positions of %d entry points in %d runs, %d of which did not come to theirs", r.Positions, len(r.Injected), r.Runs, r.Missed)
}

// A Case is one run of a workflow under [Each] or [Replay]: without a fault, or
// with one. It belongs to the run.
type Case struct {
	plan   Plan
	traced bool
	inj    *Injector
	a      *arming
	twice  bool
}

// Plan returns the case's plan: the one that does nothing in the unfaulted run.
// Its line, given to [Parse] and [Replay], runs the case again.
func (c *Case) Plan() Plan { return c.plan }

// Faulted tells whether the case has a fault at all.
func (c *Case) Faulted() bool { return len(c.plan.chains) > 0 }

// Arm puts the case's plan into force. The calls behind it, until the Injector
// is disarmed, are the workflow: what the unfaulted run calls there is what
// fails in the others. A run arms once. Each disarms where the run does not.
func (c *Case) Arm(i *Injector) error {
	if c.a != nil {
		c.twice = true
		return fmt.Errorf("fault: %v: armed twice in one run", c.plan)
	}
	a, err := i.arm(c.plan, c.traced)
	if err != nil {
		return err
	}
	c.inj, c.a = i, a
	return nil
}

// Injected returns the first call that the case's plan injected. It is false in
// the unfaulted run, and in one that did not come to its position.
func (c *Case) Injected() (Injection, bool) {
	if c.a == nil {
		return Injection{}, false
	}
	c.inj.mu.Lock()
	defer c.inj.mu.Unlock()
	if len(c.a.log) == 0 {
		return Injection{}, false
	}
	return c.a.log[0], true
}

// run runs the case and tells what was wrong with it.
func (c *Case) run(f func(*Case) error) error {
	err := f(c)
	switch {
	case c.a == nil:
		return errors.Join(err, errors.New("the run did not arm the case"))
	case c.twice:
		err = errors.Join(err, errors.New("the run armed twice"))
	}
	c.inj.mu.Lock()
	if c.inj.cur == c.a {
		c.inj.disarm()
	}
	c.inj.mu.Unlock()
	return err
}

// Each runs a workflow without a fault, to learn each of its driver calls, and
// then again and again, each time with one call failing: every call, that is
// every entry point and position, with every code, before and after its effect.
// Runs follow each other on the calling goroutine.
//
// The function makes a fresh driver, wraps it ([Wrap]), sets up what is not to
// fail, and arms ([Case.Arm]); the workflow follows; then it judges, and returns
// what it finds wrong, which need not be what the workflow returned. It must
// work the same in each run.
//
// The error joins what the runs found, each under the case's line. Each fails
// itself where the law is broken that it injects each position of the unfaulted
// run: where a case did not come to its position, in ten runs of it, since
// goroutines may come in another order; where a run did not arm, or armed twice;
// and where the unfaulted run failed or made no call.
func Each(l Loop, run func(*Case) error) (Report, error) {
	report := Report{Injected: map[string]int{}}
	if len(l.Codes) == 0 {
		l.Codes = []driver.Result{driver.ErrInvalidValue, driver.ErrOutOfMemory, driver.ErrLaunchFailed}
	}
	varies, err := l.check()
	if err != nil {
		return report, err
	}
	first := &Case{traced: true}
	if err := first.run(run); err != nil {
		return report, fmt.Errorf("fault: the unfaulted run: %w", err)
	}
	first.inj.mu.Lock()
	steps := l.steps(first.a.trace, &varies)
	first.inj.mu.Unlock()
	if len(steps) == 0 {
		return report, errors.New("fault: the unfaulted run made no driver call that is to fail")
	}
	report.Positions = len(steps)

	var errs []error
	for _, code := range l.Codes {
		for _, after := range []bool{false, true} {
			var due, done [cuapi.NumEntries]bool
			for _, s := range steps {
				due[s.id] = true
				plan := l.plan(s, code, after)
				hit, found := inject(plan, s, varies[s.id], run, &report)
				if found != nil {
					errs = append(errs, found)
				}
				switch {
				case hit:
					done[s.id] = true
					report.Injected[cuapi.Entries[s.id].Symbol()]++
				case varies[s.id]:
					report.Missed++
				default:
					errs = append(errs, fmt.Errorf("fault: %v: never injected, though the unfaulted run made that call: name it in Loop.Varies if it is made as often as somebody looks, or when somebody gets to it", plan))
				}
			}
			for id := range due {
				if due[id] && !done[id] && varies[id] {
					errs = append(errs, fmt.Errorf("fault: %s with %v, after its effect %v: injected in no run", cuapi.Entries[id].Symbol(), code, after))
				}
			}
		}
	}
	return report, errors.Join(errs...)
}

// tries bounds how often a case is run that does not come to its position.
const tries = 10

// inject runs one case until its position was injected, and tells whether it
// was and what the runs found.
func inject(plan Plan, s step, once bool, run func(*Case) error, report *Report) (hit bool, found error) {
	for range tries {
		c := &Case{plan: plan}
		if err := c.run(run); err != nil {
			found = errors.Join(found, fmt.Errorf("fault: %v: %w", plan, err))
		}
		report.Runs++
		inj, ok := c.Injected()
		if hit = ok && inj.Call == cuapi.Entries[s.id].Symbol() && inj.Nth == s.nth && !inj.Lost; hit || once || found != nil {
			break
		}
	}
	return hit, found
}

// Replay runs one case: a line that [Each] reported, or any other plan. The
// error is what the run found, or that nothing was injected.
func Replay(plan Plan, run func(*Case) error) error {
	c := &Case{plan: plan}
	if err := c.run(run); err != nil {
		return fmt.Errorf("fault: %v: %w", plan, err)
	}
	if _, ok := c.Injected(); !ok {
		return fmt.Errorf("fault: %v: never injected", plan)
	}
	return nil
}

// check tells what is wrong with the loop, and which entry points vary.
func (l Loop) check() (varies [cuapi.NumEntries]bool, err error) {
	if err := l.Only.check(1); err != nil {
		return varies, fmt.Errorf("fault: Loop.Only: %w", err)
	}
	for _, code := range l.Codes {
		if err := Fail(Any(), code).check(); err != nil {
			return varies, fmt.Errorf("fault: Loop.Codes: %w", err)
		}
	}
	for _, name := range l.Varies {
		c := Name(name)
		if err := c.check(1); err != nil {
			return varies, fmt.Errorf("fault: Loop.Varies: %w", err)
		}
		for id := range varies {
			varies[id] = varies[id] || c.ids[id]
		}
	}
	return varies, nil
}

// steps are the calls that are to fail, of those that the unfaulted run made.
func (l Loop) steps(trace []step, varies *[cuapi.NumEntries]bool) (list []step) {
	var of [cuapi.NumEntries][]step
	for i, s := range trace {
		if l.Only.matches(s.id, i+1) {
			of[s.id] = append(of[s.id], s)
		}
	}
	for id, all := range of {
		n, most := len(all), l.Sample
		if varies[id] && l.SampleVaries > 0 {
			most = l.SampleVaries
		}
		if most > 0 {
			n = min(n, most)
		}
		for i := range n {
			list = append(list, all[i*len(all)/n])
		}
	}
	return list
}

// plan is the case of one call.
func (l Loop) plan(s step, code driver.Result, after bool) Plan {
	c := exactly(s.id)
	r := Fail(c, code)
	if l.Lose && code.Sticky() {
		r = Lose(c, code)
	}
	if after {
		r = r.After()
	}
	return Rules(r.Nth(s.nth))
}

// exactly is the condition that the calls of one entry point match. Its name
// may mean later versions besides.
func exactly(id cuapi.ID) Cond {
	c := Name(cuapi.Entries[id].Symbol())
	list := []Cond{c}
	for other, matches := range c.ids {
		if matches && cuapi.ID(other) != id {
			list = append(list, Not(Name(cuapi.Entries[other].Symbol())))
		}
	}
	return And(list...)
}
