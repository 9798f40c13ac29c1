package publish_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync/atomic"
	"testing"
	"weak"

	"github.com/google/go-cmp/cmp"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/retirequeue"
	"github.com/purecuda/purecuda/stream"
)

// The rows of the specification's evidence plan, and what it lists as not
// delivered.

func TestEvidencePublicationSurvivesItsSession(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		for _, n := range []int{1, 8, 4096, 4097, 1 << 20, 64 << 20} {
			s := r.session()
			release := func() {}
			if n < 1<<20 { // also where the work is yet to run
				release = r.hold(s)
			}
			var v *publish.Value
			want := random(n)
			if n > 1<<20 && r.sim != nil { // its kernels are Go code, which takes its time there
				v = r.uploaded(s, want)
			} else {
				v, want = r.produce(s, want)
			}
			p, err := s.Publish(v)
			must(r.t, err)
			must(r.t, s.Close())
			if p.Bytes() != int64(n) || p.Err() != nil {
				r.t.Errorf("%d bytes: %d, %v", n, p.Bytes(), p.Err())
			}
			release()
			r.download(p, want)
		}
	})
}

// uploaded makes a value of the data.
func (r *rig) uploaded(s *publish.Session, data []byte) *publish.Value {
	r.t.Helper()
	v, err := s.Alloc(publish.U8, len(data))
	must(r.t, err)
	up, err := s.Upload(v, r.buffer(data))
	must(r.t, err)
	must(r.t, up.Close())
	return v
}

func TestEvidenceFrontierIsPendingThenReady(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		early, want := r.produce(s, random(100))
		// The value's own work is known to be done.
		must(t, s.Synchronize(r.within()))
		first, wantFirst := r.publication(s, 10)
		must(t, first.AwaitFrontier(r.within()))
		release := r.hold(s)
		// The frontier follows all that the session ran, not the value's own work.
		r.produceAndClose(s)
		p, err := s.Publish(early)
		must(t, err)
		for range 3 {
			if ready, err := p.FrontierReady(); ready || err != nil {
				t.Fatalf("behind a held stream: ready %v, %v", ready, err)
			}
		}
		select {
		case <-p.Done():
			t.Fatal("done behind a held stream")
		default:
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := p.AwaitFrontier(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("a cancelled wait: %v", err)
		}
		if ready, err := first.FrontierReady(); !ready || err != nil {
			t.Errorf("what was complete before: ready %v, %v", ready, err)
		}
		release()
		must(t, p.AwaitFrontier(r.within()))
		<-p.Done()
		if ready, err := p.FrontierReady(); !ready || err != nil {
			t.Fatalf("after the wait: ready %v, %v", ready, err)
		}
		must(t, s.Close())
		r.download(p, want)
		r.download(first, wantFirst)
	})
}

func (r *rig) produceAndClose(s *publish.Session) {
	r.t.Helper()
	v, _ := r.produce(s, random(64))
	must(r.t, v.Close())
}

// A publication alone keeps its memory, stream, runtime and context: session,
// stream, value and runtime are closed, and their handles are collected.
func TestEvidenceRetentionWithoutAnyOtherHandle(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		var gone atomic.Int64
		var runtimeOf weak.Pointer[publish.Runtime]
		var release func()
		var want []byte
		var buf *pinned.Buffer
		produce := func() *publish.Publication {
			st, err := stream.New(r.ctx)
			must(t, err)
			rt, err := publish.New(r.ctx, publish.Config{})
			must(t, err)
			s, err := rt.OpenSession(st)
			must(t, err)
			runtimeOf = weak.Make(rt)
			own := *r
			own.rt = rt
			release = r.hold(s)
			v, bytes := own.produce(s, random(1000))
			want = bytes
			p, err := s.Publish(v)
			must(t, err)
			buf = own.buffer(make([]byte, 1000))
			must(t, s.Close())
			must(t, st.Close())
			must(t, rt.Close())
			collected := func(n *atomic.Int64) { n.Add(1) }
			runtime.AddCleanup(s, collected, &gone)
			runtime.AddCleanup(st, collected, &gone)
			return p
		}
		p := produce()
		collect(t, func() bool { return gone.Load() == 2 })
		must(t, r.rt.Close())
		if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
			t.Fatalf("the context was shut down under a publication: %v", err)
		}
		if ready, err := p.FrontierReady(); ready || err != nil {
			t.Fatal(ready, err)
		}
		tr, err := p.DownloadInto(buf)
		must(t, err)
		for range 10 {
			runtime.GC()
		}
		if err := r.ctx.Shutdown(r.within()); !errors.Is(err, driver.ErrBusy) {
			t.Fatalf("the context was shut down under a transfer: %v", err)
		}
		rt := runtimeOf.Value() // nobody but the transfer has it
		if rt == nil {
			t.Fatal("the runtime is gone, and the transfer works on")
		}
		release()
		r.finish(tr, want)
		must(t, rt.Shutdown(r.within()))
	})
}

