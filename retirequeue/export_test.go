package retirequeue

// Locked tells whether somebody holds a lock that no callback may find held. It
// is for tests with one goroutine.
func Locked(q *Queue) bool {
	for _, mu := range []interface {
		TryLock() bool
		Unlock()
	}{&q.mu, &kept.mu} {
		if !mu.TryLock() {
			return true
		}
		mu.Unlock()
	}
	return false
}

// Forget lets go of all that was kept, so that long fuzzing finds memory.
func Forget() {
	kept.mu.Lock()
	defer kept.mu.Unlock()
	kept.head = nil
}
