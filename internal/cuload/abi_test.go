//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"weak"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// codes are results that a call or a list must give back as they are. C sets
// the upper half of the register besides.
var codes = []cuapi.Result{cuapi.Success, cuapi.InvalidValue, cuapi.NotReady, cuapi.Unknown, 0xffff}

// check compares one call as C saw it with its arguments.
func check(r record, ent cuapi.Entry, args []arg) error {
	if r.entry != uint64(ent.ID) || r.nargs != uint64(len(args)) {
		return fmt.Errorf("C saw %s with %d arguments", cuapi.Entries[r.entry].Symbol(), r.nargs)
	}
	for i, a := range args {
		if r.args[i] != a.word {
			return fmt.Errorf("argument %d: C saw %#x, want %#x", i, r.args[i], a.word)
		}
		typ := a.value.Type()
		if typ.Kind() == reflect.Pointer && isOut(ent.Name, i, typ.Elem()) && r.outs[i] == 0 {
			return fmt.Errorf("argument %d: C wrote nothing", i)
		}
		if n := r.outs[i]; n != 0 && typ.Kind() == reflect.Pointer && n != uint64(typ.Elem().Size()) {
			return fmt.Errorf("argument %d: %d bytes in C, %d in Go", i, n, typ.Elem().Size())
		}
		for j, got := range a.mem {
			want := byte(canary)
			if uint64(j) < r.outs[i] {
				want = pattern(ent.ID, i, j)
			}
			if got != want {
				return fmt.Errorf("argument %d: byte %d of what it points to is %#x, want %#x", i, j, got, want)
			}
		}
	}
	return nil
}

// isOut tells, independently of the generator, which parameters C writes.
func isOut(entry string, i int, elem reflect.Type) bool {
	switch {
	case entry == "ModuleLoadDataEx":
		return i == 0
	case entry == "LaunchKernel":
		return false
	case elem.Kind() == reflect.Struct, elem.Kind() == reflect.Uint8: // constant, mostly
		return false
	}
	return true
}

