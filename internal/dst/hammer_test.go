package dst

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

// A hammer is the same workload on real goroutines, with waits that park, the
// watcher on its own, and a device that somebody holds and lets go. It has no seed:
// which goroutine comes first is not ours to say.
type hammer struct {
	t       testing.TB
	sim     *cudasim.Sim
	ctx     *driver.Context
	rt      *publish.Runtime
	fill    *kernel.Function
	mix     *kernel.Function
	faults  atomic.Int64 // one in so many calls fails; 0: none
	struck  atomic.Int64
	beside  sync.WaitGroup // what runs beside the actors' own calls
	streams sync.Map       // uintptr: to be held
}

func newHammer(t testing.TB, faults int64) *hammer {
	h := &hammer{t: t, sim: cudasim.New(cudasim.Config{})}
	h.sim.Kernel("fill", func(l *cudasim.Launch) { fillBytes(l.Bytes(0)[:l.U32(1)], l.U32(2)) })
	h.sim.Kernel("mix", func(l *cudasim.Launch) { mixBytes(l.Bytes(1)[:l.U32(2)], l.Bytes(0)[:l.U32(2)], l.U32(3)) })
	table := h.sim.Table()
	h.must(result(table.Init(0)))
	d, err := wire.NewDriver(cuapi.Intercept(table, h.around), "simulation")
	h.must(err)
	dev, err := d.(*driver.Driver).Device(0)
	h.must(err)
	h.ctx, err = dev.Primary()
	h.must(err)
	h.rt, err = publish.New(h.ctx, publish.Config{Slots: 64, PinnedBytes: 4096 * 64})
	h.must(err)
	mod, err := kernel.Load(h.ctx, []byte(ptx))
	h.must(err)
	h.fill, err = mod.Function("fill")
	h.must(err)
	h.mix, err = mod.Function("mix")
	h.must(err)
	h.streams.Clear() // the probe has streams of its own
	h.faults.Store(faults)
	return h
}

func (h *hammer) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

func (h *hammer) around(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
	if at := streamArg[c.ID]; at > 0 {
		h.streams.LoadOrStore(uintptr(c.Args[at-1]), true)
	}
	one := h.faults.Load()
	if one == 0 || c.ID == cuapi.IDGetErrorName || c.ID == cuapi.IDGetErrorString || rand.Int64N(one) != 0 {
		return next()
	}
	h.struck.Add(1)
	if rand.IntN(2) == 0 {
		next()
	}
	return codes[rand.IntN(len(codes))]
}

// known checks that an error is of a kind that the library promises, and that
// what is unproven has a fault behind it.
func (h *hammer) known(op string, err error) bool {
	var re *publish.RejectedError
	var un *publish.UnprovenError
	switch {
	case err == nil:
		return true
	case errors.As(err, &un):
		if h.struck.Load() == 0 {
			h.t.Errorf("%s is unproven, and nothing failed: %v", op, err)
		}
	case errors.As(err, &re), errors.Is(err, context.Canceled), errors.Is(err, pinned.ErrLimit), errors.Is(err, driver.ErrClosed), errors.Is(err, driver.ErrMoved):
	case h.struck.Load() == 0:
		h.t.Errorf("%s: an error of no known kind: %v", op, err)
	}
	return false
}

// cancelled returns a context that another goroutine may end at any time.
func (h *hammer) cancelled(one int) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	if rand.IntN(one) == 0 {
		h.beside.Go(cancel)
	}
	return ctx, cancel
}

// life goes from an allocation to a download, and meets others on the way.
func (h *hammer) life(s *publish.Session, shared chan *publish.Publication) {
	n := 1 + rand.IntN(200)
	ctx, cancel := h.cancelled(4)
	defer cancel()
	v, err := s.AllocContext(ctx, publish.U8, n)
	if !h.known("alloc", err) {
		return
	}
	tag := rand.Uint32()
	want := make([]byte, n)
	fillBytes(want, tag)
	if !h.known("launch", s.LaunchContext(ctx, h.fill, kernel.Grid(n), publish.Out(v), kernel.U32(uint32(n)), kernel.U32(tag), kernel.U32(0), kernel.U32(0))) {
		v.Close()
		return
	}
	if rand.IntN(3) == 0 {
		h.upload(ctx, s, v, want)
	}
	switch rand.IntN(8) {
	case 0:
		h.beside.Go(func() { v.Close() }) // beside the publish
	case 1:
		h.beside.Go(v.Leak)
	}
	p, err := s.Publish(v)
	if !h.known("publish", err) {
		v.Close()
		return
	}
	_, _ = p.FrontierReady()
	select {
	case shared <- p: // whoever takes it closes it
		return
	default:
	}
	h.download(ctx, p, want)
}

