// Package memory allocates device memory for one context, in stream order from
// a pool of the context's own (cuMemAllocFromPoolAsync), so that neither taking
// nor giving back stalls other work of the process. Where the device has no
// pools, a cache by size class takes over, which frees only in Shutdown.
//
// Its functions take what only this module's packages have: programs meet
// device memory as the values of package publish.
package memory

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// A Block is a piece of device memory that somebody owns.
type Block struct {
	cell  own.Cell
	Addr  cuapi.DevicePtr
	Bytes int64 // as asked for
	class uint8 // of the cache, plus one; 0 for the pool
}

func newBlock(addr cuapi.DevicePtr, n int64, class uint8) *Block {
	b := &Block{Addr: addr, Bytes: n, class: class}
	b.cell.Open()
	return b
}

// Pool is the device memory of one context.
type Pool struct {
	core *wire.Context

	setting sync.Mutex
	ready   bool          // set up, guarded by setting
	pool    cuapi.MemPool // 0: the cache is used
	lane    cuapi.Stream  // frees run here, behind nothing
	limit   int64         // of the cache, in bytes

	mu     sync.Mutex
	asking int // queries of the reclaim stream under way
	dead   bool
	used   [48]int               // blocks of the cache in use, by class
	kept   int64                 // of inUse: retained for good
	free   [48][]cuapi.DevicePtr // the cache, by class
	held   int64                 // taken from the driver for the cache
	inUse  int64
	peak   int64
}

type key struct{}

// PoolOf returns the context's memory, set up on first use: the pool is made,
// kept from giving memory back and from making streams depend on each other,
// and warmed, which takes some 15 ms. It is set-up. After an error the next
// call goes on where this one failed.
func PoolOf(core *wire.Context) (*Pool, error) {
	p := core.Shared(key{}, func() any {
		p := &Pool{core: core}
		core.OnShutdown(p.destroy)
		return p
	}).(*Pool)
	p.setting.Lock()
	defer p.setting.Unlock()
	if !p.ready {
		if err := p.setUp(); err != nil {
			return nil, err
		}
		p.ready = true
	}
	return p, nil
}

func (p *Pool) setUp() error {
	t := p.core.Table
	if p.lane == 0 {
		lane := new(cuapi.Stream)
		if r := p.core.Current(func() cuapi.Result { return t.StreamCreate(lane, cuapi.StreamNonBlocking) }); r != cuapi.Success {
			return p.core.Fail(cuapi.IDStreamCreate, r, "")
		}
		p.lane = *lane
	}
	if !p.core.Pools {
		free, total := new(uintptr), new(uintptr)
		if r := p.core.Current(func() cuapi.Result { return t.MemGetInfo(free, total) }); r != cuapi.Success {
			return p.core.Fail(cuapi.IDMemGetInfo, r, "")
		}
		p.limit = int64(*total / 2)
		return nil
	}
	if p.pool == 0 {
		props := &cuapi.MemPoolProps{
			AllocType: cuapi.MemAllocationTypePinned,
			Location:  cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice, ID: int32(p.core.Device)},
		}
		pool := new(cuapi.MemPool)
		if r := p.core.Current(func() cuapi.Result { return t.MemPoolCreate(pool, props) }); r != cuapi.Success {
			return p.core.Fail(cuapi.IDMemPoolCreate, r, "")
		}
		p.pool = *pool
	}
	for _, s := range []struct {
		attr  int32
		value cuapi.HostPtr
	}{
		{cuapi.PoolReleaseThreshold, cuapi.Word(^uint64(0))},
		{cuapi.PoolReuseAllowInternalDependencies, cuapi.Word(0)},
	} {
		if r := t.MemPoolSetAttribute(p.pool, s.attr, s.value); r != cuapi.Success {
			return p.core.Fail(cuapi.IDMemPoolSetAttribute, r, fmt.Sprintf("attribute %d", s.attr))
		}
	}
	warm := new(cuapi.DevicePtr)
	if r := t.MemAllocFromPoolAsync(warm, 1<<20, p.pool, p.lane); r != cuapi.Success {
		return p.core.Fail(cuapi.IDMemAllocFromPoolAsync, r, "1048576 bytes")
	}
	if r := t.MemFreeAsync(*warm, p.lane); r != cuapi.Success {
		return p.core.Fail(cuapi.IDMemFreeAsync, r, "1048576 bytes")
	}
	return nil
}