// exportedMethods returns the names of the type's exported methods.
func exportedMethods(v any) (names []string) {
	t := reflect.TypeOf(v)
	for i := range t.NumMethod() {
		names = append(names, t.Method(i).Name)
	}
	return names
}

// A publication that one goroutine waits for can be consumed by another one, and
// the wait ends well.
func TestEvidenceConsumedWhileAwaited(t *testing.T) {
	var watched, asked atomic.Bool
	around := func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDEventQuery && watched.Load() {
			asked.Store(true)
		}
		return next()
	}
	onEach(t, options{around: around}, func(r *rig) {
		t := r.t
		s := r.session()
		want := random(64)
		v := r.uploaded(s, want)
		buf := r.buffer(make([]byte, 64))
		must(t, s.Synchronize(r.within()))
		r.settle() // who queries from here on is the wait
		release := r.hold(s)
		p, err := s.Publish(v)
		must(t, err)
		watched.Store(true)
		waited := make(chan error)
		go func() { waited <- p.AwaitFrontier(r.within()) }()
		for !asked.Load() {
			runtime.Gosched()
		}
		tr, err := p.DownloadInto(buf)
		must(t, err)
		release()
		must(t, <-waited)
		r.finish(tr, want)
		must(t, s.Close())
		watched.Store(false)
		asked.Store(false)
	})
}

// Nothing that takes a value or is a method of it works on one that was
// published; what describes it still answers.
func TestEvidenceUseAfterPublishFails(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		s := r.session()
		v, want := r.produce(s, random(64))
		p, err := s.Publish(v)
		must(t, err)
		buf := r.buffer(make([]byte, 64))
		fails := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, driver.ErrMoved) {
				t.Errorf("%s after publish: %v", what, err)
			}
		}
		before := r.rt.Stats()
		ofValue := map[string]func(){
			"Bytes": func() {
				if v.Bytes() != 64 {
					t.Error(v.Bytes())
				}
			},
			"DType": func() {
				if v.DType() != publish.U8 {
					t.Error(v.DType())
				}
			},
			"Shape": func() {
				if diff := cmp.Diff([]int{64}, v.Shape()); diff != "" {
					t.Error(diff)
				}
			},
			"Err":   func() { fails("Err", v.Err()) },
			"Close": func() { must(t, v.Close()) }, // idempotent: the value is nobody's to close
			"Leak":  v.Leak,
		}
		for _, name := range exportedMethods(v) {
			if ofValue[name] == nil {
				t.Fatalf("what is Value.%s after a move?", name)
			}
			ofValue[name]()
		}
		ofSession := map[string]func(){
			"Publish":         func() { _, err := s.Publish(v); fails("Publish", err) },
			"PublishAsserted": func() { _, err := s.PublishAsserted(v); fails("PublishAsserted", err) },
			"Upload":          func() { _, err := s.Upload(v, buf); fails("Upload", err) },
			"UploadContext":   func() { _, err := s.UploadContext(r.within(), v, buf); fails("UploadContext", err) },
		}
		session := reflect.TypeOf(s)
		for i := range session.NumMethod() {
			m := session.Method(i)
			for j := 1; j < m.Type.NumIn(); j++ {
				if m.Type.In(j) != reflect.TypeOf(v) {
					continue
				}
				if ofSession[m.Name] == nil {
					t.Fatalf("what does Session.%s do with a value that was moved?", m.Name)
				}
				ofSession[m.Name]()
			}
		}
		fails("In", s.Launch(r.inc, kernel.Grid(64), publish.In(v), publish.Out(v), kernel.U32(64)))
		other, err := s.Alloc(publish.U8, 64)
		must(t, err)
		fails("Out", s.Launch(r.inc, kernel.Grid(64), publish.In(other), publish.Out(v), kernel.U32(64)))
		must(t, other.Close())
		must(t, s.Close())
		if after := r.rt.Stats(); after.Leaked != before.Leaked || after.Queue.Permanent != 0 {
			t.Errorf("a stale handle let go of something: %+v", after)
		}
		// The buffer that was refused is the caller's and works.
		tr, err := p.DownloadInto(buf)
		must(t, err)
		if buf.Bytes() != nil || !errors.Is(buf.Err(), driver.ErrMoved) {
			t.Error("a buffer is reachable while the device writes it")
		}
		if ready, err := p.FrontierReady(); ready || !errors.Is(err, driver.ErrMoved) {
			t.Errorf("frontier of a consumed publication: %v, %v", ready, err)
		}
		fails("AwaitFrontier", p.AwaitFrontier(r.within()))
		fails("Publication.Err", p.Err())
		if p.Done() != nil {
			t.Error("a moved publication has a channel")
		}
		spare := r.buffer(make([]byte, 64))
		_, err = p.DownloadInto(spare)
		fails("DownloadInto", err)
		must(t, spare.Close())
		must(t, p.Close())
		p.Leak()
		r.finish(tr, want)
		_, err = tr.Wait(r.within())
		fails("a second Wait", err)
		must(t, tr.Close())
	})
}

