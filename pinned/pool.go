package pinned

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
)

// ErrLimit is in the error of an allocation that would pass the pool's bound.
var ErrLimit = errors.New("pinned memory is at its bound")

// DefaultLimit bounds the pinned memory of one context, in bytes.
const DefaultLimit = 1 << 30

// A Block is a piece of pinned memory, of a size class. It goes back to the
// pool and never to the driver before Shutdown: cuMemFreeHost stalls the
// process while any stream has work pending.
type Block struct {
	pool  *Pool
	addr  cuapi.HostPtr
	class int
	next  *Block // in the list of those that cleanups gave back
}

// Pool returns the pool that the block belongs to.
func (b *Block) Pool() *Pool { return b.pool }

// Addr returns the block's address: memory of the driver, not of Go.
func (b *Block) Addr() cuapi.HostPtr { return b.addr }

// Pool is the pinned memory of one context.
type Pool struct {
	core *wire.Context

	returned  atomic.Pointer[Block] // by cleanups, which take no lock
	abandoned atomic.Int64          // dropped while a slice may be in use

	mu    sync.Mutex
	idle  [48][]*Block
	held  int64
	limit int64
	stats Stats
}

// Stats are a pool's counters.
type Stats struct {
	Hits      int   // buffers that came from the pool
	Misses    int   // buffers that came from the driver (cuMemHostAlloc)
	InUse     int   // buffers that somebody owns, the abandoned ones included
	Abandoned int   // dropped without Close after Bytes: never used again
	Kept      int   // retained for good with a transfer that could not be proven
	Held      int64 // bytes taken from the driver
	Limit     int64 // the bound of Held
}

type key struct{}

// PoolOf returns the context's pinned memory.
func PoolOf(core *wire.Context) *Pool {
	return core.Shared(key{}, func() any {
		p := &Pool{core: core, limit: DefaultLimit}
		core.OnShutdown(p.destroy)
		core.OnAsk(p.stillOpen)
		return p
	}).(*Pool)
}

// stillOpen tells of buffers that a program may yet close.
func (p *Pool) stillOpen() error {
	s := p.Stats()
	if n := s.InUse - s.Abandoned - s.Kept; n > 0 {
		return own.StillOpen("%d pinned buffers were not closed", n)
	}
	return nil
}

// minClass is the smallest block: a page, which is what the driver pins.
const minClass = 12

func classOf(n int) int { return max(minClass, bits.Len(uint(n-1))) }

// Take returns a buffer of exactly n bytes. A miss takes a block of the next
// power of two, 4,096 at least, from the driver, which is set-up: it may take milliseconds for
// megabytes, and blocks while the process is stalled. Reserve avoids it.
func (p *Pool) Take(n int) (*Buffer, error) {
	if n <= 0 {
		return nil, fmt.Errorf("pinned: a buffer of %d bytes: the length must be positive", n)
	}
	b, err := p.block(classOf(n))
	if err != nil {
		return nil, fmt.Errorf("pinned: a buffer of %d bytes: %w", n, err)
	}
	return newBuffer(b, n), nil
}

func (p *Pool) block(class int) (*Block, error) {
	if class >= len(p.idle) {
		return nil, fmt.Errorf("%w: no class holds 2^%d bytes", ErrLimit, class)
	}
	p.collect()
	size := int64(1) << class
	p.mu.Lock()
	if list := p.idle[class]; len(list) > 0 {
		b := list[len(list)-1]
		p.idle[class] = list[:len(list)-1]
		p.stats.Hits++
		p.stats.InUse++
		p.mu.Unlock()
		return b, nil
	}
	if b := p.larger(class); b != nil {
		p.mu.Unlock()
		return b, nil
	}
	if p.held+size > p.limit {
		held, limit := p.held, p.limit
		p.mu.Unlock()
		return nil, fmt.Errorf("%w: %d of %d bytes are held, %d more are needed; %d buffers were dropped without Close", ErrLimit, held, limit, size, p.abandoned.Load())
	}
	p.held += size
	p.mu.Unlock()
	b := &Block{pool: p, class: class}
	if r := p.core.Current(func() cuapi.Result {
		return p.core.Table.MemHostAlloc(&b.addr, uintptr(size), cuapi.MemHostAllocPortable)
	}); r != cuapi.Success {
		p.mu.Lock()
		p.held -= size
		p.mu.Unlock()
		return nil, p.core.Fail(cuapi.IDMemHostAlloc, r, fmt.Sprintf("%d bytes", size))
	}
	p.mu.Lock()
	p.stats.Misses++
	p.stats.InUse++
	p.mu.Unlock()
	return b, nil
}

