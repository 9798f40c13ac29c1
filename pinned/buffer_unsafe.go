// Package pinned has page-locked host buffers, the only host memory that the
// device reads and writes here, and their pool.
package pinned

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
)

// Buffer is an owned pinned buffer of a fixed length. It is moved into a
// transfer, and what comes back from the transfer is a new handle: a stale one
// stays stale. A nil or zero Buffer is closed.
type Buffer struct {
	state *state
	n     int
}

// state is what a cleanup needs of a Buffer.
type state struct {
	cell    own.Cell
	block   *Block
	exposed atomic.Bool // Bytes was called: a slice may outlive the handle
}

func init() {
	wire.BufferOf = func(b any) (*own.Cell, any) {
		if buf := b.(*Buffer); buf != nil && buf.state != nil {
			return &buf.state.cell, buf.state.block
		}
		return nil, nil
	}
	wire.NewBuffer = func(block any, n int) any { return newBuffer(block.(*Block), n) }
	wire.Cleanups = append(wire.Cleanups, func(h any) bool {
		b, ok := h.(*Buffer)
		if ok {
			b.state.abandon()
		}
		return ok
	})
}

func newBuffer(b *Block, n int) *Buffer {
	buf := &Buffer{state: &state{block: b}, n: n}
	buf.state.cell.Open()
	runtime.AddCleanup(buf, (*state).abandon, buf.state)
	return buf
}

// A condition of a buffer, besides who owns it.
type condition uint8

const (
	private condition = iota
	shown             // Bytes was called: a slice may be in use
	numConditions
)

// An act is what the end of a buffer does with its block.
type act uint8

const (
	frees   act = iota // back to the pool
	hands              // back to the pool, without a lock
	strands            // never used again, and counted
)

// bufferTable is the state machine of a buffer, beside that of its cell: how it
// ends. The collector does not see slices of driver memory, so that one may be in
// use when the handle was dropped and never closed.
var bufferTable = struct {
	Close, Abandon [numConditions]act
}{
	//                          private shown
	Close:   [numConditions]act{frees, frees},
	Abandon: [numConditions]act{hands, strands},
}

func (s *state) condition() condition {
	if s.exposed.Load() {
		return shown
	}
	return private
}

// abandon is the cleanup of a handle that was dropped and never closed.
func (s *state) abandon() {
	if s.cell.Close() {
		s.finish(bufferTable.Abandon[s.condition()])
	}
}

func (s *state) finish(a act) {
	switch a {
	case frees:
		s.block.Free()
	case hands:
		s.block.abandon()
	case strands:
		s.block.pool.abandoned.Add(1)
	}
}

// Len returns the buffer's length in bytes, also after a move or a close.
func (b *Buffer) Len() int {
	if b == nil {
		return 0
	}
	return b.n
}

// Bytes returns the buffer's memory, or nil after a move or a close. The slice
// must not be used after the buffer was moved or closed: the device may write
// it then, or another owner. It is the driver's memory, not Go's, and does not
// keep the Buffer alive: a Buffer that is dropped without Close after a call of
// Bytes is never used again, and counts against the pool's bound as abandoned.
func (b *Buffer) Bytes() []byte {
	if b == nil || b.state == nil || b.state.cell.Borrow() != nil {
		return nil // also while a call moves it: the copy may be under way
	}
	defer b.endUse()
	b.state.exposed.Store(true)
	p := unsafe.Slice((*byte)(b.state.block.addr), b.n)
	runtime.KeepAlive(b)
	return p
}

func (b *Buffer) endUse() {
	if b.state.cell.Return() {
		b.state.finish(bufferTable.Close[b.state.condition()])
	}
}

// Err returns nil while the caller owns the buffer, else an error that matches
// driver.ErrMoved or driver.ErrClosed.
func (b *Buffer) Err() error {
	err := own.ErrClosed
	if b != nil && b.state != nil {
		err = b.state.cell.Err()
	}
	if err != nil {
		return fmt.Errorf("pinned: buffer %w", err)
	}
	return nil
}

// Close gives the memory back to the pool. It never waits. Closing a buffer
// that was moved or closed does nothing.
func (b *Buffer) Close() error {
	if b == nil || b.state == nil {
		return nil
	}
	if b.state.cell.Close() {
		b.state.finish(bufferTable.Close[b.state.condition()])
	}
	runtime.KeepAlive(b)
	return nil
}
