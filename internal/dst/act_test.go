package dst

import (
	"slices"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// An action is one thing that an actor does. It chooses what to do it with, and
// does nothing where there is nothing to do it with.
type action uint8

const (
	open action = iota
	shut
	alloc
	take
	drop
	copyUp
	launch
	publishes
	looksAtFrontier
	downloads
	looksAtCopy
	waitsForCopy
	closes
	closesAgain
	usesPast
	leaks
	abandons
	drains
	rounds
	steps
	awaits
	synchronizes
	counts
	adopts
	bursts
	replaces
	breaks
	waitsForRoom
	submits
	numActions
)

// actions: how often each is chosen, what it is called, and whether an actor may
// do it in the midst of another's driver call.
var actions = [numActions]struct {
	weight int
	name   string
	do     func(*world)
	amidst bool
}{
	open:            {6, "open session", (*world).open, true},
	shut:            {4, "close session", (*world).shut, true},
	alloc:           {14, "alloc", (*world).alloc, true},
	take:            {10, "take buffer", (*world).take, true},
	drop:            {4, "close buffer", (*world).drop, true},
	copyUp:          {10, "upload", (*world).upload, true},
	launch:          {16, "launch", (*world).launch, true},
	publishes:       {14, "publish", (*world).publish, true},
	looksAtFrontier: {10, "frontier ready", (*world).lookAtFrontier, true},
	downloads:       {12, "download", (*world).download, true},
	looksAtCopy:     {6, "transfer ready", (*world).lookAtCopy, true},
	waitsForCopy:    {14, "wait", (*world).waitForCopy, false},
	closes:          {14, "close", (*world).close, true},
	closesAgain:     {2, "close again", (*world).closeAgain, true},
	usesPast:        {4, "use after the end", (*world).usePast, true},
	leaks:           {1, "leak", (*world).leak, true},
	abandons:        {3, "abandon", (*world).abandon, true},
	drains:          {6, "drain", (*world).drain, true},
	rounds:          {8, "round of the watcher", (*world).round, true},
	steps:           {60, "step", (*world).advance, true},
	awaits:          {4, "await frontier", (*world).await, false},
	synchronizes:    {2, "synchronize", (*world).synchronize, false},
	counts:          {6, "stats", (*world).count, true},
	adopts:          {2, "adopt", (*world).adopt, true},
	bursts:          {1, "burst", (*world).burst, false},
	replaces:        {1, "replace runtime", (*world).replace, false},
	breaks:          {1, "lose context", (*world).lose, false},
	waitsForRoom:    {2, "wait for room", (*world).waitForRoom, false},
	submits:         {2, "submit", (*world).submit, true},
}

var weights = func() (sum int) {
	for _, a := range actions {
		sum += a.weight
	}
	return sum
}()

// act does one action.
func (w *world) act() {
	n := w.rng.IntN(weights)
	for i := range actions {
		if n -= actions[i].weight; n < 0 {
			w.do(action(i))
			return
		}
	}
}

func (w *world) do(a action) {
	w.stats.actions[a]++
	if a != steps {
		w.log.add(entry{step: w.step, depth: w.guard.depth, what: "does", name: actions[a].name})
	}
	actions[a].do(w)
}

// nested does one action in the midst of a driver call.
func (w *world) nested() {
	if w.chance(1, 3) {
		w.do(closes)
		return
	}
	for range 4 {
		a := action(w.rng.IntN(int(numActions)))
		if a == closes || actions[a].amidst && w.chance(1, 2) {
			w.do(a)
			return
		}
	}
}

func pick[T any](w *world, list []T) (v T, ok bool) {
	if len(list) == 0 {
		return v, false
	}
	return list[w.rng.IntN(len(list))], true
}

// life returns one of that stage that is not being moved.
func (w *world) life(s stage) *life {
	if len(w.lives) == 0 {
		return nil
	}
	at := w.rng.IntN(len(w.lives))
	for i := range w.lives {
		if l := w.lives[(at+i)%len(w.lives)]; l.stage == s && !l.moving {
			return l
		}
	}
	return nil
}

// free tells whether an enqueue into the lane may be made now: not in the midst
// of another one of the same lane, which holds the lane's enqueue lock.
func (w *world) free(l *lane) bool {
	return w.guard.depth == 0 || w.guard.within != anyStream && w.guard.within != l.h
}

func (w *world) session() *session {
	s, ok := pick(w, w.sessions)
	if !ok || !w.free(s.lane) {
		return nil
	}
	if s.rt.closed && w.chance(1, 4) && w.guard.depth == 0 { // there is little left to do with it
		w.forget(s)
		w.guard.dev = s.rt.dev
		s.s.Close()
		return nil
	}
	return s
}

// valueOf returns a value, one of the session's more often than not.
func (w *world) valueOf(s *session) *life {
	if w.chance(1, 24) {
		return w.life(value)
	}
	at := 0
	if len(w.lives) > 0 {
		at = w.rng.IntN(len(w.lives))
	}
	for i := range w.lives {
		if l := w.lives[(at+i)%len(w.lives)]; l.stage == value && l.lane == s.lane && l.rt == s.rt && !l.moving {
			return l
		}
	}
	return nil
}

func (w *world) runtime() *runtimeOf {
	d := w.devs[w.rng.IntN(len(w.devs))]
	if w.chance(1, 16) {
		r, _ := pick(w, d.runtimes)
		return r
	}
	return d.runtimes[len(d.runtimes)-1]
}

func (w *world) open() {
	if len(w.sessions) > 7 && !w.chance(1, 8) {
		return
	}
	rt := w.runtime()
	c := w.call(rt, "runtime: open session").expect(rt.closed, driver.ErrClosed)
	s, err := rt.rt.OpenSession(nil)
	if c.end(err) != done {
		return
	}
	w.keep = append(w.keep, s)
	m := &session{id: w.id(), s: s, rt: rt}
	w.guard.stream = 0
	s.Submit() // which tells its stream
	if w.guard.stream == 0 {
		if !c.faulted() {
			w.fail("submit makes no driver call")
		}
		s.Close()
		return
	}
	m.lane = w.lane(w.guard.stream)
	for _, o := range w.sessions {
		if o.lane == m.lane {
			w.fail("two sessions hold one stream")
		}
	}
	if m.lane.ran < m.lane.sure && !rt.dev.sticky && !m.lane.broken {
		w.fail("a stream is given to a session with work pending: launch %d of %d ran", m.lane.ran, m.lane.sure)
	}
	if m.lane.broken {
		w.fail("a stream on which an enqueue failed is used again")
	}
	w.sessions = append(w.sessions, m)
}

func (w *world) shut() {
	s, ok := pick(w, w.sessions)
	if !ok {
		return
	}
	w.forget(s)
	w.guard.dev = s.rt.dev
	s.s.Close()
	w.past = append(w.past, s)
}

func (w *world) forget(s *session) {
	s.closed = true
	w.sessions = slices.DeleteFunc(w.sessions, func(o *session) bool { return o == s })
}

func (w *world) size() int {
	switch w.rng.IntN(20) {
	case 0:
		return 1 + w.rng.IntN(8192)
	case 1, 2:
		return 1
	}
	return 1 + w.rng.IntN(96)
}

func (w *world) alloc() {
	s := w.session()
	if s == nil {
		return
	}
	n := w.size()
	if w.tight && w.chance(1, 8) {
		n = 1 + w.rng.IntN(1<<20)
	}
	c := w.call(s.rt, "alloc").expect(s.rt.closed, driver.ErrClosed)
	var v *publish.Value
	var err error
	if w.chance(1, 6) {
		v, err = s.s.AllocContext(ended, publish.U8, n)
	} else {
		v, err = s.s.Alloc(publish.U8, n)
	}
	c.may(s.rt.closed, driver.ErrClosed).may(s.closed, driver.ErrClosed)
	o := c.end(err)
	if o == unproven {
		s.lane.broken = true
		s.rt.keeps++
	}
	w.full(s.rt.dev, err)
	if o != done {
		return
	}
	l := &life{id: w.id(), rt: s.rt, lane: s.lane, v: v, size: n}
	w.lives = append(w.lives, l)
	w.keep = append(w.keep, v)
}

func (w *world) adopt() {
	s := w.session()
	if s == nil {
		return
	}
	d := s.rt.dev
	m := d.memory[w.rng.IntN(len(d.memory))]
	if m.life != nil {
		return
	}
	l := &life{id: w.id(), rt: s.rt, lane: s.lane, size: m.size, memory: m}
	m.life = l
	c := w.call(s.rt, "adopt").expect(s.rt.closed, driver.ErrClosed)
	v, err := s.s.Adopt(uint64(m.addr), publish.U8, []int{m.size}, func() {
		switch {
		case m.life != l:
			w.fail("adopted memory is let go of twice")
		case l.stage != over && l.busy == 0 && !l.revoked:
			w.fail("adopted memory is let go of, and is still a %v", l.stage)
		case l.lane.ran < l.needs:
			w.fail("adopted memory is let go of behind launch %d, and launch %d uses it", l.lane.ran, l.needs)
		}
		m.life = nil
	})
	c.may(s.rt.closed, driver.ErrClosed).may(s.closed, driver.ErrClosed)
	if c.end(err) != done {
		m.life = nil
		return
	}
	l.v = v
	w.lives = append(w.lives, l)
	w.keep = append(w.keep, v)
}

// launch runs a kernel: a pattern into a value, or one value into another.
func (w *world) launch() {
	s := w.session()
	if s == nil {
		return
	}
	dst := w.valueOf(s)
	if dst == nil {
		return
	}
	src := w.valueOf(s)
	if src == nil || src.size < dst.size || w.chance(1, 2) || w.past == nil {
		src = nil
	}
	w.launchOn(s, dst, src)
}

func (w *world) launchOn(s *session, dst, src *life) outcome {
	d := s.rt.dev
	tag := w.rng.Uint32()
	n := min(dst.size, 8192) // most of the large ones stay untouched
	seq := s.lane.issued + 1
	c := w.call(s.rt, "launch")
	args := []kernel.Arg{publish.Out(dst.v), kernel.U32(uint32(n)), kernel.U32(tag), kernel.U32(s.lane.n), kernel.U32(uint32(seq))}
	f := d.fill
	used := []*life{dst}
	if src != nil {
		f, args, used = d.mix, append([]kernel.Arg{publish.In(src.v)}, args...), append(used, src)
	}
	for _, l := range used {
		c.expect(l.rt != s.rt, publish.ErrForeign).expect(l.lane != s.lane, publish.ErrOtherStream)
		l.busy++
	}
	err := s.s.Launch(f, kernel.Grid(n), args...)
	for _, l := range used {
		l.busy--
		c.may(l.stage != value || l.revoked || l.moving, driver.ErrClosed, driver.ErrMoved, driver.ErrBusy)
	}
	o := c.may(s.closed, driver.ErrClosed).end(err)
	w.full(d, err)
	switch o {
	case done:
		s.lane.issued, s.lane.sure = seq, seq
		for _, l := range used {
			l.needs = seq
		}
		switch {
		case src != nil && src.data == nil:
			dst.data = nil
		case src != nil:
			next := make([]byte, n)
			mixBytes(next, src.data, tag)
			dst.data = over8192(dst, next)
		default:
			next := make([]byte, n)
			fillBytes(next, tag)
			dst.data = over8192(dst, next)
		}
	case unproven:
		s.lane.broken, s.lane.issued = true, seq // it may run, or not
		for _, l := range used {
			w.taint(l)
		}
	}
	return o
}

// over8192: what is behind the first bytes of a large value is not known.
func over8192(l *life, head []byte) []byte {
	if len(head) < l.size {
		return nil
	}
	return head
}

func (w *world) publish() {
	s := w.session()
	if s == nil {
		return
	}
	l := w.valueOf(s)
	if l == nil || l.busy > 0 && w.guard.depth == 0 {
		return
	}
	c := w.call(s.rt, "publish")
	c.expect(l.rt != s.rt, publish.ErrForeign).expect(l.lane != s.lane, publish.ErrOtherStream).
		expect(s.lane.broken || l.tainted, publish.ErrStreamFailed)
	asserted := w.chance(1, 2)
	c.expect(l.memory != nil && !asserted, publish.ErrProvenance)
	if l.busy > 0 {
		c.may(true, driver.ErrBusy)
	}
	l.moving = true
	var p *publish.Publication
	var err error
	if asserted {
		p, err = s.s.PublishAsserted(l.v)
	} else {
		p, err = s.s.Publish(l.v)
	}
	l.moving = false
	c.may(s.closed, driver.ErrClosed).may(s.lane.hurt, publish.ErrStreamFailed).may(l.revoked, driver.ErrClosed)
	switch c.end(err) {
	case done:
		l.stage, l.p, l.revoked, l.ready = publication, p, false, false
		l.needs = max(l.needs, s.lane.sure)
		w.keep = append(w.keep, p)
		w.is(l.v.Err(), driver.ErrMoved, "a value that was published")
		w.past = append(w.past, l.v)
	case unproven:
		s.lane.broken = true
		w.retained(l)
		w.is(l.v.Err(), driver.ErrMoved, "a value whose publish is unproven")
	case rejected:
		w.back(l)
		if l.stage == value {
			w.is(l.v.Err(), nil, "a value whose publish was refused")
		}
	}
}

// back ends a refused move of a life.
func (w *world) back(l *life) {
	if l.revoked {
		w.end(l)
	}
}

// retained ends a life that is on the permanent side.
func (w *world) retained(l *life) {
	l.tainted = false // counted here
	l.rt.keeps++
	w.end(l)
}

// end takes a life out of the model.
func (w *world) end(l *life) {
	switch l.stage {
	case value:
		w.past = append(w.past, l.v)
	case publication:
		w.past = append(w.past, l.p)
	case download, upload:
		w.past = append(w.past, l.t)
	}
	if l.tainted && l.stage == value {
		l.rt.keeps++
	}
	l.stage = over
	w.lives = slices.DeleteFunc(w.lives, func(o *life) bool { return o == l })
	if len(w.past) > 64 {
		w.past = w.past[32:]
	}
}

// is compares the error of a handle with what the model says.
func (w *world) is(err, want error, what string) {
	if want == nil && err != nil || want != nil && !is(err, want) {
		w.fail("%s: its error is %v, want %v", what, err, want)
	}
}

func (w *world) lookAtFrontier() {
	l := w.life(publication)
	if l == nil {
		return
	}
	c := w.call(l.rt, "frontier ready").earlier()
	l.busy++
	ready, err := l.p.FrontierReady()
	l.busy--
	w.looked(c, l, ready, err)
}

func (w *world) lookAtCopy() {
	l := w.life(download)
	if l == nil || w.chance(1, 2) {
		l = w.life(upload)
	}
	if l == nil {
		return
	}
	c := w.call(l.rt, "transfer ready").earlier()
	l.busy++
	ready, err := l.t.Ready()
	l.busy--
	w.looked(c, l, ready, err)
}

// looked judges a look: what is ready has run, and stays ready.
func (w *world) looked(c *call, l *life, ready bool, err error) {
	o := done
	if err != nil {
		o = c.may(l.stage == over || l.revoked, driver.ErrClosed).may(l.stage != publication || l.waiting, driver.ErrMoved).end(err)
	}
	if o == unproven && ready {
		w.fail("%s: ready, and unproven: %v", c.op, err)
	}
	if ready && l.rt.dev.cause != nil {
		w.fail("%s: ready, on a context that is known to be lost", c.op)
	}
	if ready {
		w.ran(l, c.op)
	} else if l.ready && err == nil && l.stage != over {
		w.fail("%s: what was ready is not any more", c.op)
	}
}

// ran checks that what the life's owner was told to be done has run.
func (w *world) ran(l *life, op string) {
	l.ready = true
	if l.lane.ran < l.needs {
		w.fail("%s: ready, and launch %d is yet to run: %d did", op, l.needs, l.lane.ran)
	}
}
