package main

import (
	"fmt"
	"strings"
)

// goName makes a parameter's name fit for Go: "hStream" stays, keywords and
// names of the generated code get a suffix.
func goName(p param) string {
	switch p.Name {
	case "func", "map", "type", "l", "t", "r", "c", "f", "w":
		return p.Name + "_"
	}
	return strings.ToLower(p.Name[:1]) + p.Name[1:]
}

func goParams(e entry) string {
	var b strings.Builder
	for i, p := range e.Params {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s", goName(p), p.Go)
	}
	return b.String()
}

func goArgs(e entry) string {
	names := make([]string, len(e.Params))
	for i, p := range e.Params {
		names[i] = goName(p)
	}
	return strings.Join(names, ", ")
}

// word is the expression that widens one argument to the 64 bits of its slot.
func word(p param) string {
	switch {
	case p.pointer():
		return "uint64(uintptr(unsafe.Pointer(" + goName(p) + ")))"
	case p.signed():
		return "uint64(int64(" + goName(p) + "))"
	}
	return "uint64(" + goName(p) + ")"
}

func tableFile(entries []entry) string {
	var b strings.Builder
	b.WriteString(header + "package cuapi\n\n")
	b.WriteString("// Table holds one typed function for each driver entry point. A nil field is\n// an entry point that this driver lacks.\ntype Table struct {\n")
	for _, e := range entries {
		fmt.Fprintf(&b, "\t// %s: %s.\n\t%s func(%s) Result\n", e.Func, blockDoc(e), e.Name, goParams(e))
	}
	b.WriteString("\n\t// Run executes a list of calls in order and stops at the first that does\n\t// not return Success. It returns how many succeeded and that result.\n\tRun func(l *List) (int, Result)\n\n\t// HostWait tells how a host function waits for the host, or why it can not.\n\t// It makes no driver call. It is nil where nobody knows.\n\tHostWait func() (*HostWait, error)\n}\n\n")
	b.WriteString("// An ID names one entry point of the manifest.\ntype ID uint8\n\nconst (\n")
	for i, e := range entries {
		if i == 0 {
			fmt.Fprintf(&b, "\tID%s ID = iota\n", e.Name)
		} else {
			fmt.Fprintf(&b, "\tID%s\n", e.Name)
		}
	}
	fmt.Fprintf(&b, "\n\t// NumEntries counts the entry points.\n\tNumEntries = %d\n)\n\n", len(entries))
	b.WriteString("// Entries describes the entry points, in the manifest's order: Entries[id].\nvar Entries = [NumEntries]Entry{\n")
	for _, e := range entries {
		fmt.Fprintf(&b, "\t{ID: ID%s, Name: %q, Symbols: []Symbol{", e.Name, e.Name)
		for i, s := range e.Symbols {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "{%q, %d}", s.Name, s.Since)
		}
		fmt.Fprintf(&b, "}, Required: %v, Block: Block%s, List: %v, Args: %d},\n", e.Required, strings.ToUpper(e.Block[:1])+e.Block[1:], e.List, len(e.Params))
	}
	b.WriteString("}\n\n")
	b.WriteString("// Has tells whether the driver behind t has the entry point.\nfunc (t *Table) Has(id ID) bool {\n\tswitch id {\n")
	for _, e := range entries {
		fmt.Fprintf(&b, "\tcase ID%s:\n\t\treturn t.%s != nil\n", e.Name, e.Name)
	}
	b.WriteString("\t}\n\treturn false\n}\n\n")
	b.WriteString("// Remove makes the entry point absent, as on a driver that lacks it.\nfunc (t *Table) Remove(id ID) {\n\tswitch id {\n")
	for _, e := range entries {
		fmt.Fprintf(&b, "\tcase ID%s:\n\t\tt.%s = nil\n", e.Name, e.Name)
	}
	b.WriteString("\t}\n}\n")
	return b.String()
}

func blockDoc(e entry) string {
	need := "required"
	if !e.Required {
		need = "optional"
	}
	return fmt.Sprintf("CUDA %d.%d, %s, block %s", e.since()/1000, e.since()%1000/10, need, e.Block)
}

func listFile(entries []entry) string {
	var b strings.Builder
	b.WriteString(header + "package cuapi\n\nimport \"unsafe\"\n\n")
	for _, e := range entries {
		if !e.List {
			continue
		}
		fmt.Fprintf(&b, "// %s appends the call.\nfunc (l *List) %s(%s) {\n\top := l.next(ID%s, %d)\n", e.Name, e.Name, goParams(e), e.Name, len(e.Params))
		ptr := 0
		for i, p := range e.Params {
			if p.pointer() {
				fmt.Fprintf(&b, "\tl.keep[l.n-1][%d] = HostPtr(%s)\n", ptr, goName(p))
				ptr++
			}
			fmt.Fprintf(&b, "\top.args[%d] = %s\n", i, word(p))
		}
		b.WriteString("}\n\n")
	}
	b.WriteString("// Step makes the i-th call of the list through its own field of the table.\nfunc (t *Table) Step(l *List, i int) Result {\n\top := &l.ops[i]\n\tswitch l.ids[i] {\n")
	for _, e := range entries {
		if !e.List {
			continue
		}
		args := make([]string, len(e.Params))
		ptr := 0
		for i, p := range e.Params {
			if p.pointer() {
				args[i] = fmt.Sprintf("(%s)(l.keep[i][%d])", p.Go, ptr)
				ptr++
			} else {
				args[i] = fmt.Sprintf("%s(op.args[%d])", p.Go, i)
			}
		}
		fmt.Fprintf(&b, "\tcase ID%s:\n\t\tif t.%s == nil {\n\t\t\treturn NotFound\n\t\t}\n\t\treturn t.%s(%s)\n", e.Name, e.Name, e.Name, strings.Join(args, ", "))
	}
	b.WriteString("\t}\n\treturn NotFound\n}\n")
	return b.String()
}

func interceptFile(entries []entry) string {
	var b strings.Builder
	b.WriteString(header + "package cuapi\n\nimport \"unsafe\"\n\n")
	b.WriteString(`// Intercept returns a table whose every call goes through around, which makes
// the call itself by calling next. Lists are executed call by call, each
// through around. Entry points that t lacks stay absent.
func Intercept(t *Table, around func(c Call, next func() Result) Result) *Table {
	w := &Table{}
`)
	for _, e := range entries {
		fmt.Fprintf(&b, "\tif f := t.%s; f != nil {\n\t\tw.%s = func(%s) Result {\n\t\t\tc := Call{ID: ID%s, N: %d}\n", e.Name, e.Name, goParams(e), e.Name, len(e.Params))
		for i, p := range e.Params {
			fmt.Fprintf(&b, "\t\t\tc.Args[%d] = %s\n", i, word(p))
		}
		fmt.Fprintf(&b, "\t\t\treturn around(c, func() Result { return f(%s) })\n\t\t}\n\t}\n", goArgs(e))
	}
	b.WriteString("\tw.Run = func(l *List) (int, Result) { return RunEach(w, l) }\n\tw.HostWait = t.HostWait\n\treturn w\n}\n")
	return b.String()
}
