package stream

import (
	"errors"
	"runtime"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// idle keeps the lanes of a context that nobody uses. A lane is taken again
// only once all its work is known to be done, so that new work never queues
// behind old, and one on which an enqueue failed never is.
type idle struct {
	core *wire.Context

	mu    sync.Mutex
	lanes []*Lane

	// known are the lanes by the driver's stream, so that each stream has one
	// lane: those that were made here, and the adopted ones that are in use.
	known map[cuapi.Stream]*Lane
}

type idleKey struct{}

func idleOf(core *wire.Context) *idle {
	event.PoolOf(core) // first, so that its shutdown comes behind ours
	return core.Shared(idleKey{}, func() any {
		p := &idle{core: core, known: map[cuapi.Stream]*Lane{}}
		core.OnShutdown(p.destroy)
		return p
	}).(*idle)
}

// looks bounds how many idle lanes a take asks about.
const looks = 8

// Take returns an idle lane whose work is done, or a new one, for one user.
func Take(core *wire.Context) (*Lane, error) {
	p := idleOf(core)
	for range looks {
		l := p.pop()
		if l == nil {
			break
		}
		done := l.settled()
		switch {
		case done && l.adopted: // kept so far for its marks alone
			l.flow.drop(l)
		case done:
			l.Retain()
			return l, nil
		default:
			p.push(l)
		}
	}
	if err := core.Lost(); err != nil {
		return nil, err
	}
	h := new(cuapi.Stream)
	if r := core.Current(func() cuapi.Result { return core.Table.StreamCreate(h, cuapi.StreamNonBlocking) }); r != cuapi.Success {
		return nil, core.Fail(cuapi.IDStreamCreate, r, "")
	}
	l := newLane(core, *h)
	p.mu.Lock()
	p.known[l.h] = l
	p.mu.Unlock()
	return l, nil
}

// adopt returns the lane of a stream that other code made or knows, for one
// user more, or nil where it is one of ours whose handle was closed.
func (p *idle) adopt(h cuapi.Stream) *Lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.known[h]
	switch {
	case l == nil:
		l = newLane(p.core, h)
		l.adopted = true
		p.known[h] = l
	case l.retain():
	case l.adopted: // on its way out: its handle may be another stream's by now
		l = newLane(p.core, h)
		l.adopted = true
		p.known[h] = l
	default:
		return nil
	}
	return l
}

// forget ends what is known of an adopted lane that nobody uses.
func (p *idle) forget(l *Lane) {
	p.mu.Lock()
	if p.known[l.h] == l {
		delete(p.known, l.h)
	}
	p.mu.Unlock()
}

func (p *idle) pop() *Lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.lanes) == 0 {
		return nil
	}
	l := p.lanes[0]
	p.lanes = p.lanes[1:]
	return l
}

func (p *idle) push(l *Lane) {
	p.mu.Lock()
	p.lanes = append(p.lanes, l)
	p.mu.Unlock()
	p.prune()
}

// prune ends adopted lanes whose work is known to be complete: nobody takes them.
// It makes no driver call.
func (p *idle) prune() {
	p.mu.Lock()
	var over []*Lane
	p.lanes = slices.DeleteFunc(p.lanes, func(l *Lane) bool {
		end := l.adopted && l.over()
		if end {
			over = append(over, l)
		}
		return end
	})
	p.mu.Unlock()
	for _, l := range over {
		l.flow.drop(l)
	}
}

// settled tells whether everything that the lane enqueued is known to be done.
// Work without a mark behind it gets one, for the next time.
func (l *Lane) settled() bool {
	if l.Failed() != nil && !l.adopted || l.core.Lost() != nil {
		return false
	}
	if l.foreign.Load() && !l.adopted && l.capturing() != nil { // an adopted one may be destroyed by now
		return false
	}
	l.Poll()
	l.mu.Lock()
	marks, done := l.head != nil || l.solo != nil, l.retired
	l.mu.Unlock()
	if marks {
		return false
	}
	switch {
	case l.adopted: // no record in what other code may have destroyed
		return l.over()
	case done == l.issued.Load():
		return true
	}
	m := new(Mark)
	if l.Record(m) != nil {
		return false
	}
	done2, err := m.Poll()
	return done2 && err == nil
}

// destroy waits for what the context has pending (cuCtxSynchronize) and for the
// looks under way, so that every event is back in its pool, and ends the idle
// streams.
func (p *idle) destroy() error {
	p.mu.Lock()
	lanes := p.lanes
	p.lanes = nil
	p.mu.Unlock()
	if len(lanes) == 0 {
		return nil
	}
	if p.core.Lost() != nil { // they end with the context
		for _, l := range lanes {
			l.quiesce()
		}
		return nil
	}
	if r := p.core.Current(func() cuapi.Result { return p.core.Table.CtxSynchronize() }); r != cuapi.Success {
		return p.core.Fail(cuapi.IDCtxSynchronize, r, "")
	}
	var errs []error
	for _, l := range lanes {
		l.quiesce()
		if l.adopted {
			continue
		}
		if r := p.core.Table.StreamDestroy(l.h); r != cuapi.Success {
			errs = append(errs, p.core.Fail(cuapi.IDStreamDestroy, r, ""))
		}
	}
	return errors.Join(errs...)
}

// quiesce returns once no mark is pending and no look is under way, and none
// will be. All work is done, so that neither takes long.
func (l *Lane) quiesce() {
	defer l.flow.drop(l)
	for {
		l.Poll()
		l.mu.Lock()
		quiet := l.head == nil && l.solo == nil && l.looking == 0 && l.asking == 0
		l.dead = l.dead || quiet // nobody asks for it from here on
		l.mu.Unlock()
		if quiet {
			return
		}
		runtime.Gosched()
	}
}
