package kernel

import (
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

const (
	maxArgs  = 64   // arguments of a launch
	maxBytes = 4096 // of all arguments, the driver's bound before CUDA 12.1
)

// argBlock holds the arguments of one launch on the heap: the driver reads them
// through a list of pointers, and copies them before the launch returns.
type argBlock struct {
	words [maxBytes/8 + 1]uint64
	ptrs  [maxArgs + 1]cuapi.HostPtr
	used  int
}

var argBlocks = sync.Pool{New: func() any { return new(argBlock) }}

func newArgBlock() *argBlock { return argBlocks.Get().(*argBlock) }

func (b *argBlock) free() {
	clear(b.words[:b.used])
	argBlocks.Put(b)
}

// fill lays the arguments out. Pointers behind the last argument lead to a
// zero word, so that a kernel with more parameters on a driver that can not
// tell reads zeros.
func (b *argBlock) fill(args []Arg, addresses []uint64) error {
	if len(args) > maxArgs {
		return fmt.Errorf("%d arguments, at most %d: %w", len(args), maxArgs, ErrArguments)
	}
	at := 0
	b.used = 0
	for i, a := range args {
		n := (a.size + 7) / 8
		if at+n > maxBytes/8 {
			return fmt.Errorf("more than %d bytes of arguments: %w", maxBytes, ErrArguments)
		}
		b.ptrs[i] = cuapi.HostPtr(&b.words[at])
		switch {
		case a.bytes != nil:
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&b.words[at])), n*8), a.bytes)
		case a.operand != nil:
			b.words[at] = addresses[0]
			addresses = addresses[1:]
		default:
			b.words[at] = a.word
		}
		at += n
		b.used = at // also of a list that is refused: free clears it
	}
	for i := len(args); i < len(b.ptrs); i++ {
		b.ptrs[i] = cuapi.HostPtr(&b.words[at])
	}
	return nil
}

func (b *argBlock) params() *cuapi.HostPtr { return &b.ptrs[0] }

func bytesPtr(p []byte) cuapi.HostPtr { return cuapi.HostPtr(&p[0]) }

// jitLog is where the just-in-time compiler writes what it has to say. Its
// fields are on the heap: the driver writes the sizes back.
type jitLog struct {
	options [4]int32
	values  [4]uintptr
	info    [4096]byte
	err     [8192]byte
}

func newJITLog() *jitLog {
	j := new(jitLog)
	j.options = [4]int32{cuapi.JITInfoLogBuffer, cuapi.JITInfoLogBufferSize, cuapi.JITErrorLogBuffer, cuapi.JITErrorLogBufferSize}
	// j is on the heap, which does not move, and log keeps it alive.
	j.values = [4]uintptr{uintptr(unsafe.Pointer(&j.info[0])), uintptr(len(j.info)), uintptr(unsafe.Pointer(&j.err[0])), uintptr(len(j.err))}
	return j
}

// log returns the error log, or the information log if that is empty.
func (j *jitLog) log() string {
	for _, buf := range [][]byte{j.err[:], j.info[:]} {
		text, _, _ := strings.Cut(string(buf), "\x00")
		if text = strings.TrimSpace(text); text != "" {
			return text
		}
	}
	return ""
}