// Alloc takes n bytes, ready in l's order. Out of memory is a *driver.Error
// with code 2 and the sizes; nothing is lost then. It never waits for work.
func (p *Pool) Alloc(l *stream.Lane, n int64) (*Block, error) {
	if p.pool == 0 {
		return p.cached(n)
	}
	addr := new(cuapi.DevicePtr)
	p.add(n) // before it is taken: who finds none finds who has it
	if err := l.Alloc(addr, uintptr(n), p.pool); err != nil {
		if p.add(-n) {
			p.core.Memory.Signal() // nobody has any: who waits for some need not
		}
		return nil, err
	}
	p.count(0)
	return newBlock(*addr, n, 0), nil
}

// Free gives a block back once all work on it was observed to be done. It
// never waits. An error means that the memory must be kept for good.
func (p *Pool) Free(b *Block) error {
	if !b.cell.Close() {
		return fmt.Errorf("memory: %d bytes are freed twice: %w", b.Bytes, own.ErrClosed)
	}
	if err := p.core.Lost(); err != nil {
		return err
	}
	if b.class != 0 {
		p.mu.Lock()
		p.free[b.class-1] = append(p.free[b.class-1], b.Addr)
		p.used[b.class-1]--
		p.mu.Unlock()
		p.count(-b.Bytes)
		p.core.Memory.Signal()
		return nil
	}
	list := cuapi.NewList()
	defer list.Free()
	list.MemFreeAsync(b.Addr, p.lane)
	list.Relax()
	if _, r := p.core.Table.Run(list); r != cuapi.Success {
		return p.core.Fail(cuapi.IDMemFreeAsync, r, fmt.Sprintf("%d bytes", b.Bytes))
	}
	p.count(-b.Bytes)
	p.core.Memory.Signal()
	return nil
}

// Lent tells whether n bytes that there are not may be there later: somebody of
// this context has memory that may come back, or what was given back is yet to
// (cuStreamQuery), and with it there are as many. While frees are under way the
// watcher looks for them, and signals the context's Memory. It never waits
// (cuMemGetInfo, cuMemPoolGetAttribute).
func (p *Pool) Lent(n int64) bool {
	if p.pool == 0 {
		c := class(n)
		p.mu.Lock()
		defer p.mu.Unlock()
		return c < len(p.used) && p.used[c] > 0 && p.inUse > p.kept // a class serves itself
	}
	free, total, reserved := new(uintptr), new(uintptr), new(uint64)
	if r := p.core.Current(func() cuapi.Result { return p.core.Table.MemGetInfo(free, total) }); r != cuapi.Success {
		p.core.Fail(cuapi.IDMemGetInfo, r, "")
		return false
	}
	if r := p.core.Table.MemPoolGetAttribute(p.pool, cuapi.PoolReservedMemCurrent, cuapi.WordPtr(reserved)); r != cuapi.Success {
		p.core.Fail(cuapi.IDMemPoolGetAttribute, r, "")
		return false
	}
	p.mu.Lock()
	lent, most := p.inUse > p.kept, int64(*free)+int64(*reserved)-p.kept
	p.mu.Unlock()
	if n > most {
		return false // others have it
	}
	if p.busy() {
		stream.WatcherOf(p.core).Add(p)
		lent = true
	}
	return lent
}

// busy tells whether a free has yet to run.
func (p *Pool) busy() bool {
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return false
	}
	p.asking++
	p.mu.Unlock()
	list := cuapi.NewList()
	list.StreamQuery(p.lane)
	list.Relax()
	_, r := p.core.Table.Run(list)
	list.Free()
	if r != cuapi.Success && r != cuapi.NotReady {
		p.core.Fail(cuapi.IDStreamQuery, r, "") // latched, if the context is lost
	}
	p.mu.Lock()
	p.asking--
	p.mu.Unlock()
	return r == cuapi.NotReady
}

// Poll is the watcher's look while somebody waits for what is being freed.
func (p *Pool) Poll() (progress, more bool) {
	switch {
	case p.core.Memory.Waiting() == 0:
		return false, false
	case p.busy():
		return false, true
	}
	p.core.Memory.Signal()
	return true, false
}

