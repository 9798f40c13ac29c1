// Package hold holds streams back, so that a test or a measurement decides
// when device work completes. It acts alike on hardware and on the simulator:
// the stream waits for a word of pinned memory (cuStreamWaitValue32), and the
// release writes it.
//
// Streams share the device's hardware queues: hold at most four at a time, or
// set CUDA_DEVICE_MAX_CONNECTIONS=32 before the driver starts
// (docs/driver-facts.md, "Held streams hold others").
package hold

import (
	"errors"
	"fmt"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// Stream holds the stream raw of the context: what is enqueued from now on
// runs only after release, which may be called from any goroutine, and again.
// It enqueues one operation, and takes pinned memory at most once for every
// 64 streams held at one time. Release before the context's Shutdown, which
// fails while a stream is held.
//
// Where the driver lacks cuStreamWaitValue32 the error is a
// *driver.UnsupportedError.
func Stream(ctx *driver.Context, raw uintptr) (release func(), err error) {
	if err := ctx.Supports(cuapi.Entries[cuapi.IDStreamWaitValue32].Symbol()); err != nil {
		return nil, err
	}
	core := wire.ContextOf(ctx)
	fs := flagsOf(core)
	f, err := fs.take()
	if err != nil {
		return nil, err
	}
	if r := core.Table.StreamWaitValue32(cuapi.Stream(raw), f.addr(), f.next(), cuapi.StreamWaitValueGEQ); r != cuapi.Success {
		fs.put(f)
		return nil, core.Fail(cuapi.IDStreamWaitValue32, r, "")
	}
	return sync.OnceFunc(func() {
		f.set()
		fs.put(f)
	}), nil
}

// flags are the words that streams of one context wait for.
type flags struct {
	core *wire.Context

	mu     sync.Mutex
	idle   []*flag
	held   int
	blocks []cuapi.HostPtr
}

// A flag only ever grows, and a hold waits for a value that no earlier hold
// waited for. So a flag may serve again as soon as it was released, also while
// the stream has yet to see it.
type flag struct {
	at    cuapi.HostPtr
	value uint32
}

func (f *flag) next() uint32 { return f.value + 1 }

const (
	blockBytes = 4096
	flagBytes  = 64 // a cache line each
)

type key struct{}

func flagsOf(core *wire.Context) *flags {
	return core.Shared(key{}, func() any { return &flags{core: core} }).(*flags)
}

func (fs *flags) take() (*flag, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
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

func (fs *flags) put(f *flag) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.idle = append(fs.idle, f)
	fs.held--
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
	fs.idle = append(fs.idle, split(*p)...)
	return nil
}

// free gives the memory back, unless a stream still waits for a word of it.
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
	fs.blocks, fs.idle = nil, nil
	return errors.Join(errs...)
}
