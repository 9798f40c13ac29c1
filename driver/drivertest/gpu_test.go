//go:build gpu

package drivertest_test

import (
	"sync"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/driver/drivertest"
)

var open = sync.OnceValues(driver.Open)

// TestGPU runs the cases on the machine's driver, and fails where there is
// none.
func TestGPU(t *testing.T) {
	drv, err := open()
	if err != nil {
		t.Fatal(err)
	}
	if drv.DeviceCount() == 0 {
		t.Fatal("the driver has no device")
	}
	drivertest.Run(t, func(*testing.T) drivertest.Target { return drivertest.Target{Driver: drv} })
}
