package cudasim

import (
	"fmt"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Eight devices of which each ordered pair has an answer of its own: what the
// driver says of it, and what works.
func TestPeerMatrix(t *testing.T) {
	const n = 8
	reach := func(from, to int) bool { return (from*3+to)%4 != 0 } // not symmetric
	r := newRig(t, Config{Devices: n, Peers: reach})
	r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0]++ })
	var contexts [n]cuapi.Context
	var memory [n]cuapi.DevicePtr
	var pools [n]cuapi.MemPool
	for i := range n {
		r.ok(r.DevicePrimaryCtxRetain(&contexts[i], cuapi.Device(i)))
		r.ok(r.CtxSetCurrent(contexts[i]))
		memory[i] = r.device(8)
		r.ok(r.DeviceGetDefaultMemPool(&pools[i], cuapi.Device(i)))
	}
	pairs, reached := 0, 0
	for from := range n {
		r.ok(r.CtxSetCurrent(contexts[from]))
		st := r.stream()
		for to := range n {
			if from == to {
				continue
			}
			pairs++
			a, b, can := cuapi.Device(from), cuapi.Device(to), reach(from, to)
			var value int32
			r.ok(r.DeviceCanAccessPeer(&value, a, b))
			if (value == 1) != can {
				t.Errorf("%d to %d: can access: %d, want %v", from, to, value, can)
			}
			for attr := int32(2); attr <= 4; attr++ {
				r.ok(r.DeviceGetP2PAttribute(&value, attr, a, b))
				if (value == 1) != can {
					t.Errorf("%d to %d: attribute %d is %d, want %v", from, to, attr, value, can)
				}
			}
			enable, access := cuapi.PeerAccessUnsupported, cuapi.InvalidValue
			if can {
				enable, access = cuapi.Success, cuapi.Success
				reached++
			}
			r.want(enable, r.CtxEnablePeerAccess(contexts[to], 0))
			desc := cuapi.MemAccessDesc{
				Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice, ID: int32(from)}, Flags: cuapi.MemAccessReadWrite,
			}
			r.want(access, r.MemPoolSetAccess(pools[to], &desc, 1))
			var flags int32
			r.ok(r.MemPoolGetAccess(&flags, pools[to], &desc.Location))
			if (flags == cuapi.MemAccessReadWrite) != can {
				t.Errorf("%d to %d: access %d to the pool, want %v", from, to, flags, can)
			}
			// The driver copies between any two.
			r.ok(r.MemcpyPeerAsync(memory[to], contexts[to], memory[from], contexts[from], 8, st))
			r.ok(r.StreamSynchronize(st))
		}
		var value int32
		r.want(cuapi.InvalidDevice, r.DeviceGetP2PAttribute(&value, 2, cuapi.Device(from), cuapi.Device(from)))
		r.want(cuapi.InvalidDevice, r.DeviceCanAccessPeer(&value, cuapi.Device(from), n))
		r.want(cuapi.PeerAccessUnsupported, r.CtxEnablePeerAccess(contexts[from], 0))
	}
	if pairs != n*(n-1) || reached == 0 || reached == pairs {
		t.Errorf("%d of %d pairs reach each other", reached, pairs)
	}
	r.clean()
}

// A kernel reaches memory of a device whose access is enabled, and no other.
func TestKernelsReachPeers(t *testing.T) {
	for _, can := range []bool{true, false} {
		for _, pooled := range []bool{true, false} {
			t.Run(fmt.Sprintf("can %v, pool %v", can, pooled), func(t *testing.T) {
				r := newRig(t, Config{Devices: 2, Peers: func(from, to int) bool { return can && from == 0 }})
				r.sim.Kernel("add", func(l *Launch) { l.Bytes(0)[0] = 1 })
				_, f := r.function(addPTX, "add")
				st := r.stream()
				var other cuapi.Context
				var far cuapi.DevicePtr
				r.ok(r.DevicePrimaryCtxRetain(&other, 1))
				r.ok(r.CtxPushCurrent(other))
				if pooled {
					var pl cuapi.MemPool
					r.ok(r.DeviceGetDefaultMemPool(&pl, 1))
					theirs := r.stream()
					r.ok(r.MemAllocFromPoolAsync(&far, 8, pl, theirs))
					r.ok(r.StreamSynchronize(theirs))
					desc := cuapi.MemAccessDesc{Location: cuapi.MemLocation{Type: cuapi.MemLocationTypeDevice}, Flags: cuapi.MemAccessReadWrite}
					r.MemPoolSetAccess(pl, &desc, 1)
				} else {
					far = r.device(8)
				}
				r.ok(r.CtxPopCurrent(nil))
				r.CtxEnablePeerAccess(other, 0)
				r.ok(r.launch(f, st, arg(far), arg(uint32(1)), arg(float32(1))))
				want := cuapi.IllegalAddress
				if can {
					want = cuapi.Success
				}
				r.want(want, r.StreamSynchronize(st))
			})
		}
	}
}
