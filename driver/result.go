package driver

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/own"
)

// Result is a CUresult: the code that every driver call returns. Each code is
// an error that [errors.Is] finds in an [*Error]:
//
//	errors.Is(err, driver.ErrOutOfMemory)
type Result int32

// Codes that programs tell apart. Other codes are Results all the same.
const (
	ErrInvalidValue         = Result(cuapi.InvalidValue)
	ErrOutOfMemory          = Result(cuapi.OutOfMemory)
	ErrDeinitialized        = Result(cuapi.Deinitialized)
	ErrStubLibrary          = Result(cuapi.StubLibrary)
	ErrNoDevice             = Result(cuapi.NoDevice)
	ErrInvalidDevice        = Result(cuapi.InvalidDevice)
	ErrInvalidContext       = Result(cuapi.InvalidContext)
	ErrInvalidImage         = Result(cuapi.InvalidImage)
	ErrNoBinaryForGPU       = Result(cuapi.NoBinaryForGPU)
	ErrECCUncorrectable     = Result(cuapi.ECCUncorrectable)
	ErrInvalidPTX           = Result(cuapi.InvalidPTX)
	ErrInvalidHandle        = Result(cuapi.InvalidHandle)
	ErrNotFound             = Result(cuapi.NotFound)
	ErrNotReady             = Result(cuapi.NotReady)
	ErrIllegalAddress       = Result(cuapi.IllegalAddress)
	ErrLaunchOutOfResources = Result(cuapi.LaunchOutOfResources)
	ErrLaunchTimeout        = Result(cuapi.LaunchTimeout)
	ErrAssert               = Result(cuapi.Assert)
	ErrMisalignedAddress    = Result(cuapi.MisalignedAddress)
	ErrLaunchFailed         = Result(cuapi.LaunchFailed)
	ErrNotPermitted         = Result(cuapi.NotPermitted)
	ErrNotSupported         = Result(cuapi.NotSupported)
	ErrSystemNotReady       = Result(cuapi.SystemNotReady)
)

var (
	// ErrMoved is in the error of every use of a handle after a move.
	ErrMoved = own.ErrMoved
	// ErrClosed is in the error of every use of a handle after a close.
	ErrClosed = own.ErrClosed
	// ErrBusy is in the error of a move while another call uses the handle, and
	// of a Shutdown while something is open.
	ErrBusy = own.ErrBusy
)

// Sticky tells whether the code means that the context is lost: from then on
// every call on it fails, for the life of the process.
func (r Result) Sticky() bool { return cuapi.Result(r).Sticky() }

// Error returns the code's name in cuda.h and its number. Names that are newer
// than this library are in an [*Error] alone.
func (r Result) Error() string { return r.text("") }

// text names the code; name is the driver's own, for codes that the table lacks.
func (r Result) text(name string) string {
	switch known, ok := resultNames[cuapi.Result(r)]; {
	case ok:
		name = "CUDA_ERROR_" + known
	case r == 0:
		name = "CUDA_SUCCESS"
	case name == "":
		return "CUDA error " + strconv.Itoa(int(r))
	}
	return name + " (" + strconv.Itoa(int(r)) + ")"
}

// Error is a driver call that failed.
type Error struct {
	Op     string // the entry point: "cuEventRecord"
	Code   Result
	Text   string // the driver's own description of the code, if it gave one
	Detail string // sizes and offsets, for copies and allocations

	name string // the driver's own name of a code that the table lacks
}

// ask takes from the driver what it says of the code, which never waits.
func (e *Error) ask(t *cuapi.Table) {
	e.Text = said(t.GetErrorString, e.Code)
	if _, ok := resultNames[cuapi.Result(e.Code)]; !ok {
		e.name = said(t.GetErrorName, e.Code)
	}
}

// said returns what the driver's entry point f, which it may lack, says of r.
func said(f func(cuapi.Result, **byte) cuapi.Result, r Result) (text string) {
	p := new(*byte)
	if f != nil && f(cuapi.Result(r), p) == cuapi.Success {
		text = cuapi.CString(*p)
	}
	runtime.KeepAlive(p)
	return text
}

