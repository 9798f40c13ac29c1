package archtest

import (
	"fmt"
	"go/ast"
	"go/build/constraint"
	"maps"
	"slices"
	"strings"
)

const gpuList = "docs/gpu-tests.txt"

// gpuTestsAreListed compares the tests that need a GPU with the list of them:
// the tests with the build tag gpu, one a line, as "package Test".
func gpuTestsAreListed(t tree) (bad []string) {
	list := t[gpuList]
	if list == nil {
		return []string{gpuList + " is missing"}
	}
	listed := map[string]bool{}
	for line := range strings.Lines(list.text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			listed[line] = true
		}
	}
	for _, f := range t.goFiles() {
		gpu := needsGPU(f)
		for _, d := range f.syn.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !f.isTest() || !strings.HasPrefix(fn.Name.Name, "Test") || fn.Name.Name == "TestMain" {
				continue
			}
			entry := f.pkg() + " " + fn.Name.Name
			switch {
			case gpu != strings.HasPrefix(fn.Name.Name, "TestGPU"):
				bad = append(bad, fmt.Sprintf("%s: a test has the build tag gpu and a name that begins with TestGPU, or neither", f.at(fn)))
			case gpu && !listed[entry]:
				bad = append(bad, fmt.Sprintf("%s: %q is not in %s", f.at(fn), entry, gpuList))
			}
			if gpu {
				delete(listed, entry)
			}
		}
	}
	for _, entry := range slices.Sorted(maps.Keys(listed)) {
		bad = append(bad, fmt.Sprintf("%s: %q is no test with the build tag gpu", gpuList, entry))
	}
	return bad
}

// needsGPU tells whether a file is built only with the tag gpu.
func needsGPU(f *file) bool {
	for line := range strings.Lines(f.text) {
		if !constraint.IsGoBuild(line) {
			continue
		}
		x, err := constraint.Parse(strings.TrimSpace(line))
		if err != nil {
			return false
		}
		with := x.Eval(func(string) bool { return true })
		without := x.Eval(func(tag string) bool { return tag != "gpu" })
		return with && !without
	}
	return false
}

// factsFile is what evidence cites.
const factsFile = "docs/driver-facts.md"

// An expectation is a case of the conformance suite.
type expectation struct{ name, evidence string }

// evidenceExists looks the evidence of the cases up: "section: words" must be
// words of that section of docs/driver-facts.md.
func evidenceExists(t tree, cases []expectation) (bad []string) {
	facts := t[factsFile]
	if facts == nil {
		return []string{factsFile + " is missing"}
	}
	for _, c := range cases {
		section, words, ok := strings.Cut(c.evidence, ": ")
		switch {
		case !ok || words == "":
			bad = append(bad, fmt.Sprintf("case %s: evidence %q is not of the form \"section: words\"", c.name, c.evidence))
		case section == "unverified" || section == "design":
		case section == "evidence":
			if t["docs/evidence/"+words] == nil {
				bad = append(bad, fmt.Sprintf("case %s: there is no docs/evidence/%s", c.name, words))
			} else if !strings.Contains(t["docs/evidence/"+words].text, "--- PASS: TestGPU/"+c.name+" ") {
				bad = append(bad, fmt.Sprintf("case %s did not pass in docs/evidence/%s", c.name, words))
			}
		case !strings.Contains(sectionOf(facts.text, section), oneLine(words)):
			bad = append(bad, fmt.Sprintf("case %s: section %q of %s does not say %q", c.name, section, factsFile, words))
		}
	}
	return bad
}

// sectionOf returns the text under the heading that begins so.
func sectionOf(text, heading string) string {
	var b strings.Builder
	in := false
	for line := range strings.Lines(text) {
		if h, ok := strings.CutPrefix(line, "## "); ok {
			in = strings.HasPrefix(h, heading)
			continue
		}
		if in {
			b.WriteString(line)
		}
	}
	return oneLine(b.String())
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
