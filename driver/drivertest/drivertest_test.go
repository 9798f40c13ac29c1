package drivertest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver/drivertest"
)

func TestSim(t *testing.T) { drivertest.Run(t, openSim) }

// openSim opens a simulator with Go functions for the cases' kernels.
func openSim(t *testing.T) drivertest.Target {
	queues, _ := strconv.Atoi(os.Getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
	sim := cudasim.New(cudasim.Config{HardwareQueues: queues})
	sim.Kernel("fill", func(l *cudasim.Launch) {
		dst := l.Bytes(0)
		for i := range int(l.U32(2)) {
			binary.NativeEndian.PutUint32(dst[4*i:], l.U32(1))
		}
	})
	sim.Kernel("scale", func(l *cudasim.Launch) {
		dst, src := l.Bytes(0), l.Bytes(1)
		for i := range int(l.U64(3)) {
			v := math.Float32frombits(binary.NativeEndian.Uint32(src[4*i:])) * l.F32(2)
			binary.NativeEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	})
	sim.Kernel("wild", func(l *cudasim.Launch) { l.Fault(700) })
	sim.Kernel("nop", func(*cudasim.Launch) {})
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
