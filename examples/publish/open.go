package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
)

// An opened driver.
type opened struct {
	*driver.Driver
	how string       // which one it is, and why
	end func() error // ends the simulator: it fails if the driver was misused
}

// open opens the driver that the flag asks for: "auto", "sim", or a library.
func open(which string) (*opened, error) {
	switch which {
	case "sim":
		return simulate("simulated, as asked for")
	case "auto":
		drv, err := driver.Open()
		switch {
		case err != nil:
			return simulate("simulated, since no CUDA driver can be opened: " + short(err))
		case drv.DeviceCount() == 0:
			return simulate("simulated, since the CUDA driver " + drv.Source() + " sees no device")
		}
		return realDriver(drv, "the first that was found"), nil
	}
	drv, err := driver.OpenPath(which)
	if err != nil {
		return nil, fmt.Errorf("-driver %s: %w", which, err)
	}
	if drv.DeviceCount() == 0 {
		return nil, fmt.Errorf("-driver %s: the driver sees no device", which)
	}
	return realDriver(drv, "as asked for"), nil
}

func realDriver(drv *driver.Driver, why string) *opened {
	how := fmt.Sprintf("CUDA %d.%d, %s, %s", drv.Version()/1000, drv.Version()%1000/10, drv.Source(), why)
	return &opened{drv, how, func() error { return nil }}
}

func simulate(how string) (*opened, error) {
	sim := cudasim.New(cudasim.Config{})
	addKernels(sim)
	drv, err := sim.Driver()
	if err != nil {
		return nil, err
	}
	return &opened{drv, how, sim.Close}, nil
}

// short picks one reason of those that the search gives, a library for each:
// the first that is there and does not serve, else the first.
func short(err error) string {
	var load *driver.LoadError
	if !errors.As(err, &load) || len(load.Attempts) == 0 {
		return oneLine(err)
	}
	pick := load.Attempts[0]
	for _, a := range load.Attempts {
		if !errors.Is(a.Err, fs.ErrNotExist) {
			pick = a
			break
		}
	}
	if pick.Path == "" {
		return oneLine(pick.Err)
	}
	return pick.Path + ": " + oneLine(pick.Err)
}
