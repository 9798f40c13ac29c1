package main

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"image"
	"time"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
)

//go:embed blur.ptx
var ptx []byte

// steps is how long each step took.
type steps struct {
	setUp    time.Duration // context, kernels, pinned memory
	enqueue  time.Duration // all that the session does, and closing everything
	device   time.Duration // from the release of the stream until the frontier is ready
	download time.Duration
}

// job draws the picture in ink on the device.
func job(ctx context.Context, dev *driver.Device, pic *image.RGBA) (drawing *image.RGBA, took steps, err error) {
	begin := time.Now()
	lap := func(d *time.Duration) { now := time.Now(); *d = now.Sub(begin); begin = now }

	cu, err := dev.Primary()
	if err != nil {
		return nil, took, err
	}
	defer func() { err = errors.Join(err, cu.Shutdown(context.WithoutCancel(ctx))) }()
	rt, err := publish.New(cu, publish.Config{})
	if err != nil {
		return nil, took, err
	}
	defer func() { err = errors.Join(err, rt.Shutdown(context.WithoutCancel(ctx))) }()

	// What may stall the process comes first: kernels and pinned memory.
	f, err := load(cu, radiusOf(pic.Rect.Dx(), pic.Rect.Dy()))
	if err != nil {
		return nil, took, err
	}
	in, err := filled(rt, pic.Pix)
	if err != nil {
		return nil, took, err
	}
	defer in.Close() // a handle that was moved does nothing here
	weights, err := filled(rt, words(weightsOf(f.radius)))
	if err != nil {
		return nil, took, err
	}
	defer weights.Close()
	out, err := rt.Pinned(len(pic.Pix))
	if err != nil {
		return nil, took, err
	}
	defer func() { out.Close() }()
	lap(&took.setUp)

	// produce closes all that it opens. With the runtime closed as well, the
	// publication is the only handle left to what is on the device.
	pub, release, err := f.produce(rt, pic.Rect.Size(), in, weights)
	if err != nil {
		return nil, took, err
	}
	defer pub.Close()
	defer release()
	if err := rt.Close(); err != nil {
		return nil, took, err
	}
	lap(&took.enqueue)

	if err := expect(pub, false); err != nil {
		return nil, took, err
	}
	release()
	if err := pub.AwaitFrontier(ctx); err != nil {
		return nil, took, err
	}
	if err := expect(pub, true); err != nil {
		return nil, took, err
	}
	lap(&took.device)

	transfer, err := pub.DownloadInto(out) // moves both
	if err != nil {
		return nil, took, err
	}
	defer transfer.Close()
	if out, err = transfer.Wait(ctx); err != nil {
		return nil, took, err
	}
	lap(&took.download)
	drawing = image.NewRGBA(pic.Rect)
	copy(drawing.Pix, out.Bytes())
	return drawing, took, nil
}

// expect fails unless the frontier is ready, or pending, as wanted.
func expect(pub *publish.Publication, want bool) error {
	ready, err := pub.FrontierReady()
	switch {
	case err != nil:
		return err
	case ready && !want:
		return errors.New("the frontier is ready while its stream is held")
	case !ready && want:
		return errors.New("the frontier is pending after the wait for it")
	}
	return nil
}

// filter is the two kernels, and the reach of the blur.
type filter struct {
	blur, ink *kernel.Function
	radius    int
}

func load(cu *driver.Context, radius int) (*filter, error) {
	mod, err := kernel.Load(cu, ptx)
	if err != nil {
		return nil, err
	}
	blur, err := mod.Function("blur")
	if err != nil {
		return nil, err
	}
	ink, err := mod.Function("ink")
	if err != nil {
		return nil, err
	}
	return &filter{blur, ink, radius}, nil
}

// produce enqueues the filter in a session of its own and publishes the result.
// It moves in and table. It waits for nothing: what it enqueued runs once
// release is called.
func (f *filter) produce(rt *publish.Runtime, size image.Point, in, table *pinned.Buffer) (pub *publish.Publication, release func(), err error) {
	s, err := rt.OpenSession(nil)
	if err != nil {
		return nil, nil, err
	}
	defer s.Close()
	var picture, rows, blurred, drawing *publish.Value
	for _, v := range []**publish.Value{&picture, &rows, &blurred, &drawing} {
		if *v, err = s.Alloc(publish.U8, size.Y, size.X, 4); err != nil {
			return nil, nil, err
		}
		defer (*v).Close()
	}
	weights, err := s.Alloc(publish.U32, 2*f.radius+1)
	if err != nil {
		return nil, nil, err
	}
	defer weights.Close()

	// Only to show a frontier that is surely pending: other programs need no
	// hold, and can not import this one.
	if release, err = holdBack(s, rt.Context()); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			release()
		}
	}()

	up, err := s.Upload(picture, in)
	if err != nil {
		return nil, nil, err
	}
	defer up.Close()
	upTable, err := s.Upload(weights, table)
	if err != nil {
		return nil, nil, err
	}
	defer upTable.Close()

	grid, w, h, r, n := kernel.Grid(size.X, size.Y), kernel.I32(size.X), kernel.I32(size.Y), kernel.I32(f.radius), size.X*size.Y*4
	if err = s.Launch(f.blur, grid, publish.In(picture), publish.Out(rows), publish.In(weights), w, h, r, kernel.I32(1), kernel.I32(0)); err != nil {
		return nil, nil, err
	}
	if err = s.Launch(f.blur, grid, publish.In(rows), publish.Out(blurred), publish.In(weights), w, h, r, kernel.I32(0), kernel.I32(1)); err != nil {
		return nil, nil, err
	}
	if err = s.Launch(f.ink, kernel.Grid(n), publish.In(picture), publish.In(blurred), publish.Out(drawing), kernel.I32(n)); err != nil {
		return nil, nil, err
	}
	pub, err = s.Publish(drawing) // moves drawing
	return pub, release, err
}

// holdBack holds the session's stream until release is called.
func holdBack(s *publish.Session, cu *driver.Context) (release func(), err error) {
	raw, err := s.Raw()
	if err != nil {
		return nil, err
	}
	return hold.Stream(cu, raw)
}

// filled returns a pinned buffer with a copy of data.
func filled(rt *publish.Runtime, data []byte) (*pinned.Buffer, error) {
	buf, err := rt.Pinned(len(data))
	if err != nil {
		return nil, err
	}
	copy(buf.Bytes(), data)
	return buf, nil
}

// words lays out 32-bit words as the device reads them.
func words(list []uint32) (b []byte) {
	for _, v := range list {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}
