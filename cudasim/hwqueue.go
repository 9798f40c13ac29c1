package cudasim

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
	return left >= len(passing) || st.index%16 < passing[left]
}
