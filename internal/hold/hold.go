// Package hold holds streams back, so that a test or a measurement decides
// when device work completes. It acts alike on hardware and on the simulator:
// the stream waits for a word of pinned memory (cuStreamWaitValue32), and the
// release writes it. Where the driver lacks that call, a host function
// (cuLaunchHostFunc) waits for a semaphore instead, and the release posts it.
//
// Streams share the device's hardware queues: hold at most four at a time, or
// set CUDA_DEVICE_MAX_CONNECTIONS=32 before the driver starts
// (docs/driver-facts.md, "Held streams hold others"). By host functions hold
// one at a time: the driver may call them one after another, so that a stream
// that was released, and any host function of other code, may wait for one that
// is held.
package hold

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// Stream holds the stream raw of the context: what is enqueued from now on
// runs only after release, which may be called from any goroutine, and again.
// It enqueues one operation, and takes pinned memory at most once for every
// 64 streams that are held, or have yet to see their release, at one time. By
// cuStreamWaitValue32 it does not wait; by cuLaunchHostFunc it does while the
// stream is full. Release before the context's Shutdown, which fails while a
// stream is held.
//
// Where the driver lacks cuStreamWaitValue32 and cuLaunchHostFunc the error is a
// *driver.UnsupportedError; where there are no semaphores, as on Windows, it
// wraps one and says so.
func Stream(ctx *driver.Context, raw uintptr) (release func(), err error) {
	core := wire.ContextOf(ctx)
	sems, err := semaphores(ctx, core.Table)
	if err != nil {
		return nil, err
	}
	fs := flagsOf(core, sems)
	f, err := fs.take()
	if err != nil {
		return nil, err
	}
	if id, r := fs.enqueue(f, cuapi.Stream(raw)); r != cuapi.Success {
		fs.release(f) // should the stream wait for it all the same, it goes on
		return nil, core.Fail(id, r, "")
	}
	return sync.OnceFunc(func() { fs.release(f) }), nil
}

// semaphores tells how host functions wait, or nil where nothing needs to.
func semaphores(ctx *driver.Context, t *cuapi.Table) (*cuapi.HostWait, error) {
	lacks := ctx.Supports(cuapi.Entries[cuapi.IDStreamWaitValue32].Symbol())
	switch {
	case lacks == nil:
		return nil, nil
	case t.LaunchHostFunc == nil || t.HostWait == nil:
		return nil, lacks
	}
	w, err := t.HostWait()
	if err != nil {
		return nil, fmt.Errorf("hold: %w, and no host function can wait: %w", lacks, err)
	}
	return w, nil
}

// flags are what streams of one context wait for.
type flags struct {
	core *wire.Context
	sems *cuapi.HostWait // nil: words

	mu     sync.Mutex
	idle   []*flag
	posted []*flag // semaphores that their host function may have yet to take
	held   int
	blocks []cuapi.HostPtr
}

// A flag is a word or a semaphore. A word only ever grows, and a hold waits for a
// value that no earlier hold waited for, so that it may serve again as soon as
// it was released, also while the stream has yet to see it. A semaphore's post
// serves whoever comes first: it serves again once its own stream took it.
type flag struct {
	at    cuapi.HostPtr
	value uint32
}

func (f *flag) next() uint32 { return f.value + 1 }

const (
	blockBytes = 4096
	flagBytes  = cuapi.SemaphoreBytes // a cache line each
)

type key struct{}

func flagsOf(core *wire.Context, sems *cuapi.HostWait) *flags {
	return core.Shared(key{}, func() any { return &flags{core: core, sems: sems} }).(*flags)
}

// enqueue has the stream wait for the flag, and tells by which call.
func (fs *flags) enqueue(f *flag, s cuapi.Stream) (cuapi.ID, cuapi.Result) {
	t := fs.core.Table
	if fs.sems == nil {
		return cuapi.IDStreamWaitValue32, t.StreamWaitValue32(s, f.addr(), f.next(), cuapi.StreamWaitValueGEQ)
	}
	// Nobody measured whether it needs a current context.
	return cuapi.IDLaunchHostFunc, fs.core.Current(func() cuapi.Result { return t.LaunchHostFunc(s, fs.sems.Wait, uintptr(f.at)) })
}

// release lets the stream go on that waits for the flag.
func (fs *flags) release(f *flag) {
	if fs.sems == nil {
		f.set()
	} else {
		fs.sems.Post(f.at)
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.held--
	if fs.sems == nil {
		fs.idle = append(fs.idle, f)
	} else {
		fs.posted = append(fs.posted, f)
	}
}

func (fs *flags) take() (*flag, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if len(fs.idle) == 0 {
		fs.posted = slices.DeleteFunc(fs.posted, func(f *flag) bool {
			taken := fs.sems.Taken(f.at)
			if taken {
				fs.idle = append(fs.idle, f)
			}
			return taken
		})
	}
	if len(fs.idle) == 0 {
		if err := fs.grow(); err != nil {
			return nil, err
		}
	}
	last := len(fs.idle) - 1
	f := fs.idle[last]
	fs.idle = fs.idle[:last]
	fs.held++
	return f, nil
}

func (fs *flags) grow() error {
	p := new(cuapi.HostPtr)
	t := fs.core.Table
	r := fs.core.Current(func() cuapi.Result {
		return t.MemHostAlloc(p, blockBytes, cuapi.MemHostAllocPortable|cuapi.MemHostAllocDeviceMap)
	})
	if r != cuapi.Success {
		return fs.core.Fail(cuapi.IDMemHostAlloc, r, fmt.Sprintf("%d bytes of flags", blockBytes))
	}
	if len(fs.blocks) == 0 {
		fs.core.OnShutdown(fs.free)
	}
	fs.blocks = append(fs.blocks, *p)
	list := split(*p)
	if fs.sems != nil {
		for _, f := range list {
			fs.sems.Init(f.at)
		}
	}
	fs.idle = append(fs.idle, list...)
	return nil
}

// free gives the memory back, unless a stream still waits for a flag in it.
func (fs *flags) free() error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.held > 0 {
		return fmt.Errorf("hold: %d streams are still held: %w", fs.held, driver.ErrBusy)
	}
	if fs.core.Lost() != nil {
		return nil // it ends with the context
	}
	var errs []error
	for _, p := range fs.blocks {
		if r := fs.core.Current(func() cuapi.Result { return fs.core.Table.MemFreeHost(p) }); r != cuapi.Success {
			errs = append(errs, fs.core.Fail(cuapi.IDMemFreeHost, r, ""))
		}
	}
	fs.blocks, fs.idle, fs.posted = nil, nil, nil
	return errors.Join(errs...)
}
