package difftest_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/driver/difftest"
	"github.com/purecuda/purecuda/driver/drivertest"
)

// The seeds that are compared: those of living contexts, and those of contexts
// that are lost in the midst.
const (
	seeds     = 3000
	lostSeeds = 40
)

// recorded holds a line for each seed: what hardware answered, as a digest.
// TestGPUDifferential writes it.
const recorded = "testdata/differential.txt"

// onSim plays the sequence of a seed on a simulator of its own.
func onSim(t *testing.T, seed uint64, lose bool) []string {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stage, err := difftest.NewStage(openSim(t))
	if err != nil {
		t.Fatal(err)
	}
	return stage.Play(seed, lose)
}

// key names a seed in the records.
func key(seed uint64, lose bool) string {
	if lose {
		return fmt.Sprintf("lost %d", seed)
	}
	return fmt.Sprintf("seed %d", seed)
}

func digest(lines []string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(lines, "\n"))))[:16]
}

// TestDifferential compares the simulator with what hardware answered to the same
// sequences. Where it fails, either the simulator changed, or the sequences did:
// TestGPUDifferential tells which on a GPU, and records them again.
func TestDifferential(t *testing.T) {
	text, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		seed, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		lose := f[0] == "lost"
		if got := digest(onSim(t, seed, lose)); got != f[2] {
			t.Errorf("%s: the simulator answers differently than hardware did", key(seed, lose))
		}
		n++
	}
	if n != seeds+lostSeeds {
		t.Errorf("%d sequences are recorded, want %d", n, seeds+lostSeeds)
	}
}

// openSim opens a simulator that can play the kernels of drivertest.PTX.
func openSim(t *testing.T) *driver.Driver {
	t.Helper()
	sim := cudasim.New(cudasim.Config{})
	for name, play := range drivertest.Kernels {
		sim.Kernel(name, func(l *cudasim.Launch) { play(l) })
	}
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	return drv
}
