package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
)

// call runs the program as the shell does.
func call(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, msg bytes.Buffer
	status = run(t.Context(), args, &out, &msg)
	return status, out.String(), msg.String()
}

func files(t *testing.T, folder string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func write(t *testing.T, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func encodePNG(t *testing.T, img image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func encodeJPEG(t *testing.T, img image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := jpeg.Encode(&b, img, nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// checkDrawing fails unless the file is the drawing of the picture.
func checkDrawing(t *testing.T, file string, pic *image.RGBA) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	if got.Bounds() != pic.Rect {
		t.Fatalf("the drawing has bounds %v, the picture %v", got.Bounds(), pic.Rect)
	}
	want := &image.RGBA{Pix: reference(pic.Pix, pic.Rect.Dx(), pic.Rect.Dy()), Stride: pic.Stride, Rect: pic.Rect}
	for y := range pic.Rect.Dy() {
		for x := range pic.Rect.Dx() {
			if g := color.RGBAModel.Convert(got.At(x, y)); g != want.At(x, y) {
				t.Fatalf("(%d, %d) is %v, want %v", x, y, g, want.At(x, y))
			}
		}
	}
}

func TestOwnPicture(t *testing.T) {
	t.Chdir(t.TempDir())
	status, stdout, stderr := call(t, "-driver", "sim")
	if status != 0 || stderr != "" {
		t.Fatalf("status %d, stderr %q", status, stderr)
	}
	for _, want := range []string{"simulated, as asked for", "3145728 bytes", "pending", "ready", "verified", "publish.png"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the table lacks %q:\n%s", want, stdout)
		}
	}
	if got := files(t, "."); !slices.Equal(got, []string{"publish.png"}) {
		t.Errorf("files: %q", got)
	}
	checkDrawing(t, "publish.png", drawScene(1024, 768))
}

func TestPictures(t *testing.T) {
	glass := image.NewNRGBA(image.Rect(-3, 5, 40, 36)) // bounds that do not begin at (0, 0)
	for i := range glass.Pix {
		glass.Pix[i] = byte(i * 7)
	}
	few := image.NewPaletted(image.Rect(0, 0, 9, 9), color.Palette{color.Transparent, color.Black, color.RGBA{200, 30, 60, 255}})
	for i := range few.Pix {
		few.Pix[i] = byte(i % 3)
	}
	for name, data := range map[string][]byte{
		"1x1.png":         encodePNG(t, drawScene(1, 1)),
		"1x1.jpg":         encodeJPEG(t, drawScene(1, 1)),
		"row.png":         encodePNG(t, drawScene(33, 1)),
		"column.png":      encodePNG(t, drawScene(1, 47)),
		"odd.png":         encodePNG(t, drawScene(257, 63)),
		"whole blocks":    encodePNG(t, drawScene(64, 32)),
		"photo.jpeg":      encodeJPEG(t, drawScene(201, 99)),
		"transparent.png": encodePNG(t, glass),
		"palette.png":     encodePNG(t, few),
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			write(t, name, data)
			pic, err := loadPicture(name)
			if err != nil {
				t.Fatal(err)
			}
			if !pic.Opaque() {
				t.Error("the paper shows through")
			}
			status, stdout, stderr := call(t, "-driver", "sim", "-in", name, "-out", "out")
			if status != 0 || stderr != "" || !strings.Contains(stdout, "verified") {
				t.Fatalf("status %d, stdout %q, stderr %q", status, stdout, stderr)
			}
			checkDrawing(t, "out", pic)
			if got := files(t, "."); len(got) != 2 {
				t.Errorf("files: %q", got)
			}
		})
	}
}

// header is a PNG file of that size that ends before its pixels.
func header(width, height uint32) []byte {
	chunk := []byte("IHDR")
	chunk = binary.BigEndian.AppendUint32(chunk, width)
	chunk = binary.BigEndian.AppendUint32(chunk, height)
	chunk = append(chunk, 8, 2, 0, 0, 0)
	b := append([]byte("\x89PNG\r\n\x1a\n"), 0, 0, 0, 13)
	return binary.BigEndian.AppendUint32(append(b, chunk...), crc32.ChecksumIEEE(chunk))
}

func TestBadInput(t *testing.T) {
	whole := encodePNG(t, drawScene(40, 30))
	flat := encodeJPEG(t, drawScene(16, 16))
	sof := bytes.Index(flat, []byte{0xFF, 0xC0})
	copy(flat[sof+5:], []byte{0, 0}) // the height
	long := strings.Repeat("x", 300)
	for _, c := range []struct {
		name string
		args string
		want string
	}{
		{"no file", "-in none.png", "none.png: "},
		{"empty", "-in empty", "empty: the file is empty"},
		{"text", "-in text", "text: not a PNG or JPEG picture"},
		{"folder", "-in folder", "folder: a folder, not a picture"},
		{"device", "-in " + os.DevNull, os.DevNull + ": not a regular file"},
		{"cut short", "-in cut.png", "cut.png: "},
		{"damaged", "-in bad.png", "bad.png: "},
		{"no pixels in a PNG", "-in zero.png", "zero.png: "},
		{"no pixels in a JPEG", "-in zero.jpg", "zero.jpg: "},
		{"too large", "-in huge.png", "huge.png: 60000 x 60000 pixels: at most"},
		{"too large for any product", "-in bomb.png", "bomb.png: "},
		{"too long", "-in long.png", "long.png: 1 x 2000000 pixels: at most"},
		{"target is a folder", "-out folder", "folder: a folder, not a file"},
		{"target in no folder", "-out none/out.png", "none/out.png: "},
		{"target below a file", "-out text/out.png", "text/out.png: "},
		{"target with a bad name", "-out " + long, long + ": "},
		{"target is a device", "-out " + os.DevNull, os.DevNull + ": not a regular file"},
		{"no such driver", "-driver ./none.so", "./none.so"},
		{"no such driver by name", "-driver libnonesuch.so.1", "libnonesuch.so.1"},
		{"driver is a folder", "-driver ./folder", "./folder"},
		{"driver is a text", "-driver ./text", "./text"},
		{"driver is a library that is not CUDA's", "-driver libm.so.6", "libm.so.6"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			write(t, "empty", nil)
			write(t, "text", []byte("not a picture\n"))
			write(t, "cut.png", whole[:len(whole)/2])
			write(t, "bad.png", append(slices.Clone(whole[:60]), make([]byte, 500)...))
			write(t, "zero.png", header(0, 9))
			write(t, "zero.jpg", flat)
			write(t, "huge.png", header(60000, 60000))
			write(t, "bomb.png", header(1<<31-1, 1<<31-1))
			write(t, "long.png", header(1, 2000000))
			if err := os.Mkdir("folder", 0o755); err != nil {
				t.Fatal(err)
			}
			before := files(t, ".")
			args := strings.Fields(c.args)
			if !slices.Contains(args, "-driver") {
				args = append(args, "-driver", "sim")
			}
			status, stdout, stderr := call(t, args...)
			if status != 1 || stdout != "" {
				t.Errorf("status %d, stdout %q", status, stdout)
			}
			if strings.Count(stderr, "\n") != 1 || !strings.HasSuffix(stderr, "\n") || !strings.Contains(stderr, c.want) {
				t.Errorf("stderr %q, want one line with %q", stderr, c.want)
			}
			if after := files(t, "."); !slices.Equal(before, after) || len(files(t, "folder")) != 0 {
				t.Errorf("files before %q, after %q", before, after)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	t.Chdir(t.TempDir())
	for args, want := range map[string]int{
		"-nonesuch": 2, "-in": 2, "picture.png": 2, "-out=": 2, "-driver=": 2, "-h": 0,
	} {
		status, stdout, stderr := call(t, strings.Fields(args)...)
		if status != want || stdout != "" || !strings.Contains(stderr, "-driver path") {
			t.Errorf("%s: status %d, want %d; stdout %q, stderr %q", args, status, want, stdout, stderr)
		}
	}
	if got := files(t, "."); got != nil {
		t.Errorf("files: %q", got)
	}
}

// Where no driver can be opened, auto takes the simulator and says why.
func TestAuto(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("PURECUDA_DRIVER", "./none.so")
	write(t, "in.png", encodePNG(t, drawScene(20, 20)))
	status, stdout, stderr := call(t, "-in", "in.png")
	if status != 0 || stderr != "" || !strings.Contains(stdout, "simulated, since no CUDA driver can be opened: ./none.so: ") {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
}

// What is there is replaced, through a link too; a failure leaves it.
func TestTarget(t *testing.T) {
	t.Chdir(t.TempDir())
	pic := drawScene(5, 4)
	write(t, "old", []byte("old"))
	for range 2 {
		if err := savePicture("old", pic); err != nil {
			t.Fatal(err)
		}
	}
	if err := savePicture("old", image.NewRGBA(image.Rectangle{})); err == nil {
		t.Error("a picture without pixels was saved")
	}
	if got, err := loadPicture("old"); err != nil || !bytes.Equal(got.Pix, pic.Pix) {
		t.Errorf("what was saved is not the picture: %v", err)
	}
	if err := os.MkdirAll(filepath.Join("taken", "by"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := savePicture("taken", pic); err == nil {
		t.Error("a folder was replaced")
	}
	if got := files(t, "."); !slices.Equal(got, []string{"old", "taken"}) {
		t.Errorf("files: %q", got)
	}
}

// simulator returns a device of a simulator with the example's kernels, which
// change may replace. It must end without a violation, and with nothing left.
func simulator(t *testing.T, change func(*cudasim.Sim)) *driver.Device {
	t.Helper()
	sim := cudasim.New(cudasim.Config{})
	addKernels(sim)
	change(sim)
	drv, err := sim.Driver()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	dev, err := drv.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

// The comparison finds one wrong bit.
func TestWrongByte(t *testing.T) {
	pic := drawScene(31, 17)
	dev := simulator(t, func(sim *cudasim.Sim) {
		sim.Kernel("ink", func(l *cudasim.Launch) {
			src, soft, dst := l.Bytes(0), l.Bytes(1), l.Bytes(2)
			for i := range dst {
				dst[i] = byte(inked(uint32(src[i]), uint32(soft[i])))
			}
			dst[4*(31*3+5)+2] ^= 1
		})
	})
	got, _, err := job(t.Context(), dev, pic)
	if err != nil {
		t.Fatal(err)
	}
	err = compare(got, reference(pic.Pix, 31, 17))
	if err == nil || !strings.Contains(err.Error(), "disagree in 1 of 2108 bytes, first in channel 2 at (5, 3)") {
		t.Errorf("got %v", err)
	}
}

func TestKernelFaults(t *testing.T) {
	dev := simulator(t, func(sim *cudasim.Sim) {
		sim.Kernel("ink", func(l *cudasim.Launch) { l.Fault(int(driver.ErrIllegalAddress)) })
	})
	if _, _, err := job(t.Context(), dev, drawScene(8, 8)); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("got %v", err)
	}
}

// An interrupt ends the program without a file, and without anything that the
// simulator could complain about.
func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	t.Chdir(t.TempDir())
	write(t, "in.png", encodePNG(t, drawScene(20, 20)))
	var out, msg bytes.Buffer
	if status := run(ctx, []string{"-driver", "sim", "-in", "in.png"}, &out, &msg); status != 1 || msg.String() != "publish: context canceled\n" {
		t.Errorf("status %d, stderr %q", status, &msg)
	}
	if got := files(t, "."); len(got) != 1 {
		t.Errorf("files: %q", got)
	}
}

func TestWeights(t *testing.T) {
	for radius := 1; radius <= 64; radius++ {
		w := weightsOf(radius)
		sum := uint32(0)
		for i, v := range w {
			sum += v
			if v != w[len(w)-1-i] || i < radius && v > w[i+1] {
				t.Fatalf("radius %d: %v is no bell", radius, w)
			}
		}
		if len(w) != 2*radius+1 || sum != 65536 {
			t.Errorf("radius %d: %d weights with the sum %d", radius, len(w), sum)
		}
	}
}
