package stream

import "github.com/purecuda/purecuda/internal/wire"

// Idle returns how many lanes of the context nobody uses.
func Idle(core *wire.Context) int {
	p := idleOf(core)
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.lanes)
}

// LookForRoom makes the look of a wait for room.
func LookForRoom(core *wire.Context) { flowOf(core).Poll() }
