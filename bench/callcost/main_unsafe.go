// Command callcost compares what a driver call costs through purecuda's
// trampolines, purego's SyscallN and cgo, over a loop in C, on the stub library
// of internal/cuload: the calls do nothing, so what remains is the crossing.
//
//	go run . [-check]
//
// It needs cgo and gcc. The ways take turns in every round, and the figures
// are medians. It fails when a call through a trampoline allocates. With -check
// it fails too when a bar of the design is missed: the bars are on the last row,
// the mean over the argument lists, since single rows differ by more than they
// are away from the bar from run to run.
package main

/*
#include <stdint.h>
#include <stddef.h>

// The prototypes of cuda.h, as a cgo binding that loads the driver at run time
// would call them.
typedef struct CUevent_st *CUevent;
typedef struct CUstream_st *CUstream;
typedef struct CUfunc_st *CUfunction;
typedef int (*fn1)(CUevent);
typedef int (*fn2)(CUevent, CUstream);
typedef int (*fn4)(void *, unsigned long long, size_t, CUstream);
typedef int (*fn11)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);

static fn1 f1;
static fn2 f2;
static fn4 f4;
static fn11 f11;

static void bind(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) { f1 = (fn1)a, f2 = (fn2)b, f4 = (fn4)c, f11 = (fn11)d; }
static int call1(CUevent a) { return f1(a); }
static int call2(CUevent a, CUstream b) { return f2(a, b); }
static int call4(void *a, unsigned long long b, size_t c, CUstream d) { return f4(a, b, c, d); }
static int call11(CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h, CUstream i, void **j, void **k) {
	return f11(a, b, c, d, e, f, g, h, i, j, k);
}
static void loop1(int n) { while (n-- > 0) f1(NULL); }
static void loop2(int n) { while (n-- > 0) f2(NULL, NULL); }
static void loop4(void *a, int n) { while (n-- > 0) f4(a, 1, 8, NULL); }
static void loop11(void **j, int n) { while (n-- > 0) f11(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, j, NULL); }
*/
import "C"

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/cuload"
)

// Bars of the design: the overhead over C, as a part of the others'.
const (
	barCgo      = 0.8
	barSyscallN = 0.4
)

// The ways to call, in the order of the columns.
var ways = []string{"C", "trampoline", "SyscallN", "cgo"}

// A shape is one argument list, and n calls with it in each way.
type shape struct {
	name string
	run  [4]func(n int)
}

func main() {
	check := flag.Bool("check", false, "fail when a bar is missed")
	stub := flag.String("stub", "../../internal/cuload/testdata/stub.c", "source of the stub library")
	rounds := flag.Int("rounds", 101, "rounds, of which the medians are taken")
	calls := flag.Int("calls", 20000, "calls of each way in a round")
	flag.Parse()
	bars, bare, err := measure(*stub, *rounds, *calls)
	if err != nil {
		fmt.Fprintln(os.Stderr, "callcost:", err)
		os.Exit(2)
	}
	if !bare || *check && !bars {
		os.Exit(1)
	}
}

// measure prints the table, and tells whether all bars hold, and whether no
// call through a trampoline allocates.
func measure(stub string, rounds, calls int) (bars, bare bool, err error) {
	all, err := shapes(stub)
	if err != nil {
		return false, false, err
	}
	bare = true
	var mean [4]float64
	fmt.Println("calls               C  trampoline  SyscallN     cgo  ns/call |  of cgo  of SyscallN | allocations")
	for _, s := range all {
		ns := medians(s, rounds, calls)
		allocs := testing.AllocsPerRun(1000, func() { s.run[1](1) })
		row(s.name, ns, allocs)
		bare = bare && allocs == 0
		for way := range ways {
			mean[way] += ns[way] / float64(len(all))
		}
	}
	ofCgo, ofSyscallN := row("mean", mean, 0)
	bars = ofCgo <= barCgo && ofSyscallN <= barSyscallN
	verdict := func(ok bool) string { return map[bool]string{true: "met", false: "MISSED"}[ok] }
	fmt.Printf("bars %s: on the mean at most %v of cgo's overhead over C and %v of SyscallN's\n", verdict(bars), barCgo, barSyscallN)
	fmt.Printf("bar %s: no allocation\n", verdict(bare))
	return bars, bare, nil
}

