// Package driver finds and opens the NVIDIA CUDA driver at run time, without
// cgo, and gives its devices, contexts and errors.
//
//	drv, err := driver.Open()      // the machine's driver
//	dev, err := drv.Device(0)      // its first device
//	ctx, err := dev.Primary()      // the device's primary context, retained
//	defer ctx.Shutdown(context.Background())
//
// Handles are pointers, safe for concurrent use from any goroutine and any
// thread. No call leaves a context current on a thread where it was not.
package driver

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/cuload"
	"github.com/purecuda/purecuda/internal/wire"
)

// LoadError tells why no driver could be opened: each library that was tried,
// with its reason. [errors.Is] and [errors.As] look at the reasons: a file that
// is not there matches [fs.ErrNotExist], a driver that does not start is an
// [*Error] of cuInit, a platform without CUDA matches [errors.ErrUnsupported].
type LoadError struct {
	Attempts []Attempt
	text     string
}

// An Attempt is one library that was tried. Path is empty where none was.
type Attempt struct {
	Path string
	Err  error
}

func (e *LoadError) Error() string { return e.text }

// Unwrap returns the reason of each attempt.
func (e *LoadError) Unwrap() []error {
	list := make([]error, len(e.Attempts))
	for i, a := range e.Attempts {
		list[i] = a.Err
	}
	return list
}

// Driver is a loaded CUDA driver library. It stays loaded for the life of the
// process, which has one Driver for each library.
type Driver struct {
	table   *cuapi.Table
	source  string
	version int
	devices int

	mu       sync.Mutex
	contexts map[cuapi.Device]*Context
}

func init() {
	wire.NewDriver = func(t *cuapi.Table, source string) (any, error) { return newDriver(t, source) }
	wire.Table = func(drv any) *cuapi.Table { return drv.(*Driver).table }
	wire.ContextOf = func(ctx any) *wire.Context {
		if c := ctx.(*Context); c != nil {
			return c.core
		}
		return nil
	}
}

// Open finds and opens the driver: the first that serves of the library that the
// environment variable PURECUDA_DRIVER names, if it is set, and libcuda.so.1 by
// the system's search and in the usual folders, or nvcuda.dll of Windows' system
// folder. [Driver.Source] tells which it is. It calls cuInit. The error is a
// [*LoadError]. It may wait for the driver to start, which takes up to seconds
// on a machine without persistence mode.
//
// A library that is open already gives the same Driver again, by whatever name.
func Open() (*Driver, error) { return OpenPath("") }

// OpenPath opens the driver library at path and no other, or searches as [Open]
// does if path is empty.
func OpenPath(path string) (*Driver, error) {
	lib, err := cuload.Open(path)
	if err != nil {
		load := &LoadError{text: "driver: " + err.Error()}
		var tried *cuload.Error
		if !errors.As(err, &tried) {
			load.Attempts = []Attempt{{path, err}}
			return nil, load
		}
		for _, a := range tried.Attempts {
			reason := a.Err
			var start *cuload.InitError
			if errors.As(a.Err, &start) {
				reason = &Error{Op: start.Call, Code: Result(start.Result)}
			}
			load.Attempts = append(load.Attempts, Attempt{a.Path, reason})
		}
		return nil, load
	}
	return driverOf(lib)
}

// drivers are the drivers of this process by their library's key: contexts and
// all that hangs on them exist once.
var drivers = struct {
	sync.Mutex
	of map[uintptr]*Driver
}{of: map[uintptr]*Driver{}}

func driverOf(lib *cuload.Library) (*Driver, error) {
	drivers.Lock()
	defer drivers.Unlock()
	if d := drivers.of[lib.Key]; d != nil {
		return d, nil
	}
	d, err := newDriver(lib.Table, lib.Path)
	if err != nil {
		return nil, err
	}
	drivers.of[lib.Key] = d
	return d, nil
}

