package watch

// Held makes w take itself for running, and returns what runs it: a test puts
// that into a bubble.
func (w *Watcher) Held() (run func()) {
	w.running.Store(true)
	return w.run
}
