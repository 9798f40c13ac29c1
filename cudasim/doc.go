// Package cudasim is a simulated CUDA driver: code that uses purecuda runs on
// it unchanged, on a machine without a GPU, and is watched while it does.
//
//	sim := cudasim.ForTest(t, cudasim.Config{}) // fails t with what was wrong
//	sim.Kernel("blur", func(l *cudasim.Launch) {
//		src, dst := l.Bytes(0), l.Bytes(1)
//		...
//	})
//	drv, err := sim.Driver() // as driver.Open gives it
//
// Outside of a test, [New] makes a simulator, and [Sim.Close] returns the
// violations and what was never freed.
//
// # Time
//
// There is no speed to wait for: an operation runs when it is enqueued, unless
// its stream is held or waits for one that is. So work is "not ready" only
// where a test says so: [Sim.Hold] holds a stream as cuStreamWaitValue32 on a
// flag does on hardware (the call itself is simulated too), and [Sim.Release]
// lets it go on. Results do not depend on timing.
//
// With [Config].Stepped nothing runs until [Sim.Step] runs it, one operation
// at a time: so a test decides how far the device got at each call. Calls that
// wait block until another goroutine steps. [Sim.SetStepped] switches.
//
// Time is virtual. Each operation starts when it was enqueued, what is before it
// in its stream and the events it waits for have ended, and a copy engine is
// free: each device has one for copies from the host and one for copies to it.
// It ends its cost later, which [Config].Cost tells, or [DefaultCost].
// cuEventElapsedTime gives differences of that time, so that a download under a
// kernel shows as one. Copy engines alone are shared: kernels of different streams
// run side by side, each at its full cost, however many they are. [Sim.Now] is the
// host's time. It moves on when the host
// sees something complete, so host code costs none; [Sim.Advance] lets time pass,
// and in stepped mode runs what ends meanwhile. Stepped mode is the one to measure
// a schedule in: otherwise each look at what was enqueued finds it complete, and
// what is enqueued behind that look starts later.
//
// In a bubble of testing/synctest a wait for the device is no durable block:
// synctest.Wait does not return while one is under way. Release or step first,
// then wait for who waits.
//
// # What blocks
//
// Where a real driver blocks, the simulated one does, as docs/driver-facts
// measured it: cuMemFree, cuMemFreeHost and module loading block while any
// stream has work pending, and while they do, so do most other calls; the
// 1,022nd copy or launch into a held stream blocks; many held streams hold the
// others, and a hold behind a download, or a download behind a hold, those of every
// fourth stream. Calls whose behaviour was never measured are taken for the worst
// kind. [Sim.Blocked] counts who blocks, and [Config].NoBlock turns blocking
// into a violation.
//
// # Suspicion
//
// The simulator knows every allocation, every handle and every operation that
// is pending. What a real driver lets pass, or answers with a corruption
// later, is recorded as a [Violation] with the stacks of both sides: memory
// freed while the device may use it, use after free, dead handles, mixed
// contexts, copies from memory that is not pinned, calls from callbacks,
// queries of captured events. Whether the device may still use memory does not
// depend on luck: it is decided by order, the order of streams, events and
// what the host has seen complete, and so also while nothing is held. Handles
// and device addresses are never reused; fresh memory holds 0xA5, freed memory
// 0xDB. [Config].Report tells a violation when it happens, and the driver's text
// for the code that the call returned tells it too.
//
// A [Race] is a copy that reads bytes which another copy or a fill writes, where
// nothing orders the two; or two copies from different places into the same
// pinned bytes. Two writes of device memory show only when something reads it,
// and that is a race with one of them. Kernels do not count, since which bytes
// they touch is not known; nor does the order count as missing behind a wait for
// a word or behind a host function, which may stand for any order, or for what is
// before a kernel with a pointer to pinned memory, by which it may tell the host.
//
// A [HostAccess] is what the host does with pinned memory that a pending copy
// has: it changes the source of an upload, or writes the destination of a
// download. It shows when the copy runs. A destination holds 0xEE until then, so
// that an early reader sees garbage; one that something pending may still read
// is left alone. What runs at once is never pending, so hold the stream, or use
// stepped mode. Of copies above 128 KiB the first and last 64 KiB are looked at.
// Nothing is reported of a block that the device, a kernel with a pointer to it,
// or a host function may have written meanwhile, that holds words which streams
// wait on, or of copies behind such a wait.
//
// # Kernels
//
// A module is PTX text, of which the declarations are read: entry names and
// parameters. A kernel's work is a Go function registered under its name. A
// fault in it, or a panic, loses the context for good, as on hardware;
// [Sim.Lose] does so from outside.
//
// # What is not simulated
//
// Per-thread default streams (the handles 0, 1 and 2 all mean the legacy
// stream), executing graphs, cubin images, the host's access to managed memory,
// and the calls of C function pointers: see [Sim.HostFunc]. Host writes to a word
// that a stream waits on must be atomic stores.
package cudasim
