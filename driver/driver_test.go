package driver_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/cuload"
	"github.com/purecuda/purecuda/kernel"
	"github.com/purecuda/purecuda/pinned"
	"github.com/purecuda/purecuda/publish"
	"github.com/purecuda/purecuda/stream"
)

// A path that leads to no library is an error that names it, with the reason.
func TestFault06OpenFindsNothing(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	must(t, os.WriteFile(text, []byte("no library"), 0o600))
	for name, path := range map[string]string{"missing": filepath.Join(dir, "libcuda.so.1"), "a folder": dir, "a text": text} {
		drv, err := driver.OpenPath(path)
		var load *driver.LoadError
		if drv != nil || !errors.As(err, &load) {
			t.Fatalf("%s: %v, %v", name, drv, err)
		}
		if len(load.Attempts) != 1 || load.Attempts[0].Path != path || load.Attempts[0].Err == nil {
			t.Errorf("%s: attempts %+v", name, load.Attempts)
		}
		if !strings.Contains(err.Error(), path) || !strings.HasPrefix(err.Error(), "driver: ") {
			t.Errorf("%s: %q", name, err)
		}
		if errors.Is(err, fs.ErrNotExist) != (name == "missing") {
			t.Errorf("%s: is fs.ErrNotExist: %v", name, err)
		}

		// The environment's is tried first, and does not end the search: a
		// machine with a driver finds it.
		t.Setenv("PURECUDA_DRIVER", path)
		drv, err = driver.Open()
		if err == nil {
			if drv.Source() == path {
				t.Errorf("%s: opened", name)
			}
			continue
		}
		if drv != nil || !errors.As(err, &load) || len(load.Attempts) < 2 || load.Attempts[0].Path != path {
			t.Errorf("%s: %v, %v", name, drv, err)
		}
	}
}

// Opening a library again gives the same driver and context, by whatever path.
// Another library has another.
func TestFault25OpenIsShared(t *testing.T) {
	sim := cudasim.New(cudasim.Config{})
	if r := sim.Table().Init(0); r != cuapi.Success {
		t.Fatal(r)
	}
	key := reflect.ValueOf(sim).Pointer() // no library is there
	var got [8]*driver.Driver
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			var err error
			got[i], err = driver.DriverOf(&cuload.Library{Path: fmt.Sprint("/path", i), Key: key, Table: sim.Table()})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, d := range got {
		if d == nil || d != got[0] || primary(t, d, 0) != primary(t, got[0], 0) {
			t.Fatal("a library has two drivers")
		}
	}
	other, err := driver.DriverOf(&cuload.Library{Key: key + 1, Table: sim.Table()})
	must(t, err)
	if other == got[0] {
		t.Error("two libraries have one driver")
	}

	// What does not serve is not kept.
	broken := cuapi.Intercept(sim.Table(), func(cuapi.Call, func() cuapi.Result) cuapi.Result { return cuapi.Unknown })
	if d, err := driver.DriverOf(&cuload.Library{Key: key + 2, Table: broken}); d != nil || !errors.Is(err, driver.Result(cuapi.Unknown)) {
		t.Errorf("%v, %v", d, err)
	}
	_, err = driver.DriverOf(&cuload.Library{Key: key + 2, Table: sim.Table()})
	must(t, err)
}

// A simulator is one library.
func TestFault25SimulatorIsShared(t *testing.T) {
	sim, other := cudasim.New(cudasim.Config{}), cudasim.New(cudasim.Config{})
	a, err := sim.Driver()
	must(t, err)
	gone, err := other.Driver()
	must(t, err)
	must(t, other.Close())
	third, err := cudasim.New(cudasim.Config{}).Driver()
	must(t, err)
	b, err := sim.Driver()
	must(t, err)
	if a != b || a == gone || a == third {
		t.Fatal("drivers are not shared by simulator")
	}

	one, two := primary(t, a, 0), primary(t, b, 0)
	st, err := stream.New(one)
	must(t, err)
	raw, err := st.Raw()
	must(t, err)
	adopted, err := stream.Adopt(two, raw)
	must(t, err)
	rt1, err := publish.New(one, publish.Config{})
	must(t, err)
	rt2, err := publish.New(two, publish.Config{})
	must(t, err)
	s, err := rt1.OpenSession(st)
	must(t, err)
	if _, err := rt2.OpenSession(adopted); err == nil {
		t.Error("two sessions hold one stream")
	}
	must(t, s.Close())
	must(t, adopted.Close())
	must(t, st.Close())
	must(t, rt1.Shutdown(within(t)))
	must(t, rt2.Shutdown(within(t)))
	must(t, one.Shutdown(within(t)))
	must(t, two.Shutdown(within(t)))
	must(t, sim.Close())
}

