//go:build gpu

package publish_test

import (
	"sync"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

func init() { machines = append(machines, machine{"gpu", openGPU}) }

var open = sync.OnceValues(driver.Open)

func openGPU(r *rig, _ options) *cuapi.Table {
	drv, err := open()
	must(r.t, err)
	return wire.Table(drv)
}

// TestGPUWorkflow goes the whole way on the machine's driver. The tests that run
// on each machine do so too, as their subtests "gpu".
func TestGPUWorkflow(t *testing.T) {
	r := newRigOn(t, machines[1], options{})
	for _, n := range []int{1, 64, 4096, 1 << 20, 64<<20 + 1} {
		must(t, r.workflow(random(n)))
	}
}
