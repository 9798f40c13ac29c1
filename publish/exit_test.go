package publish_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/internal/child"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A flight is what a process is in the middle of when it ends, and how it ends.
type flight struct {
	i             int
	way, moment   string
	spin, dropped bool     // a kernel runs; handles became garbage
	call          cuapi.ID // that another goroutine is inside
}

const flights = 100

// flightOf varies everything: each way out at each moment, four times.
func flightOf(i int) flight {
	ways := []string{"return", "os.Exit", "os.Exit with the context current", "os.Exit after a panic", "panic"}
	moments := []string{"all pending", "calls in progress", "stalled", "shutting down", "inside a call"}
	calls := []cuapi.ID{cuapi.IDEventQuery, cuapi.IDEventRecord, cuapi.IDMemcpyDtoHAsync, cuapi.IDLaunchKernel}
	return flight{
		i: i, way: ways[i%5], moment: moments[i/5%5], spin: i/25%2 == 1, dropped: i/50%2 == 1, call: calls[i/25%4],
	}
}

func (f flight) String() string {
	return fmt.Sprintf("flight %d: %s, %s, a kernel runs: %v, handles dropped: %v, call %s", f.i, f.way, f.moment, f.spin, f.dropped, cuapi.Entries[f.call].Symbol())
}

const (
	flightEnv = "PURECUDA_TEST_FLIGHT"
	leaving   = "leaving in mid-flight"
	uncaught  = "uncaught in mid-flight"
)

// A process ends in mid-flight, with a stream held that nobody releases, and
// neither crashes nor hangs. The output of one that did is in the failure, with
// the name of its flight.
func TestProcessExitInMidFlight(t *testing.T) {
	for _, m := range machines {
		t.Run(m.name, func(t *testing.T) {
			if child.Is() {
				i, err := strconv.Atoi(os.Getenv(flightEnv))
				must(t, err)
				fly(t, m, flightOf(i))
				return
			}
			var wg sync.WaitGroup
			slots := make(chan struct{}, 8)
			for i := range flights {
				slots <- struct{}{}
				if t.Failed() { // one says enough
					break
				}
				wg.Go(func() {
					land(t, flightOf(i))
					<-slots
				})
			}
			wg.Wait()
		})
	}
}

// land runs a flight in a process of its own and checks its end.
func land(t *testing.T, f flight) {
	// The race detector would sleep for a second at the end of each.
	out, status, err := child.End(t, 40*time.Second, flightEnv+"="+strconv.Itoa(f.i), "GORACE=atexit_sleep_ms=0")
	want := 0
	if f.way == "panic" {
		want = 2
	}
	switch {
	case err != nil:
		t.Errorf("%v: %v\n%s", f, err, out)
		return
	case status != want:
		t.Errorf("%v: exit status %d, want %d\n%s", f, status, want, out)
		return
	}
	for text, n := range map[string]int{
		leaving: 1, "panic: ": want / 2, "panic: " + uncaught: want / 2, "--- FAIL": 0, "DATA RACE": 0,
		"SIG": 0, "fatal error": 0, "unexpected": 0, "core dumped": 0,
	} {
		if got := strings.Count(out, text); got != n {
			t.Errorf("%v: %q is written %d times, want %d\n%s", f, text, got, n, out)
			return
		}
	}
}

