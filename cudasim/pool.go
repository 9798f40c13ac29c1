package cudasim

import (
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A pool is a memory pool. Only its accounts are simulated: every allocation
// gets an address of its own.
type pool struct {
	h         cuapi.MemPool
	dev       *device
	used      uint64
	usedHigh  uint64
	reserved  uint64
	resHigh   uint64
	threshold uint64
	reuse     [3]int32               // attributes 1 to 3
	access    map[cuapi.Device]int32 // of other devices
	made      stack
}

func (s *Sim) newPool(d *device) *pool {
	p := &pool{h: cuapi.MemPool(s.newID()), dev: d, reuse: [3]int32{1, 1, 1}, access: map[cuapi.Device]int32{}, made: callers()}
	s.pools[p.h] = p
	return p
}

func (s *Sim) defaultPool(d *device) *pool {
	if d.pool == nil {
		d.pool = s.newPool(d)
	}
	return d.pool
}

func (s *Sim) pool(h cuapi.MemPool) (*pool, cuapi.Result) {
	p, ok := find(s, s.pools, h, "memory pool")
	if !ok {
		return nil, cuapi.InvalidValue
	}
	return p, cuapi.Success // a pool outlives its context, and its loss (measured)
}

func (s *Sim) memAllocAsync(p *cuapi.DevicePtr, size uintptr, hs cuapi.Stream) cuapi.Result {
	st, r := s.target(hs)
	if r != cuapi.Success {
		return r
	}
	return s.allocAsync(p, size, s.defaultPool(st.ctx.dev), st)
}

func (s *Sim) memAllocFromPoolAsync(p *cuapi.DevicePtr, size uintptr, h cuapi.MemPool, hs cuapi.Stream) cuapi.Result {
	pl, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	st, r := s.target(hs)
	if r != cuapi.Success {
		return r
	}
	return s.allocAsync(p, size, pl, st)
}

// allocAsync gives an address at once; the memory is there when the stream
// reaches the allocation. What is short is known at once too (measured: 1 TiB
// fails with 2).
func (s *Sim) allocAsync(p *cuapi.DevicePtr, size uintptr, pl *pool, st *stream) cuapi.Result {
	if r := s.besides(st); r != cuapi.Success {
		return r
	}
	if pl.dev != st.ctx.dev && pl.access[st.ctx.dev.ordinal] == 0 {
		return cuapi.InvalidValue
	}
	if size == 0 { // measured: no memory, and no error
		*p = 0
		return cuapi.Success
	}
	owner := st.ctx
	if pl.dev != st.ctx.dev && pl.dev.primary != nil {
		owner = pl.dev.primary
	}
	b := s.newDeviceBlock(owner, size)
	if b == nil {
		return cuapi.OutOfMemory
	}
	b.pool = pl
	pl.used += b.size
	pl.usedHigh = max(pl.usedHigh, pl.used)
	pl.reserved = max(pl.reserved, pl.used)
	pl.resHigh = max(pl.resHigh, pl.reserved)
	*p = cuapi.DevicePtr(b.base)
	r := s.enqueue(st, &op{})
	b.born = tick{st: st, seq: st.newest}
	return r
}

// besides is beside for an operation that captures forbid unless it is theirs.
func (s *Sim) besides(st *stream) cuapi.Result {
	if st.capture != nil {
		return cuapi.Success
	}
	return s.beside()
}

// memFreeAsync frees when the stream reaches it, and is ordered on that
// stream alone (documented).
func (s *Sim) memFreeAsync(addr cuapi.DevicePtr, hs cuapi.Stream) cuapi.Result {
	st, r := s.target(hs)
	if r != cuapi.Success {
		return r
	}
	if r := s.besides(st); r != cuapi.Success {
		return r
	}
	b, r := s.freeable(uint64(addr), func(b *block) bool { return b.pool != nil })
	if r != cuapi.Success {
		return r
	}
	s.suspectFree(b, st)
	b.freeing, b.gone = true, callers()
	return s.enqueue(st, &op{run: func() cuapi.Result {
		if !b.freed {
			s.free(b)
		}
		return cuapi.Success
	}})
}

func (s *Sim) deviceGetDefaultMemPool(p *cuapi.MemPool, dev cuapi.Device) cuapi.Result {
	d, r := s.device(dev)
	if r == cuapi.Success {
		*p = s.defaultPool(d).h
	}
	return r
}

func (s *Sim) memPoolCreate(p *cuapi.MemPool, props *cuapi.MemPoolProps) cuapi.Result {
	d, r := s.device(cuapi.Device(props.Location.ID))
	if r != cuapi.Success || props.Location.Type != cuapi.MemLocationTypeDevice || props.AllocType != cuapi.MemAllocationTypePinned {
		return cuapi.InvalidValue
	}
	*p = s.newPool(d).h
	return cuapi.Success
}

// memPoolDestroy leaves the pool's allocations alive (documented).
func (s *Sim) memPoolDestroy(h cuapi.MemPool) cuapi.Result {
	p, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	if p == p.dev.pool {
		s.violate(Misuse, fmt.Sprintf("the default memory pool of device %d is destroyed", p.dev.ordinal), nil)
		return cuapi.InvalidValue
	}
	delete(s.pools, h)
	s.gone.add(uintptr(h))
	return cuapi.Success
}

func (s *Sim) memPoolTrimTo(h cuapi.MemPool, keep uintptr) cuapi.Result {
	p, r := s.pool(h)
	if r == cuapi.Success {
		p.reserved = max(p.used, min(p.reserved, uint64(keep)))
	}
	return r
}

func (s *Sim) memPoolSetAttribute(h cuapi.MemPool, attr int32, value cuapi.HostPtr) cuapi.Result {
	p, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	switch attr {
	case 1, 2, 3:
		p.reuse[attr-1] = peek[int32](value)
	case cuapi.PoolReleaseThreshold:
		p.threshold = peek[uint64](value)
	case 6, 8: // CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, USED_MEM_HIGH: may be reset
		switch {
		case peek[uint64](value) != 0:
			return cuapi.InvalidValue
		case attr == 6:
			p.resHigh = p.reserved
		default:
			p.usedHigh = p.used
		}
	default:
		return cuapi.InvalidValue
	}
	return cuapi.Success
}

func (s *Sim) memPoolGetAttribute(h cuapi.MemPool, attr int32, value cuapi.HostPtr) cuapi.Result {
	p, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	switch attr {
	case 1, 2, 3:
		poke(value, p.reuse[attr-1])
	case cuapi.PoolReleaseThreshold:
		poke(value, p.threshold)
	case cuapi.PoolReservedMemCurrent:
		poke(value, p.reserved)
	case 6:
		poke(value, p.resHigh)
	case cuapi.PoolUsedMemCurrent:
		poke(value, p.used)
	case 8:
		poke(value, p.usedHigh)
	default:
		return cuapi.InvalidValue
	}
	return cuapi.Success
}

// memPoolSetAccess changes nothing where it fails. A device that cannot reach the
// pool's is an invalid value: the reference lists no other code that fits. Which
// code hardware gives is unverified.
func (s *Sim) memPoolSetAccess(h cuapi.MemPool, descs *cuapi.MemAccessDesc, count uintptr) cuapi.Result {
	p, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	for i := range int(count) {
		d := index(descs, i)
		dev, r := s.device(cuapi.Device(d.Location.ID))
		switch own := r == cuapi.Success && dev == p.dev; {
		case d.Location.Type != cuapi.MemLocationTypeDevice:
			return cuapi.NotSupported
		case d.Flags == 1: // CU_MEM_ACCESS_FLAGS_PROT_READ
			return cuapi.NotSupported
		case r != cuapi.Success || own && d.Flags == 0: // the pool's own device keeps its access
			return cuapi.InvalidDevice
		case d.Flags != 0 && d.Flags != cuapi.MemAccessReadWrite || d.Flags != 0 && !own && !s.canAccess(dev.ordinal, p.dev.ordinal):
			return cuapi.InvalidValue
		}
	}
	for i := range int(count) {
		d := index(descs, i)
		p.access[cuapi.Device(d.Location.ID)] = d.Flags
	}
	return cuapi.Success
}

func (s *Sim) memPoolGetAccess(flags *int32, h cuapi.MemPool, loc *cuapi.MemLocation) cuapi.Result {
	p, r := s.pool(h)
	if r != cuapi.Success {
		return r
	}
	if _, r := s.device(cuapi.Device(loc.ID)); r != cuapi.Success || loc.Type != cuapi.MemLocationTypeDevice {
		return cuapi.InvalidValue
	}
	if *flags = p.access[cuapi.Device(loc.ID)]; cuapi.Device(loc.ID) == p.dev.ordinal {
		*flags = cuapi.MemAccessReadWrite
	}
	return cuapi.Success
}
