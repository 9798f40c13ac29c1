// Command publish is the main job of this module, from end to end: it draws a
// picture in ink on the device, and moves the result off the device safely.
//
//	go run ./examples/publish                      # a picture of its own
//	go run ./examples/publish -in cat.jpg -out ink.png
//	go run ./examples/publish -driver sim          # without a GPU
//
// A session uploads the picture, runs the kernels of blur.ptx and publishes the
// drawing. Then the session, its values and the runtime are closed. What is left
// is the publication: its frontier is pending while the stream is held, then
// ready; it is downloaded into a pinned buffer and compared, byte for byte, with
// the same filter on the CPU.
//
// job.go is the part to read and copy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"image"
	"io"
	"os"
	"os/signal"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // a second interrupt ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit status: 1 if the job failed, which one line on stderr
// explains, 2 if the command line is wrong.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("publish", flag.ContinueOnError)
	flags.SetOutput(stderr)
	in := flags.String("in", "", "the picture to draw, a PNG or JPEG `file`; without it, one of the program's own")
	out := flags.String("out", "publish.png", "the PNG `file` to write")
	which := flags.String("driver", "auto", "auto, sim for the simulator, or the `path` of a CUDA driver library")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() > 0:
		fmt.Fprintf(stderr, "unexpected argument: %q\n", flags.Arg(0))
		flags.Usage()
		return 2
	case *out == "" || *which == "":
		fmt.Fprintln(stderr, "-out and -driver may not be empty")
		flags.Usage()
		return 2
	}
	if err := show(ctx, *in, *out, *which, stdout); err != nil {
		fmt.Fprintln(stderr, "publish: "+oneLine(err))
		return 1
	}
	return 0
}

// oneLine is the error's text without line ends: the driver's may have many.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// show does the job and prints its table.
func show(ctx context.Context, in, out, which string, stdout io.Writer) (err error) {
	var pic *image.RGBA
	name := in
	if in != "" {
		if pic, err = loadPicture(in); err != nil {
			return err
		}
	}
	if err := checkTarget(out); err != nil {
		return err
	}
	drv, err := open(which)
	if err != nil {
		return err
	}
	if in == "" {
		pic, name = drawScene(1024, 768), "drawn by the program"
	}
	dev, err := drv.Device(0)
	if err != nil {
		return err
	}
	drawing, took, err := job(ctx, dev, pic)
	if err = errors.Join(err, drv.end()); err != nil {
		return err
	}
	begin := time.Now()
	err = compare(drawing, reference(pic.Pix, pic.Rect.Dx(), pic.Rect.Dy()))
	cpu := time.Since(begin)
	if err = errors.Join(err, ctx.Err()); err != nil {
		return err
	}
	if err := savePicture(out, drawing); err != nil {
		return err
	}

	major, minor := dev.Capability()
	return table(stdout,
		"driver", drv.how,
		"device", fmt.Sprintf("%s, compute capability %d.%d", dev.Name(), major, minor),
		"picture", fmt.Sprintf("%s, %d x %d, %d bytes", name, pic.Rect.Dx(), pic.Rect.Dy(), len(pic.Pix)),
		"set-up", ms(took.setUp)+"context, kernels, pinned memory",
		"enqueue", ms(took.enqueue)+"2 uploads, 3 launches, publish; then all else was closed",
		"frontier", "  pending     while the stream was held",
		"frontier", ms(took.device)+"from the release until ready: the uploads and kernels",
		"download", ms(took.download)+"into pinned memory",
		"reference", ms(cpu)+"the same filter on the CPU",
		"result", "verified: all bytes equal the reference",
		"written", out,
	)
}

// table prints pairs of a name and a text, a line each.
func table(w io.Writer, pairs ...string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := 0; i < len(pairs); i += 2 {
		fmt.Fprintf(t, "%s\t%s\n", pairs[i], pairs[i+1])
	}
	return t.Flush()
}

// ms is a time as the table shows it.
func ms(d time.Duration) string { return fmt.Sprintf("%9.3f ms  ", d.Seconds()*1e3) }

// compare fails unless the drawing has the bytes that the reference has.
func compare(drawing *image.RGBA, want []byte) error {
	first, n := -1, 0
	for i, b := range drawing.Pix {
		if b != want[i] {
			if n++; first < 0 {
				first = i
			}
		}
	}
	if n == 0 {
		return nil
	}
	x, y := first/4%drawing.Rect.Dx(), first/4/drawing.Rect.Dx()
	return fmt.Errorf("the device and the CPU disagree in %d of %d bytes, first in channel %d at (%d, %d): %d on the device, %d on the CPU",
		n, len(want), first%4, x, y, drawing.Pix[first], want[first])
}
