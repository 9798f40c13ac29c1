package main

import (
	"fmt"
	"strings"
)

// Build constraints of the three ways to call the driver. They are disjoint,
// and unsupported.go in internal/cuload takes what they leave.
const (
	nativeTags   = "linux && !android && (amd64 || arm64) && !purecuda_portable"
	portableTags = "linux && !android && ((purecuda_portable && (amd64 || arm64)) || loong64 || ppc64le || riscv64)"
	windowsTags  = "windows && (amd64 || arm64)"
)

// maxArity is the longest argument list with a trampoline: cuapi.MaxArgs.
const maxArity = 11

// qualified is the parameter's Go type as other packages write it.
func qualified(p param) string {
	base := strings.TrimLeft(p.Go, "*")
	if base[0] >= 'A' && base[0] <= 'Z' {
		return p.Go[:len(p.Go)-len(base)] + "cuapi." + base
	}
	return p.Go
}

func qualifiedParams(e entry) string {
	list := make([]string, len(e.Params))
	for i, p := range e.Params {
		list[i] = goName(p) + " " + qualified(p)
	}
	return strings.Join(list, ", ")
}

// fillFunc writes the function that fills a Table; body writes the statements
// of one call, with the entry point's address in the variable sym.
func fillFunc(b *strings.Builder, entries []entry, body func(e entry) string) {
	b.WriteString("// fill sets each field of t whose entry point has an address, and Run.\n")
	b.WriteString("func fill(t *cuapi.Table, addrs *[cuapi.NumEntries]uintptr) {\n")
	for _, e := range entries {
		fmt.Fprintf(b, "\tif sym := addrs[cuapi.ID%s]; sym != 0 {\n\t\tt.%s = func(%s) cuapi.Result {\n%s\t\t}\n\t}\n", e.Name, e.Name, qualifiedParams(e), body(e))
	}
}

func nativeFile(entries []entry) string {
	var b strings.Builder
	b.WriteString(header + "//go:build " + nativeTags + "\n\npackage cuload\n\nimport (\n\t\"unsafe\"\n\n\t\"github.com/purecuda/purecuda/internal/cuapi\"\n)\n\n")
	b.WriteString("// Addresses of the trampolines, set in tramp_*.s: callN calls a C function of\n// N arguments.\nvar (\n")
	for n := 0; n <= maxArity; n++ {
		fmt.Fprintf(&b, "\tcall%d uintptr\n", n)
	}
	b.WriteString(")\n\n")
	fillFunc(&b, entries, func(e entry) string {
		var fields, values strings.Builder
		for i, p := range e.Params {
			if p.pointer() {
				fmt.Fprintf(&fields, "; a%d %s", i, qualified(p))
				fmt.Fprintf(&values, ", %s", goName(p))
			} else {
				fmt.Fprintf(&fields, "; a%d uint64", i)
				fmt.Fprintf(&values, ", %s", word(p))
			}
		}
		return fmt.Sprintf("\t\t\tb := &struct{ fn uintptr%s }{sym%s}\n\t\t\treturn cuapi.Result(cgocall(call%d, unsafe.Pointer(b)))\n", fields.String(), values.String(), len(e.Params))
	})
	b.WriteString("\tt.Run = func(l *cuapi.List) (int, cuapi.Result) { return run(l, addrs) }\n}\n")
	return b.String()
}

func portableFile(entries []entry) string {
	return syscallFile(entries, portableTags, "github.com/ebitengine/purego", "purego")
}

func windowsFile(entries []entry) string {
	return syscallFile(entries, windowsTags, "syscall", "syscall")
}

// syscallFile writes calls through a SyscallN function. Each address must
// stand literally in its argument list: only there does the compiler keep what
// it points to alive, and on the heap.
func syscallFile(entries []entry, tags, path, pkg string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s//go:build %s\n\npackage cuload\n\nimport (\n", header, tags)
	if path == "syscall" {
		b.WriteString("\t\"syscall\"\n")
	}
	b.WriteString("\t\"unsafe\"\n\n")
	if path != "syscall" {
		fmt.Fprintf(&b, "\t%q\n", path)
	}
	b.WriteString("\t\"github.com/purecuda/purecuda/internal/cuapi\"\n)\n\n")
	fillFunc(&b, entries, func(e entry) string {
		args := "sym"
		for _, p := range e.Params {
			if p.pointer() {
				args += ", uintptr(unsafe.Pointer(" + goName(p) + "))"
			} else {
				args += ", uintptr(" + goName(p) + ")"
			}
		}
		return fmt.Sprintf("\t\t\tr, _, _ := %s.SyscallN(%s)\n\t\t\treturn cuapi.Result(r)\n", pkg, args)
	})
	b.WriteString("\tt.Run = func(l *cuapi.List) (int, cuapi.Result) { return cuapi.RunEach(t, l) }\n}\n")
	return b.String()
}