// Each end of a publication is counted exactly once, where it belongs.
func TestEvidenceLifecycle(t *testing.T) {
	onEach(t, options{}, func(r *rig) {
		t := r.t
		r.keep = true // what is leaked
		s := r.session()
		warm, _ := r.publication(s, 4096)
		must(t, warm.Close())
		r.settle()
		expect := func(what string, change, before retirequeue.Stats) {
			t.Helper()
			after := r.rt.Stats().Queue
			got := retirequeue.Stats{
				Reserved: after.Reserved - before.Reserved, Entered: after.Entered - before.Entered,
				Released: after.Released - before.Released, Pending: after.Pending - before.Pending,
				PendingBytes: after.PendingBytes - before.PendingBytes, Permanent: after.Permanent - before.Permanent,
				PermanentBytes: after.PermanentBytes - before.PermanentBytes,
			}
			if diff := cmp.Diff(change, got); diff != "" {
				t.Errorf("%s: %s", what, diff)
			}
		}
		bare := func() *publish.Publication {
			v, err := s.Alloc(publish.U8, 4096)
			must(t, err)
			p, err := s.Publish(v)
			must(t, err)
			return p
		}
		inUse := r.rt.Stats().Memory.InUse
		release := r.hold(s)
		q := r.rt.Stats().Queue
		p := bare()
		expect("publish", retirequeue.Stats{Reserved: 1}, q)
		must(t, p.Close())
		expect("close", retirequeue.Stats{Entered: 1, Pending: 1, PendingBytes: 4096}, q)
		must(t, p.Close())
		p.Leak()
		r.rt.Drain()
		expect("a drain behind a held stream", retirequeue.Stats{Entered: 1, Pending: 1, PendingBytes: 4096}, q)

		leaked := bare()
		leaked.Leak()
		leaked.Leak()
		must(t, leaked.Close())
		expect("leak", retirequeue.Stats{Entered: 2, Pending: 1, PendingBytes: 4096, Permanent: 1, PermanentBytes: 4096}, q)
		if n := r.rt.Stats().Leaked; n != 1 {
			t.Errorf("%d leaked", n)
		}

		v, err := s.Alloc(publish.U8, 4096)
		must(t, err)
		other := r.session()
		for range 3 {
			var rejected *publish.RejectedError
			if _, err := other.Publish(v); !errors.As(err, &rejected) || rejected.Value != v || v.Err() != nil {
				t.Errorf("reject: %v", err)
			}
		}
		must(t, other.Close())
		expect("reject", retirequeue.Stats{Reserved: 1, Entered: 2, Pending: 1, PendingBytes: 4096, Permanent: 1, PermanentBytes: 4096}, q)
		p, err = s.Publish(v)
		must(t, err)
		must(t, p.Close())
		must(t, s.Close())
		expect("close of the rejected", retirequeue.Stats{Entered: 3, Pending: 2, PendingBytes: 8192, Permanent: 1, PermanentBytes: 4096}, q)
		release()
		r.settle()
		expect("drain", retirequeue.Stats{Entered: 3, Released: 2, Permanent: 1, PermanentBytes: 4096}, q)
		if n := r.rt.Stats().Memory.InUse - inUse; n != 4096 {
			t.Errorf("%d bytes of device memory are in use, and 4096 were leaked", n)
		}
		if err := r.rt.Shutdown(r.within()); err == nil || errors.Is(err, driver.ErrBusy) {
			t.Errorf("shutdown over a leak: %v", err)
		}
	})
}

