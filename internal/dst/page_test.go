package dst

import (
	"bytes"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/template"
	"time"
)

// pageFile is written by these tests alone, with -write.
const pageFile = "../../docs/simulation.md"

var writeFlag = flag.Bool("write", false, "write what was found into docs/simulation.md")

//go:embed testdata/page.md
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// The parts of the page that tests fill are between two such lines.
const (
	tableBegin, tableEnd = "<!-- mutations -->\n", "<!-- end of mutations -->\n"
	runBegin, runEnd     = "<!-- run -->\n", "<!-- end of run -->\n"
)

// A page is the table of the mutations, as this run fills it.
type page struct {
	old  string
	mu   sync.Mutex
	rows []string
}

func readPage(t *testing.T) *page {
	old, err := os.ReadFile(pageFile)
	if err != nil && !*writeFlag {
		t.Fatal(err)
	}
	return &page{old: string(old), rows: make([]string, len(mutations))}
}

func (p *page) row(i int, text string) {
	p.mu.Lock()
	p.rows[i] = text
	p.mu.Unlock()
}

// told is what the page says of the mutation i.
func (p *page) told(i int) string {
	lines := strings.Split(strings.TrimSpace(between(p.old, tableBegin, tableEnd)), "\n")
	return lines[min(i+2, len(lines)-1)]
}

func between(text, begin, end string) string {
	_, text, _ = strings.Cut(text, begin)
	text, _, _ = strings.Cut(text, end)
	return text
}

// render makes the page of its parts.
func render(t *testing.T, run, table string) string {
	var b bytes.Buffer
	err := pageTemplate.Execute(&b, map[string]any{
		"Run": runBegin + run + runEnd, "Table": tableBegin + table + tableEnd,
		"Count": len(mutations), "Seed": mutationSeed, "Steps": mutationSteps,
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// check writes the table, or fails if the page has other rows, or other words
// around them. Within how many steps a mutation is found is no promise.
func (p *page) check(t *testing.T) {
	if *writeFlag {
		if slices.Contains(p.rows, "") {
			t.Error("the page is not written: some mutations were not found, or not run")
			return
		}
		table := "| what is broken | law | file | steps | what tells |\n|---|---|---|---|---|\n" + strings.Join(p.rows, "\n") + "\n"
		if err := os.WriteFile(pageFile, []byte(render(t, between(p.old, runBegin, runEnd), table)), 0o644); err != nil {
			t.Error(err)
		}
		return
	}
	table := between(p.old, tableBegin, tableEnd)
	lines := strings.Split(strings.TrimSpace(table), "\n")
	if len(lines) != len(mutations)+2 {
		t.Fatalf("%s has %d mutations, the test %d: run it with -args -write", pageFile, len(lines)-2, len(mutations))
	}
	for i, m := range mutations {
		if want := fmt.Sprintf("| %s | %s | `%s` |", m.name, m.law, m.file); !strings.HasPrefix(lines[i+2], want) {
			t.Errorf("%s is not about these mutations: row %d is %q, want %q: run it with -args -write", pageFile, i, lines[i+2], want)
		}
	}
	if render(t, between(p.old, runBegin, runEnd), table) != p.old {
		t.Errorf("%s has other words than its template: run it with -args -write", pageFile)
	}
}

// writeRun notes the figures of a long run in the page.
func writeRun(t *testing.T, sum tally, seeds int, began time.Time) {
	p := readPage(t)
	took := time.Since(began)
	text := fmt.Sprintf(`| | |
|---|---|
| actions | %d, and %d in the midst of others |
| worlds | %d, of %d seeds |
| driver calls | %d |
| faults injected | %d |
| contexts lost | %d |
| violations | none |
| actions a second, in each process | %d |
| date | %s |
| commit | %s |
`, sum.steps, sum.nested, sum.worlds, seeds, sum.calls, sum.faults, sum.losses, int(float64(sum.steps)/took.Seconds()), began.UTC().Format(time.DateOnly), commit(t))
	if err := os.WriteFile(pageFile, []byte(render(t, text, between(p.old, tableBegin, tableEnd))), 0o644); err != nil {
		t.Fatal(err)
	}
}
