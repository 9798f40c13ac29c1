package dst

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// chunk is how many actions a process does: what is retained for good is so for
// the life of a process.
const chunk = 500000

const tallyLine = "TALLY "

// TestMillions runs as many actions as -steps says in processes of their own, one
// after another, each with a seed that nobody ran before.
func TestMillions(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var sum tally
	seeds := 0
	for want := or(*stepsFlag, 40000); sum.steps < want; seeds++ {
		seed := rand.Uint64()
		fmt.Printf("seed %d\n", seed)
		out, err := exec.CommandContext(t.Context(), exe, "-test.timeout", "10m", "-seed", fmt.Sprint(seed), "-steps", fmt.Sprint(min(chunk, want-sum.steps))).CombinedOutput()
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, out)
		}
		_, line, _ := strings.Cut(string(out), tallyLine)
		line, _, _ = strings.Cut(line, "\n")
		var of Tally
		if err := json.Unmarshal([]byte(line), &of); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		sum.add(&tally{steps: of.Steps, nested: of.Nested, faults: of.Faults, losses: of.Losses, calls: of.Calls, worlds: of.Worlds})
	}
	t.Logf("%d actions of %d worlds, %d faults, %d losses, in %v", sum.steps, sum.worlds, sum.faults, sum.losses, time.Since(began))
	if *writeFlag {
		writeRun(t, sum, seeds, began)
	}
}

// Tally is what a process tells.
type Tally struct{ Steps, Nested, Faults, Losses, Calls, Worlds int }

// tell prints it.
func (s *tally) tell(t *testing.T) {
	line, err := json.Marshal(Tally{s.steps, s.nested, s.faults, s.losses, s.calls, s.worlds})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("%s%s\n", tallyLine, line)
}

// commit is what is checked out.
func commit(t *testing.T) string {
	out, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
