package publish_test

import (
	"context"
	"fmt"
	"log"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/publish"
)

// A value is uploaded, changed by a kernel, published and downloaded. On the
// simulator a Go function stands in for the kernel's PTX.
func Example() {
	sim := cudasim.New(cudasim.Config{})
	sim.Kernel("shout", func(l *cudasim.Launch) {
		text := l.Bytes(0)
		for i := range int(l.U32(1)) {
			if 'a' <= text[i] && text[i] <= 'z' {
				text[i] -= 'a' - 'A'
			}
		}
	})
	drv, err := sim.Driver() // with a GPU: driver.Open()
	check(err)
	dev, err := drv.Device(0)
	check(err)
	ctx, err := dev.Primary()
	check(err)
	rt, err := publish.New(ctx, publish.Config{})
	check(err)
	mod, err := kernel.Load(ctx, []byte(".version 7.0\n.target sm_70\n.address_size 64\n"+
		".visible .entry shout(.param .u64 text, .param .u32 n) { ret; }"))
	check(err)
	shout, err := mod.Function("shout")
	check(err)

	in, err := rt.Pinned(5)
	check(err)
	copy(in.Bytes(), "hello")

	var pub *publish.Publication
	var up *publish.Transfer
	err = rt.WithSession(func(s *publish.Session) error {
		text, err := s.Alloc(publish.U8, 5)
		check(err)
		up, err = s.Upload(text, in) // moves in
		check(err)
		check(s.Launch(shout, kernel.Grid(5), publish.Out(text), kernel.U32(5)))
		pub, err = s.Publish(text) // moves text
		return err
	})
	check(err)

	out, err := up.Wait(context.Background()) // the buffer comes back
	check(err)
	down, err := pub.DownloadInto(out) // moves pub and out
	check(err)
	out, err = down.Wait(context.Background())
	check(err)
	fmt.Printf("%s from %s\n", out.Bytes(), dev.Name())

	check(out.Close())
	check(rt.Shutdown(context.Background()))
	check(ctx.Shutdown(context.Background()))
	check(sim.Close()) // fails if a rule of the driver was broken
	// Output: HELLO from purecuda simulated device 0
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
