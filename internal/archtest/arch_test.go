package archtest

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/driver/drivertest"
)

// The rules, each with a bad example: the files of a tree on which it must
// complain so many times.
var rules = []struct {
	name  string
	check func(tree) []string
	bad   map[string]string
	times int
}{
	{"imports point down", importsPointDown, map[string]string{
		"internal/own/a.go":    "package own\nimport _ \"github.com/purecuda/purecuda/driver\"",
		"driver/a.go":          "package driver\nimport _ \"github.com/purecuda/purecuda/internal/own\"",
		"driver/a_test.go":     "package driver\nimport _ \"github.com/purecuda/purecuda/publish\"",
		"novel/a.go":           "package novel",
		"publish/a.go":         "package publish\nimport (\n_ \"os\"\n_ \"github.com/purecuda/purecuda/cudasim\"\n)",
		"examples/x/main.go":   "package main\nimport _ \"github.com/purecuda/purecuda/cudasim\"",
		"bench/y/main.go":      "package main\nimport _ \"github.com/purecuda/purecuda/internal/cuapi\"",
		"retirequeue/x/go.mod": "module x", "retirequeue/x/a.go": "package x",
	}, 3},
	{"layers exist", layersExist, emptyLayers(), 2},
	{"only tests simulate", onlyTestsSimulate, map[string]string{
		"kernel/a.go":      "package kernel\nimport _ \"github.com/purecuda/purecuda/cudasim/fault\"",
		"driver/a.go":      "package driver\nimport _ \"github.com/purecuda/purecuda/cudasim\"",
		"driver/a_test.go": "package driver\nimport _ \"github.com/purecuda/purecuda/cudasim\"",
		"cmd/x/main.go":    "package main\nimport _ \"github.com/purecuda/purecuda/cudasim\"",
	}, 2},
	{"unsafe is named", unsafeIsNamed, map[string]string{
		"a/a.go":             "package a\nimport _ \"unsafe\"",
		"a/b_unsafe.go":      "package a\nimport _ \"unsafe\"",
		"a/c_unsafe_test.go": "package a\nimport _ \"unsafe\"",
		"a/d_test.go":        "//go:build never\n\npackage a\nimport \"unsafe\"\nvar _ unsafe.Pointer",
	}, 2},
	{"purego is in the loader", puregoIsLoaded, map[string]string{
		"driver/a.go":          "package driver\nimport _ \"github.com/ebitengine/purego\"",
		"event/a_test.go":      "package event\nimport _ \"github.com/ebitengine/purego/objc\"",
		"internal/cuload/a.go": "package cuload\nimport _ \"github.com/ebitengine/purego\"",
		"bench/x/go.mod":       "module x", "bench/x/a.go": "package x\nimport _ \"github.com/ebitengine/purego\"",
	}, 2},
	{"no cgo", noCgo, map[string]string{"a/a.go": "package a\nimport \"C\""}, 1},
	{"no Go memory for the device", noGoMemory, map[string]string{
		"a/a.go":              "package a\nvar p = cuapi.HostPtr(&x)\nvar q cuapi.HostPtr",
		"internal/cuapi/a.go": "package cuapi\nvar p = HostPtr(&x)",
		"a/a_unsafe.go":       "package a\nvar r = cuapi.HostPtr(&x)",
	}, 2},
	{"no finalizers", noFinalizers, map[string]string{"a/a.go": "package a\nfunc f() { runtime.SetFinalizer(p, nil) }"}, 1},
	{"no sleeping tests", noSleepingTests, map[string]string{
		"a/a_test.go": "package a\nfunc f() { time.Sleep(1) }",
		"a/a.go":      "package a\nfunc g() { time.Sleep(1) }",
	}, 1},
	{"no skips", noSkips, map[string]string{
		"a/a_test.go":                         "package a\nfunc f(t *testing.T) { t.Skip(); r.t.Skipf(\"\"); tb.SkipNow(); bufio.Skip2() }",
		"internal/cuload/stub_unsafe_test.go": "package cuload\nfunc f(t *testing.T) { t.Skip() }",
	}, 3},
	{"small files", smallFiles, map[string]string{
		"a/a.go": "package a\n" + strings.Repeat("\n", 600), "a/b_gen.go": "package a\n" + strings.Repeat("\n", 700),
		"a/c_gen_unsafe.go": "package a\n" + strings.Repeat("\n", 700), "a/d.go": "package a\n" + strings.Repeat("\n", 599),
	}, 1},
	{"small packages", smallPackages, manyFiles(), 2},
	{"finished", finished, map[string]string{"a/a.go": "package a // TO" + "DO: all of it", "b.md": "FIX" + "ME\nautoTO" + "DOs"}, 2},
	{"no machine's paths", noMachine, map[string]string{
		"a.md": "see /ho" + "me/me/x\n(/wo" + "rk/main)\nC:\\Us" + "ers\\me", "b.txt": "http://x/wo" + "rk/in\n./wo" + "rk/in\n/usr/lib",
	}, 3},
	{"few dependencies", fewDependencies, map[string]string{
		"go.mod": "module m\nrequire (\n\tgithub.com/ebitengine/purego v1\n\texample.com/a v1\n\texample.com/b v1 // indirect\n)\nrequire example.com/c v1\nreplace example.com/a => ../a\n",
	}, 3},
	{"few dependencies, no go.mod", fewDependencies, nil, 1},
	{"licensed", licensed, map[string]string{"LICENSE": "MIT"}, 5},
	{"licensed at all", licensed, nil, 1},
	{"GPU tests are listed", gpuTestsAreListed, map[string]string{
		gpuList:       "# the list\na TestGPUOne\na TestGPUGone\n",
		"a/a_test.go": "//go:build gpu && linux\n\npackage a\nfunc TestGPUOne() {}\nfunc TestGPUTwo() {}\nfunc TestThree() {}\nfunc helper() {}",
		"a/b_test.go": "//go:build !gpu\n\npackage a\nfunc TestFour() {}\nfunc TestGPUFive() {}",
		"a/c_test.go": "package a\nfunc TestMain() {}",
	}, 4},
	{"GPU tests have a list", gpuTestsAreListed, nil, 1},
	{"evidence exists", conformance, nil, 1},
	{"starred tests ran", starredTestsRan, map[string]string{
		"docs/EVIDENCE.md":   "`TestRan`*, `TestDeep`*, `TestNot`* and `TestPlain`",
		"docs/evidence/2.md": "    --- PASS: TestRan/gpu (0.00s)\n            --- PASS: TestDeep/x/gpu (0.1s)\n--- PASS: TestNot (0.00s)\n    --- PASS: TestNot/sim (0.00s)",
	}, 1},
	{"starred tests have a page", starredTestsRan, nil, 1},
	{"named tests exist", namedTestsExist, map[string]string{
		"a/a_test.go": "package a\nfunc TestHere() {}\nfunc FuzzHere() {}", "docs/a.md": "`TestHere`, `FuzzHere`, `TestGone`* and TestSomething", "b.md": "`TestNowhere`",
	}, 2},
}