func TestErrorTextAndCode(t *testing.T) {
	_, d := open(t, cudasim.Config{}, func(c cuapi.Call, next func() cuapi.Result) cuapi.Result {
		if c.ID == cuapi.IDDeviceGetAttribute {
			return cuapi.OutOfMemory
		}
		return next()
	})
	_, err := d.Device(0)
	var e *driver.Error
	if !errors.As(err, &e) || !errors.Is(err, driver.ErrOutOfMemory) || errors.Is(err, driver.ErrInvalidValue) {
		t.Fatal(err)
	}
	var code driver.Result
	if !errors.As(err, &code) || code != 2 {
		t.Errorf("code %v", code)
	}
	if want := "cuDeviceGetAttribute: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory [attribute 75]"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	for e, want := range map[error]string{
		&driver.Error{Op: "cuInit", Code: 34}:                                           "cuInit: CUDA_ERROR_STUB_LIBRARY (34)",
		&driver.Error{Op: "cuInit", Code: 12345}:                                        "cuInit: CUDA error 12345",
		&driver.UnsupportedError{Feature: "cuMemAllocAsync", Since: 11020, Have: 11000}: "cuMemAllocAsync: needs CUDA 11.2, this driver has 11.0",
		&driver.UnsupportedError{Feature: "memory pools"}:                               "memory pools: this device does not support it",
	} {
		if e.Error() != want {
			t.Errorf("%q, want %q", e, want)
		}
	}
	if !errors.Is(&driver.UnsupportedError{}, errors.ErrUnsupported) {
		t.Error("an UnsupportedError does not match errors.ErrUnsupported")
	}
}

// The codes that lose the context are those of the documents, and no others.
func TestStickyCodes(t *testing.T) {
	sticky := map[driver.Result]bool{
		214: true, 220: true, 700: true, 702: true, 709: true, 710: true, 714: true, 715: true,
		716: true, 717: true, 718: true, 719: true, 721: true,
	}
	for r := driver.Result(-1); r < 1100; r++ {
		if r.Sticky() != sticky[r] {
			t.Errorf("%v: sticky %v", r, r.Sticky())
		}
	}
}