// spinPTX runs until the process ends: nobody writes the word that it reads.
const spinPTX = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 flag)
{
	.reg .pred %p;
	.reg .u32 %v;
	.reg .u64 %a;
	ld.param.u64 %a, [flag];
	cvta.to.global.u64 %a, %a;
AGAIN:
	ld.volatile.global.u32 %v, [%a];
	setp.eq.u32 %p, %v, 0;
	@%p bra AGAIN;
	ret;
}
`

// holdForGood holds the session's stream until the process ends.
func (r *rig) holdForGood(raw uintptr) {
	r.t.Helper()
	_, err := hold.Stream(r.ctx, raw)
	must(r.t, err)
}

// spin starts a kernel that runs until the process ends.
func (r *rig) spin(f *kernel.Function) *publish.Value {
	r.t.Helper()
	s := r.session()
	v, err := s.Alloc(publish.U8, 64)
	must(r.t, err)
	up, err := s.Upload(v, r.buffer(make([]byte, 64)))
	must(r.t, err)
	buf, err := up.Wait(r.within())
	must(r.t, err)
	must(r.t, buf.Close())
	if r.sim != nil { // where kernels take no time
		raw, err := s.Raw()
		must(r.t, err)
		r.holdForGood(raw)
	}
	must(r.t, s.Launch(f, kernel.Grid(1), publish.Out(v)))
	must(r.t, s.Close())
	return v
}

func fly(t *testing.T, m machine, f flight) {
	inside := make(chan struct{})
	d := &during{id: f.call, f: func() { close(inside) }}
	r := newRigOn(t, m, options{around: d.around})
	sim := r.sim
	if sim != nil {
		sim.Kernel("spin", func(*cudasim.Launch) {})
	}
	mod, err := kernel.Load(r.ctx, []byte(spinPTX)) // now: a held stream stalls it
	must(t, err)
	fn, err := mod.Function("spin")
	must(t, err)
	core := wire.ContextOf(r.ctx)
	host, raw := new(cuapi.HostPtr), new(cuapi.Stream)
	for _, call := range []func() cuapi.Result{
		func() cuapi.Result { return core.Table.MemHostAlloc(host, 4096, cuapi.MemHostAllocPortable) },
		func() cuapi.Result { return core.Table.StreamCreate(raw, cuapi.StreamNonBlocking) },
	} {
		if res := core.Current(call); res != cuapi.Success {
			t.Fatal(res)
		}
	}
	must(t, r.rt.Reserve(24, 64)) // now: who knows what a running kernel stalls
	spare := r.session()
	leave := r.leave(f.way, spare)
	var keep []any // to the end
	if f.moment != "shutting down" {
		// A download behind the hold would hold those of other streams too
		// (docs/driver-facts.md: "A held copy holds copies of other streams").
		alone := f.moment != "calls in progress" && f.moment != "inside a call"
		keep = append(keep, r.takeOff(alone))
	}
	if f.dropped {
		s := r.session()
		r.drop(s)
		must(t, s.Close())
	}
	if f.spin {
		r.spin(fn).Leak()
	}

	switch f.moment {
	case "shutting down":
		must(t, spare.Close())
		r.holdForGood(uintptr(*raw)) // not one of the library's
		r.rt.Shutdown(r.within())    // tells of the leak
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := r.ctx.Shutdown(ended); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		for sim != nil && sim.Blocked() == 0 {
			runtime.Gosched()
		}
	case "calls in progress", "inside a call":
		done := make(chan struct{})
		for range 4 {
			go func() {
				for first := true; ; first = false {
					err := r.workflow(random(64))
					if errors.Is(err, context.Canceled) {
						select {} // the test's end is the process's
					}
					if err != nil {
						stacks := make([]byte, 1<<20)
						fmt.Printf("--- FAIL: %v\n%+v\n%s\n", err, r.rt.Stats(), stacks[:runtime.Stack(stacks, true)])
						os.Exit(3)
					}
					if first {
						done <- struct{}{}
					}
				}
			}()
		}
		for range 4 {
			<-done
		}
		if f.moment == "inside a call" {
			d.on.Store(true)
			<-inside
		}
	case "stalled": // a thread is stuck in the driver, and most of its other calls would be
		began := make(chan struct{})
		go core.Current(func() cuapi.Result {
			close(began)
			return core.Table.MemFreeHost(*host)
		})
		<-began
		for sim != nil && sim.Blocked() == 0 {
			runtime.Gosched()
		}
	}
	r.keep, r.sim = true, nil // the rig ends nothing, and releases no stream
	fmt.Println(leaving)
	leave()
	runtime.KeepAlive(keep)
}

// takeOff leaves one of everything pending behind a stream that is held for
// good, with goroutines that wait for it; a download only where asked for.
func (r *rig) takeOff(download bool) any {
	s := r.session()
	raw, err := s.Raw()
	must(r.t, err)
	r.holdForGood(raw)
	p, _ := r.publication(s, 64)
	q, _ := r.publication(s, 64)
	retired, _ := r.publication(s, 64)
	must(r.t, retired.Close())
	v, err := s.Alloc(publish.U8, 64)
	must(r.t, err)
	up, err := s.Upload(v, r.buffer(random(64)))
	must(r.t, err)
	var tr *publish.Transfer
	if download {
		tr, err = q.DownloadInto(r.buffer(make([]byte, 64)))
		must(r.t, err)
		go tr.Wait(context.Background())
	}
	for range 2 {
		go p.AwaitFrontier(context.Background())
		go up.Wait(context.Background())
		go s.Synchronize(context.Background())
	}
	go func() { <-p.Done() }()
	if !stream.WatcherOf(wire.ContextOf(r.ctx)).Running() {
		r.t.Error("nobody looks for what was retired")
	}
	return []any{s, p, q, v, up, tr}
}

// drop leaves garbage that the cleanups have found.
func (r *rig) drop(s *publish.Session) {
	func() {
		r.publication(s, 64)
		_, err := s.Alloc(publish.U8, 64)
		must(r.t, err)
		p, _ := r.publication(s, 64)
		_, err = p.DownloadInto(r.buffer(make([]byte, 64)))
		must(r.t, err)
	}()
	for r.rt.Stats().Abandoned < 3 {
		runtime.GC()
	}
}

// leave returns what ends the process, or returns so that the test's end does. It
// makes no driver call, which might block by then.
func (r *rig) leave(way string, s *publish.Session) func() {
	switch way {
	case "os.Exit":
		return func() {
			go os.Exit(0) // while this goroutine goes on
			select {}
		}
	case "os.Exit with the context current":
		inside, exit := make(chan struct{}), make(chan struct{})
		go r.current(func() cuapi.Result {
			close(inside)
			<-exit
			os.Exit(0)
			return cuapi.Success
		})
		<-inside
		return func() {
			close(exit)
			select {}
		}
	case "os.Exit after a panic":
		return func() {
			recovered := make(chan any)
			go func() {
				defer func() { recovered <- recover() }()
				defer s.Close()
				panic("recovered")
			}()
			<-recovered
			os.Exit(0)
		}
	case "panic":
		return func() {
			go func() {
				defer s.Close()
				panic(uncaught)
			}()
			select {}
		}
	}
	return func() {}
}
