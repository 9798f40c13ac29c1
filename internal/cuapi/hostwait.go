package cuapi

// HostWait is how cuLaunchHostFunc makes a stream wait for the host: its
// function waits for a semaphore. Whoever fills a Table says how that is done:
// the loader with the C library's semaphores, so that no Go code runs on the
// driver's thread, the simulator with its own.
type HostWait struct {
	// Wait is the CUhostFn. Its userData is a semaphore's address; it returns
	// when one Post more was made than it and others took.
	Wait uintptr
	// Init makes a semaphore without posts of SemaphoreBytes of pinned memory.
	Init func(sem HostPtr)
	// Post lets one Wait return. It never waits.
	Post func(sem HostPtr)
	// Taken tells whether a Wait took each Post, so that the semaphore may
	// serve again. It never waits.
	Taken func(sem HostPtr) bool
}

// SemaphoreBytes is the size of a semaphore of HostWait, at a multiple of it.
const SemaphoreBytes = 64
