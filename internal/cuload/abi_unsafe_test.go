//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"reflect"
	"unsafe"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// An arg is one argument of a call: what Go passes, and what C must see.
type arg struct {
	value reflect.Value
	word  uint64
	mem   []byte // what a pointer points to
}

const canary = 0xee

// newArg makes the i-th argument of a call, of type typ, with bits that differ
// in every call, argument and round; the top bit of each width is set in even
// rounds. Pointers point to heap memory that the collector takes for bytes.
func newArg(typ reflect.Type, id cuapi.ID, i, round int) arg {
	x := (uint64(id)<<16 | uint64(i)<<8 | uint64(round) | 1<<40) * 0x9e3779b97f4a7c15
	const tops = 1<<63 | 1<<31 | 1<<7
	if x |= tops; round%2 == 1 {
		x &^= tops
	}
	a := arg{value: reflect.New(typ).Elem()}
	switch typ.Kind() {
	case reflect.Int32:
		a.value.SetInt(int64(int32(x)))
		a.word = uint64(int64(int32(x)))
	case reflect.Uint8, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		a.value.SetUint(x & (1<<(8*typ.Size()) - 1))
		a.word = a.value.Uint()
	case reflect.Pointer, reflect.UnsafePointer:
		a.mem = make([]byte, 128)
		for j := range a.mem {
			a.mem[j] = canary
		}
		p := unsafe.Pointer(&a.mem[0])
		if typ.Kind() == reflect.Pointer {
			a.value.Set(reflect.NewAt(typ.Elem(), p).Convert(typ))
		} else {
			a.value.SetPointer(p)
		}
		a.word = uint64(uintptr(p))
	default:
		panic("no pattern for " + typ.String())
	}
	return a
}

// newArgs makes the arguments of a function type from its parameter skip on.
func newArgs(f reflect.Type, skip int, id cuapi.ID, round int) (args []arg, values []reflect.Value) {
	for i := skip; i < f.NumIn(); i++ {
		a := newArg(f.In(i), id, i-skip, round)
		args = append(args, a)
		values = append(values, a.value)
	}
	return args, values
}

func hostPtrs(p *[64]byte) *cuapi.HostPtr { return (*cuapi.HostPtr)(unsafe.Pointer(p)) }
