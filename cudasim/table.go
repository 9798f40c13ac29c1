package cudasim

import (
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// raw is the whole table. Its functions run under the lock, admitted.
func (s *Sim) raw() *cuapi.Table {
	return &cuapi.Table{
		Init:                            s.init,
		DriverGetVersion:                s.driverGetVersion,
		GetErrorName:                    getErrorName,
		GetErrorString:                  s.getErrorString,
		GetProcAddressV2:                s.getProcAddressV2,
		GetProcAddress:                  s.getProcAddress,
		LogsDumpToMemory:                logsDumpToMemory,
		DeviceGetCount:                  s.deviceGetCount,
		DeviceGet:                       s.deviceGet,
		DeviceGetName:                   s.deviceGetName,
		DeviceGetUuid:                   s.deviceGetUUID,
		DeviceTotalMem:                  s.deviceTotalMem,
		DeviceGetAttribute:              s.deviceGetAttribute,
		DeviceGetP2PAttribute:           s.deviceGetP2PAttribute,
		DeviceCanAccessPeer:             s.deviceCanAccessPeer,
		DevicePrimaryCtxRetain:          s.devicePrimaryCtxRetain,
		DevicePrimaryCtxRelease:         s.devicePrimaryCtxRelease,
		DevicePrimaryCtxGetState:        s.devicePrimaryCtxGetState,
		CtxGetCurrent:                   s.ctxGetCurrent,
		CtxSetCurrent:                   s.ctxSetCurrent,
		CtxPushCurrent:                  s.ctxPushCurrent,
		CtxPopCurrent:                   s.ctxPopCurrent,
		CtxGetId:                        s.ctxGetID,
		CtxSynchronize:                  s.ctxSynchronize,
		CtxEnablePeerAccess:             s.ctxEnablePeerAccess,
		CtxDisablePeerAccess:            s.ctxDisablePeerAccess,
		MemGetInfo:                      s.memGetInfo,
		MemAlloc:                        s.memAlloc,
		MemAllocManaged:                 s.memAllocManaged,
		MemFree:                         s.memFree,
		MemHostAlloc:                    s.memHostAlloc,
		MemFreeHost:                     s.memFreeHost,
		MemHostRegister:                 s.memHostRegister,
		MemHostUnregister:               s.memHostUnregister,
		MemHostGetDevicePointer:         s.memHostGetDevicePointer,
		MemGetAddressRange:              s.memGetAddressRange,
		PointerGetAttribute:             s.pointerGetAttribute,
		MemAllocAsync:                   s.memAllocAsync,
		MemAllocFromPoolAsync:           s.memAllocFromPoolAsync,
		MemFreeAsync:                    s.memFreeAsync,
		DeviceGetDefaultMemPool:         s.deviceGetDefaultMemPool,
		MemPoolCreate:                   s.memPoolCreate,
		MemPoolDestroy:                  s.memPoolDestroy,
		MemPoolTrimTo:                   s.memPoolTrimTo,
		MemPoolSetAttribute:             s.memPoolSetAttribute,
		MemPoolGetAttribute:             s.memPoolGetAttribute,
		MemPoolSetAccess:                s.memPoolSetAccess,
		MemPoolGetAccess:                s.memPoolGetAccess,
		MemcpyHtoDAsync:                 s.memcpyHtoDAsync,
		MemcpyDtoHAsync:                 s.memcpyDtoHAsync,
		MemcpyDtoDAsync:                 s.memcpyDtoDAsync,
		MemcpyAsync:                     s.memcpyAsync,
		MemcpyPeerAsync:                 s.memcpyPeerAsync,
		MemsetD8Async:                   s.memsetD8Async,
		StreamCreate:                    s.streamCreate,
		StreamCreateWithPriority:        s.streamCreateWithPriority,
		StreamDestroy:                   s.streamDestroy,
		StreamQuery:                     s.streamQuery,
		StreamSynchronize:               s.streamSynchronize,
		StreamWaitEvent:                 s.streamWaitEvent,
		StreamGetCtx:                    s.streamGetCtx,
		StreamGetFlags:                  s.streamGetFlags,
		StreamGetPriority:               s.streamGetPriority,
		StreamGetId:                     s.streamGetID,
		StreamWaitValue32:               s.streamWaitValue32,
		StreamWriteValue32:              s.streamWriteValue32,
		LaunchHostFunc:                  s.launchHostFunc,
		StreamIsCapturing:               s.streamIsCapturing,
		StreamBeginCapture:              s.streamBeginCapture,
		StreamEndCapture:                s.streamEndCapture,
		GraphDestroy:                    s.graphDestroy,
		ThreadExchangeStreamCaptureMode: s.threadExchangeStreamCaptureMode,
		EventCreate:                     s.eventCreate,
		EventDestroy:                    s.eventDestroy,
		EventRecord:                     s.eventRecord,
		EventQuery:                      s.eventQuery,
		EventSynchronize:                s.eventSynchronize,
		EventElapsedTime:                s.eventElapsedTime,
		ModuleLoadDataEx:                s.moduleLoadDataEx,
		ModuleUnload:                    s.moduleUnload,
		ModuleGetFunction:               s.moduleGetFunction,
		ModuleGetGlobal:                 s.moduleGetGlobal,
		FuncGetAttribute:                s.funcGetAttribute,
		FuncSetAttribute:                s.funcSetAttribute,
		FuncLoad:                        s.funcLoad,
		FuncGetParamInfo:                s.funcGetParamInfo,
		LaunchKernel:                    s.launchKernel,
		OccupancyMaxActiveBlocksPerMultiprocessor: s.occupancyMaxActiveBlocks,
		OccupancyMaxPotentialBlockSize:            s.occupancyMaxPotentialBlockSize,
		HostWait:                                  s.hostWait,
	}
}

// getProcAddressV2 gives each known symbol a number of its own; it is no code
// address, and nothing calls it.
func (s *Sim) getProcAddressV2(symbol *byte, pfn *uintptr, version int32, flags uint64, status *int32) cuapi.Result {
	r, known := s.procAddress(symbol, pfn, version)
	if status != nil {
		*status = 0 // CU_GET_PROC_ADDRESS_SUCCESS
		switch {
		case !known:
			*status = 1 // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
		case r != cuapi.Success:
			*status = 2 // CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
		}
	}
	return r
}

func (s *Sim) getProcAddress(symbol *byte, pfn *uintptr, version int32, flags uint64) cuapi.Result {
	r, _ := s.procAddress(symbol, pfn, version)
	return r
}

func (s *Sim) procAddress(symbol *byte, pfn *uintptr, version int32) (r cuapi.Result, known bool) {
	*pfn = 0
	name, _ := cString(symbol, 256)
	for i, e := range cuapi.Entries {
		for j, sym := range e.Symbols {
			if sym.Name != name && strings.TrimSuffix(sym.Name, "_v2") != name {
				continue
			}
			if known = true; sym.Since <= int(version) && sym.Since <= s.cfg.Version {
				*pfn = uintptr(0x1000 + i*0x10 + j)
				return cuapi.Success, true
			}
		}
	}
	return cuapi.NotFound, known
}

// logsDumpToMemory: the simulated driver has no log.
func logsDumpToMemory(iterator *uint32, buffer *byte, size *uintptr, flags uint32) cuapi.Result {
	if size == nil {
		return cuapi.InvalidValue
	}
	if buffer != nil && *size > 0 {
		*buffer = 0
	}
	*size = 0
	return cuapi.Success
}

// cText is a C string that stays where it is.
func cText(s string) *byte { return &append([]byte(s), 0)[0] }

type errorText struct{ name, text *byte }

func describe(name, text string) errorText { return errorText{cText(name), cText(text)} }

// errorTexts are names and descriptions as in cuda.h, shortened.
var errorTexts = map[cuapi.Result]errorText{
	cuapi.Success:                   describe("CUDA_SUCCESS", "no error"),
	cuapi.InvalidValue:              describe("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
	cuapi.OutOfMemory:               describe("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
	cuapi.NotInitialized:            describe("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
	cuapi.Deinitialized:             describe("CUDA_ERROR_DEINITIALIZED", "driver shutting down"),
	cuapi.StubLibrary:               describe("CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"),
	cuapi.DeviceUnavailable:         describe("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
	cuapi.NoDevice:                  describe("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
	cuapi.InvalidDevice:             describe("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
	cuapi.InvalidImage:              describe("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
	cuapi.InvalidContext:            describe("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
	cuapi.NoBinaryForGPU:            describe("CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"),
	cuapi.ECCUncorrectable:          describe("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"),
	cuapi.UnsupportedLimit:          describe("CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported on this architecture"),
	cuapi.PeerAccessUnsupported:     describe("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"),
	cuapi.InvalidPTX:                describe("CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
	cuapi.NVLinkUncorrectable:       describe("CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected during the execution"),
	cuapi.UnsupportedPTXVersion:     describe("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."),
	cuapi.InvalidHandle:             describe("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
	cuapi.IllegalState:              describe("CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"),
	cuapi.NotFound:                  describe("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
	cuapi.NotReady:                  describe("CUDA_ERROR_NOT_READY", "device not ready"),
	cuapi.IllegalAddress:            describe("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
	cuapi.LaunchOutOfResources:      describe("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"),
	cuapi.LaunchTimeout:             describe("CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
	cuapi.PeerAccessAlreadyEnabled:  describe("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"),
	cuapi.PeerAccessNotEnabled:      describe("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"),
	cuapi.PrimaryContextActive:      describe("CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"),
	cuapi.ContextIsDestroyed:        describe("CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"),
	cuapi.Assert:                    describe("CUDA_ERROR_ASSERT", "device-side assert triggered"),
	cuapi.TooManyPeers:              describe("CUDA_ERROR_TOO_MANY_PEERS", "peer mapping resources exhausted"),
	cuapi.HostMemoryRegistered:      describe("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"),
	cuapi.HostMemoryNotRegistered:   describe("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"),
	cuapi.HardwareStackError:        describe("CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"),
	cuapi.IllegalInstruction:        describe("CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
	cuapi.MisalignedAddress:         describe("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
	cuapi.InvalidAddressSpace:       describe("CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"),
	cuapi.InvalidPC:                 describe("CUDA_ERROR_INVALID_PC", "invalid program counter"),
	cuapi.LaunchFailed:              describe("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
	cuapi.CooperativeLaunchTooLarge: describe("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"),
	cuapi.TensorMemoryLeak:          describe("CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory not completely freed"),
	cuapi.NotPermitted:              describe("CUDA_ERROR_NOT_PERMITTED", "operation not permitted"),
	cuapi.NotSupported:              describe("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
	cuapi.SystemNotReady:            describe("CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"),
	cuapi.SystemDriverMismatch:      describe("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"),
	cuapi.StreamCaptureUnsupported:  describe("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
	cuapi.StreamCaptureInvalidated:  describe("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"),
	cuapi.StreamCaptureMerge:        describe("CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"),
	cuapi.StreamCaptureUnmatched:    describe("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"),
	cuapi.StreamCaptureUnjoined:     describe("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"),
	cuapi.StreamCaptureIsolation:    describe("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"),
	cuapi.StreamCaptureImplicit:     describe("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"),
	cuapi.CapturedEvent:             describe("CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"),
	cuapi.StreamCaptureWrongThread:  describe("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"),
	cuapi.Unknown:                   describe("CUDA_ERROR_UNKNOWN", "unknown error"),
}

func getErrorName(r cuapi.Result, p **byte) cuapi.Result {
	*p = errorTexts[r].name
	return knownError(*p)
}

// getErrorString adds what the last call did wrong: who prints the error of a
// launch then sees that the kernel was not registered.
func (s *Sim) getErrorString(r cuapi.Result, p **byte) cuapi.Result {
	*p = errorTexts[r].text
	if *p != nil && s.reason != "" {
		text, _ := cString(*p, 256)
		*p = cText(text + " (simulated driver: " + s.reason + ")")
	}
	return knownError(*p)
}

func knownError(p *byte) cuapi.Result {
	if p == nil {
		return cuapi.InvalidValue
	}
	return cuapi.Success
}
