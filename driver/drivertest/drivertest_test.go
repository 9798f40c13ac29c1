package drivertest_test

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver/drivertest"
)

func TestSim(t *testing.T) { drivertest.Run(t, openSim) }

// openSim opens a simulator that can play the cases' kernels.
func openSim(t *testing.T) drivertest.Target {
	queues, _ := strconv.Atoi(os.Getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
	sim := cudasim.New(cudasim.Config{HardwareQueues: queues})
	for name, play := range drivertest.Kernels {
		sim.Kernel(name, func(l *cudasim.Launch) { play(l) })
	}
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	return drivertest.Target{Driver: drv, Blocked: sim.Blocked, Done: func(misuse bool) error {
		err := sim.Close()
		if !misuse {
			return err
		}
		var found *cudasim.CloseError
		if !errors.As(err, &found) || len(found.Violations) == 0 || len(found.Left) > 0 {
			return fmt.Errorf("the simulator did not notice the misuse alone: %w", err)
		}
		return nil
	}}
}

func TestCasesAreNamed(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range drivertest.Cases() {
		if c.Name == "" || c.Evidence == "" || seen[c.Name] {
			t.Errorf("case %q: a name of its own and evidence are needed", c.Name)
		}
		seen[c.Name] = true
	}
}
