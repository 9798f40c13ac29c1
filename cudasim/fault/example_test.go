package fault_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/cudasim/fault"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// echo is a program's own code: it takes text to the device and back.
func echo(rt *publish.Runtime, text string) (string, error) {
	in, err := rt.Pinned(len(text))
	if err != nil {
		return "", err
	}
	defer in.Close()
	copy(in.Bytes(), text)
	var pub *publish.Publication
	err = rt.WithSession(func(s *publish.Session) error {
		v, err := s.Alloc(publish.U8, len(text))
		if err != nil {
			return err
		}
		defer v.Close()
		up, err := s.Upload(v, in) // moves in
		if err != nil {
			return err
		}
		defer up.Close()
		pub, err = s.Publish(v) // moves v
		return err
	})
	if err != nil {
		return "", err
	}
	defer pub.Close()
	out, err := rt.Pinned(len(text))
	if err != nil {
		return "", err
	}
	defer out.Close()
	down, err := pub.DownloadInto(out) // moves both
	if err != nil {
		return "", err
	}
	defer down.Close()
	out, err = down.Wait(context.Background())
	if err != nil {
		return "", err
	}
	defer out.Close()
	return string(out.Bytes()), nil
}

// open is what a program does before.
func open(drv *driver.Driver) (*publish.Runtime, *driver.Context, error) {
	dev, err := drv.Device(0)
	if err != nil {
		return nil, nil, err
	}
	ctx, err := dev.Primary()
	if err != nil {
		return nil, nil, err
	}
	rt, err := publish.New(ctx, publish.Config{})
	if err != nil {
		return nil, nil, err
	}
	return rt, ctx, rt.Reserve(2, 8) // so that no run takes more than another
}

// One call of a program fails, as a line of text says.
func Example() {
	sim := cudasim.New(cudasim.Config{})
	base, err := sim.Driver() // with a GPU: driver.Open()
	check(err)
	inj, err := fault.Wrap(base, fault.Plan{}) // set-up works
	check(err)
	rt, _, err := open(inj.Driver())
	check(err)

	plan, err := fault.Parse("fail cuMemcpyDtoHAsync #1 with CUDA_ERROR_ILLEGAL_ADDRESS after")
	check(err)
	check(inj.Arm(plan))
	_, err = echo(rt, "hello")
	inj.Disarm()

	fmt.Println(plan)
	fmt.Println(errors.Is(err, driver.ErrIllegalAddress), inj.Times())
	fmt.Println(rt.Err() != nil, len(sim.Violations()))
	// Output:
	// fail cuMemcpyDtoHAsync #1 with CUDA_ERROR_ILLEGAL_ADDRESS after
	// true 1
	// true 0
}

// Every driver call of a program fails once, and nothing bad comes of it: the
// error is told, the text is right or absent, no rule of the driver is broken.
func ExampleEach() {
	report, err := fault.Each(fault.Loop{
		// These are called as often as the library looks whether work is done.
		Varies: []string{"cuEventQuery", "cuThreadExchangeStreamCaptureMode"},
	}, func(c *fault.Case) error {
		sim := cudasim.New(cudasim.Config{})
		base, err := sim.Driver()
		if err != nil {
			return err
		}
		inj, err := fault.Wrap(base, fault.Plan{})
		if err != nil {
			return err
		}
		rt, ctx, err := open(inj.Driver())
		if err != nil {
			return err
		}
		if err := c.Arm(inj); err != nil { // what follows fails
			return err
		}
		text, err := echo(rt, "hello")
		inj.Disarm()
		if err == nil && text != "hello" {
			return fmt.Errorf("no error, and the text is %q", text)
		}
		if hit, faulted := c.Injected(); err != nil && (!faulted || !errors.Is(err, hit.Code)) {
			return err
		}
		if v := sim.Violations(); len(v) > 0 {
			return v[0]
		}
		if !c.Faulted() { // after a fault memory may rightly be retained, and the ends tell
			return errors.Join(rt.Shutdown(context.Background()), ctx.Shutdown(context.Background()), sim.Close())
		}
		return nil
	})
	check(err)
	fmt.Println("downloads that failed:", report.Injected["cuMemcpyDtoHAsync_v2"])
	// Output: downloads that failed: 6
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The line of a case, as Each reports it, runs that case alone: from an environment
// variable, a flag, or pasted into a test.
func ExampleReplay() {
	line := "fail cuStreamCreate #1 with CUDA_ERROR_OUT_OF_MEMORY"
	plan, err := fault.Parse(line)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = fault.Replay(plan, func(c *fault.Case) error {
		drv, err := cudasim.New(cudasim.Config{}).Driver()
		if err != nil {
			return err
		}
		inj, err := fault.Wrap(drv, fault.Plan{})
		if err != nil {
			return err
		}
		dev, err := inj.Driver().Device(0)
		if err != nil {
			return err
		}
		ctx, err := dev.Primary()
		if err != nil {
			return err
		}
		if err := c.Arm(inj); err != nil {
			return err
		}
		_, err = stream.New(ctx)
		fmt.Println(err)
		return nil
	})
	fmt.Println(err)
	// Output:
	// cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory
	// <nil>
}
