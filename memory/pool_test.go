package memory_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/event"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/memory"
	"github.com/purecuda/purecuda/stream"
)

type around = func(c cuapi.Call, next func() cuapi.Result) cuapi.Result

type rig struct {
	t    *testing.T
	sim  *cudasim.Sim
	ctx  *driver.Context
	core *wire.Context
	lane *stream.Lane
	keep bool // something is retained for good
}

func newRig(t *testing.T, cfg cudasim.Config, f around) *rig {
	t.Helper()
	r := &rig{t: t, sim: cudasim.New(cfg)}
	table := r.sim.Table()
	table.Init(0)
	if f != nil {
		table = cuapi.Intercept(table, f)
	}
	d, err := wire.NewDriver(table, "simulator")
	must(t, err)
	dev, err := d.(*driver.Driver).Device(0)
	must(t, err)
	r.ctx, err = dev.Primary()
	must(t, err)
	r.core = wire.ContextOf(r.ctx)
	r.lane, err = stream.Take(r.core)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		for _, v := range r.sim.Violations() {
			t.Errorf("violation: %v", v)
		}
		r.lane.Drop()
		if !r.keep {
			must(t, r.ctx.Shutdown(context.Background()))
			must(t, r.sim.Close())
		}
	})
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) pool() *memory.Pool {
	r.t.Helper()
	p, err := memory.PoolOf(r.core)
	must(r.t, err)
	return p
}

func (r *rig) alloc(p *memory.Pool, n int64) *memory.Block {
	r.t.Helper()
	b, err := p.Alloc(r.lane, n)
	must(r.t, err)
	if b.Bytes != n || b.Addr == 0 {
		r.t.Fatalf("%d bytes: %+v", n, b)
	}
	return b
}

// free does as its users do: once the work is known to be done.
func (r *rig) free(p *memory.Pool, b *memory.Block) {
	r.t.Helper()
	must(r.t, r.lane.Synchronize(context.Background()))
	must(r.t, p.Free(b))
}

func TestThePoolIsSetUp(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	r.sim.StartTrace()
	p := r.pool()
	r.sim.StopTrace()
	var pool cuapi.MemPool
	var lane uint64
	var calls []string
	for _, c := range r.sim.Trace() {
		switch c.ID {
		case cuapi.IDCtxPushCurrent, cuapi.IDCtxPopCurrent, cuapi.IDThreadExchangeStreamCaptureMode:
			continue
		case cuapi.IDMemPoolSetAttribute:
			pool = cuapi.MemPool(c.Args[0])
		case cuapi.IDMemFreeAsync:
			lane = c.Args[1]
		}
		calls = append(calls, c.Name)
	}
	want := "[cuStreamCreate cuMemPoolCreate cuMemPoolSetAttribute cuMemPoolSetAttribute cuMemAllocFromPoolAsync cuMemFreeAsync]"
	if fmt.Sprint(calls) != want {
		t.Errorf("%v, want %s", calls, want)
	}
	for attr, want := range map[int32]uint64{cuapi.PoolReleaseThreshold: math.MaxUint64, cuapi.PoolReuseAllowInternalDependencies: 0, cuapi.PoolReuseAllowOpportunistic: 1} {
		value := new(uint64)
		if res := r.core.Table.MemPoolGetAttribute(pool, attr, cuapi.HostPtr(value)); res != cuapi.Success || *value != want {
			t.Errorf("attribute %d is %d, want %d (%v)", attr, *value, want, res)
		}
	}
	flags := new(uint32)
	if res := r.core.Table.StreamGetFlags(cuapi.Stream(lane), flags); res != cuapi.Success || *flags != cuapi.StreamNonBlocking {
		t.Errorf("the reclaim stream has flags %d (%v)", *flags, res)
	}
	if again := r.pool(); again != p {
		t.Error("two pools of one context")
	}
	r.sim.StartTrace()
	b := r.alloc(p, 100)
	r.free(p, b)
	for _, c := range r.sim.Trace() {
		if c.ID == cuapi.IDMemFreeAsync && c.Args[1] != lane || c.ID == cuapi.IDMemAllocFromPoolAsync && cuapi.Stream(c.Args[3]) != r.lane.Handle() {
			t.Errorf("%s on stream %#x", c.Name, c.Args[len(c.Args)-1])
		}
	}
	if s := p.Stats(); s != (memory.Stats{Peak: 100, Pools: true}) {
		t.Errorf("%+v", s)
	}
}

