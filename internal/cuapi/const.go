package cuapi

import "strconv"

// Result is a CUresult: what every entry point returns.
type Result int32

// Results that purecuda tells apart by name (CUresult in cuda.h).
const (
	Success                   Result = 0
	InvalidValue              Result = 1
	OutOfMemory               Result = 2
	NotInitialized            Result = 3
	Deinitialized             Result = 4
	StubLibrary               Result = 34
	DeviceUnavailable         Result = 46
	NoDevice                  Result = 100
	InvalidDevice             Result = 101
	InvalidImage              Result = 200
	InvalidContext            Result = 201
	NoBinaryForGPU            Result = 209
	ECCUncorrectable          Result = 214
	UnsupportedLimit          Result = 215
	PeerAccessUnsupported     Result = 217
	InvalidPTX                Result = 218
	NVLinkUncorrectable       Result = 220
	UnsupportedPTXVersion     Result = 222
	InvalidHandle             Result = 400
	IllegalState              Result = 401
	NotFound                  Result = 500
	NotReady                  Result = 600
	IllegalAddress            Result = 700
	LaunchOutOfResources      Result = 701
	LaunchTimeout             Result = 702
	PeerAccessAlreadyEnabled  Result = 704
	PeerAccessNotEnabled      Result = 705
	PrimaryContextActive      Result = 708
	ContextIsDestroyed        Result = 709
	Assert                    Result = 710
	TooManyPeers              Result = 711
	HostMemoryRegistered      Result = 712
	HostMemoryNotRegistered   Result = 713
	HardwareStackError        Result = 714
	IllegalInstruction        Result = 715
	MisalignedAddress         Result = 716
	InvalidAddressSpace       Result = 717
	InvalidPC                 Result = 718
	LaunchFailed              Result = 719
	CooperativeLaunchTooLarge Result = 720
	TensorMemoryLeak          Result = 721
	NotPermitted              Result = 800
	NotSupported              Result = 801
	SystemNotReady            Result = 802
	SystemDriverMismatch      Result = 803
	StreamCaptureUnsupported  Result = 900
	StreamCaptureInvalidated  Result = 901
	StreamCaptureMerge        Result = 902
	StreamCaptureUnmatched    Result = 903
	StreamCaptureUnjoined     Result = 904
	StreamCaptureIsolation    Result = 905
	StreamCaptureImplicit     Result = 906
	CapturedEvent             Result = 907
	StreamCaptureWrongThread  Result = 908
	Unknown                   Result = 999
)

// Sticky tells whether the result means that the context is lost: every later
// call on it returns the same, for the life of the process.
func (r Result) Sticky() bool {
	switch r {
	case ECCUncorrectable, NVLinkUncorrectable, IllegalAddress, LaunchTimeout, ContextIsDestroyed, Assert, LaunchFailed, TensorMemoryLeak,
		HardwareStackError, IllegalInstruction, MisalignedAddress, InvalidAddressSpace, InvalidPC:
		return true
	}
	return false
}

func (r Result) String() string { return "CUresult " + strconv.Itoa(int(r)) }

// Flags and attributes, by their names in cuda.h.
const (
	StreamNonBlocking = 1 // CU_STREAM_NON_BLOCKING

	EventDefault       = 0
	EventBlockingSync  = 1 // CU_EVENT_BLOCKING_SYNC
	EventDisableTiming = 2 // CU_EVENT_DISABLE_TIMING

	MemAttachGlobal           = 1 // CU_MEM_ATTACH_GLOBAL
	MemAttachHost             = 2 // CU_MEM_ATTACH_HOST
	MemHostAllocPortable      = 1 // CU_MEMHOSTALLOC_PORTABLE
	MemHostAllocDeviceMap     = 2 // CU_MEMHOSTALLOC_DEVICEMAP
	MemHostAllocWriteCombined = 4 // CU_MEMHOSTALLOC_WRITECOMBINED

	StreamWaitValueGEQ = 0 // CU_STREAM_WAIT_VALUE_GEQ
	StreamWaitValueEQ  = 1 // CU_STREAM_WAIT_VALUE_EQ

	MemAllocationTypePinned = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	MemLocationTypeDevice   = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	MemAccessReadWrite      = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

	PoolReuseFollowEventDependencies   = 1 // CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
	PoolReuseAllowOpportunistic        = 2 // CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
	PoolReuseAllowInternalDependencies = 3 // CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
	PoolReleaseThreshold               = 4 // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
	PoolReservedMemCurrent             = 5 // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
	PoolUsedMemCurrent                 = 7 // CU_MEMPOOL_ATTR_USED_MEM_CURRENT

	CaptureStatusNone        = 0
	CaptureStatusActive      = 1
	CaptureStatusInvalidated = 2
	CaptureModeGlobal        = 0
	CaptureModeThreadLocal   = 1
	CaptureModeRelaxed       = 2

	DeviceMaxThreadsPerBlock     = 1   // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
	DeviceMaxBlockDimX           = 2   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
	DeviceMaxBlockDimY           = 3   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y
	DeviceMaxBlockDimZ           = 4   // CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z
	DeviceMaxGridDimX            = 5   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X
	DeviceMaxGridDimY            = 6   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y
	DeviceMaxGridDimZ            = 7   // CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z
	DeviceMaxSharedPerBlock      = 8   // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK
	DeviceWarpSize               = 10  // CU_DEVICE_ATTRIBUTE_WARP_SIZE
	DeviceMultiprocessors        = 16  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
	DeviceIntegrated             = 18  // CU_DEVICE_ATTRIBUTE_INTEGRATED
	DeviceCanMapHostMemory       = 19  // CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
	DeviceComputeMode            = 20  // CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
	DeviceAsyncEngines           = 40  // CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
	DeviceUnifiedAddressing      = 41  // CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
	DeviceCapabilityMajor        = 75  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
	DeviceCapabilityMinor        = 76  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
	DeviceManagedMemory          = 83  // CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
	DeviceMaxSharedPerBlockOptin = 97  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
	DeviceMemoryPools            = 115 // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED

	PointerContext    = 1  // CU_POINTER_ATTRIBUTE_CONTEXT
	PointerMemoryType = 2  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
	PointerIsManaged  = 8  // CU_POINTER_ATTRIBUTE_IS_MANAGED
	PointerOrdinal    = 9  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
	PointerRangeStart = 11 // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
	PointerRangeSize  = 12 // CU_POINTER_ATTRIBUTE_RANGE_SIZE
	MemoryTypeHost    = 1  // CU_MEMORYTYPE_HOST
	MemoryTypeDevice  = 2  // CU_MEMORYTYPE_DEVICE

	FuncMaxThreadsPerBlock = 0 // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
	FuncSharedSize         = 1 // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
	FuncNumRegs            = 4 // CU_FUNC_ATTRIBUTE_NUM_REGS
	FuncMaxDynamicShared   = 8 // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

	JITInfoLogBuffer      = 3 // CU_JIT_INFO_LOG_BUFFER
	JITInfoLogBufferSize  = 4 // CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES
	JITErrorLogBuffer     = 5 // CU_JIT_ERROR_LOG_BUFFER
	JITErrorLogBufferSize = 6 // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
)