func (h *hammer) upload(ctx context.Context, s *publish.Session, v *publish.Value, want []byte) {
	b, err := h.rt.Pinned(len(want))
	if !h.known("pinned", err) {
		return
	}
	next := make([]byte, len(want))
	fillBytes(next, rand.Uint32())
	copy(b.Bytes(), next)
	up, err := s.UploadContext(ctx, v, b)
	if !h.known("upload", err) {
		b.Close()
		return
	}
	copy(want, next)
	if rand.IntN(2) == 0 {
		up.Close()
		return
	}
	h.wait(up, nil)
}

func (h *hammer) download(ctx context.Context, p *publish.Publication, want []byte) {
	defer p.Close()
	if rand.IntN(4) == 0 {
		h.known("await", p.AwaitFrontier(ctx))
	}
	b, err := h.rt.Pinned(len(want))
	if !h.known("pinned", err) {
		return
	}
	t, err := p.DownloadIntoContext(ctx, b)
	if !h.known("download", err) {
		b.Close()
		return
	}
	switch rand.IntN(8) {
	case 0:
		t.Close()
		return
	case 1:
		h.beside.Go(func() { t.Close() }) // beside the wait
	case 2:
		over := t.Done() // before the wait: it is nil behind it
		h.beside.Go(func() { <-over })
	}
	h.wait(t, want)
}

// wait waits until the copy is through, also when a wait was cancelled.
func (h *hammer) wait(t *publish.Transfer, want []byte) {
	ctx, cancel := h.cancelled(3)
	b, err := t.Wait(ctx)
	cancel()
	if errors.Is(err, context.Canceled) {
		b, err = t.Wait(context.Background())
	}
	if !h.known("wait", err) {
		t.Close()
		return
	}
	if want != nil && string(b.Bytes()) != string(want) {
		h.t.Errorf("a download of %d bytes brings others", len(want))
	}
	b.Close()
}

// TestHammer runs the workload on goroutines, with the device held now and then.
func TestHammer(t *testing.T) {
	for _, c := range []struct {
		name   string
		faults int64
	}{{"no faults", 0}, {"faults", 400}} {
		t.Run(c.name, func(t *testing.T) {
			h := newHammer(t, c.faults)
			h.run(8, 60)
			h.end()
		})
	}
}

func (h *hammer) run(actors, lives int) {
	shared := make(chan *publish.Publication, 4)
	stop := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() { // the device
		for {
			select {
			case <-stop:
				h.sim.ReleaseAll()
				return
			default:
			}
			h.streams.Range(func(k, _ any) bool {
				if rand.IntN(4) == 0 {
					h.sim.Hold(k.(uintptr))
				}
				return true
			})
			h.rt.Drain()
			h.conserved()
			h.sim.ReleaseAll()
		}
	})
	beside.Go(func() { // who ends what others made
		for p := range shared {
			switch rand.IntN(4) {
			case 0:
				p.Close()
			case 1:
				h.beside.Go(func() { p.Close() })
				_, _ = p.FrontierReady()
			case 2:
				h.known("await", p.AwaitFrontier(context.Background()))
				p.Close()
			default:
				over := p.Done()
				h.beside.Go(func() { <-over })
				p.Close()
			}
		}
	})
	var all sync.WaitGroup
	for range actors {
		all.Go(func() {
			for range lives {
				s, err := h.rt.OpenSession(nil)
				if !h.known("open session", err) {
					continue
				}
				for range 1 + rand.IntN(3) {
					h.life(s, shared)
				}
				s.Close()
			}
		})
	}
	all.Wait()
	close(shared)
	close(stop)
	beside.Wait()
}

func (h *hammer) conserved() {
	if q := h.rt.Stats().Queue; q.Entered != q.Released+q.Permanent+q.Pending || min(q.Reserved, q.Pending) < 0 {
		h.t.Errorf("the queue does not conserve: %+v", q)
	}
}

// end stops the faults: everything must drain.
func (h *hammer) end() {
	t := h.t
	h.faults.Store(0)
	h.sim.ReleaseAll()
	h.beside.Wait() // also for each Done
	err := h.rt.Shutdown(t.Context())
	s := h.rt.Stats()
	if s.Queue.Pending != 0 || s.Queue.Reserved != 0 || (err == nil) != (s.Queue.Permanent == 0) {
		t.Errorf("the runtime's shutdown: %v: %+v", err, s.Queue)
	}
	if h.struck.Load() == 0 && s.Queue.Permanent != s.Leaked {
		t.Errorf("%d owners are retained, %d were leaked, and nothing failed: %v", s.Queue.Permanent, s.Leaked, s.Queue.Cause)
	}
	if err := h.ctx.Shutdown(t.Context()); (err == nil) != (s.Queue.Permanent == 0) {
		t.Errorf("the context's shutdown, with %d owners retained: %v", s.Queue.Permanent, err)
	}
	for _, v := range h.sim.Violations() {
		t.Errorf("the simulated driver: %v\n%s other side:\n%s", v, v.Stack(), v.Other())
	}
	t.Logf("%d faults, %+v", h.struck.Load(), s.Queue)
}
