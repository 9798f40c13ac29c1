package stream

import (
	"errors"
	"sync"

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
}

type idleKey struct{}

func idleOf(core *wire.Context) *idle {
	return core.Shared(idleKey{}, func() any {
		p := &idle{core: core}
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
		if l.settled() {
			l.Retain()
			return l, nil
		}
		p.push(l)
	}
	if err := core.Lost(); err != nil {
		return nil, err
	}
	h := new(cuapi.Stream)
	if r := core.Current(func() cuapi.Result { return core.Table.StreamCreate(h, cuapi.StreamNonBlocking) }); r != cuapi.Success {
		return nil, core.Fail(cuapi.IDStreamCreate, r, "")
	}
	return newLane(core, *h), nil
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
}

// settled tells whether everything that the lane enqueued is known to be done.
// Work without a mark behind it gets one, for the next time.
func (l *Lane) settled() bool {
	if l.Failed() != nil || l.core.Lost() != nil {
		return false
	}
	l.Poll()
	l.mu.Lock()
	marks, done := l.head != nil || l.solo != nil, l.retired
	l.mu.Unlock()
	if marks {
		return false
	}
	if done == l.issued.Load() {
		return true
	}
	m := new(Mark)
	if l.Record(m) != nil {
		return false
	}
	done2, err := m.Poll()
	return done2 && err == nil
}

// destroy ends the idle streams. Pending work of a destroyed stream goes on.
func (p *idle) destroy() error {
	p.mu.Lock()
	lanes := p.lanes
	p.lanes = nil
	p.mu.Unlock()
	if p.core.Lost() != nil {
		return nil
	}
	var errs []error
	for _, l := range lanes {
		if r := p.core.Table.StreamDestroy(l.h); r != cuapi.Success {
			errs = append(errs, p.core.Fail(cuapi.IDStreamDestroy, r, ""))
		}
	}
	return errors.Join(errs...)
}