// Consuming a publication makes exactly a copy and a record, both on the stream
// that produced it, and in one crossing, with session and runtime closed.
func TestEvidenceNoSessionInConsumption(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		s := r.session()
		warm, want := r.publication(s, 512) // event and buffer pools are warm
		r.download(warm, want)
		var p *publish.Publication
		v, want := r.produce(s, random(512))
		r.settle()
		recorded := r.trace(func() {
			var err error
			p, err = s.Publish(v)
			must(t, err)
		})
		buf := r.buffer(make([]byte, 512))
		must(t, s.Close())
		r.settle() // the watcher makes no calls from here on
		must(t, r.rt.Close())
		if len(recorded) != 1 || recorded[0].ID != cuapi.IDEventRecord {
			t.Fatalf("publishing made %v", recorded)
		}
		captured := recorded[0].Args[1]
		if r.sim != nil {
			r.sim.StartTrace()
		}
		var tr *publish.Transfer
		calls := r.trace(func() {
			var err error
			tr, err = p.DownloadInto(buf)
			must(t, err)
		})
		var got []string
		for _, c := range calls {
			got = append(got, fmt.Sprintf("%s on %#x", c.Name(), c.Args[c.N-1]))
		}
		on := fmt.Sprintf(" on %#x", captured)
		if diff := cmp.Diff([]string{"cuMemcpyDtoHAsync_v2" + on, "cuEventRecord" + on}, got); diff != "" {
			t.Error(diff)
		}
		r.finish(tr, want)
	})
}

// On a table that is not intercepted the two are one crossing.
func TestEvidenceConsumptionIsOneCrossing(t *testing.T) {
	r := newRig(t, options{})
	s := r.session()
	p, want := r.publication(s, 512)
	buf := r.buffer(make([]byte, 512))
	must(t, s.Close())
	r.settle()
	r.sim.StartTrace()
	tr, err := p.DownloadInto(buf)
	must(t, err)
	crossings := map[int]bool{}
	for _, c := range r.sim.Trace() {
		crossings[c.Crossing] = true
	}
	r.sim.StopTrace()
	if len(crossings) != 1 {
		t.Errorf("%d crossings", len(crossings))
	}
	r.finish(tr, want)
}

// While the stream is held and nothing of it completes, all that does not take a
// context returns, and makes no driver call that could wait for it.
func TestEvidenceHostWaitFreePublication(t *testing.T) {
	onEach(t, options{trace: true}, func(r *rig) {
		t := r.t
		r.keep = true // one is leaked
		must(t, r.rt.Reserve(8, 4096))
		s := r.session()
		release := r.hold(s)
		var values []*publish.Value
		var wants [][]byte
		for range 4 {
			v, want := r.produce(s, random(4096))
			values, wants = append(values, v), append(wants, want)
		}
		var tr *publish.Transfer
		var last *publish.Publication
		calls := r.trace(func() {
			var ps []*publish.Publication
			for _, v := range values {
				p, err := s.Publish(v)
				must(t, err)
				if ready, err := p.FrontierReady(); ready || err != nil {
					t.Error(ready, err)
				}
				ps = append(ps, p)
			}
			var err error
			tr, err = ps[0].DownloadInto(r.buffer(make([]byte, 4096)))
			must(t, err)
			if ready, err := tr.Ready(); ready || err != nil {
				t.Error(ready, err)
			}
			must(t, ps[1].Close())
			ps[2].Leak()
			r.rt.Drain()
			last = ps[3]
			must(t, s.Close())
		})
		stalls(t, calls)
		if n := callsOf(calls, cuapi.IDEventRecord); n < 5 {
			t.Errorf("the trace shows %d records for 4 publications and a download", n)
		}
		release()
		r.finish(tr, wants[0])
		r.download(last, wants[3])
		r.settle()
		if q := r.rt.Stats().Queue; q.Permanent != 1 || q.Reserved != 0 {
			t.Errorf("%+v", q)
		}
	})
}
