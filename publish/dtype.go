package publish

import (
	"fmt"
	"math"
)

// DType is the type of a value's elements.
type DType uint8

// The data types that are served.
const (
	U8 DType = iota + 1
	I8
	U16
	I16
	F16
	BF16
	U32
	I32
	F32
	U64
	I64
	F64
)

var dtypes = [...]struct {
	name string
	size int64
}{
	U8: {"u8", 1}, I8: {"i8", 1}, U16: {"u16", 2}, I16: {"i16", 2}, F16: {"f16", 2}, BF16: {"bf16", 2},
	U32: {"u32", 4}, I32: {"i32", 4}, F32: {"f32", 4}, U64: {"u64", 8}, I64: {"i64", 8}, F64: {"f64", 8},
}

// Size returns the bytes of one element, or 0 for no data type.
func (d DType) Size() int {
	if int(d) >= len(dtypes) {
		return 0
	}
	return int(dtypes[d].size)
}

func (d DType) String() string {
	if d.Size() == 0 {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// maxDims is the most dimensions of a shape.
const maxDims = 8

// extent is a value's element type and shape, outermost dimension first.
type extent struct {
	dtype DType
	rank  int
	dims  [maxDims]int
	bytes int64
}

func extentOf(d DType, shape []int) (extent, error) {
	e := extent{dtype: d, rank: len(shape)}
	if d.Size() == 0 {
		return e, fmt.Errorf("%w: %v", ErrDType, d)
	}
	if len(shape) == 0 || len(shape) > maxDims {
		return e, fmt.Errorf("%w: %d dimensions, want 1 to %d", ErrShape, len(shape), maxDims)
	}
	e.bytes = int64(d.Size())
	for i, n := range shape {
		if n <= 0 || int64(n) > math.MaxInt64/2/e.bytes {
			return e, fmt.Errorf("%w: %v %v", ErrShape, d, shape)
		}
		e.dims[i] = n
		e.bytes *= int64(n)
	}
	if uint64(e.bytes) > uint64(^uintptr(0)) {
		return e, fmt.Errorf("%w: %v %v: %d bytes are beyond this platform", ErrShape, d, shape, e.bytes)
	}
	return e, nil
}

func (e *extent) shape() []int { return append([]int(nil), e.dims[:e.rank]...) }
