// Package event keeps the driver's events: a pool for each context, so that in
// steady state no event is created or destroyed. Events come without timing,
// the kind that is fastest to query and wait for (CU_EVENT_DISABLE_TIMING).
//
// Its functions take what only this module's packages have: programs meet
// events as the frontiers of package publish.
package event

import (
	"errors"
	"sync"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
)

// An Event is one event of a pool, owned by who took it. Calls in progress
// borrow it, so that it is used again behind the last of them.
type Event struct {
	h    cuapi.Event
	pool *Pool
	cell own.Cell
}

// Handle returns the driver's event.
func (e *Event) Handle() cuapi.Event { return e.h }

// Borrow begins a call that uses the event. Each success is paired with Return.
func (e *Event) Borrow() error { return e.cell.Borrow() }

// Return ends a borrow. It puts the event back if its owner did so meanwhile.
func (e *Event) Return() {
	if e.cell.Return() {
		e.pool.take(e)
	}
}

// Pool holds the idle events of one context. An event is put back only once
// its completion was observed.
type Pool struct {
	core *wire.Context

	mu     sync.Mutex
	idle   []*Event
	barred []*Event
	made   int
	taken  int
}

type key struct{}

// PoolOf returns the context's event pool.
func PoolOf(core *wire.Context) *Pool {
	return core.Shared(key{}, func() any {
		p := &Pool{core: core}
		core.OnShutdown(p.destroy)
		return p
	}).(*Pool)
}

// Get takes an idle event, or creates one (cuEventCreate), which returns at
// once unless the process is stalled.
func (p *Pool) Get() (*Event, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		e := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.taken++
		p.mu.Unlock()
		e.cell.Open()
		return e, nil
	}
	p.mu.Unlock()
	e := &Event{pool: p}
	if r := p.core.Current(func() cuapi.Result { return p.core.Table.EventCreate(&e.h, cuapi.EventDisableTiming) }); r != cuapi.Success {
		return nil, p.core.Fail(cuapi.IDEventCreate, r, "")
	}
	p.mu.Lock()
	p.made++
	p.taken++
	p.mu.Unlock()
	e.cell.Open()
	return e, nil
}

// Put gives an event back, behind the calls that borrow it. Putting it back
// twice does nothing.
func (p *Pool) Put(e *Event) {
	if e.cell.Close() {
		p.take(e)
	}
}

// Bar keeps an event out of use for good, as one of which nobody knows whether it
// is recorded, or complete: it counts as in use. The context's shutdown destroys
// it.
func (p *Pool) Bar(e *Event) {
	p.mu.Lock()
	p.barred = append(p.barred, e)
	p.mu.Unlock()
}

// take makes a closed event idle.
func (p *Pool) take(e *Event) {
	e.cell = own.Cell{}
	p.mu.Lock()
	p.taken--
	p.idle = append(p.idle, e)
	p.mu.Unlock()
}

// Reserve makes the pool hold at least n idle events.
func (p *Pool) Reserve(n int) error {
	var got []*Event
	var err error
	for range n {
		var e *Event
		if e, err = p.Get(); err != nil {
			break
		}
		got = append(got, e)
	}
	for _, e := range got {
		p.Put(e)
	}
	return err
}

// Stats are the pool's counters.
type Stats struct {
	Created int // by the driver, ever
	Idle    int
	InUse   int
}

// Stats returns the counters at this instant.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{Created: p.made, Idle: len(p.idle), InUse: p.taken}
}

// destroy ends the idle events and those that are barred: an event may be
// destroyed while it is pending. Those still in use stay, with their context.
func (p *Pool) destroy() error {
	p.mu.Lock()
	idle := append(p.idle, p.barred...)
	p.idle, p.barred = nil, nil
	p.mu.Unlock()
	if p.core.Lost() != nil {
		return nil // they end with the context
	}
	var errs []error
	for _, e := range idle {
		if r := p.core.Table.EventDestroy(e.h); r != cuapi.Success {
			errs = append(errs, p.core.Fail(cuapi.IDEventDestroy, r, ""))
		}
	}
	return errors.Join(errs...)
}
