package fault

import (
	"fmt"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/outside"
	"github.com/purecuda/purecuda/internal/wire"
)

// maxLog bounds what Injected keeps: a rule without an end, or a poller on a
// lost context, would fill memory.
const maxLog = 10000

// An Injector is a driver with faults, made by [Wrap]. It is safe for concurrent
// use.
type Injector struct {
	drv *driver.Driver

	mu   sync.Mutex
	on   bool
	cur  *arming       // what Arm made last
	lost driver.Result // what every call on a context returns; for good
}

// An arming is what happened since one call of Arm. The Injector's lock guards
// it.
type arming struct {
	plan   Plan
	states []chainState // of plan.chains
	gates  map[string]*Gate
	calls  int
	counts [cuapi.NumEntries]int
	log    []Injection
	times  int // injections, those that the log has no room for too

	traced bool
	trace  []step
}

// A chainState is how far a chain of rules has come.
type chainState struct {
	at int // the rule that counts
	n  int // calls that matched it
}

// A step is one call: its entry point, and how many it had then.
type step struct {
	id  cuapi.ID
	nth int
}

// An Injection is one call that was injected.
type Injection struct {
	Call     string        // the entry point's versioned name in C: "cuMemcpyDtoHAsync_v2"
	Position int           // among all calls since Arm, from 1
	Nth      int           // among the calls of this entry point since Arm, from 1
	Code     driver.Result // what the call returned; 0 if it was delayed alone
	After    bool          // the call was made
	Gate     string        // where it waited, or empty
	Lost     bool          // the context was lost before, or while it waited
}

// String returns the injection in words, for a test's output.
func (i Injection) String() string {
	s := fmt.Sprintf("call %d, %s #%d", i.Position, i.Call, i.Nth)
	if i.Code != 0 {
		s += ": " + i.Code.Error()
	}
	if i.After {
		s += ", after its effect"
	}
	if i.Gate != "" {
		s += ", at gate " + i.Gate
	}
	if i.Lost {
		s += ", the context is lost"
	}
	return s
}

// Wrap returns an Injector over a driver, armed with the plan. The calls that
// it makes itself, cuDriverGetVersion and cuDeviceGetCount, are neither counted
// nor injected. Wrap with the zero Plan and Arm later to leave set-up alone.
//
// It fails if drv is nil, or the plan is none, see [Injector.Arm]. The driver
// beneath stays usable, but its contexts are not those of the Injector's driver:
// use one of the two. Wrap may be wrapped again.
func Wrap(drv *driver.Driver, plan Plan) (*Injector, error) {
	if drv == nil || wire.Table(drv) == nil {
		return nil, fmt.Errorf("fault: no driver: %w", driver.ErrClosed)
	}
	i := &Injector{}
	d, err := wire.NewDriver(cuapi.Intercept(wire.Table(drv), i.around), drv.Source()+", with faults")
	if err != nil {
		return nil, err
	}
	i.drv = d.(*driver.Driver)
	if err := i.Arm(plan); err != nil {
		return nil, err
	}
	return i, nil
}

// Driver returns the driver whose calls are injected: the same each time.
func (i *Injector) Driver() *driver.Driver { return i.drv }

// Arm puts a plan into force. Counts, positions and the log begin anew; a call
// that waits at a gate of the plan before goes on. A lost context stays lost.
// The error tells what is wrong with the plan, and nothing changes then. It
// never waits.
func (i *Injector) Arm(plan Plan) error {
	_, err := i.arm(plan, false)
	return err
}

func (i *Injector) arm(plan Plan, traced bool) (*arming, error) {
	if i == nil || i.drv == nil {
		return nil, fmt.Errorf("fault: no Injector: %w", driver.ErrClosed)
	}
	if err := plan.check(); err != nil {
		return nil, err
	}
	a := &arming{plan: plan, states: make([]chainState, len(plan.chains)), gates: map[string]*Gate{}, traced: traced}
	for _, chain := range plan.chains {
		for _, r := range chain {
			if r.gate != "" && a.gates[r.gate] == nil {
				a.gates[r.gate] = newGate()
			}
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.disarm()
	i.on, i.cur = true, a
	return a, nil
}

// Disarm ends the plan: calls go through, uncounted, unless the context is lost.
// Calls that wait at a gate go on as their rule says. Counts and log stay until
// the next Arm. It never waits: a call under way may still be injected.
func (i *Injector) Disarm() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.disarm()
}

func (i *Injector) disarm() {
	i.on = false
	if i.cur != nil {
		for _, g := range i.cur.gates {
			g.Open()
		}
	}
}

// now is what was armed last: nothing on a zero Injector.
func (i *Injector) now() *arming {
	if i.cur == nil {
		return &arming{}
	}
	return i.cur
}

// Calls returns how many calls were made since Arm, until Disarm: a list's count
// one by one, those that never are injected do not.
func (i *Injector) Calls() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.now().calls
}

