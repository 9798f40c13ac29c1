package stream

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/wire"
)

// Idle returns how many lanes of the context nobody uses.
func Idle(core *wire.Context) int {
	p := idleOf(core)
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.lanes)
}

// LookForRoom makes the look of a wait for room.
func LookForRoom(core *wire.Context) { flowOf(core).Poll() }

// MarkTable returns the table of a mark in words: by "state/event", the next
// state, or impossible.
func MarkTable() map[string]string {
	states := [...]string{"unset", "pending", "complete", "failed"}
	events := [...]string{"recorded", "needless", "seenDone", "seenNot", "seenBad"}
	words := map[string]string{}
	for s, row := range markTable {
		for e, next := range row {
			word := "impossible"
			if next != impossible {
				word = states[next]
			}
			words[fmt.Sprintf("%s/%s", states[s], events[e])] = word
			// The code does what the table says, and panics where it has no state.
			m := new(Mark)
			m.state.Store(uint32(s))
			if got := turned(m, markEvent(e)); got != (next == impossible) || !got && m.state.Load() != next {
				words[fmt.Sprintf("%s/%s", states[s], events[e])] = fmt.Sprintf("in state %d, panicked %v", m.state.Load(), got)
			}
		}
	}
	return words
}

func turned(m *Mark, e markEvent) (panicked bool) {
	defer func() { panicked = recover() != nil }()
	m.turn(e)
	return
}

// StateOf returns the state of a mark, in words.
func StateOf(m *Mark) string {
	return [...]string{"unset", "pending", "complete", "failed"}[m.state.Load()]
}
