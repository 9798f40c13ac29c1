package cudasim

import "slices"

// A queueKind is a kind of hardware queue that an operation fills while it is
// pending.
type queueKind uint8

const (
	nothing   queueKind = iota // records, waits, pool allocations: they fill none
	work                       // kernels, fills, host functions, uploads
	downloads                  // half as many queues
	numKinds
)

// queueDepth is how many operations a hardware queue takes before the next
// enqueue blocks, in whichever of its streams (docs/driver-facts: "A full stream
// blocks").
const queueDepth = 1021

// queue returns how many operations are pending in the hardware queue of that
// kind that the stream shares with others, in order of their creation, or nil.
func (st *stream) queue(kind queueKind) *int {
	if kind == nothing {
		return nil
	}
	queues := st.ctx.dev.queues
	if kind == downloads {
		queues = max(1, queues/2)
	}
	at := &st.ctx.dev.filled[kind]
	if *at == nil {
		*at = make([]int, queues)
	}
	return &(*at)[st.index%queues]
}

// A model of the hardware queues that the streams of a device share. Measured
// with 8 queues and 16 streams beside the held ones (docs/driver-facts: "Held
// streams hold others"): with 5 held all 16 ran, with 6 held 12 of them, with
// 7 held 7, with 8 none. So what counts here is how many queues are left, and
// which streams still run follows from their order of creation. Which real
// stream shares a queue with which is not modelled.

// passing[left] is how many of 16 consecutive streams still run.
var passing = [...]int{0, 7, 12}

// hasQueue tells whether the stream's first operation finds a free hardware
// queue.
func (s *Sim) hasQueue(st *stream) bool {
	if len(s.active) <= s.cfg.HardwareQueues-len(passing) || st.first().holds {
		return true // a released stream had a queue all along
	}
	held := 0
	for _, a := range s.active {
		if o := a.first(); a.ctx.dev == st.ctx.dev && o.holds && !o.ready() {
			held++
		}
	}
	left := max(0, s.cfg.HardwareQueues-held)
	return held == 0 || left >= len(passing) || st.index%16 < passing[left]
}

// A copyQueue is a hardware queue of downloads, or of large uploads, that streams
// share: half as many of each as there are hardware queues, given to streams in
// order of their creation. It is strictly in order, whatever its copies wait for,
// so that a copy which stands behind a held one stands still, in whichever stream
// (docs/driver-facts: "A held copy holds copies of other streams"). The numbers are
// approximate: where a driver was told of 32 hardware queues no other stream was
// seen to stand still, and here every sixteenth does.
type copyQueue []uint64 // the operations pending, by number, in order

// largeUpload is how many bytes it takes: 16 KiB were seen to go through the queues
// of kernels instead, and 32 KiB not to.
const largeUpload = 32 << 10

// copies returns the queue of a stream's copies: up, or down.
func (d *device) copies(st *stream, up bool) *copyQueue {
	n := max(1, d.queues/2)
	i := 0
	if up {
		i = 1
	}
	if d.copyQueues[i] == nil {
		d.copyQueues[i] = make([]copyQueue, n)
	}
	return &d.copyQueues[i][st.index%n]
}

// line tells which copy queue an operation takes: its own, and a hold's is that
// of what its stream was given before. The first copy that a stream makes behind a
// hold takes none.
func (st *stream) line(o *op) *copyQueue {
	down := o.span.toHost && !o.span.fromHost
	up := o.span.fromHost && !o.span.toHost && o.span.bytes >= largeUpload
	switch {
	case down || up:
		used := &st.copied[0]
		if up {
			used = &st.copied[1]
		}
		fresh := !*used && st.pending() > 0
		*used = true
		if fresh {
			return nil
		}
		st.lastLine = st.ctx.dev.copies(st, up)
	case o.holds:
	case o.fills != nothing:
		st.lastLine = nil
		return nil
	default:
		return nil
	}
	return st.lastLine
}

// first tells whether the queue has come to an operation.
func (q *copyQueue) first(o *op) bool { return q == nil || (*q)[0] == o.seq }

func (q *copyQueue) leave(o *op) {
	if q != nil {
		i := slices.Index(*q, o.seq)
		*q = slices.Delete(*q, i, i+1)
	}
}
