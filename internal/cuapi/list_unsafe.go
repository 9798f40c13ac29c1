package cuapi

import (
	"sync"
	"unsafe"
)

// HostPtr is an address of host memory: pinned memory of the driver, or an
// out-parameter on the Go heap. It is a pointer for the collector.
type HostPtr unsafe.Pointer

const (
	MaxArgs = 11 // the longest argument list: cuLaunchKernel
	MaxList = 4  // calls that fit into one List
)

// A List is a short program of driver calls that Table.Run executes in one
// crossing into C. It lives on the heap and is pooled: take it with NewList,
// append calls by its methods, give it back with Free. Not safe for
// concurrent use.
//
// Its first fields are read by the assembly of internal/cuload.
type List struct {
	n        uint64
	exchange uint64 // cuThreadExchangeStreamCaptureMode's code, if relaxed
	mode     int32  // in and out of that call
	_        int32
	ops      [MaxList]listOp

	relaxed bool
	ids     [MaxList]ID
	keep    [MaxList][2]HostPtr // what the argument words point to
}

// listOp is what the assembly reads: the function, how many arguments it
// takes, and their words.
type listOp struct {
	fn    uint64
	nargs uint64
	args  [MaxArgs]uint64
}

var lists = sync.Pool{New: func() any { return new(List) }}

// NewList returns an empty list from the pool.
func NewList() *List { return lists.Get().(*List) }

// Free empties the list and gives it back to the pool.
func (l *List) Free() {
	for i := range l.keep[:l.n] {
		l.keep[i] = [2]HostPtr{}
	}
	l.n, l.exchange, l.relaxed = 0, 0, false
	lists.Put(l)
}

// Len returns the number of calls in the list.
func (l *List) Len() int { return int(l.n) }

// ID returns the entry point of the i-th call.
func (l *List) ID(i int) ID { return l.ids[i] }

// Resolve fills in the code addresses of the list's calls.
func (l *List) Resolve(addrs *[NumEntries]uintptr) {
	for i := range l.ops[:l.n] {
		l.ops[i].fn = uint64(addrs[l.ids[i]])
	}
	if l.relaxed {
		l.exchange, l.mode = uint64(addrs[IDThreadExchangeStreamCaptureMode]), CaptureModeRelaxed
	}
}

// Relax has the list run with its thread in the relaxed capture mode, and puts
// the thread's own mode back behind it, wherever it stopped. Without it a query
// or an allocation spoils a capture in global mode on any other thread, and
// fails (docs/driver-facts.md, "Beside a capture").
func (l *List) Relax() { l.relaxed = true }

// Block returns the address of what the assembly reads.
func (l *List) Block() HostPtr { return HostPtr(unsafe.Pointer(l)) }

func (l *List) next(id ID, nargs int) *listOp {
	op := &l.ops[l.n] // more than MaxList calls is a bug of the caller
	l.ids[l.n] = id
	l.n++
	op.nargs = uint64(nargs)
	return op
}

// Word returns the address of a new word that holds v: an attribute's value.
func Word(v uint64) HostPtr { return HostPtr(&v) }

// WordPtr returns the address of a word on the heap, as an out-parameter.
func WordPtr(p *uint64) HostPtr { return HostPtr(p) }
