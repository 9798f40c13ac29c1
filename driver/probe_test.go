package driver_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// Each call of the probe may fail: Primary tells which, whatever the code, and a
// second attempt works. Not yet is the answer of a query, and no failure.
func TestFailuresOfTheProbe(t *testing.T) {
	for id, notReady := range map[cuapi.ID]bool{
		cuapi.IDCtxGetCurrent: true, cuapi.IDEventRecord: true, cuapi.IDEventQuery: false, cuapi.IDEventSynchronize: true,
		cuapi.IDStreamWaitEvent: true, cuapi.IDStreamQuery: false,
	} {
		for code, fails := range map[cuapi.Result]bool{cuapi.InvalidValue: true, cuapi.LaunchFailed: true, cuapi.NotReady: notReady} {
			var on atomic.Bool
			_, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
				if c.ID == id && on.CompareAndSwap(true, false) {
					return code
				}
				return next()
			})
			dev, err := d.Device(0)
			must(t, err)
			on.Store(true)
			ctx, err := dev.Primary()
			var e *driver.Error
			switch {
			case on.Load():
				t.Errorf("the probe does not call %s", cuapi.Entries[id].Symbol())
			case (err != nil) != fails:
				t.Errorf("%s with %d: %v", cuapi.Entries[id].Symbol(), code, err)
			case err != nil && (!errors.As(err, &e) || e.Op != cuapi.Entries[id].Symbol() || e.Code != driver.Result(code)):
				t.Errorf("%s with %d: another error: %v", cuapi.Entries[id].Symbol(), code, err)
			}
			if err != nil {
				ctx = primary(t, d, 0)
			}
			must(t, ctx.Shutdown(context.Background()))
		}
	}
}
