package cudasim

import (
	"fmt"
	"slices"
	"sort"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// deviceBase is where device addresses begin: above every host address, so
// that the two never meet and following one faults. Addresses only grow and
// are never given out twice.
const deviceBase = 1 << 52

// What unwritten and freed memory holds, so that wrong results show.
const (
	freshByte = 0xA5
	freedByte = 0xDB
)

// A block is one allocation: of device memory, of pinned memory, or a range of
// host memory that was registered.
type block struct {
	base    uint64
	size    uint64
	data    []byte // nil until something touches it
	ctx     *context
	pool    *pool
	module  *module // of a module's global
	host    cuapi.HostPtr
	reg     bool // registered
	managed bool

	words   map[uint64]moment // when streams last wrote those words that others wait on
	born    tick              // the stream's allocation, for pool memory
	last    clock             // the newest uses
	touches []touch
	pending int  // uses that are pending
	stirred int  // times that the device may have written it, for host memory
	flagged bool // holds a word that streams wait on, or that they write
	freeing bool // MemFreeAsync was called
	freed   bool
	made    stack
	gone    stack // where it was freed
}

func (b *block) String() string {
	what := "device memory"
	switch {
	case b.module != nil && b.size == 0:
		return fmt.Sprintf("module %#x", b.module.h)
	case b.reg:
		what = "registered host memory"
	case b.host != nil:
		what = "pinned memory"
	case b.pool != nil:
		what = "pool memory"
	case b.managed:
		what = "managed memory"
	}
	return fmt.Sprintf("%s %#x of %d bytes", what, b.base, b.size)
}

// bytes returns the block's memory; freed memory reads as 0xDB.
func (b *block) bytes() []byte {
	if b.data == nil {
		b.data = make([]byte, b.size)
		fill(b.data, freshByte)
		if b.freed {
			fill(b.data, freedByte)
		}
	}
	return b.data
}

func fill(p []byte, v byte) {
	if len(p) == 0 {
		return
	}
	p[0] = v
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}

// memory is the address space. Freed blocks stay findable for a while, so
// that a use after free tells where the free was; freed pinned blocks stay
// allocated as long, so that their addresses are not reused.
type memory struct {
	device []*block // by base
	hosts  []*block // by base
	deadD  int      // freed blocks in device
	deadH  []*block // freed blocks in hosts, oldest first
	deadHB uint64   // their bytes
	next   uint64   // next device address
	pinned uint64   // bytes of pinned memory
}

const (
	maxDeadBlocks = 1024
	maxDeadPinned = 64 << 20
)

func (m *memory) blocks() []*block { return slices.Concat(m.device, m.hosts) }

// at returns the block that contains an address, freed or not, or nil.
func (m *memory) at(addr uint64) *block {
	list := m.hosts
	if addr >= deviceBase {
		list = m.device
	}
	i := sort.Search(len(list), func(i int) bool { return list[i].base > addr }) - 1
	if i < 0 || addr-list[i].base >= list[i].size {
		return nil
	}
	return list[i]
}

// addDevice gives a block its address: 512-byte aligned, with a gap behind.
func (m *memory) addDevice(b *block) {
	b.base = m.next
	m.next = (b.base + b.size + 4096 + 511) &^ 511
	m.device = append(m.device, b)
}

// addHost puts a block of host memory in. Freed blocks that its address range
// covers are forgotten: their memory was reused.
func (m *memory) addHost(b *block) {
	overlaps := func(o *block) bool {
		return o.freed && o.base < b.base+b.size && b.base < o.base+o.size
	}
	m.hosts = slices.DeleteFunc(m.hosts, overlaps)
	m.deadH = slices.DeleteFunc(m.deadH, overlaps)
	i := sort.Search(len(m.hosts), func(i int) bool { return m.hosts[i].base > b.base })
	m.hosts = slices.Insert(m.hosts, i, b)
}

// bury keeps a freed block findable and forgets the oldest ones.
func (m *memory) bury(b *block) {
	if b.host == nil {
		if m.deadD++; m.deadD >= 2*maxDeadBlocks && m.deadD > len(m.device)/2 {
			forget := m.deadD - maxDeadBlocks
			m.device = slices.DeleteFunc(m.device, func(o *block) bool {
				if o.freed && forget > 0 {
					forget--
					return true
				}
				return false
			})
			m.deadD = maxDeadBlocks
		}
		return
	}
	m.deadH = append(m.deadH, b)
	m.deadHB += b.size
	for len(m.deadH) > maxDeadBlocks || m.deadHB > maxDeadPinned {
		old := m.deadH[0]
		m.deadH = m.deadH[1:]
		m.deadHB -= old.size
		m.hosts = slices.DeleteFunc(m.hosts, func(o *block) bool { return o == old })
	}
}

// free ends a block.
func (s *Sim) free(b *block) {
	b.freed = true
	b.stirred++
	b.gone = callers()
	switch {
	case b.reg:
	case b.host != nil:
		fill(b.data, freedByte)
		s.mem.pinned -= b.size
	default:
		b.data = nil
		b.ctx.dev.live -= b.size
		if b.pool != nil {
			b.pool.used -= b.size
		}
	}
	s.mem.bury(b)
}

// freeable returns the block that starts at an address, or reports what is
// wrong with freeing it.
func (s *Sim) freeable(addr uint64, match func(*block) bool) (*block, cuapi.Result) {
	b := s.mem.at(addr)
	switch {
	case b == nil || b.base != addr || !match(b):
		s.violate(BadFree, fmt.Sprintf("no such allocation starts at %#x", addr), nil)
	case b.freed || b.freeing:
		s.violate(DoubleFree, fmt.Sprintf("%v is freed twice", b), &b.gone)
	default:
		return b, b.ctx.usable()
	}
	return nil, cuapi.InvalidValue
}

// span returns the block of a range that an operation is about to use.
// Outside any allocation, or across its end, it is InvalidValue (measured).
func (s *Sim) span(addr uint64, n uintptr) (*block, cuapi.Result) {
	b := s.mem.at(addr)
	switch {
	case b == nil:
		return nil, cuapi.InvalidValue
	case b.freed:
		s.violate(UseAfterFree, fmt.Sprintf("%v was freed", b), &b.gone)
		return nil, cuapi.InvalidValue
	case uint64(n) > b.size-(addr-b.base):
		return nil, cuapi.InvalidValue
	case b.freeing:
		s.violate(UseAfterFree, fmt.Sprintf("%v was freed by cuMemFreeAsync", b), &b.gone)
	}
	return b, cuapi.Success
}

// at returns n bytes of a block.
func (b *block) at(addr uint64, n uintptr) []byte {
	off := addr - b.base
	return b.bytes()[off : off+uint64(n)]
}

// newDeviceBlock makes device memory, or returns nil when there is too little.
func (s *Sim) newDeviceBlock(ctx *context, size uintptr) *block {
	if ctx.dev.live+uint64(size) > s.cfg.Memory || uint64(size) > s.cfg.Memory {
		return nil
	}
	b := &block{size: uint64(size), ctx: ctx, made: callers()}
	ctx.dev.live += b.size
	s.mem.addDevice(b)
	return b
}

func (s *Sim) memGetInfo(free, total *uintptr) cuapi.Result {
	*free, *total = uintptr(s.cfg.Memory-s.cur.ctx.dev.live), uintptr(s.cfg.Memory)
	return cuapi.Success
}

func (s *Sim) memAlloc(p *cuapi.DevicePtr, size uintptr) cuapi.Result {
	if size == 0 {
		return cuapi.InvalidValue // measured
	}
	b := s.newDeviceBlock(s.cur.ctx, size)
	if b == nil {
		return cuapi.OutOfMemory
	}
	*p = cuapi.DevicePtr(b.base)
	return cuapi.Success
}

// memAllocManaged gives managed memory, which the device and the driver's calls
// use as its own; what the host does with it is not simulated: its address is
// none of the host's. flags are CU_MEM_ATTACH_GLOBAL or HOST (documented).
func (s *Sim) memAllocManaged(p *cuapi.DevicePtr, size uintptr, flags uint32) cuapi.Result {
	if flags != cuapi.MemAttachGlobal && flags != cuapi.MemAttachHost || size == 0 {
		return cuapi.InvalidValue // before it looks at the context (measured)
	}
	ctx, r := s.current()
	if r != cuapi.Success {
		return r
	}
	if r := s.beside(); r != cuapi.Success {
		return r
	}
	s.cur.ctx = ctx
	r = s.memAlloc(p, size)
	if r == cuapi.Success {
		s.mem.at(uint64(*p)).managed = true
	}
	return r
}

// ofCurrent answers a call that needs no current context, but tells of the loss of
// one that is there (measured).
func (s *Sim) ofCurrent() cuapi.Result {
	if ctx, _ := s.current(); ctx != nil {
		return ctx.usable()
	}
	return cuapi.Success
}

func (s *Sim) memFree(addr cuapi.DevicePtr) cuapi.Result {
	if r := s.ofCurrent(); r != cuapi.Success || addr == 0 {
		return r
	}
	b, r := s.freeable(uint64(addr), func(b *block) bool { return b.host == nil && b.module == nil })
	if r == cuapi.Success {
		s.free(b)
	}
	return r
}

// maxHost is more host memory than there is: what asks for it has a bad size.
const maxHost = 1 << 40

// memHostAlloc of 0 bytes succeeds (measured); it gives no address.
func (s *Sim) memHostAlloc(p *cuapi.HostPtr, size uintptr, flags uint32) cuapi.Result {
	if flags&^7 != 0 {
		return cuapi.InvalidValue
	}
	if size == 0 {
		*p = nil
		return cuapi.Success
	}
	if uint64(size) > maxHost || s.cfg.PinnedMemory > 0 && s.mem.pinned+uint64(size) > s.cfg.PinnedMemory {
		return cuapi.OutOfMemory
	}
	data := aligned(int(size), 256)
	fill(data, freshByte)
	s.mem.pinned += uint64(size)
	b := &block{base: addressOf(data), size: uint64(size), data: data, host: hostPtr(data), ctx: s.cur.ctx, made: callers()}
	s.mem.addHost(b)
	*p = b.host
	return cuapi.Success
}

func (s *Sim) memFreeHost(p cuapi.HostPtr) cuapi.Result {
	if p == nil {
		return s.ofCurrent() // measured
	}
	b, r := s.freeable(hostAddress(p), func(b *block) bool { return b.host != nil && !b.reg })
	if r == cuapi.Success {
		s.free(b)
	}
	return r
}

func (s *Sim) memHostRegister(p cuapi.HostPtr, size uintptr, flags uint32) cuapi.Result {
	if p == nil || size == 0 || uint64(size) > maxHost {
		return cuapi.InvalidValue
	}
	b := &block{base: hostAddress(p), size: uint64(size), data: hostBytes(p, size), host: p, reg: true, ctx: s.cur.ctx, made: callers()}
	for _, o := range s.mem.hosts {
		if !o.freed && o.base < b.base+b.size && b.base < o.base+o.size {
			return cuapi.HostMemoryRegistered
		}
	}
	s.mem.addHost(b)
	return cuapi.Success
}

func (s *Sim) memHostUnregister(p cuapi.HostPtr) cuapi.Result {
	b := s.mem.at(hostAddress(p))
	if b == nil || !b.reg || b.freed || b.host != p {
		s.violate(BadFree, fmt.Sprintf("no registered memory starts at %#x", hostAddress(p)), nil)
		return cuapi.HostMemoryNotRegistered
	}
	if r := b.ctx.usable(); r != cuapi.Success {
		return r
	}
	s.free(b)
	return cuapi.Success
}

func (s *Sim) memHostGetDevicePointer(p *cuapi.DevicePtr, h cuapi.HostPtr, flags uint32) cuapi.Result {
	b := s.mem.at(hostAddress(h))
	if b == nil || b.freed || flags != 0 {
		return cuapi.InvalidValue
	}
	*p = cuapi.DevicePtr(hostAddress(h))
	return cuapi.Success
}

func (s *Sim) memGetAddressRange(base *cuapi.DevicePtr, size *uintptr, addr cuapi.DevicePtr) cuapi.Result {
	b := s.mem.at(uint64(addr))
	if b == nil || b.freed {
		return cuapi.NotFound
	}
	if base != nil {
		*base = cuapi.DevicePtr(b.base)
	}
	if size != nil {
		*size = uintptr(b.size)
	}
	return cuapi.Success
}

// pointerGetAttribute needs no current context, and answers InvalidValue for
// an address that the driver does not know (measured). Memory of a pool has a
// null context (documented). Managed memory is of the type of device memory
// (reported).
func (s *Sim) pointerGetAttribute(data cuapi.HostPtr, attribute int32, addr cuapi.DevicePtr) cuapi.Result {
	b := s.mem.at(uint64(addr))
	if b == nil || b.freed {
		return cuapi.InvalidValue
	}
	switch attribute {
	case cuapi.PointerContext:
		h := b.ctx.h
		if b.pool != nil {
			h = 0
		}
		poke(data, h)
	case cuapi.PointerMemoryType:
		kind := uint32(cuapi.MemoryTypeDevice)
		if b.host != nil {
			kind = cuapi.MemoryTypeHost
		}
		poke(data, kind)
	case cuapi.PointerIsManaged:
		poke(data, b.managed)
	case cuapi.PointerOrdinal:
		poke(data, int32(b.ctx.dev.ordinal))
	case cuapi.PointerRangeStart:
		poke(data, b.base)
	case cuapi.PointerRangeSize:
		poke(data, uintptr(b.size))
	default:
		return cuapi.InvalidValue
	}
	return cuapi.Success
}