// collect runs the collector until stop is called: an argument that C can see
// and the collector cannot is then soon lost.
func collect() (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				runtime.GC()
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

// quiesce sets the stub to write patterns where it would otherwise behave.
func (s stub) quiesce() { s.version, s.procs = 0, 0 }

// Every entry point, concurrently, each call on a new goroutine with the
// collector running: C sees each argument, Go sees each out-parameter and the
// result.
func TestEveryCall(t *testing.T) {
	s, lib := openStub(t)
	s.quiesce()
	defer collect()()
	table := reflect.ValueOf(lib.Table).Elem()
	var wg sync.WaitGroup
	for id := range cuapi.ID(cuapi.NumEntries) {
		wg.Go(func() {
			ent := cuapi.Entries[id]
			f := table.FieldByName(ent.Name)
			if f.Type().NumIn() != ent.Args {
				t.Errorf("%s: %d parameters, the manifest says %d", ent.Name, f.Type().NumIn(), ent.Args)
			}
			for round := range 2 * len(codes) {
				done := make(chan error)
				go func() {
					want := codes[round%len(codes)]
					s.results[id] = uint64(uint32(want))
					args, values := newArgs(f.Type(), 0, id, round)
					got := f.Call(values)[0].Interface().(cuapi.Result)
					err := check(s.last[id], ent, args)
					if err == nil && got != want {
						err = fmt.Errorf("result %v, want %v", got, want)
					}
					runtime.KeepAlive(args)
					done <- err
				}()
				if err := <-done; err != nil {
					t.Errorf("%s, round %d: %v", ent.Name, round, err)
				}
			}
		})
	}
	wg.Wait()
	if s.misaligned != 0 {
		t.Errorf("%d calls came with a misaligned stack", s.misaligned)
	}
}

// listable are the entry points that may stand in a list.
func listable() (ids []cuapi.ID) {
	for _, e := range cuapi.Entries {
		if e.List {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// appendCall appends a call with fresh arguments to the list.
func appendCall(l *cuapi.List, id cuapi.ID, round int) []arg {
	m := reflect.ValueOf(l).MethodByName(cuapi.Entries[id].Name)
	args, values := newArgs(m.Type(), 0, id, round)
	m.Call(values)
	return args
}

// Lists of one to four calls, each entry point at each position, stopped at
// each position by each result, or not at all.
func TestEveryList(t *testing.T) {
	s, lib := openStub(t)
	defer collect()()
	ids := listable()
	for first := range ids {
		for n := 1; n <= cuapi.MaxList; n++ {
			for stop := 0; stop <= n; stop++ {
				for c, code := range codes {
					if (stop == n) != (code == cuapi.Success) {
						continue
					}
					l := cuapi.NewList()
					var calls [][]arg
					for i := range n {
						calls = append(calls, appendCall(l, ids[(first+i)%len(ids)], c+i))
					}
					seq := s.seq
					s.failAt, s.failCode = seq+uint64(stop)+1, uint64(code)
					got, r := lib.Table.Run(l)
					name := fmt.Sprintf("%s and %d more, stop at %d with %v", cuapi.Entries[ids[first]].Name, n-1, stop, code)
					if got != stop || r != code {
						t.Errorf("%s: %d, %v", name, got, r)
					}
					if made := s.seq - seq; made != uint64(min(stop+1, n)) {
						t.Errorf("%s: %d calls made", name, made)
						continue
					}
					for i := range min(stop+1, n) {
						r := s.trace[(seq+1+uint64(i))%uint64(len(s.trace))]
						if err := check(r, cuapi.Entries[ids[(first+i)%len(ids)]], calls[i]); err != nil {
							t.Errorf("%s: call %d: %v", name, i, err)
						}
					}
					l.Free()
				}
			}
		}
	}
	if n, r := lib.Table.Run(cuapi.NewList()); n != 0 || r != cuapi.Success {
		t.Errorf("an empty list: %d, %v", n, r)
	}
	if s.misaligned != 0 {
		t.Errorf("%d calls came with a misaligned stack", s.misaligned)
	}
}

// A list that names an entry point that the driver lacks stops there.
func TestListAbsent(t *testing.T) {
	s := newStub(t, hide(t, image(t), symbols(cuapi.IDMemFreeAsync)...), "")
	lib, err := Open(s.path)
	if err != nil {
		t.Fatal(err)
	}
	for at := range cuapi.MaxList {
		l := cuapi.NewList()
		for i := range cuapi.MaxList {
			id := cuapi.IDEventRecord
			if i == at {
				id = cuapi.IDMemFreeAsync
			}
			appendCall(l, id, i)
		}
		seq := s.seq
		if n, r := lib.Table.Run(l); n != at || r != cuapi.NotFound {
			t.Errorf("absent at %d: %d, %v", at, n, r)
		}
		if made := s.seq - seq; made != uint64(at) {
			t.Errorf("absent at %d: %d calls made", at, made)
		}
		l.Free()
	}
}

// deepen grows the goroutine's stack, which moves it.
func deepen(n int) byte {
	var frame [512]byte
	frame[n%len(frame)] = byte(n)
	if n > 0 {
		frame[0] += deepen(n - 1)
	}
	return frame[0]
}

// A callback from C into Go may move the caller's stack: out-parameters are
// right nevertheless, because they are on the heap.
func TestCallbackMovesStack(t *testing.T) {
	s, lib := openStub(t)
	s.quiesce()
	calls := 0
	s.onCall(func() { calls++; deepen(500) })
	word := func(id cuapi.ID, arg int) (w uint64) {
		for j := range 8 {
			w |= uint64(pattern(id, arg, j)) << (8 * j)
		}
		return w
	}
	const rounds = 50
	for range rounds {
		done := make(chan string) // a new goroutine has a small stack
		go func() {
			var wrong []string
			expect := func(what string, got, want uint64) {
				if got != want {
					wrong = append(wrong, fmt.Sprintf("%s: %#x, want %#x", what, got, want))
				}
			}
			var event cuapi.Event
			lib.Table.EventCreate(&event, cuapi.EventDisableTiming)
			expect("event", uint64(event), word(cuapi.IDEventCreate, 0))
			var flags uint32
			var active int32
			lib.Table.DevicePrimaryCtxGetState(0, &flags, &active)
			expect("flags", uint64(flags), uint64(uint32(word(cuapi.IDDevicePrimaryCtxGetState, 1))))
			expect("active", uint64(uint32(active)), uint64(uint32(word(cuapi.IDDevicePrimaryCtxGetState, 2))))
			var a, b cuapi.DevicePtr
			l := cuapi.NewList()
			l.MemAllocFromPoolAsync(&a, 8, 1, 1)
			l.MemAllocFromPoolAsync(&b, 8, 1, 1)
			if n, r := lib.Table.Run(l); n != 2 || r != cuapi.Success {
				wrong = append(wrong, fmt.Sprint("run: ", n, r))
			}
			l.Free()
			expect("first of list", uint64(a), word(cuapi.IDMemAllocFromPoolAsync, 0))
			expect("second of list", uint64(b), word(cuapi.IDMemAllocFromPoolAsync, 0))
			done <- strings.Join(wrong, "; ")
		}()
		if wrong := <-done; wrong != "" {
			t.Error(wrong)
		}
	}
	if calls != 4*rounds {
		t.Errorf("%d callbacks, want %d", calls, 4*rounds)
	}
}

// What an argument points to lives as long as the call, though only the call
// knows it: the collector runs inside the call.
func TestArgumentLives(t *testing.T) {
	s, lib := openStub(t)
	for name, call := range map[string]func(p *[64]byte){
		"call": func(p *[64]byte) { lib.Table.ModuleGetFunction(new(cuapi.Function), 1, &p[0]) },
		"long call": func(p *[64]byte) {
			lib.Table.LaunchKernel(1, 1, 1, 1, 1, 1, 1, 1, 2, nil, hostPtrs(p))
		},
		"list": func(p *[64]byte) {
			l := cuapi.NewList()
			l.LaunchKernel(1, 1, 1, 1, 1, 1, 1, 1, 2, nil, hostPtrs(p))
			lib.Table.Run(l)
			l.Free()
		},
	} {
		w, run := weakly(call)
		calls, alive := 0, false
		s.onCall(func() {
			calls++
			runtime.GC()
			alive = w.Value() != nil
		})
		run()
		if calls != 1 || !alive {
			t.Errorf("%s: %d calls, argument alive: %v", name, calls, alive)
		}
		runtime.GC()
		runtime.GC() // a pooled list may keep what it held for one cycle, no longer
		if w.Value() != nil {
			t.Errorf("%s: the argument is still held after the call", name)
		}
	}
}

// weakly makes an argument that nothing but the call in run keeps.
func weakly(call func(*[64]byte)) (weak.Pointer[[64]byte], func()) {
	p := new([64]byte)
	w := weak.Make(p)
	box := &p
	return w, func() {
		p := *box
		*box = nil
		call(p)
	}
}