// row prints a row of the table, and returns the trampoline's overhead over C
// as a part of cgo's and SyscallN's.
func row(name string, ns [4]float64, allocs float64) (ofCgo, ofSyscallN float64) {
	over := func(way int) float64 { return ns[way] - ns[0] }
	ofCgo, ofSyscallN = over(1)/over(3), over(1)/over(2)
	fmt.Printf("%-14s %6.1f  %10.1f  %8.1f  %6.1f          |   %5.2f        %5.2f | %v\n", name, ns[0], ns[1], ns[2], ns[3], ofCgo, ofSyscallN, allocs)
	return ofCgo, ofSyscallN
}

// medians times the ways in turn and returns ns per call. Each round begins
// with another way, so that none always follows the same.
func medians(s shape, rounds, calls int) (ns [4]float64) {
	var times [4][]float64
	for r := range rounds {
		for i := range ways {
			way := (r + i) % len(ways)
			start := time.Now()
			s.run[way](calls)
			times[way] = append(times[way], float64(time.Since(start).Nanoseconds())/float64(calls))
		}
	}
	for way := range ways {
		slices.Sort(times[way])
		ns[way] = times[way][rounds/2]
	}
	return ns
}

// shapes builds the stub library, opens it and prepares the calls.
func shapes(source string) ([]shape, error) {
	dir, err := os.MkdirTemp("", "callcost")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "libcuda.so.1")
	if out, err := exec.Command("gcc", "-O2", "-shared", "-fPIC", "-o", path, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, out)
	}
	lib, err := cuload.Open(path)
	if err != nil {
		return nil, err
	}
	h, err := purego.Dlopen(path, purego.RTLD_NOW)
	if err != nil {
		return nil, err
	}
	addr := func(name string) uintptr {
		a, e := purego.Dlsym(h, name)
		if e != nil {
			err = e
		}
		return a
	}
	state := addr("stub_state")
	query, record, copied, launch := addr("cuEventQuery"), addr("cuEventRecord"), addr("cuMemcpyDtoHAsync_v2"), addr("cuLaunchKernel")
	if err != nil {
		return nil, err
	}
	(*[3]uint64)(pointer(state))[2] = 1 // quiet: the calls only return
	t := lib.Table
	// Handles and memory of C, in variables as a caller has them.
	host := pointer(state)
	params, extra := (*cuapi.HostPtr)(host), (*cuapi.HostPtr)(nil)
	cParams, cExtra := (*unsafe.Pointer)(host), (*unsafe.Pointer)(nil)
	var event C.CUevent
	var stream C.CUstream
	var function C.CUfunction
	C.bind(C.uintptr_t(query), C.uintptr_t(record), C.uintptr_t(copied), C.uintptr_t(launch))
	return []shape{
		{"1 argument", [4]func(int){
			func(n int) { C.loop1(C.int(n)) },
			func(n int) {
				for range n {
					t.EventQuery(1)
				}
			},
			func(n int) {
				for range n {
					purego.SyscallN(query, 1)
				}
			},
			func(n int) {
				for range n {
					C.call1(event)
				}
			},
		}},
		{"2 arguments", [4]func(int){
			func(n int) { C.loop2(C.int(n)) },
			func(n int) {
				for range n {
					t.EventRecord(1, 2)
				}
			},
			func(n int) {
				for range n {
					purego.SyscallN(record, 1, 2)
				}
			},
			func(n int) {
				for range n {
					C.call2(event, stream)
				}
			},
		}},
		{"4 arguments", [4]func(int){
			func(n int) { C.loop4(host, C.int(n)) },
			func(n int) {
				for range n {
					t.MemcpyDtoHAsync(cuapi.HostPtr(host), 1, 8, 2)
				}
			},
			func(n int) {
				for range n {
					purego.SyscallN(copied, uintptr(host), 1, 8, 2)
				}
			},
			func(n int) {
				for range n {
					C.call4(host, 1, 8, stream)
				}
			},
		}},
		{"11 arguments", [4]func(int){
			func(n int) { C.loop11(cParams, C.int(n)) },
			func(n int) {
				for range n {
					t.LaunchKernel(1, 1, 1, 1, 1, 1, 1, 0, 2, params, extra)
				}
			},
			func(n int) {
				for range n {
					purego.SyscallN(launch, 1, 1, 1, 1, 1, 1, 1, 0, 2, uintptr(unsafe.Pointer(params)), uintptr(unsafe.Pointer(extra)))
				}
			},
			func(n int) {
				for range n {
					C.call11(function, 1, 1, 1, 1, 1, 1, 0, stream, cParams, cExtra)
				}
			},
		}},
	}, nil
}

// pointer is an address of C as a pointer.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
