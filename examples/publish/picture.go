package main

import (
	"bufio"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	_ "image/jpeg"
	"image/png"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

const (
	maxPixels = 64 << 20
	maxSide   = 1 << 16
)

// loadPicture reads a PNG or JPEG file, on white paper where it is transparent.
// The size is checked before any pixel is decoded.
func loadPicture(path string) (*image.RGBA, error) {
	info, err := os.Stat(path) // before the open, which would wait at a pipe
	if err != nil {
		return nil, reason(path, err)
	}
	switch {
	case info.IsDir():
		return nil, fmt.Errorf("%s: a folder, not a picture", path)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s: not a regular file", path)
	case info.Size() == 0:
		return nil, fmt.Errorf("%s: the file is empty", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, reason(path, err)
	}
	defer f.Close()
	cfg, _, err := image.DecodeConfig(bufio.NewReader(f))
	w, h := cfg.Width, cfg.Height
	switch {
	case errors.Is(err, image.ErrFormat):
		return nil, fmt.Errorf("%s: not a PNG or JPEG picture", path)
	case err != nil:
		return nil, fmt.Errorf("%s: the picture can not be read: %w", path, bare(err))
	case w <= 0 || h <= 0:
		return nil, fmt.Errorf("%s: the picture has no pixels", path)
	case w > maxSide || h > maxSide || w > maxPixels/h:
		return nil, fmt.Errorf("%s: %d x %d pixels: at most %d are taken, and %d a side", path, w, h, maxPixels, maxSide)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, reason(path, err)
	}
	img, _, err := image.Decode(bufio.NewReader(f))
	if err != nil {
		return nil, fmt.Errorf("%s: the picture can not be read: %w", path, bare(err))
	}
	if img.Bounds().Size() != (image.Point{w, h}) {
		return nil, fmt.Errorf("%s: the file changed while it was read", path)
	}
	pic := image.NewRGBA(image.Rect(0, 0, w, h))
	draw.Draw(pic, pic.Rect, image.NewUniform(color.White), image.Point{}, draw.Src)
	draw.Draw(pic, pic.Rect, img, img.Bounds().Min, draw.Over)
	return pic, nil
}

// checkTarget fails where savePicture is sure to fail, before any work is done.
func checkTarget(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		folder := filepath.Dir(path)
		if info, err = os.Stat(folder); err == nil && !info.IsDir() {
			err = fmt.Errorf("%s is not a folder", folder)
		}
		if err != nil {
			return fmt.Errorf("%s: no file can be made there: %w", path, bare(err))
		}
		return nil
	case err != nil:
		return reason(path, err)
	case info.IsDir():
		return fmt.Errorf("%s: a folder, not a file to write", path)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s: not a regular file", path)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0) // may it be written at all?
	if err != nil {
		return reason(path, err)
	}
	return f.Close()
}

// savePicture writes a PNG file, whole or not at all: it writes another file
// in the same folder, which then takes the name.
func savePicture(path string, pic image.Image) (err error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	part := filepath.Join(filepath.Dir(path), fmt.Sprintf(".publish-%d.tmp", os.Getpid()))
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return reason(path, err)
	}
	w := bufio.NewWriterSize(f, 1<<16)
	err = errors.Join((&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(w, pic), w.Flush(), f.Close())
	if err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		os.Remove(part)
		return reason(path, err)
	}
	return nil
}

// reason puts the path in front of an error, once.
func reason(path string, err error) error { return fmt.Errorf("%s: %w", path, bare(err)) }

// bare strips the operation and the path from an error of package os.
func bare(err error) error {
	var onPath *fs.PathError
	var onLink *os.LinkError
	switch {
	case errors.As(err, &onPath):
		return onPath.Err
	case errors.As(err, &onLink):
		return onLink.Err
	}
	return err
}