func newDriver(t *cuapi.Table, source string) (*Driver, error) {
	d := &Driver{table: t, source: source, contexts: map[cuapi.Device]*Context{}}
	n := new(int32)
	if r := t.DriverGetVersion(n); r != cuapi.Success {
		return nil, newError(t, cuapi.IDDriverGetVersion, r, "")
	}
	d.version = int(*n)
	if r := t.DeviceGetCount(n); r != cuapi.Success {
		return nil, newError(t, cuapi.IDDeviceGetCount, r, "")
	}
	d.devices = int(*n)
	for _, e := range cuapi.Entries {
		if e.Required && !t.Has(e.ID) {
			return nil, &UnsupportedError{Feature: e.Symbol(), Since: e.Since(), Have: d.version}
		}
	}
	return d, nil
}

// Source tells where the driver comes from: the path by which its library was
// opened first, or "simulator".
func (d *Driver) Source() string {
	if d == nil {
		return ""
	}
	return d.source
}

// Version returns the CUDA version of the driver, as cuDriverGetVersion does:
// 13000 is CUDA 13.0.
func (d *Driver) Version() int {
	if d == nil {
		return 0
	}
	return d.version
}

// DeviceCount returns the number of devices that this process can see.
func (d *Driver) DeviceCount() int {
	if d == nil {
		return 0
	}
	return d.devices
}

// none is the error of a nil or a zero Driver.
func (d *Driver) none() error {
	if d == nil || d.table == nil {
		return fmt.Errorf("driver: no driver: %w", ErrClosed)
	}
	return nil
}

// Supports returns nil if the driver has the entry point of that name, for
// instance "cuMemAllocAsync", else an [*UnsupportedError].
func (d *Driver) Supports(name string) error {
	if err := d.none(); err != nil {
		return err
	}
	for _, e := range cuapi.Entries {
		for _, s := range e.Symbols {
			if s.Name == name {
				return d.supports(e)
			}
		}
	}
	return fmt.Errorf("driver: purecuda knows no entry point %q", name)
}

func (d *Driver) supports(e cuapi.Entry) error {
	if d.table.Has(e.ID) {
		return nil
	}
	return &UnsupportedError{Feature: e.Symbol(), Since: e.Since(), Have: d.version}
}

// Device returns the device of that ordinal, from 0 to DeviceCount-1.
func (d *Driver) Device(ordinal int) (*Device, error) {
	if err := d.none(); err != nil {
		return nil, err
	}
	if ordinal < 0 || ordinal >= d.devices {
		return nil, fmt.Errorf("driver: no device %d: this process sees %d: %w", ordinal, d.devices, ErrInvalidDevice)
	}
	h := new(cuapi.Device)
	if r := d.table.DeviceGet(h, int32(ordinal)); r != cuapi.Success {
		return nil, newError(d.table, cuapi.IDDeviceGet, r, fmt.Sprintf("ordinal %d", ordinal))
	}
	return d.describe(*h, ordinal)
}

// DeviceByUUID returns the device with that UUID, written as "GPU-8-4-4-4-12"
// hexadecimal digits, with or without the prefix and the dashes.
func (d *Driver) DeviceByUUID(uuid string) (*Device, error) {
	if err := d.none(); err != nil {
		return nil, err
	}
	digits := strings.ReplaceAll(strings.TrimPrefix(strings.TrimPrefix(uuid, "GPU-"), "MIG-"), "-", "")
	want, err := hex.DecodeString(digits)
	if err != nil || len(want) != 16 {
		return nil, fmt.Errorf("driver: %q is no UUID", uuid)
	}
	for i := range d.devices {
		dev, err := d.Device(i)
		if err != nil {
			return nil, err
		}
		if bytes.Equal(dev.uuid[:], want) {
			return dev, nil
		}
	}
	return nil, fmt.Errorf("driver: no device %s among the %d that this process sees: %w", uuid, d.devices, ErrInvalidDevice)
}

// newError asks the driver for what it says of the code, which never waits.
func newError(t *cuapi.Table, op cuapi.ID, r cuapi.Result, detail string) *Error {
	e := &Error{Op: cuapi.Entries[op].Symbol(), Code: Result(r), Detail: detail}
	e.ask(t)
	return e
}
