package cudasim_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// ptx declares the kernels of the code under test. With a GPU it is compiled
// code; the simulator reads the declarations alone.
const ptx = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry invert(.param .u64 picture, .param .u32 n) { ret; }
`

// invert is code that uses purecuda, and knows nothing of the simulator: it
// inverts a picture on the device.
func invert(drv *driver.Driver, picture []byte) (err error) {
	ctx := context.Background()
	dev, err := drv.Device(0)
	if err != nil {
		return err
	}
	cu, err := dev.Primary()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cu.Shutdown(ctx)) }()
	rt, err := publish.New(cu, publish.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Shutdown(ctx)) }()
	mod, err := kernel.Load(cu, []byte(ptx))
	if err != nil {
		return err
	}
	f, err := mod.Function("invert")
	if err != nil {
		return err
	}
	buf, err := rt.Pinned(len(picture))
	if err != nil {
		return err
	}
	copy(buf.Bytes(), picture)
	var up *publish.Transfer
	var pub *publish.Publication
	err = rt.WithSession(func(s *publish.Session) error {
		v, err := s.Alloc(publish.U8, len(picture))
		if err != nil {
			return err
		}
		if up, err = s.Upload(v, buf); err != nil {
			return err
		}
		if err := s.Launch(f, kernel.Grid(len(picture)), publish.Out(v), kernel.U32(uint32(len(picture)))); err != nil {
			return err
		}
		pub, err = s.Publish(v)
		return err
	})
	if err != nil {
		return err
	}
	if buf, err = up.Wait(ctx); err != nil {
		return err
	}
	down, err := pub.DownloadInto(buf)
	if err != nil {
		return err
	}
	if buf, err = down.Wait(ctx); err != nil {
		return err
	}
	copy(picture, buf.Bytes())
	return buf.Close()
}

// TestInvert is a test of that code without a GPU. ForTest fails it with every
// violation, and with everything that invert leaves behind.
func TestInvert(t *testing.T) {
	sim := cudasim.ForTest(t, cudasim.Config{})
	sim.Kernel("invert", func(l *cudasim.Launch) {
		picture := l.Bytes(0)
		for i := range l.U32(1) {
			picture[i] = ^picture[i]
		}
	})
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	picture := []byte{0, 1, 255}
	if err := invert(drv, picture); err != nil {
		t.Fatal(err)
	}
	if want := string([]byte{255, 254, 0}); string(picture) != want {
		t.Errorf("got %x, want %x", picture, want)
	}
}

// A program that uses purecuda runs on the simulator unchanged. In a test, ForTest
// makes the simulator and closes it.
func ExampleForTest() {
	t := &exampleTest{} // in a test: its *testing.T
	sim := cudasim.ForTest(t, cudasim.Config{})
	sim.Kernel("invert", func(l *cudasim.Launch) {
		for i := range l.U32(1) {
			l.Bytes(0)[i] ^= 0xFF
		}
	})
	drv, err := sim.Driver()
	check(err)
	picture := []byte{0, 1, 255}
	check(invert(drv, picture))
	fmt.Println(picture)
	t.end()
	// Output:
	// [255 254 0]
	// failures: 0
}

// start opens device 0 of a simulated driver.
func start(sim *cudasim.Sim) (*driver.Context, *publish.Runtime) {
	drv, err := sim.Driver()
	check(err)
	dev, err := drv.Device(0)
	check(err)
	cu, err := dev.Primary()
	check(err)
	rt, err := publish.New(cu, publish.Config{})
	check(err)
	return cu, rt
}

func end(sim *cudasim.Sim, cu *driver.Context, rt *publish.Runtime) {
	check(rt.Shutdown(context.Background()))
	check(cu.Shutdown(context.Background()))
	check(sim.Close())
}

// A test decides how far the device got: here the value is published, and then
// ready step by step.
func ExampleSim_Step() {
	sim := cudasim.New(cudasim.Config{})
	cu, rt := start(sim)
	sim.SetStepped(true) // after the set-up, which waits for work of its own
	s, err := rt.OpenSession(nil)
	check(err)
	v, err := s.Alloc(publish.U8, 4)
	check(err)
	pub, err := s.Publish(v)
	check(err)
	check(s.Close())
	for {
		ready, err := pub.FrontierReady()
		check(err)
		fmt.Println("ready:", ready)
		if ready {
			break
		}
		for sim.Step() {
		}
	}
	check(pub.Close())
	sim.SetStepped(false)
	end(sim, cu, rt)
	// Output:
	// ready: false
	// ready: true
}

// Virtual time tells what a schedule is worth: of two sessions that upload for
// 1 ms and compute for 3 ms, the second uploads while the first computes.
func ExampleConfig_cost() {
	sim := cudasim.New(cudasim.Config{Cost: func(o cudasim.Operation) time.Duration {
		switch {
		case o.FromHost:
			return 1 * time.Millisecond
		case o.Kernel == "invert":
			return 3 * time.Millisecond
		}
		return cudasim.DefaultCost(o)
	}})
	sim.Kernel("invert", func(*cudasim.Launch) {})
	cu, rt := start(sim)
	mod, err := kernel.Load(cu, []byte(ptx))
	check(err)
	invert, err := mod.Function("invert")
	check(err)
	var uploads []*publish.Transfer
	sim.SetStepped(true)
	begin := sim.Now()
	for range 2 {
		buf, err := rt.Pinned(8)
		check(err)
		check(rt.WithSession(func(s *publish.Session) error {
			v, err := s.Alloc(publish.U8, 8)
			check(err)
			up, err := s.Upload(v, buf)
			check(err)
			uploads = append(uploads, up)
			return errors.Join(s.Launch(invert, kernel.Grid(1), publish.Out(v), kernel.U32(0)), v.Close())
		}))
	}
	for sim.Step() {
	}
	fmt.Println((sim.Now() - begin).Round(time.Millisecond))
	sim.SetStepped(false)
	for _, up := range uploads {
		buf, err := up.Wait(context.Background())
		check(err)
		check(buf.Close())
	}
	end(sim, cu, rt)
	// Output:
	// 5ms
}

// A device that is full answers as a real one does.
func ExampleConfig_memory() {
	sim := cudasim.New(cudasim.Config{Memory: 1 << 20})
	cu, rt := start(sim)
	s, err := rt.OpenSession(nil)
	check(err)
	_, err = s.Alloc(publish.U8, 2<<20)
	fmt.Println(errors.Is(err, driver.ErrOutOfMemory))
	check(s.Close())
	end(sim, cu, rt)
	// Output:
	// true
}

// Of two devices the first reaches the memory of the second, and not the other
// way round.
func ExampleConfig_peers() {
	sim := cudasim.New(cudasim.Config{Devices: 2, Peers: func(from, to int) bool { return from == 0 }})
	table := sim.Table()
	table.Init(0)
	var there, back int32
	table.DeviceCanAccessPeer(&there, 0, 1)
	table.DeviceCanAccessPeer(&back, 1, 0)
	fmt.Println("0 reaches 1:", there == 1)
	fmt.Println("1 reaches 0:", back == 1)
	check(sim.Close())
	// Output:
	// 0 reaches 1: true
	// 1 reaches 0: false
}

// An exampleTest stands for a *testing.T.
type exampleTest struct {
	failures int
	cleanup  func()
}

func (t *exampleTest) Helper()               {}
func (t *exampleTest) Errorf(string, ...any) { t.failures++ }
func (t *exampleTest) Cleanup(f func())      { t.cleanup = f }
func (t *exampleTest) end()                  { t.cleanup(); fmt.Println("failures:", t.failures) }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
