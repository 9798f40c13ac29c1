package cudasim

import (
	"slices"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Hold holds a stream: nothing that is enqueued after it runs until Release.
// It acts as an operation of the stream that completes on Release, as
// cuStreamWaitValue32 on a flag does on hardware: the stream is not ready
// meanwhile, and calls that wait for all streams block.
func (s *Sim) Hold(h uintptr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cur = frame{id: cuapi.IDStreamWaitValue32}
	st, ok := find(s, s.streams, cuapi.Stream(h), "held stream")
	if !ok || st.ctx.fault != cuapi.Success {
		return
	}
	gate := new(bool)
	s.enqueue(st, op{gate: gate, holds: true, ready: func() bool { return *gate }})
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
		for i := st.head; i < len(st.q); i++ {
			if g := st.q[i].gate; g != nil {
				*g = true
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
// it takes the operation that was enqueued first, so that a run repeats. One that
// is held, or that waits for an event or a word, does not run before its time.
//
// A host function runs on the calling goroutine and without the simulator's
// lock; an operation behind it waits for its end. Step is meant for
// Config.Stepped: otherwise it finds nothing left to run.
func (s *Sim) Step(streams ...uintptr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var next *stream
	for _, st := range s.active {
		if len(streams) > 0 && !slices.Contains(streams, uintptr(st.h)) || !s.runnable(st) {
			continue
		}
		if next == nil || st.first().seq < next.first().seq {
			next = st
		}
	}
	if next == nil {
		return false
	}
	s.step(next)
	s.moved.Broadcast()
	return true
}

// passGates takes the released holds out of a stream: they are no operations of
// the code under test, so that no step is spent on them.
func (s *Sim) passGates(st *stream) {
	kept := slices.DeleteFunc(st.q[st.head:], func(o op) bool { return o.gate != nil && *o.gate })
	st.q = st.q[:st.head+len(kept)]
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
}