func TestDevices(t *testing.T) {
	_, d := open(t, cudasim.Config{Devices: 3, Version: 12040, Memory: 1 << 30}, nil)
	if d.DeviceCount() != 3 || d.Version() != 12040 || d.Source() != "simulator" {
		t.Fatal(d.DeviceCount(), d.Version(), d.Source())
	}
	seen := map[string]bool{}
	for i := range 3 {
		dev, err := d.Device(i)
		must(t, err)
		uuid := dev.UUID()
		digits := strings.Split(strings.TrimPrefix(uuid, "GPU-"), "-")
		var lengths []int
		for _, part := range digits {
			lengths = append(lengths, len(part))
		}
		if !strings.HasPrefix(uuid, "GPU-") || !reflect.DeepEqual(lengths, []int{8, 4, 4, 4, 12}) || seen[uuid] {
			t.Errorf("device %d: UUID %q", i, uuid)
		}
		seen[uuid] = true
		major, minor := dev.Capability()
		sms, err := dev.Multiprocessors()
		if dev.Ordinal() != i || dev.Name() == "" || dev.Memory() != 1<<30 || major != 9 || minor != 0 || sms != 132 || err != nil || !dev.MemoryPools() {
			t.Errorf("%+v: %d.%d, %d, %v", dev, major, minor, sms, err)
		}
		bare := strings.TrimPrefix(uuid, "GPU-")
		for _, spelling := range []string{uuid, bare, strings.ReplaceAll(bare, "-", ""), "GPU-" + strings.ToUpper(bare), "MIG-" + bare} {
			same, err := d.DeviceByUUID(spelling)
			if err != nil || same.Ordinal() != i {
				t.Errorf("%q: %v, %v", spelling, same, err)
			}
		}
	}
	for _, bad := range []string{"", "GPU-", "GPU-00", "zz", strings.Repeat("0", 31), strings.Repeat("0", 34)} {
		if dev, err := d.DeviceByUUID(bad); err == nil || dev != nil {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := d.DeviceByUUID(strings.Repeat("0", 32)); !errors.Is(err, driver.ErrInvalidDevice) {
		t.Error(err)
	}
	for _, ordinal := range []int{-1, 3, 1 << 31} {
		if dev, err := d.Device(ordinal); !errors.Is(err, driver.ErrInvalidDevice) || dev != nil {
			t.Errorf("device %d: %v", ordinal, err)
		}
	}
}

func TestSupports(t *testing.T) {
	_, d := open(t, cudasim.Config{Version: 11010}, nil)
	ctx := primary(t, d, 0)
	for _, s := range []interface{ Supports(string) error }{d, ctx} {
		must(t, s.Supports("cuMemAlloc_v2"))
		must(t, s.Supports("cuDeviceGetUuid")) // an older name of the same
		err := s.Supports("cuMemAllocAsync")
		var u *driver.UnsupportedError
		if !errors.As(err, &u) || *u != (driver.UnsupportedError{Feature: "cuMemAllocAsync", Since: 11020, Have: 11010}) {
			t.Error(err)
		}
		if err := s.Supports("cuNoSuchThing"); err == nil || errors.Is(err, errors.ErrUnsupported) {
			t.Error(err)
		}
	}
	must(t, ctx.Shutdown(within(t)))
}

// Each method of a nil and of a zero handle returns: what returns an error
// returns one that matches ErrClosed, except what ends the handle.
func TestNilAndZeroHandles(t *testing.T) {
	ends := map[string]bool{"Close": true, "Shutdown": true}
	for _, h := range []any{
		(*driver.Driver)(nil), new(driver.Driver), (*driver.Device)(nil), new(driver.Device),
		(*driver.Context)(nil), new(driver.Context), (*stream.Stream)(nil), new(stream.Stream),
		(*pinned.Buffer)(nil), new(pinned.Buffer), (*kernel.Module)(nil), new(kernel.Module),
		(*kernel.Function)(nil), new(kernel.Function), new(driver.Error), new(driver.UnsupportedError),
		new(driver.LoadError), new(kernel.LoadError),
	} {
		v := reflect.ValueOf(h)
		for i := range v.NumMethod() {
			name := v.Type().Method(i).Name
			t.Run(reflect.TypeOf(h).String()+"."+name, func(t *testing.T) {
				m := v.Method(i)
				var args []reflect.Value
				for j := range m.Type().NumIn() {
					arg := reflect.Zero(m.Type().In(j))
					if m.Type().In(j) == reflect.TypeFor[context.Context]() {
						arg = reflect.ValueOf(context.Background())
					}
					args = append(args, arg)
				}
				out := m.Call(args)
				if _, isError := h.(error); isError || len(out) == 0 || m.Type().Out(len(out)-1) != reflect.TypeFor[error]() {
					return
				}
				err, _ := out[len(out)-1].Interface().(error)
				if ends[name] && err != nil || !ends[name] && !errors.Is(err, driver.ErrClosed) {
					t.Error(err)
				}
			})
		}
	}
	for what, f := range map[string]func() error{
		"stream.New":   func() error { _, err := stream.New(new(driver.Context)); return err },
		"stream.Adopt": func() error { _, err := stream.Adopt(nil, 77); return err },
		"kernel.Load":  func() error { _, err := kernel.Load(new(driver.Context), []byte("x")); return err },
	} {
		if err := f(); !errors.Is(err, driver.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
