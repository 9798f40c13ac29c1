package cudasim

import (
	"math"
	"slices"
	"time"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Hold holds a stream: nothing that is enqueued after it runs until Release.
// It acts as an operation of the stream that completes on Release, as
// cuStreamWaitValue32 on a flag does on hardware: the stream is not ready
// meanwhile, and calls that wait for all streams block.
//
// The handle is what stream.Stream.Raw or publish.Session.Raw returns. Code whose
// sessions have streams of their own that a test can not reach is stopped with
// SetStepped(true), which needs no handle.
func (s *Sim) Hold(h uintptr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cur = frame{id: cuapi.IDStreamWaitValue32}
	st, ok := find(s, s.streams, cuapi.Stream(h), "held stream")
	if !ok || st.ctx.fault != cuapi.Success {
		return
	}
	gate := new(bool)
	s.enqueue(st, &op{gate: gate, holds: true, ready: func() bool { return *gate }})
}

// Release undoes every Hold of a stream, also of one destroyed meanwhile, and
// runs what is ready then.
func (s *Sim) Release(h uintptr) { s.release(func(st *stream) bool { return st.h == cuapi.Stream(h) }) }

// ReleaseAll releases every stream.
func (s *Sim) ReleaseAll() { s.release(func(*stream) bool { return true }) }

func (s *Sim) release(match func(*stream) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range slices.Clone(s.active) {
		if !match(st) {
			continue
		}
		held := false
		for i := st.head; i < len(st.q); i++ {
			o := &st.q[i]
			if o.gate != nil {
				*o.gate, held = true, true
			}
			if held {
				o.span.asked = max(o.span.asked, s.now)
			}
		}
		if s.cfg.Stepped {
			s.passGates(st)
		}
	}
	s.drain()
}

// Step runs one operation and tells whether there was one that could run. With
// no stream named it may be any stream's; else one of those, which may have
// been destroyed meanwhile. Of several streams whose first operation could run
// it takes the one that ends first in virtual time, and of those the one that
// was enqueued first, so that a run repeats. What is held, or waits for an event
// or a word, does not run before its time.
//
// A host function runs on the calling goroutine and without the simulator's
// lock; an operation behind it waits for its end. Step is meant for
// Config.Stepped: otherwise it finds nothing left to run.
func (s *Sim) Step(streams ...uintptr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.next(streams)
	if next == nil {
		return false
	}
	s.step(next)
	s.moved.Broadcast()
	return true
}

// Advance lets virtual time pass: it runs, as Step does, every operation that
// ends until then, and returns how many those were. Without Config.Stepped
// nothing is left to run, and the host is merely busy for that long.
func (s *Sim) Advance(d time.Duration) (ran int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	until := s.now + min(moment(max(0, d)), math.MaxInt64-s.now)
	for s.cfg.Stepped {
		st := s.next(nil)
		if st == nil || st.first().span.end > until {
			break
		}
		s.step(st)
		ran++
	}
	s.sawAt(until)
	s.moved.Broadcast()
	return ran
}

// Now returns the host's virtual time since New. It moves on when the host sees
// that something is complete, in stepped mode with every operation that runs,
// and by Advance.
func (s *Sim) Now() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Duration(s.now)
}

// next returns the stream whose first operation is the next to run.
func (s *Sim) next(streams []uintptr) (next *stream) {
	for _, st := range s.active {
		if len(streams) > 0 && !slices.Contains(streams, uintptr(st.h)) || !s.runnable(st) {
			continue
		}
		o := st.first()
		if !o.span.timed {
			s.time(st, o)
		}
		if next == nil {
			next = st
		} else if n := next.first(); o.span.end < n.span.end || o.span.end == n.span.end && o.seq < n.seq {
			next = st
		}
	}
	return next
}

// passGates takes the released holds out of a stream: they are no operations of
// the code under test, so that no step is spent on them.
func (s *Sim) passGates(st *stream) {
	before := st.pending()
	kept := slices.DeleteFunc(st.q[st.head:], func(o op) bool {
		released := o.gate != nil && *o.gate
		if released {
			o.line.leave(&o)
		}
		return released
	})
	st.q = st.q[:st.head+len(kept)]
	st.late -= before - len(kept)
	if st.pending() == 0 {
		st.q, st.head = st.q[:0], 0
		s.idle(st)
	}
	s.moved.Broadcast()
}

// SetStepped changes Config.Stepped from here on: a test that steps may leave
// its set-up, parts of which wait, to run by itself. Off runs what is pending.
func (s *Sim) SetStepped(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg.Stepped = on
	s.drain()
	s.moved.Broadcast() // who waits looks at the memory that streams wait on, from now on
}