// quiesce returns once nobody asks for the reclaim stream, and nobody will.
func (p *Pool) quiesce() {
	for {
		p.mu.Lock()
		p.dead = true
		quiet := p.asking == 0
		p.mu.Unlock()
		if quiet {
			return
		}
		runtime.Gosched() // a query never waits
	}
}

// class returns the cache's class of n bytes.
func class(n int64) int { return bits.Len64(uint64(max(n, 512) - 1)) }

// Keep notes that n bytes in use never come back.
func (p *Pool) Keep(n int64) {
	p.mu.Lock()
	p.kept += n
	p.mu.Unlock()
	p.core.Memory.Signal()
}

// add counts n bytes more, and tells whether all that is in use is kept.
func (p *Pool) add(n int64) (bare bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inUse += n
	return p.inUse <= p.kept
}

func (p *Pool) count(n int64) {
	p.mu.Lock()
	p.inUse += n
	p.peak = max(p.peak, p.inUse)
	p.mu.Unlock()
}

// cached takes a block of a power of two bytes from the cache, or from the
// driver (cuMemAlloc) while the cache is below its bound, half of the memory
// of the device.
func (p *Pool) cached(n int64) (*Block, error) {
	class := uint8(class(n))
	if int(class) >= len(p.free) {
		return nil, p.core.Fail(cuapi.IDMemAlloc, cuapi.OutOfMemory, fmt.Sprintf("%d bytes; the cache has no class for them", n))
	}
	size := int64(1) << class
	p.mu.Lock()
	if list := p.free[class]; len(list) > 0 {
		b := newBlock(list[len(list)-1], n, class+1)
		p.free[class] = list[:len(list)-1]
		p.used[class]++
		p.mu.Unlock()
		p.count(n)
		return b, nil
	}
	held := p.held
	fits := held+size <= p.limit
	if fits {
		p.held += size
	}
	p.mu.Unlock()
	detail := fmt.Sprintf("%d bytes; the cache holds %d of at most %d", n, held, p.limit)
	if !fits {
		return nil, p.core.Fail(cuapi.IDMemAlloc, cuapi.OutOfMemory, detail)
	}
	addr := new(cuapi.DevicePtr)
	if r := p.core.Current(func() cuapi.Result { return p.core.Table.MemAlloc(addr, uintptr(size)) }); r != cuapi.Success {
		p.mu.Lock()
		p.held -= size
		p.mu.Unlock()
		return nil, p.core.Fail(cuapi.IDMemAlloc, r, detail)
	}
	p.mu.Lock()
	p.used[class]++
	p.mu.Unlock()
	p.count(n)
	return newBlock(*addr, n, class+1), nil
}

// Stats are the counters of a context's device memory, in bytes.
type Stats struct {
	InUse int64
	Peak  int64
	Pools bool // stream-ordered; false: the cache by size class
}

// Stats returns the counters at this instant.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{InUse: p.inUse, Peak: p.peak, Pools: p.pool != 0}
}

// destroy waits for the frees and ends the pool. It stalls.
func (p *Pool) destroy() error {
	p.mu.Lock()
	inUse := p.inUse
	p.mu.Unlock()
	if inUse != 0 {
		return fmt.Errorf("memory: %d bytes of device memory are retained: leaked, or work on them may be pending", inUse)
	}
	if p.core.Lost() != nil {
		return nil // it ends with the context
	}
	t := p.core.Table
	var errs []error
	note := func(op cuapi.ID, r cuapi.Result) {
		if r != cuapi.Success {
			errs = append(errs, p.core.Fail(op, r, ""))
		}
	}
	p.quiesce()
	if p.lane != 0 {
		note(cuapi.IDStreamSynchronize, t.StreamSynchronize(p.lane))
		note(cuapi.IDStreamDestroy, t.StreamDestroy(p.lane))
	}
	if p.pool != 0 {
		note(cuapi.IDMemPoolDestroy, t.MemPoolDestroy(p.pool))
	}
	for _, list := range p.free {
		for _, addr := range list {
			note(cuapi.IDMemFree, p.core.Current(func() cuapi.Result { return t.MemFree(addr) }))
		}
	}
	return errors.Join(errs...)
}
