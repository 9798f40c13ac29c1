package publish

import (
	"runtime"
)

// Value is an owned device allocation with a data type and a shape. Until it is
// published it belongs to the stream of the session that made it, and may be
// used by any session on that stream.
type Value struct {
	r    *record
	life *life
}

// Bytes returns the size in bytes, also after a move or a close.
func (v *Value) Bytes() int64 {
	if v == nil || v.r == nil {
		return 0
	}
	return v.r.bytes
}

// DType returns the data type, also after a move or a close.
func (v *Value) DType() DType {
	if v == nil || v.r == nil {
		return 0
	}
	return v.r.dtype
}

// Shape returns the dimensions, outermost first, also after a move or a close.
func (v *Value) Shape() []int {
	if v == nil || v.r == nil {
		return nil
	}
	return v.r.shape()
}

// Err returns nil while the caller owns the value, else an error that matches
// driver.ErrMoved or driver.ErrClosed.
func (v *Value) Err() error {
	if v == nil || v.r == nil {
		return none("value")
	}
	_, err := valueTable.Err.enter(&v.r.val)
	return unusable("value", err)
}

// Close retires the value behind its last use (cuEventRecord, if no mark is behind
// that; cuMemFreeAsync once it is done). It never waits. A value that
// an unproven operation used is retained for good. Closing a value that was
// moved or closed does nothing.
func (v *Value) Close() error {
	if v == nil || v.r == nil {
		return nil
	}
	release, _ := valueTable.Close.enter(&v.r.val)
	v.r.gone.Signal()
	if release {
		v.r.closeValue()
	}
	runtime.KeepAlive(v)
	return nil
}

// Leak retains the value's memory for the life of the process, and counts it.
func (v *Value) Leak() {
	if v != nil && v.r != nil {
		v.r.leak(stageValue, &valueTable.Leak, &v.r.val, v.r.closeValue)
	}
	runtime.KeepAlive(v)
}