// Error returns operation, code name, number, description and detail.
func (e *Error) Error() string {
	s := e.Op + ": " + e.Code.text(e.name)
	if e.Text != "" {
		s += ": " + e.Text
	}
	if e.Detail != "" {
		s += " [" + e.Detail + "]"
	}
	return s
}

// Unwrap returns the code, so that errors.Is finds it.
func (e *Error) Unwrap() error { return e.Code }

// UnsupportedError tells that the driver lacks an optional entry point or a
// device lacks a feature. It matches [errors.ErrUnsupported].
type UnsupportedError struct {
	Feature string // "cuMemAllocAsync", or what the device lacks
	Since   int    // the first CUDA version that has it, 11020 for 11.2; 0 if it is the device
	Have    int    // the driver's CUDA version
}

func (e *UnsupportedError) Error() string {
	if e.Since == 0 {
		return e.Feature + ": this device does not support it"
	}
	return fmt.Sprintf("%s: needs CUDA %s, this driver has %s", e.Feature, versionText(e.Since), versionText(e.Have))
}

// Is matches errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

func versionText(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// resultNames are the names of cuda.h without CUDA_ERROR_. They need no driver
// to ask; it is asked for others.
var resultNames = map[cuapi.Result]string{
	1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 3: "NOT_INITIALIZED", 4: "DEINITIALIZED",
	34: "STUB_LIBRARY", 46: "DEVICE_UNAVAILABLE", 100: "NO_DEVICE", 101: "INVALID_DEVICE",
	200: "INVALID_IMAGE", 201: "INVALID_CONTEXT", 205: "MAP_FAILED", 209: "NO_BINARY_FOR_GPU",
	214: "ECC_UNCORRECTABLE", 215: "UNSUPPORTED_LIMIT", 217: "PEER_ACCESS_UNSUPPORTED", 218: "INVALID_PTX",
	220: "NVLINK_UNCORRECTABLE", 221: "JIT_COMPILER_NOT_FOUND", 222: "UNSUPPORTED_PTX_VERSION",
	300: "INVALID_SOURCE", 301: "FILE_NOT_FOUND", 304: "OPERATING_SYSTEM",
	400: "INVALID_HANDLE", 401: "ILLEGAL_STATE", 500: "NOT_FOUND", 600: "NOT_READY",
	700: "ILLEGAL_ADDRESS", 701: "LAUNCH_OUT_OF_RESOURCES", 702: "LAUNCH_TIMEOUT",
	704: "PEER_ACCESS_ALREADY_ENABLED", 705: "PEER_ACCESS_NOT_ENABLED", 708: "PRIMARY_CONTEXT_ACTIVE",
	709: "CONTEXT_IS_DESTROYED", 710: "ASSERT", 711: "TOO_MANY_PEERS",
	712: "HOST_MEMORY_ALREADY_REGISTERED", 713: "HOST_MEMORY_NOT_REGISTERED",
	714: "HARDWARE_STACK_ERROR", 715: "ILLEGAL_INSTRUCTION", 716: "MISALIGNED_ADDRESS",
	717: "INVALID_ADDRESS_SPACE", 718: "INVALID_PC", 719: "LAUNCH_FAILED",
	720: "COOPERATIVE_LAUNCH_TOO_LARGE", 721: "TENSOR_MEMORY_LEAK",
	800: "NOT_PERMITTED", 801: "NOT_SUPPORTED", 802: "SYSTEM_NOT_READY", 803: "SYSTEM_DRIVER_MISMATCH",
	900: "STREAM_CAPTURE_UNSUPPORTED", 901: "STREAM_CAPTURE_INVALIDATED", 902: "STREAM_CAPTURE_MERGE",
	903: "STREAM_CAPTURE_UNMATCHED", 904: "STREAM_CAPTURE_UNJOINED", 905: "STREAM_CAPTURE_ISOLATION",
	906: "STREAM_CAPTURE_IMPLICIT", 907: "CAPTURED_EVENT", 908: "STREAM_CAPTURE_WRONG_THREAD",
	999: "UNKNOWN",
}