// The i-th call of the set-up fails, for every i: PoolOf tells, and the next
// PoolOf goes on from there. Nothing is made twice.
func TestEachCallOfTheSetUpFails(t *testing.T) {
	for _, cfg := range []cudasim.Config{{}, {NoPools: true}} {
		for i := 0; ; i++ {
			n, hit := 0, ""
			armed := false
			r := newRig(t, cfg, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
				switch c.ID {
				case cuapi.IDCtxPushCurrent, cuapi.IDCtxPopCurrent, cuapi.IDThreadExchangeStreamCaptureMode, cuapi.IDGetErrorString:
					return next()
				}
				if armed {
					if n++; n == i+1 {
						hit = c.Name()
						return cuapi.OutOfMemory
					}
				}
				return next()
			})
			r.sim.StartTrace()
			armed = true
			p, err := memory.PoolOf(r.core)
			armed = false
			if hit == "" {
				must(t, err)
				if want := map[bool]int{false: 6, true: 2}[cfg.NoPools]; i != want {
					t.Errorf("%d calls were failed, want %d", i, want)
				}
				break
			}
			if p != nil || !errors.Is(err, driver.ErrOutOfMemory) || !strings.Contains(err.Error(), hit) {
				t.Fatalf("call %d, %s: %v", i, hit, err)
			}
			p = r.pool()
			made := map[string]int{}
			for _, c := range r.sim.Trace() {
				made[c.Name]++
			}
			if made["cuStreamCreate"] != 1 || made["cuMemPoolCreate"] > 1 {
				t.Errorf("call %d, %s: %v", i, hit, made)
			}
			b := r.alloc(p, 1000)
			r.free(p, b)
			// An error code proves nothing: what was to be freed stays.
			r.keep = hit == "cuMemFreeAsync"
		}
	}
}

func TestPoolOfByManyAtOnce(t *testing.T) {
	r := newRig(t, cudasim.Config{}, nil)
	r.sim.StartTrace()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := memory.PoolOf(r.core); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	made := 0
	for _, c := range r.sim.Trace() {
		if c.ID == cuapi.IDMemPoolCreate {
			made++
		}
	}
	if made != 1 {
		t.Errorf("%d pools", made)
	}
}

// A free that fails keeps the memory counted, and Shutdown keeps the context.
func TestAFailedFreeIsRetained(t *testing.T) {
	fail := false
	r := newRig(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if fail && c.ID == cuapi.IDMemFreeAsync {
			return cuapi.InvalidValue
		}
		return next()
	})
	r.keep = true
	p := r.pool()
	b := r.alloc(p, 1234)
	fail = true
	err := p.Free(b)
	if !errors.Is(err, driver.ErrInvalidValue) || !strings.Contains(err.Error(), "cuMemFreeAsync") || !strings.Contains(err.Error(), "1234 bytes") {
		t.Error(err)
	}
	if s := p.Stats(); s.InUse != 1234 {
		t.Errorf("%+v", s)
	}
	r.sim.StartTrace()
	if err := r.ctx.Shutdown(context.Background()); err == nil || !strings.Contains(err.Error(), "1234 bytes of device memory are retained") {
		t.Error(err)
	}
	for _, c := range r.sim.Trace() {
		if c.ID == cuapi.IDDevicePrimaryCtxRelease || c.ID == cuapi.IDMemPoolDestroy {
			t.Errorf("%s under retained memory", c.Name)
		}
	}
}

func TestNothingIsFreedOnALostContext(t *testing.T) {
	for _, noPools := range []bool{false, true} {
		r := newRig(t, cudasim.Config{NoPools: noPools}, nil)
		r.keep = true
		p := r.pool()
		b := r.alloc(p, 10)
		r.core.Fail(cuapi.IDEventQuery, cuapi.IllegalAddress, "")
		r.sim.StartTrace()
		if err := p.Free(b); !errors.Is(err, driver.ErrIllegalAddress) {
			t.Error(err)
		}
		if n := len(r.sim.Trace()); n != 0 || p.Stats().InUse != 10 {
			t.Errorf("%d driver calls, %+v", n, p.Stats())
		}
	}
}

