package main

import (
	"fmt"
	"strings"
)

// inPointers are parameters that look like out-parameters to C and are none.
var inPointers = map[string]bool{
	"cuLaunchKernel.kernelParams":     true,
	"cuLaunchKernel.extra":            true,
	"cuModuleLoadDataEx.options":      true,
	"cuModuleLoadDataEx.optionValues": true,
	"cuMemPoolGetAccess.location":     true,
}

// outSize is the C expression for how many bytes the call writes through its
// i-th parameter, or "" if it is no out-parameter.
func outSize(e entry, i int) string {
	p := e.Params[i]
	switch {
	case p.C == "void*" && e.Func != "cuMemPoolSetAttribute" && (p.Name == "data" || p.Name == "value"):
		return "8"
	case p.C == "void*", !strings.HasSuffix(p.C, "*"), inPointers[e.Func+"."+p.Name]:
		return ""
	case strings.HasPrefix(p.C, "const ") && !strings.HasSuffix(p.C, "**"):
		return ""
	}
	return fmt.Sprintf("sizeof *a%d", i)
}

// stubFile writes the C library that stands in for the driver in tests of the
// calls: it shows what C saw, and writes and returns what the test asks for.
func stubFile(entries []entry) string {
	var b strings.Builder
	b.WriteString(header)
	fmt.Fprintf(&b, `#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef int CUresult, CUdevice;
typedef int CUdevice_attribute, CUdevice_P2PAttribute, CUpointer_attribute, CUfunction_attribute;
typedef int CUmemPool_attribute, CUmemAccess_flags, CUstreamCaptureMode, CUstreamCaptureStatus, CUjit_option;
typedef unsigned int CUlogIterator;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUfunction, *CUgraph, *CUmemoryPool;
typedef void (*CUhostFn)(void *);
typedef size_t (*CUoccupancyB2DSize)(int);
typedef struct { char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
	int allocType, handleTypes;
	CUmemLocation location;
	void *win32SecurityAttributes;
	size_t maxSize;
	unsigned short usage;
	unsigned char reserved[54];
} CUmemPoolProps;

enum { ENTRIES = %d, ARGS = %d, TRACE = 256 };

/* One call as C saw it; outs are the bytes written through each argument. */
struct record {
	uint64_t seq, entry, symbol, nargs, args[ARGS], outs[ARGS];
};

/* Read and written by the tests, which mirror its layout: words only. */
struct state {
	uint64_t entries;
	uint64_t seq;              /* calls so far */
	uint64_t quiet;            /* not 0: record nothing, only return */
	uint64_t version;          /* what cuDriverGetVersion says; 0: a pattern */
	uint64_t procs;            /* lookups: 0 write a pattern, 1 fail with 500, 2 give a null pointer */
	uint64_t failAt, failCode; /* the call of this number fails so */
	uint64_t callback;         /* void (*)(uint64_t entry), called before the outs are written */
	uint64_t misaligned;       /* calls that came with a stack not aligned to 16 bytes */
	uint64_t results[ENTRIES];
	struct record last[ENTRIES];
	struct record trace[TRACE];
} stub_state = {.entries = ENTRIES, .version = 13000, .procs = 1};

/* The ABI leaves the upper half of a 32-bit result undefined. */
#define DIRTY 0xdeadbeef00000000u

static uint64_t stub_enter(uint64_t entry, uint64_t frame) {
	if (frame %% 16)
		__atomic_add_fetch(&stub_state.misaligned, 1, __ATOMIC_SEQ_CST);
	uint64_t seq = __atomic_add_fetch(&stub_state.seq, 1, __ATOMIC_SEQ_CST);
	if (stub_state.callback)
		((void (*)(uint64_t))stub_state.callback)(entry);
	return seq;
}

static uint64_t stub_fill(void *p, size_t n, uint64_t entry, uint64_t arg) {
	if (!p)
		return 0;
	for (size_t i = 0; i < n; i++)
		((unsigned char *)p)[i] = 0x81 + 31 * entry + 7 * arg + 13 * i;
	return n;
}

static uint64_t stub_leave(struct record *r) {
	uint64_t code = stub_state.results[r->entry];
	if (r->seq == stub_state.failAt)
		code = stub_state.failCode;
	stub_state.last[r->entry] = *r;
	stub_state.trace[r->seq %% TRACE] = *r;
	return DIRTY | (uint32_t)code;
}

static void stub_lookup(const char *name, void **pfn, int version, int *status);

`, len(entries), maxArity)
	for id, e := range entries {
		for s, sym := range e.Symbols {
			params := make([]string, len(e.Params))
			args := make([]string, len(e.Params))
			for i, p := range e.Params {
				params[i] = fmt.Sprintf("%s a%d", p.C, i)
				args[i] = fmt.Sprintf("(uint64_t)a%d", i)
			}
			list := strings.Join(params, ", ")
			if list == "" {
				list, args = "void", []string{"0"}
			}
			fmt.Fprintf(&b, "uint64_t %s(%s) {\n\tif (stub_state.quiet)\n\t\treturn DIRTY;\n", sym.Name, list)
			fmt.Fprintf(&b, "\tstruct record r = {stub_enter(%d, (uint64_t)__builtin_frame_address(0)), %d, %d, %d, {%s}, {0}};\n", id, id, s, len(e.Params), strings.Join(args, ", "))
			for i := range e.Params {
				if size := outSize(e, i); size != "" {
					fmt.Fprintf(&b, "\tr.outs[%d] = stub_fill((void *)a%d, %s, %d, %d);\n", i, i, size, id, i)
				}
			}
			switch e.Name {
			case "DriverGetVersion":
				b.WriteString("\tif (stub_state.version)\n\t\t*a0 = stub_state.version;\n")
			case "GetProcAddress":
				b.WriteString("\tif (stub_state.procs)\n\t\tstub_lookup(a0, a1, a2, NULL);\n\tif (stub_state.procs == 1 && !*a1)\n\t\treturn DIRTY | 500;\n")
			case "GetProcAddressV2":
				b.WriteString("\tif (stub_state.procs)\n\t\tstub_lookup(a0, a1, a2, a4);\n\tif (stub_state.procs == 1 && !*a1)\n\t\treturn DIRTY | 500;\n")
			}
			b.WriteString("\treturn stub_leave(&r);\n}\n\n")
		}
	}
	b.WriteString("static const struct {\n\tconst char *name;\n\tint since;\n\tvoid *fn;\n} stub_symbols[] = {\n")
	for _, e := range entries {
		for _, s := range e.Symbols {
			fmt.Fprintf(&b, "\t{%q, %d, (void *)%s},\n", s.Name, s.Since, s.Name)
		}
	}
	b.WriteString(`};

/* As cuGetProcAddress: by the name without its version, the newest function
   that is not newer than the version asked for. */
static void stub_lookup(const char *name, void **pfn, int version, int *status) {
	int best = 0, known = 0;
	*pfn = NULL;
	for (size_t i = 0; i < sizeof stub_symbols / sizeof *stub_symbols; i++) {
		const char *full = stub_symbols[i].name, *end = strstr(full, "_v");
		size_t n = end ? (size_t)(end - full) : strlen(full);
		if (n != strlen(name) || memcmp(full, name, n) != 0)
			continue;
		known = 1;
		if (stub_symbols[i].since <= version && stub_symbols[i].since > best) {
			best = stub_symbols[i].since;
			*pfn = stub_symbols[i].fn;
		}
	}
	if (status)
		*status = best ? 0 : known ? 2 : 1;
}

/* uint64_t stub_keeps(fn, block): call fn(block) with a mark in each register
   that a function must keep, and return how many it did not. */
#if defined(__x86_64__)
__asm__(
	".text\n.globl stub_keeps\n.type stub_keeps, @function\nstub_keeps:\n"
	"push %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\nsub $8, %rsp\n"
	"mov %rdi, %rax\nmov %rsi, %rdi\n"
	"mov $101, %rbx\nmov $102, %rbp\nmov $103, %r12\nmov $104, %r13\nmov $105, %r14\nmov $106, %r15\n"
	"call *%rax\n"
	"xor %eax, %eax\n"
	"cmp $101, %rbx\nje 1f\ninc %eax\n1: cmp $102, %rbp\nje 1f\ninc %eax\n1: cmp $103, %r12\nje 1f\ninc %eax\n"
	"1: cmp $104, %r13\nje 1f\ninc %eax\n1: cmp $105, %r14\nje 1f\ninc %eax\n1: cmp $106, %r15\nje 1f\ninc %eax\n1:\n"
	"add $8, %rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n");
#elif defined(__aarch64__)
#define EACH(op) op(19) op(20) op(21) op(22) op(23) op(24) op(25) op(26) op(27) op(28)
#define MARK(n) "mov x" #n ", #1" #n "\n"
#define CHECK(n) "cmp x" #n ", #1" #n "\ncinc x0, x0, ne\n"
__asm__(
	".text\n.globl stub_keeps\n.type stub_keeps, %function\nstub_keeps:\n"
	"stp x29, x30, [sp, #-96]!\nstp x19, x20, [sp, #16]\nstp x21, x22, [sp, #32]\n"
	"stp x23, x24, [sp, #48]\nstp x25, x26, [sp, #64]\nstp x27, x28, [sp, #80]\n"
	"mov x29, #129\nmov x9, x0\nmov x0, x1\n"
	EACH(MARK) "blr x9\nmov x0, #0\n" EACH(CHECK) CHECK(29)
	"ldp x19, x20, [sp, #16]\nldp x21, x22, [sp, #32]\nldp x23, x24, [sp, #48]\n"
	"ldp x25, x26, [sp, #64]\nldp x27, x28, [sp, #80]\nldp x29, x30, [sp], #96\nret\n");
#endif
`)
	return b.String()
}
