package archtest

import (
	"fmt"
	"go/ast"
	"maps"
	"regexp"
	"slices"
	"strings"
)

const purego = "github.com/ebitengine/purego"

// onlyTestsSimulate: the simulator is no part of a program that uses this
// library.
func onlyTestsSimulate(t tree) (bad []string) {
	return badImports(t, func(f *file, p string) bool {
		return (p == "cudasim" || strings.HasPrefix(p, "cudasim/")) && !f.isTest() && !free(f.pkg())
	})
}

// unsafeIsNamed: unsafe stands only in files that say so.
func unsafeIsNamed(t tree) (bad []string) {
	return badImports(t, func(f *file, p string) bool { return p == "unsafe" && !f.isUnsafe() })
}

// puregoIsLoaded: one package alone calls C.
func puregoIsLoaded(t tree) (bad []string) {
	return badImports(t, func(f *file, p string) bool {
		return (p == purego || strings.HasPrefix(p, purego+"/")) && f.pkg() != "internal/cuload"
	})
}

// noCgo: nothing needs a C compiler.
func noCgo(t tree) (bad []string) {
	return badImports(t, func(f *file, p string) bool { return p == "C" })
}

func badImports(t tree, is func(*file, string) bool) (bad []string) {
	for _, f := range t.goFiles() {
		for i, p := range f.imports() {
			if is(f, p) {
				bad = append(bad, fmt.Sprintf("%s: %s", f.at(f.syn.Imports[i]), p))
			}
		}
	}
	return bad
}

// noGoMemory: a HostPtr is made of a Go pointer only where unsafe stands. Its
// conversion needs no import of unsafe, so that the compiler does not tell.
// Tests of the simulator, where nothing is a device, may.
func noGoMemory(t tree) (bad []string) {
	return badCalls(t, func(f *file, fun string) bool {
		return !f.isUnsafe() && !f.isTest() && (fun == "cuapi.HostPtr" || fun == "HostPtr" && f.pkg() == "internal/cuapi")
	})
}

// noFinalizers: runtime.AddCleanup does not resurrect.
func noFinalizers(t tree) (bad []string) {
	return badCalls(t, func(_ *file, fun string) bool { return fun == "runtime.SetFinalizer" })
}

// noSleepingTests: a test waits for what it waits for, not for a while.
func noSleepingTests(t tree) (bad []string) {
	return badCalls(t, func(f *file, fun string) bool { return f.isTest() && fun == "time.Sleep" })
}

// skips are the tests that may be skipped, with the reason.
var skips = map[string]string{
	"internal/cuload/stub_unsafe_test.go": "the ABI test needs a C compiler; .ci/run sees to it that there is one",
}

// noSkips: a test that is skipped proves nothing.
func noSkips(t tree) (bad []string) {
	return badCalls(t, func(f *file, fun string) bool {
		_, method, _ := strings.Cut(fun, ".")
		return f.isTest() && skips[f.name] == "" && (method == "Skip" || method == "Skipf" || method == "SkipNow")
	})
}

// badCalls looks at calls of "f" and "x.f".
func badCalls(t tree, is func(f *file, fun string) bool) (bad []string) {
	for _, f := range t.goFiles() {
		ast.Inspect(f.syn, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			fun := ""
			switch e := call.Fun.(type) {
			case *ast.Ident:
				fun = e.Name
			case *ast.SelectorExpr:
				if x, ok := e.X.(*ast.Ident); ok {
					fun = x.Name + "." + e.Sel.Name
				} else {
					fun = "?." + e.Sel.Name
				}
			}
			if is(f, fun) {
				bad = append(bad, fmt.Sprintf("%s: %s", f.at(n), fun))
			}
			return true
		})
	}
	return bad
}

// Bounds of what a reader holds in mind.
const (
	maxLines = 600
	maxFiles = 15
)

// smallFiles: a file has at most 600 lines, unless it is generated.
func smallFiles(t tree) (bad []string) {
	for _, f := range t.goFiles() {
		if n := strings.Count(f.text, "\n"); n > maxLines && !strings.HasSuffix(f.base(), "_gen") && !strings.Contains(f.base(), "_gen_") {
			bad = append(bad, fmt.Sprintf("%s: %d lines, at most %d", f.name, n, maxLines))
		}
	}
	return bad
}

// variant is what a file's name ends with when it is a part of another's
// subject: its unsafe half, or the same for one platform.
var variant = regexp.MustCompile(`(_(unsafe|linux|windows|darwin|other|amd64|arm64|gen))+$`)