// emptyLayers has a file in each layer but one, and a test alone in another.
func emptyLayers() map[string]string {
	files := map[string]string{}
	for _, l := range layers {
		files[l.pkg+"/a.go"] = "package a"
	}
	delete(files, "driver/a.go")
	delete(files, "internal/hold/a.go")
	files["internal/hold/a_test.go"] = "package a"
	return files
}

func manyFiles() map[string]string {
	files := map[string]string{}
	for _, c := range "abcdefghijklmnop" {
		files["a/"+string(c)+".go"] = "package a"
		files["a/"+string(c)+"_test.go"] = "package a"
		files["b/"+string(c)+"_test.go"] = "package b"
		files["c/x_"+string(c)+".go"] = "package c"
	}
	delete(files, "c/x_a.go")
	for _, v := range []string{"", "_unsafe", "_linux", "_gen_unsafe"} { // one subject
		files["c/y"+v+".go"] = "package c"
	}
	return files
}

// conformance looks up the evidence of the conformance suite's cases.
func conformance(t tree) []string {
	var list []expectation
	for _, c := range drivertest.Cases() {
		list = append(list, expectation{c.Name, c.Evidence})
	}
	return evidenceExists(t, list)
}

func TestRules(t *testing.T) {
	module := readTree(t)
	if len(module.goFiles()) < 50 {
		t.Fatalf("only %d Go files were found", len(module.goFiles()))
	}
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			for _, bad := range r.check(module) {
				t.Error(bad)
			}
		})
	}
}

func TestRulesCanFail(t *testing.T) {
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			example := tree{}
			for name, text := range r.bad {
				example.add(t, name, text)
			}
			if bad := r.check(example); len(bad) != r.times {
				t.Errorf("%d complaints about the bad example, want %d: %q", len(bad), r.times, bad)
			}
		})
	}
}

func TestLayers(t *testing.T) {
	for _, bad := range layersAreOrdered(layers) {
		t.Error(bad)
	}
	upward := []layer{{"a", "b"}, {"b", ""}}
	if bad := layersAreOrdered(upward); len(bad) != 1 {
		t.Errorf("an upward import is allowed: %q", bad)
	}
}

func TestEvidence(t *testing.T) {
	example := tree{}
	example.add(t, factsFile, "## One\n\nwater is\nwet\n\n## Two\n\nfire is hot\n")
	example.add(t, "docs/evidence/a.md", "    --- PASS: TestGPU/Good (0.01s)\n")
	for evidence, want := range map[string]int{
		"One: water is wet": 0, "Two: fire is hot": 0, "One: fire is hot": 1, "Three: water is wet": 1,
		"nothing": 1, "unverified: so I heard": 0, "evidence: a.md": 0, "evidence: b.md": 1,
	} {
		if bad := evidenceExists(example, []expectation{{"Good", evidence}}); len(bad) != want {
			t.Errorf("evidence %q: %q, want %d complaints", evidence, bad, want)
		}
	}
	if bad := evidenceExists(example, []expectation{{"Other", "evidence: a.md"}}); len(bad) != 1 {
		t.Errorf("a case that did not pass has evidence: %q", bad)
	}
}

// TestGenerated runs the generator's own comparison, which fails on a stale
// file.
func TestGenerated(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "run", "./internal/gen", "-root", "internal", "-check")
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	stale := exec.CommandContext(t.Context(), "go", "run", "./internal/gen", "-root", "internal/archtest/testdata/stale", "-check")
	stale.Dir = "../.."
	if out, err := stale.CombinedOutput(); err == nil || !slices.Contains(strings.Fields(string(out)), "stale:") {
		t.Errorf("a stale file is not noticed: %v\n%s", err, out)
	}
}
