package driver

import (
	"bytes"
	"fmt"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Device is one GPU, or one MIG partition of a GPU.
type Device struct {
	drv     *Driver
	handle  cuapi.Device
	ordinal int
	name    string
	uuid    cuapi.UUID
	memory  uint64
	major   int
	minor   int
}

func (d *Driver) describe(h cuapi.Device, ordinal int) (*Device, error) {
	t := d.table
	dev := &Device{drv: d, handle: h, ordinal: ordinal}
	name := make([]byte, 256)
	if r := t.DeviceGetName(&name[0], int32(len(name)), h); r != cuapi.Success {
		return nil, newError(t, cuapi.IDDeviceGetName, r, "")
	}
	dev.name = string(name[:max(0, bytes.IndexByte(name, 0))])
	if r := t.DeviceGetUuid(&dev.uuid, h); r != cuapi.Success {
		return nil, newError(t, cuapi.IDDeviceGetUuid, r, "")
	}
	total := new(uintptr)
	if r := t.DeviceTotalMem(total, h); r != cuapi.Success {
		return nil, newError(t, cuapi.IDDeviceTotalMem, r, "")
	}
	dev.memory = uint64(*total)
	var err error
	if dev.major, err = dev.attribute(cuapi.DeviceCapabilityMajor); err != nil {
		return nil, err
	}
	if dev.minor, err = dev.attribute(cuapi.DeviceCapabilityMinor); err != nil {
		return nil, err
	}
	return dev, nil
}

// Ordinal returns the device's number in this process.
func (d *Device) Ordinal() int {
	if d == nil {
		return 0
	}
	return d.ordinal
}

// Name returns the device's name, as cuDeviceGetName gives it.
func (d *Device) Name() string {
	if d == nil {
		return ""
	}
	return d.name
}

// UUID returns the device's identity as "GPU-" and 8-4-4-4-12 digits: the same
// in every process and after a restart.
func (d *Device) UUID() string {
	if d == nil {
		return ""
	}
	u := d.uuid
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// Memory returns the device's total memory in bytes.
func (d *Device) Memory() uint64 {
	if d == nil {
		return 0
	}
	return d.memory
}

// Capability returns the compute capability: 9 and 0 for a Hopper GPU.
func (d *Device) Capability() (major, minor int) {
	if d == nil {
		return 0, 0
	}
	return d.major, d.minor
}

// Multiprocessors returns the number of streaming multiprocessors.
func (d *Device) Multiprocessors() (int, error) { return d.attribute(cuapi.DeviceMultiprocessors) }

// MemoryPools tells whether the device has stream-ordered allocation
// (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CUDA 11.2) and the driver every
// entry point that it takes.
func (d *Device) MemoryPools() bool {
	n, err := d.attribute(cuapi.DeviceMemoryPools)
	if err != nil || n == 0 {
		return false
	}
	for _, id := range []cuapi.ID{
		cuapi.IDMemPoolCreate, cuapi.IDMemPoolSetAttribute, cuapi.IDMemPoolDestroy,
		cuapi.IDMemAllocFromPoolAsync, cuapi.IDMemFreeAsync,
	} {
		if !d.drv.table.Has(id) {
			return false
		}
	}
	return true
}

func (d *Device) attribute(attr int32) (int, error) {
	if d == nil || d.drv == nil {
		return 0, fmt.Errorf("driver: no device: %w", ErrClosed)
	}
	n := new(int32)
	if r := d.drv.table.DeviceGetAttribute(n, attr, d.handle); r != cuapi.Success {
		return 0, newError(d.drv.table, cuapi.IDDeviceGetAttribute, r, fmt.Sprintf("attribute %d", attr))
	}
	return int(*n), nil
}
