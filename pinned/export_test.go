package pinned

import "fmt"

// BufferTable returns the table of a buffer in words, by "end/condition".
func BufferTable() map[string]string {
	words := map[string]string{}
	for end, row := range map[string][numConditions]act{"Close": bufferTable.Close, "Abandon": bufferTable.Abandon} {
		for c, a := range row {
			words[fmt.Sprintf("%s/%s", end, [...]string{"private", "shown"}[c])] = [...]string{"frees", "hands", "strands"}[a]
		}
	}
	return words
}

// Abandon is the cleanup of a handle that was dropped. It takes no lock: the
// pool's is held meanwhile.
func Abandon(b *Buffer) {
	if b != nil && b.state != nil {
		b.state.block.pool.mu.Lock()
		defer b.state.block.pool.mu.Unlock()
		b.state.abandon()
	}
}

// EndUse is the end of a call that uses the buffer.
func EndUse(b *Buffer) { b.endUse() }
