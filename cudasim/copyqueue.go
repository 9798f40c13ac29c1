package cudasim

import "slices"

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
