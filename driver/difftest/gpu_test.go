//go:build gpu

package difftest_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/driver/difftest"
	"github.com/purecuda/purecuda/internal/child"
)

const (
	seedsEnv  = "PURECUDA_SEEDS"  // what a child plays: "seed 0 250"
	recordEnv = "PURECUDA_RECORD" // the folder that the records are written to
	perChild  = 250
)

// TestGPUDifferential plays sequences on the simulator and on the GPU, in
// processes of their own, and compares them line by line.
func TestGPUDifferential(t *testing.T) {
	if child.Is() {
		playChild(t)
		return
	}
	type example struct {
		n    int
		text []string
	}
	found := map[string]*example{}
	records := map[string]string{}
	died := 0
	run := func(kind string, from, to uint64) (next uint64) {
		out, status, err := child.End(t, 8*time.Second, fmt.Sprintf("%s=%s %d %d", seedsEnv, kind, from, to))
		next = from
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			if rest, ok := strings.CutPrefix(line, "PLAYED "); ok {
				i := strings.LastIndex(rest, " ")
				records[rest[:i]] = rest[i+1:]
				next++
			} else if rest, ok := strings.CutPrefix(line, "DIFFERS "); ok {
				group, text, _ := strings.Cut(rest, " | ")
				if found[group] == nil {
					found[group] = &example{}
				}
				found[group].n++
				found[group].text = append(found[group].text, text)
			}
		}
		if next < to { // it died, or lost its context
			if err != nil || status != 0 {
				died++
				t.Errorf("%s %d ended the process: %v\n%s", kind, next, err, last(out))
			}
			next++
		}
		return next
	}
	for from := uint64(0); from < seeds && died < 10; {
		from = run("seed", from, min(seeds, from-from%perChild+perChild))
	}
	for from := uint64(0); from < lostSeeds; from++ {
		run("lost", from, from+1)
	}
	total := 0
	for _, group := range slices.Sorted(maps.Keys(found)) {
		e := found[group]
		total += e.n
		t.Errorf("%d times: %s", e.n, group)
		for _, text := range e.text[:min(2, len(e.text))] {
			t.Log("   " + strings.ReplaceAll(text, " / ", "\n        "))
		}
	}
	t.Logf("%d sequences of %d steps and %d with a lost context were played on both, %d differ", seeds, difftest.Steps, lostSeeds, total)
	if dir := os.Getenv(recordEnv); dir != "" && !t.Failed() {
		writeRecords(t, dir, records)
	}
}

// last is what a process was about when it died.
func last(out string) string {
	lines := strings.Split(out, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, "SIG") || strings.HasPrefix(l, "fatal") || strings.HasPrefix(l, "panic") {
			return strings.Join(lines[max(0, i-14):min(len(lines), i+30)], "\n")
		}
	}
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

func writeRecords(t *testing.T, dir string, records map[string]string) {
	var b strings.Builder
	b.WriteString("# What a GPU answered to the sequences of the differential test, as digests.\n# Written by TestGPUDifferential; docs/evidence tells of the run.\n")
	for _, kind := range []struct {
		lose bool
		n    uint64
	}{{false, seeds}, {true, lostSeeds}} {
		for seed := range kind.n {
			k := key(seed, kind.lose)
			if records[k] == "" {
				t.Fatalf("%s was not played", k)
			}
			fmt.Fprintln(&b, k, records[k])
		}
	}
	if err := os.WriteFile(filepath.Join(dir, filepath.Base(recorded)), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

var result = regexp.MustCompile(`^(\w+)\(.*\) = (-?\d+)`)

// playChild plays some seeds on both, and prints what it saw.
func playChild(t *testing.T) {
	f := strings.Fields(os.Getenv(seedsEnv))
	lose := f[0] == "lost"
	from, _ := strconv.ParseUint(f[1], 10, 64)
	to, _ := strconv.ParseUint(f[2], 10, 64)
	drv, err := driver.Open()
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	stage, err := difftest.NewStage(drv)
	if err != nil {
		t.Fatal(err)
	}
	for seed := from; seed < to; seed++ {
		sim := onSim(t, seed, lose)
		stage.Line = func(l string) { fmt.Println("  ", l) } // should the process die
		gpu := stage.Play(seed, lose)
		for i := range max(len(sim), len(gpu)) {
			a, b := at(sim, i), at(gpu, i)
			if a == b {
				continue
			}
			before := sim[max(0, i-6):min(i, len(sim))]
			group := fmt.Sprintf("%s: sim %s, GPU %s", name(a), answer(a), answer(b))
			fmt.Printf("DIFFERS %s | %s, line %d: / %s / sim: %s / GPU: %s\n", group, key(seed, lose), i, strings.Join(before, " / "), a, b)
			break
		}
		fmt.Printf("PLAYED %s %s\n", key(seed, lose), digest(gpu))
		if !lose && !alive(gpu) {
			return // the next one needs another process
		}
	}
}

// alive tells whether the last sequence left a context that works.
func alive(lines []string) bool {
	for _, l := range lines {
		if strings.HasPrefix(l, "cuCtxSynchronize()") {
			return strings.HasSuffix(l, " = 0")
		}
	}
	return false
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "nothing"
}

func name(line string) string {
	if m := result.FindStringSubmatch(line); m != nil {
		return m[1]
	}
	return "bytes"
}

func answer(line string) string {
	if m := result.FindStringSubmatch(line); m != nil {
		return m[2]
	}
	return line
}