// Counts returns how many calls of each entry point were made since Arm, until
// Disarm, by its versioned name in C.
func (i *Injector) Counts() map[string]int {
	i.mu.Lock()
	defer i.mu.Unlock()
	m := map[string]int{}
	for id, n := range i.now().counts {
		if n > 0 {
			m[cuapi.Entries[id].Symbol()] = n
		}
	}
	return m
}

// Injected returns what was injected since Arm, in order: a call that a rule
// holds up, and that then finds the context lost, for both. It keeps the first
// 10,000; [Injector.Times] counts all.
func (i *Injector) Injected() []Injection {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.now().log)
}

// Times returns how many calls were injected since Arm.
func (i *Injector) Times() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.now().times
}

// Lost returns the code with which the context was lost by this Injector, or 0.
func (i *Injector) Lost() driver.Result {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.lost
}

// Gate returns a gate of the plan that was armed last. The error tells that the
// plan has none of that name.
func (i *Injector) Gate(name string) (*Gate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if g := i.now().gates[name]; g != nil {
		return g, nil
	}
	return nil, fmt.Errorf("fault: %q has no gate %q", i.now().plan.String(), name)
}

// A Gate is where calls wait for the test. It is closed when its plan is armed,
// and opened once and for all.
type Gate struct {
	mu      sync.Mutex
	waiting int
	reached bool
	here    chan struct{} // closed when a call first waits
	opened  chan struct{} // closed by Open
	open    bool
}

// The channels belong to no bubble of testing/synctest: calls of any goroutine
// wait here.
func newGate() *Gate { return &Gate{here: outside.Chan(), opened: outside.Chan()} }

// Open lets the calls that wait go on, and all later ones pass. It never waits.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open {
		g.open = true
		close(g.opened)
	}
}

// Reached returns a channel that is closed when a call has come to the gate, as
// long as it was shut.
func (g *Gate) Reached() <-chan struct{} { return g.here }

// Waiting returns how many calls wait at the gate now.
func (g *Gate) Waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting
}

func (g *Gate) pass() {
	g.mu.Lock()
	if g.open {
		g.mu.Unlock()
		return
	}
	g.waiting++
	if !g.reached {
		g.reached = true
		close(g.here)
	}
	g.mu.Unlock()
	<-g.opened
	g.mu.Lock()
	g.waiting--
	g.mu.Unlock()
}

// A verdict is what becomes of one call.
type verdict struct {
	rule *Rule         // or nil
	gate *Gate         // or nil
	lost driver.Result // the context was lost before, and the call touches it
	a    *arming       // where the call counted, or nil
	inj  Injection     // what is known of the call
}

// around makes one call, or not.
func (i *Injector) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if c.ID == cuapi.IDGetErrorName || c.ID == cuapi.IDGetErrorString {
		return next()
	}
	v := i.judge(c.ID)
	if v.lost != 0 {
		return cuapi.Result(v.lost)
	}
	rule := Rule{verb: delay} // at no gate: nothing
	if v.rule != nil {
		rule = *v.rule
	}
	waited := false
	if v.gate != nil && !rule.after {
		v.gate.pass()
		if lost := i.lostMeanwhile(c.ID, &v); lost != 0 {
			return cuapi.Result(lost)
		}
	}
	r := cuapi.Success
	if rule.verb == delay || rule.after {
		r = next()
		waited = cuapi.Entries[c.ID].Block == cuapi.BlockWaits
	}
	if v.gate != nil && rule.after {
		v.gate.pass()
		waited = true
	}
	if waited {
		if lost := i.lostMeanwhile(c.ID, &v); lost != 0 {
			return cuapi.Result(lost)
		}
	}
	switch rule.verb {
	case lose:
		return cuapi.Result(i.lose(rule.code))
	case fail:
		return cuapi.Result(rule.code)
	}
	return r
}

