package kernel

import (
	"errors"
	"fmt"
	"math"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/stream"
)

// Config is the shape of a launch: blocks, threads of a block, and bytes of
// dynamic shared memory.
type Config struct {
	Blocks  [3]uint32
	Threads [3]uint32
	Shared  uint32
}

// Grid covers n elements in up to three dimensions: blocks of 256 threads in
// one dimension, 16 by 16 in two, 8 by 8 by 4 in three. The last blocks of each
// dimension reach past the end, so kernels check their index.
func Grid(n ...int) Config {
	shapes := [][3]uint32{{256, 1, 1}, {16, 16, 1}, {8, 8, 4}}
	c := Config{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}
	if len(n) == 0 || len(n) > 3 {
		return Config{} // refused by the launch
	}
	c.Threads = shapes[len(n)-1]
	for i, size := range n {
		c.Blocks[i] = 0
		if size > 0 && size <= math.MaxInt32 {
			c.Blocks[i] = uint32((size-1)/int(c.Threads[i]) + 1)
		}
	}
	return c
}

func (c Config) check(f *Function) error {
	threads := uint64(1)
	for i, axis := range "xyz" {
		if n, limit := c.Blocks[i], f.limits.grid[i]; n == 0 || uint64(n) > uint64(limit) {
			return fmt.Errorf("kernel %s: %d blocks in %c, want 1 to %d: %w", f.name, n, axis, limit, ErrConfig)
		}
		if n, limit := c.Threads[i], f.limits.block[i]; n == 0 || uint64(n) > uint64(limit) {
			return fmt.Errorf("kernel %s: %d threads of a block in %c, want 1 to %d: %w", f.name, n, axis, limit, ErrConfig)
		}
		threads *= uint64(c.Threads[i])
	}
	if limit := f.limits.threads; threads > uint64(limit) {
		return fmt.Errorf("kernel %s: %d threads a block, at most %d: %w", f.name, threads, limit, ErrConfig)
	}
	if allowed := f.allowed.Load(); int64(c.Shared) > allowed {
		return fmt.Errorf("kernel %s: %d bytes of dynamic shared memory, at most %d without AllowShared: %w", f.name, c.Shared, allowed, ErrConfig)
	}
	return nil
}

// An Arg is one argument of a launch. Package publish makes those that are
// device memory.
type Arg struct {
	word    uint64
	size    int
	bytes   []byte
	operand any
}

// I32 is a 32-bit integer argument; v is cut to 32 bits as Go converts it.
func I32[T ~int | ~int32](v T) Arg { return Arg{word: uint64(uint32(int32(v))), size: 4} }

// U32 is an unsigned 32-bit integer argument.
func U32(v uint32) Arg { return Arg{word: uint64(v), size: 4} }

// I64 is a 64-bit integer argument.
func I64[T ~int | ~int64](v T) Arg { return Arg{word: uint64(v), size: 8} }

// U64 is an unsigned 64-bit integer argument.
func U64(v uint64) Arg { return Arg{word: v, size: 8} }

// F32 is a 32-bit floating-point argument.
func F32(v float32) Arg { return Arg{word: uint64(math.Float32bits(v)), size: 4} }

// F64 is a 64-bit floating-point argument.
func F64(v float64) Arg { return Arg{word: math.Float64bits(v), size: 8} }

// Struct is an argument passed by value, in the layout that the kernel was
// compiled with.
func Struct(data []byte) Arg { return Arg{bytes: data, size: len(data)} }

func init() {
	wire.OperandArg = func(o any) any { return Arg{operand: o, size: 8} }
	wire.ArgOperand = func(a any) any { return a.(*Arg).operand }
	wire.Launch = func(f, l, c, args any, addresses []uint64) error {
		return f.(*Function).launch(l.(*stream.Lane), c.(Config), args.([]Arg), addresses)
	}
}

var (
	// ErrArguments is in the error of a launch whose arguments do not fit the
	// kernel's parameters: nothing was enqueued.
	ErrArguments = errors.New("arguments do not fit the kernel's parameters")
	// ErrConfig is in the error of a launch whose blocks, threads or shared
	// memory are beyond what kernel and device allow: nothing was enqueued.
	ErrConfig = errors.New("launch out of bounds")
)

// Launch enqueues the kernel in a lane. addresses are those of the operands, in
// their order. A plain error is a rejection; an *stream.Enqueued is not.
func (f *Function) launch(l *stream.Lane, c Config, args []Arg, addresses []uint64) error {
	if f.none() {
		return fmt.Errorf("kernel: no function: %w", driver.ErrClosed)
	}
	if f.core != l.Core() {
		return fmt.Errorf("kernel %s: %w", f.name, own.ErrForeign)
	}
	if err := c.check(f); err != nil {
		return err
	}
	if err := f.fits(args); err != nil {
		return err
	}
	b := newArgBlock()
	defer b.free()
	if err := b.fill(args, addresses); err != nil {
		return fmt.Errorf("kernel %s: %w", f.name, err)
	}
	err := l.Launch(f.h, c.Blocks, c.Threads, c.Shared, b.params())
	var e *stream.Enqueued
	var failed *driver.Error
	if errors.As(err, &e) && errors.As(e.Err, &failed) && failed.Detail == "" {
		named := *failed // the context may have latched the other
		named.Detail = "kernel " + f.name
		return &stream.Enqueued{Err: &named}
	}
	return err
}

func (f *Function) fits(args []Arg) error {
	for i, a := range args {
		if a.size == 0 {
			return fmt.Errorf("kernel %s: argument %d is empty: %w", f.name, i, ErrArguments)
		}
	}
	if f.params == nil {
		return nil // the driver is older than CUDA 12.4
	}
	if len(args) != len(f.params) {
		return fmt.Errorf("kernel %s: %d arguments, it takes %d: %w", f.name, len(args), len(f.params), ErrArguments)
	}
	for i, a := range args {
		if a.size != f.params[i] {
			return fmt.Errorf("kernel %s: argument %d has %d bytes, the parameter %d: %w", f.name, i, a.size, f.params[i], ErrArguments)
		}
	}
	return nil
}