// Without pools, blocks of a power of two are cached, up to half the device's
// memory, and freed by Shutdown alone.
func TestFault12TheCache(t *testing.T) {
	r := newRig(t, cudasim.Config{NoPools: true, Memory: 64 << 20}, nil)
	p := r.pool()
	r.sim.StartTrace()
	a := r.alloc(p, 3000)
	r.free(p, a)
	b := r.alloc(p, 4096)
	if b.Addr != a.Addr {
		t.Error("the class's block was not used again")
	}
	c := r.alloc(p, 1)
	if c.Addr == b.Addr {
		t.Error("one block, two owners")
	}
	r.free(p, c)
	r.free(p, b)
	for _, call := range r.sim.Trace() {
		if call.ID == cuapi.IDMemFree {
			t.Error("cuMemFree stalls")
		}
	}
	var blocks []*memory.Block
	for {
		b, err := p.Alloc(r.lane, 4<<20)
		if err != nil {
			for _, want := range []string{"cuMemAlloc", "OUT_OF_MEMORY", "4194304 bytes", fmt.Sprintf("%d of at most %d", 4096+512+7*4<<20, 32<<20)} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q lacks %q", err, want)
				}
			}
			if !errors.Is(err, driver.ErrOutOfMemory) {
				t.Error(err)
			}
			break
		}
		blocks = append(blocks, b)
	}
	if len(blocks) != 7 { // 32 MiB less the small blocks
		t.Errorf("%d blocks of 4 MiB", len(blocks))
	}
	for _, b := range blocks {
		r.free(p, b)
	}
	r.free(p, r.alloc(p, 3<<20)) // the class again
	for _, n := range []int64{1<<47 + 1, 1 << 50, math.MaxInt64} {
		if _, err := p.Alloc(r.lane, n); !errors.Is(err, driver.ErrOutOfMemory) || !strings.Contains(err.Error(), fmt.Sprint(n)) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if s := p.Stats(); s.InUse != 0 || s.Peak != 28<<20 || s.Pools {
		t.Errorf("%+v", s)
	}
}

// A cuMemAlloc that fails returns its bytes to the bound.
func TestAFailedCacheAllocationReturnsItsBytes(t *testing.T) {
	fail := false
	r := newRig(t, cudasim.Config{NoPools: true, Memory: 8 << 20}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if fail && c.ID == cuapi.IDMemAlloc {
			return cuapi.OutOfMemory
		}
		return next()
	})
	p := r.pool()
	fail = true
	for range 10 {
		if _, err := p.Alloc(r.lane, 4<<20); !errors.Is(err, driver.ErrOutOfMemory) || !strings.Contains(err.Error(), "holds 0 of at most 4194304") {
			t.Fatal(err)
		}
	}
	fail = false
	r.free(p, r.alloc(p, 4<<20))
}

// Out of memory names the size, loses nothing, and the stream goes on, however
// often it happens: no credit and no event stays away.
func TestOutOfMemoryLosesNothing(t *testing.T) {
	r := newRig(t, cudasim.Config{Memory: 64 << 20}, nil)
	p := r.pool()
	for i := range 3 * stream.Credits {
		_, err := p.Alloc(r.lane, 1<<40)
		if !errors.Is(err, driver.ErrOutOfMemory) {
			t.Fatalf("allocation %d: %v", i, err)
		}
		for _, want := range []string{"cuMemAllocFromPoolAsync", "1099511627776 bytes"} {
			if !strings.Contains(err.Error(), want) {
				t.Fatalf("%q lacks %q", err, want)
			}
		}
	}
	if err := r.lane.Failed(); err != nil {
		t.Errorf("the lane is broken: %v", err)
	}
	if s := event.PoolOf(r.core).Stats(); s.Created > 8 || s.InUse > 4 {
		t.Errorf("events: %+v", s)
	}
	b := r.alloc(p, 1000)
	must(t, r.lane.Fill(b.Addr, 1, 1000))
	r.free(p, b)
	if n := r.lane.InFlight(); n != 0 {
		t.Errorf("%d operations are in flight", n)
	}
}

// A block is freed once: the memory may be somebody else's by the second time.
func TestAFreeOfWhatWasFreedIsRefused(t *testing.T) {
	for _, cfg := range []cudasim.Config{{}, {NoPools: true}} {
		r := newRig(t, cfg, nil)
		p := r.pool()
		b := r.alloc(p, 64)
		r.free(p, b)
		if err := p.Free(b); !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
		if s := p.Stats(); s.InUse != 0 {
			t.Errorf("%+v", s)
		}
	}
}