// judge counts a call and finds what becomes of it.
func (i *Injector) judge(id cuapi.ID) (v verdict) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.on {
		v.a = i.cur
		v.inj = v.a.count(id)
		v.rule = v.a.choose(id)
	}
	switch {
	case i.lost != 0 && touches(id):
		v.lost = i.lost
		v.noteLost(i.lost)
	case v.rule != nil:
		v.gate = v.a.gates[v.rule.gate]
		inj := v.inj
		inj.Code, inj.After, inj.Gate = v.rule.code, v.rule.after, v.rule.gate
		v.a.note(inj)
	}
	return v
}

// lostMeanwhile tells whether the context was lost while a call waited.
func (i *Injector) lostMeanwhile(id cuapi.ID, v *verdict) driver.Result {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.lost == 0 || !touches(id) {
		return 0
	}
	v.noteLost(i.lost)
	return i.lost
}

// lose loses the context. The first loss stays.
func (i *Injector) lose(code driver.Result) driver.Result {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.lost == 0 {
		i.lost = code
	}
	return i.lost
}

// count counts a call.
func (a *arming) count(id cuapi.ID) Injection {
	a.calls++
	a.counts[id]++
	if a.traced {
		a.trace = append(a.trace, step{id, a.counts[id]})
	}
	return Injection{Call: cuapi.Entries[id].Symbol(), Position: a.calls, Nth: a.counts[id]}
}

// choose shows the call that was counted last to each chain, and returns the
// first rule that is for it, or nil.
func (a *arming) choose(id cuapi.ID) (winner *Rule) {
	for k, chain := range a.plan.chains {
		s := &a.states[k]
		if s.at == len(chain) {
			continue
		}
		r := &chain[s.at]
		if !r.cond.matches(id, a.calls) {
			continue
		}
		s.n++
		if winner == nil && (!r.bounded || r.nth.has(s.n)) {
			winner = r
		}
		if r.bounded && s.n == r.nth.last {
			*s = chainState{at: s.at + 1}
		}
	}
	return winner
}

// noteLost keeps that a call failed since the context is lost, if it counted.
func (v *verdict) noteLost(code driver.Result) {
	if v.a == nil {
		return
	}
	inj := v.inj
	inj.Code, inj.Lost = code, true
	v.a.note(inj)
}

func (a *arming) note(inj Injection) {
	a.times++
	if len(a.log) < maxLog {
		a.log = append(a.log, inj)
	}
}

// touches tells whether a call touches a context, so that it fails when that is
// lost (docs/driver-facts.md: "a kernel that stores to address 16").
func touches(id cuapi.ID) bool { return !bystanders[id] }

// bystanders are the calls that a lost context leaves alone. That is measured of
// cuDevicePrimaryCtxRelease; the others, which ask nothing of a context, are
// those of the simulator.
var bystanders = func() (t [cuapi.NumEntries]bool) {
	for _, id := range []cuapi.ID{
		cuapi.IDInit, cuapi.IDDriverGetVersion, cuapi.IDGetErrorName, cuapi.IDGetErrorString,
		cuapi.IDGetProcAddressV2, cuapi.IDGetProcAddress, cuapi.IDLogsDumpToMemory,
		cuapi.IDDeviceGetCount, cuapi.IDDeviceGet, cuapi.IDDeviceGetName, cuapi.IDDeviceGetUuid, cuapi.IDDeviceTotalMem,
		cuapi.IDDeviceGetAttribute, cuapi.IDDeviceGetP2PAttribute, cuapi.IDDeviceCanAccessPeer,
		cuapi.IDDevicePrimaryCtxRetain, cuapi.IDDevicePrimaryCtxRelease, cuapi.IDDevicePrimaryCtxGetState,
		cuapi.IDCtxGetCurrent, cuapi.IDCtxSetCurrent, cuapi.IDCtxPushCurrent, cuapi.IDCtxPopCurrent, cuapi.IDCtxGetId,
		cuapi.IDThreadExchangeStreamCaptureMode,
		cuapi.IDPointerGetAttribute, cuapi.IDGraphDestroy, cuapi.IDDeviceGetDefaultMemPool, cuapi.IDMemPoolCreate, cuapi.IDMemPoolDestroy,
		cuapi.IDMemPoolTrimTo, cuapi.IDMemPoolSetAttribute, cuapi.IDMemPoolGetAttribute, cuapi.IDMemPoolSetAccess, cuapi.IDMemPoolGetAccess,
	} {
		t[id] = true
	}
	return t
}()