// smallPackages: a package has at most 15 files, its tests and doc.go apart.
// Variants of a file count once.
func smallPackages(t tree) (bad []string) {
	subjects := map[string]map[string]bool{}
	for _, f := range t.goFiles() {
		if f.isTest() || f.base() == "doc" {
			continue
		}
		if subjects[f.pkg()] == nil {
			subjects[f.pkg()] = map[string]bool{}
		}
		subjects[f.pkg()][variant.ReplaceAllString(f.base(), "")] = true
	}
	for pkg, names := range subjects {
		if len(names) > maxFiles {
			bad = append(bad, fmt.Sprintf("%s: %d files, at most %d", pkg, len(names), maxFiles))
		}
	}
	return bad
}

// The patterns are written so that they do not match themselves.
var (
	unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)
	machine    = regexp.MustCompile(`(^|[^\w.])/(ho` + `me|ro` + `ot|wo` + `rk|Us` + `ers)/\w|[A-Z]:\\Us` + `ers\\`)
)

// finished: what is left to be done stands in no file.
func finished(t tree) []string { return badLines(t, unfinished) }

// noMachine: no path of a machine on which something was built.
func noMachine(t tree) []string { return badLines(t, machine) }

func badLines(t tree, pattern *regexp.Regexp) (bad []string) {
	for name, f := range t {
		n := 0
		for line := range strings.Lines(f.text) {
			if n++; pattern.MatchString(line) {
				bad = append(bad, fmt.Sprintf("%s:%d: %s", name, n, strings.TrimSpace(line)))
			}
		}
	}
	return bad
}

// directs are the modules that this one may require.
var directs = map[string]bool{purego: true, "github.com/google/go-cmp": true}

// fewDependencies: go.mod requires nothing else, and replaces nothing.
func fewDependencies(t tree) (bad []string) {
	mod := t["go.mod"]
	if mod == nil {
		return []string{"go.mod is missing"}
	}
	block := ""
	for line := range strings.Lines(mod.text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			continue
		case len(words) == 2 && words[1] == "(":
			block = words[0]
			continue
		case words[0] == ")":
			block = ""
			continue
		case block != "":
			words = append([]string{block}, words...)
		}
		switch {
		case words[0] == "replace", words[0] == "exclude":
			bad = append(bad, "go.mod: "+strings.Join(words, " "))
		case words[0] == "require" && !strings.Contains(line, "// indirect") && !directs[words[1]]:
			bad = append(bad, "go.mod requires "+words[1])
		}
	}
	return bad
}

// licensed: the licence is Apache-2.0, and nothing is added to it.
func licensed(t tree) (bad []string) {
	f := t["LICENSE"]
	if f == nil {
		return []string{"LICENSE is missing"}
	}
	for _, words := range []string{"Apache License", "Version 2.0, January 2004", "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION", "END OF TERMS AND CONDITIONS"} {
		if !strings.Contains(f.text, words) {
			bad = append(bad, "LICENSE is not Apache-2.0: it lacks "+words)
		}
	}
	if n := len(f.text); n < 11000 || n > 11600 {
		bad = append(bad, fmt.Sprintf("LICENSE has %d bytes, Apache-2.0 about 11,350", n))
	}
	return bad
}

var starredTest = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9_]*)`\\*")

// starredTestsRan: a test that docs/EVIDENCE.md stars passed on a GPU.
func starredTestsRan(t tree) (bad []string) {
	var ran strings.Builder
	for name, f := range t {
		if strings.HasPrefix(name, "docs/evidence/") {
			ran.WriteString(f.text)
		}
	}
	page := t["docs/EVIDENCE.md"]
	if page == nil {
		return []string{"docs/EVIDENCE.md is missing"}
	}
	seen := map[string]bool{}
	for _, m := range starredTest.FindAllStringSubmatch(page.text, -1) {
		passed := regexp.MustCompile(`--- PASS: ` + m[1] + `(/[^ ]*)?/gpu `)
		if !seen[m[1]] && !passed.MatchString(ran.String()) {
			bad = append(bad, fmt.Sprintf("docs/EVIDENCE.md: %s did not pass on a GPU, says docs/evidence", m[1]))
		}
		seen[m[1]] = true
	}
	return bad
}

var namedTest = regexp.MustCompile("`((?:Test|Fuzz)[A-Z][A-Za-z0-9_]*)`")

// namedTestsExist: a test that a document names is there.
func namedTestsExist(t tree) (bad []string) {
	there := map[string]bool{}
	for _, f := range t.goFiles() {
		for _, d := range f.syn.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && f.isTest() {
				there[fn.Name.Name] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if !strings.HasSuffix(name, ".md") || strings.HasPrefix(name, "docs/evidence/") {
			continue
		}
		for _, m := range namedTest.FindAllStringSubmatch(t[name].text, -1) {
			if !there[m[1]] {
				bad = append(bad, fmt.Sprintf("%s: there is no test %s", name, m[1]))
			}
		}
	}
	return bad
}