// larger takes an idle block of a larger class, with p.mu held: better than none
// at the bound.
func (p *Pool) larger(class int) *Block {
	if p.held+int64(1)<<class <= p.limit {
		return nil
	}
	for c := class + 1; c < len(p.idle); c++ {
		if list := p.idle[c]; len(list) > 0 {
			p.idle[c] = list[:len(list)-1]
			p.stats.Hits++
			p.stats.InUse++
			return list[len(list)-1]
		}
	}
	return nil
}

// Reserve makes the pool hold at least count idle buffers of n bytes. It is
// set-up.
func (p *Pool) Reserve(count, n int) error {
	if n <= 0 {
		return fmt.Errorf("pinned: a buffer of %d bytes: the length must be positive", n)
	}
	var got []*Block
	var err error
	for range count {
		var b *Block
		if b, err = p.block(classOf(n)); err != nil {
			err = fmt.Errorf("pinned: %d buffers of %d bytes: %w", count, n, err)
			break
		}
		got = append(got, b)
	}
	for _, b := range got {
		b.Free()
	}
	return err
}

// Limit sets the bound of pinned memory, in bytes.
func (p *Pool) Limit(bytes int64) {
	p.mu.Lock()
	p.limit = bytes
	p.mu.Unlock()
}

// Free gives the block back to its pool, once nothing uses it.
func (b *Block) Free() {
	p := b.pool
	p.mu.Lock()
	p.stats.InUse--
	p.idle[b.class] = append(p.idle[b.class], b)
	p.mu.Unlock()
}

// Keep counts the block as retained for good.
func (b *Block) Keep() {
	b.pool.mu.Lock()
	b.pool.stats.Kept++
	b.pool.mu.Unlock()
}

// abandon gives the block back from a cleanup: no lock, no driver call.
func (b *Block) abandon() {
	p := b.pool
	for {
		head := p.returned.Load()
		b.next = head
		if p.returned.CompareAndSwap(head, b) {
			return
		}
	}
}

// collect takes in what cleanups gave back.
func (p *Pool) collect() {
	for b := p.returned.Swap(nil); b != nil; {
		next := b.next
		b.next = nil
		b.Free()
		b = next
	}
}

// Stats returns the counters at this instant.
func (p *Pool) Stats() Stats {
	p.collect()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Held, s.Limit, s.Abandoned = p.held, p.limit, int(p.abandoned.Load())
	return s
}

// destroy gives the idle blocks back to the driver. It stalls. Blocks in use
// stay, with their context.
func (p *Pool) destroy() error {
	p.collect()
	p.mu.Lock()
	var idle []*Block
	for class := range p.idle {
		idle = append(idle, p.idle[class]...)
		p.idle[class] = nil
	}
	inUse := p.stats.InUse
	p.mu.Unlock()
	var errs []error
	for _, b := range idle {
		if p.core.Lost() != nil {
			break // they end with the context
		}
		if r := p.core.Current(func() cuapi.Result { return p.core.Table.MemFreeHost(b.addr) }); r != cuapi.Success {
			errs = append(errs, p.core.Fail(cuapi.IDMemFreeHost, r, ""))
		}
	}
	if inUse != 0 {
		errs = append(errs, fmt.Errorf("pinned: %d buffers are retained: dropped without Close, or work on them may be pending", inUse))
	}
	return errors.Join(errs...)
}
