package nvml

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Library is the part of NVML that Virgate uses, one method a call, named as in
// NVML's header. Calls come from several goroutines at once: one for each GPU
// that is being read, one that waits for events, and one for the rest.
//
// Every method returns one value and an error, or an error only. A failing method
// returns an *Error with its name and NVML's return code, NotSupported for what a
// back-end cannot do.
type Library interface {
	Init() error
	Shutdown() error
	SystemGetDriverVersion() (string, error)
	// SystemGetCudaDriverVersion is the newest CUDA that the driver runs: 12080 for 12.8.
	SystemGetCudaDriverVersion() (int, error)
	// SystemGetConfComputeState says whether confidential computing is on, for all GPUs of the machine.
	SystemGetConfComputeState() (bool, error)
	// SystemGetConfComputeGpusReadyState is ConfComputeReady when the GPUs accept work, which nobody
	// but an operator's program says: with confidential computing CUDA fails until then.
	SystemGetConfComputeGpusReadyState() (uint32, error)

	DeviceGetCount() (int, error)
	DeviceGetHandleByIndex(index int) (Device, error)
	DeviceGetUUID(Device) (string, error)
	DeviceGetMinorNumber(Device) (int, error)
	DeviceGetPciInfo(Device) (PCIInfo, error)
	// DeviceGetName is the product name. For a MIG device the driver appends
	// " MIG " and the profile.
	DeviceGetName(Device) (string, error)
	DeviceGetMemoryInfo(Device) (MemoryInfo, error)
	DeviceGetArchitecture(Device) (Architecture, error)
	DeviceGetBrand(Device) (Brand, error)
	DeviceGetCudaComputeCapability(Device) (ComputeCapability, error)
	// DeviceGetNumaNodeId is the NUMA node next to the GPU, -1 for none. NVML's call
	// of that name is about GPUs that are a node themselves; this one is read from
	// sysfs by the PCI bus ID.
	DeviceGetNumaNodeId(Device) (int, error)
	// DeviceGetTemperature is the core temperature in degrees Celsius.
	DeviceGetTemperature(Device) (int, error)
	// DeviceGetTemperatureThreshold is a temperature that the board has set, such as
	// TemperatureSlowdown. Drivers are to lose it for GPUs from Ada on (nvml.h).
	DeviceGetTemperatureThreshold(d Device, threshold int) (int, error)
	// DeviceGetMarginTemperature is how many degrees the GPU may still become hotter, below 0
	// when it is slowed down. The field SlowdownMargin says how far below 0 the hardware does that.
	// Older GPUs and drivers do not have it.
	DeviceGetMarginTemperature(Device) (int, error)
	DeviceGetComputeRunningProcesses(Device) ([]Process, error)
	DeviceGetGraphicsRunningProcesses(Device) ([]Process, error)
	// DeviceGetMPSComputeRunningProcesses are the clients of an MPS server.
	DeviceGetMPSComputeRunningProcesses(Device) ([]Process, error)
	// DeviceGetFieldValues reads one field, such as RecoveryAction.
	DeviceGetFieldValues(d Device, field int) (uint32, error)
	// DeviceGetRemappedRows is NotSupported on GPUs that replace no memory
	// rows, which are those before Ampere.
	DeviceGetRemappedRows(Device) (RemappedRows, error)
	// DeviceGetMemoryErrorCounter is how many errors that ECC has found were counted. It is
	// NotSupported where ECC is off, for memory that the GPU does not count, and with MIG
	// enabled for what is counted since the driver was loaded (nvml.h).
	DeviceGetMemoryErrorCounter(Device, MemoryErrorCounter) (uint64, error)
	// DeviceGetRetiredPagesPendingStatus says whether memory pages wait for a reset
	// to be retired. It is NotSupported on GPUs that replace rows instead.
	DeviceGetRetiredPagesPendingStatus(Device) (bool, error)

	// The next say how busy a device is. The first two are NotSupported on a GPU with MIG
	// enabled (nvml.h), and all on a MIG device: clocks and power are the GPU's.

	// DeviceGetUtilizationRates is how busy the GPU was in the driver's last
	// sample period, of between a sixth of a second and a second.
	DeviceGetUtilizationRates(Device) (Utilization, error)
	// DeviceGetProcessUtilization returns the samples taken after lastSeen, the
	// latest Time of an earlier call, or all that the driver has kept for 0. There
	// is none of a process that did nothing in the sample period. NotFound says
	// that there is none at all, and is no failure.
	DeviceGetProcessUtilization(d Device, lastSeen uint64) ([]ProcessSample, error)
	// DeviceGetCurrentClocksEventReasons says why the clocks are not higher.
	DeviceGetCurrentClocksEventReasons(Device) (ClockReasons, error)
	// DeviceGetPowerUsage is in milliwatts, with the memory: the mean of a second, or on
	// GA100 and before Ampere that of the moment.
	DeviceGetPowerUsage(Device) (int, error)
	// DeviceGetTotalEnergyConsumption is in millijoules since the driver was loaded. It is
	// NotSupported before Volta.
	DeviceGetTotalEnergyConsumption(Device) (uint64, error)

	// DeviceGetTopologyCommonAncestor says how close two GPUs are on the bus.
	DeviceGetTopologyCommonAncestor(a, b Device) (TopologyLevel, error)
	// DeviceGetNvLinkState says whether a link, counted from 0, is active. A
	// GPU without NVLink answers NotSupported; InvalidArgument is the end.
	DeviceGetNvLinkState(d Device, link int) (bool, error)
	// DeviceGetNvLinkRemotePciInfo is what is at the link's other end: a GPU
	// or a switch.
	DeviceGetNvLinkRemotePciInfo(d Device, link int) (PCIInfo, error)

	// DeviceGetGpuFabricInfo is NVML's DeviceGetGpuFabricInfoV in the newest version that the driver
	// has, or its predecessor. It is NotSupported on GPUs before Hopper.
	DeviceGetGpuFabricInfo(Device) (FabricInfo, error)

	// DeviceGetVirtualizationMode says how a virtual machine has the GPU, if one has it.
	DeviceGetVirtualizationMode(Device) (VirtualizationMode, error)
	// DeviceGetComputeMode and DeviceSetComputeMode are for a GPU without MIG; setting takes
	// root, and answers NoPermission without.
	DeviceGetComputeMode(Device) (ComputeMode, error)
	DeviceSetComputeMode(d Device, mode ComputeMode) error
	DeviceGetMigMode(Device) (MIGMode, error)
	DeviceGetMaxMigDeviceCount(Device) (int, error)
	// DeviceGetMigDeviceHandleByIndex returns NotFound where there is no device:
	// indices have holes, up to the maximum.
	DeviceGetMigDeviceHandleByIndex(parent Device, index int) (Device, error)
	DeviceGetGpuInstanceId(mig Device) (int, error)
	DeviceGetComputeInstanceId(mig Device) (int, error)
	// DeviceGetAttributes is NotSupported for a GPU.
	DeviceGetAttributes(mig Device) (Attributes, error)
	DeviceGetGpuInstanceById(parent Device, id int) (GPUInstance, error)
	GpuInstanceGetInfo(GPUInstance) (GPUInstanceInfo, error)
	// DeviceGetGpuInstanceProfileInfo takes NVML's enumeration 0, 1, …, not the
	// published profile ID; InvalidArgument is its end, NotSupported a hole.
	DeviceGetGpuInstanceProfileInfo(d Device, profile int) (GPUInstanceProfile, error)
	// GpuInstanceGetComputeInstanceById and ComputeInstanceGetInfo together say
	// how many of its GPU instance's slices a MIG device computes on.
	GpuInstanceGetComputeInstanceById(gi GPUInstance, id int) (ComputeInstance, error)
	ComputeInstanceGetInfo(ComputeInstance) (ComputeInstanceInfo, error)

	// The rest of MIG lists exactly how a GPU is partitioned, and changes it. All of
	// it needs root or MIG's capability files (NVIDIA MIG User Guide, "Device Nodes
	// and Capabilities"), and answers NoPermission without. A profile is a published
	// profile ID here, as in GPUInstanceProfile.ID, unless a method says otherwise.

	// DeviceSetMigMode makes the mode the pending one and tries to activate it.
	// activation is Success or the reason why that is not possible now, such as
	// InUse or ResetRequired; err is about the call. Check both.
	DeviceSetMigMode(d Device, on bool) (activation Return, err error)
	// DeviceGetGpuInstancePossiblePlacements does not depend on the mode or on
	// what is on the GPU.
	DeviceGetGpuInstancePossiblePlacements(d Device, profile int) ([]mig.Placement, error)
	// DeviceGetGpuInstances also returns those without a compute instance, which are
	// no MIG devices but take their slots.
	DeviceGetGpuInstances(d Device, profile int) ([]GPUInstance, error)
	// DeviceCreateGpuInstanceWithPlacement answers InsufficientResources both
	// where there is no room and where the slots are taken.
	DeviceCreateGpuInstanceWithPlacement(d Device, profile int, at mig.Placement) (GPUInstance, error)
	// GpuInstanceDestroy answers InUse while there are compute instances or
	// processes, and for a moment after the last one went.
	GpuInstanceDestroy(GPUInstance) error
	// GpuInstanceGetComputeInstanceProfileInfo takes the enumeration 0, 1, …;
	// InvalidArgument is the end, NotSupported a hole. The engines are shared, which
	// is the only kind that NVML has.
	GpuInstanceGetComputeInstanceProfileInfo(gi GPUInstance, profile int) (ComputeInstanceProfile, error)
	// GpuInstanceGetComputeInstances and GpuInstanceCreateComputeInstance take a
	// ComputeInstanceProfile.ID.
	GpuInstanceGetComputeInstances(gi GPUInstance, profile int) ([]ComputeInstance, error)
	GpuInstanceCreateComputeInstance(gi GPUInstance, profile int) (ComputeInstance, error)
	// ComputeInstanceDestroy answers InUse while processes run on it.
	ComputeInstanceDestroy(ComputeInstance) error

	EventSetCreate() (EventSet, error)
	DeviceGetSupportedEventTypes(Device) (EventTypes, error)
	DeviceRegisterEvents(Device, EventTypes, EventSet) error
	// EventSetWait blocks for at most timeout and then returns Timeout.
	EventSetWait(set EventSet, timeout time.Duration) (Event, error)
	EventSetFree(EventSet) error
}

// Device, GPUInstance, ComputeInstance and EventSet are the back-end's handles:
// opaque, comparable, and valid until Shutdown or until what they stand for goes.
type (
	Device          uint64
	GPUInstance     uint64
	ComputeInstance uint64
	EventSet        uint64
)

// PCIInfo is where a GPU sits.
type PCIInfo struct {
	// BusID is domain:bus:device.function, for example "00000000:3B:00.0".
	BusID string
	// DeviceID is the PCI device ID in the upper and the vendor ID in the lower
	// 16 bits, for example 0x20B010DE.
	DeviceID uint32
	// SubsystemID likewise; 0 when unknown.
	SubsystemID uint32
	// Class is the kernel's, 0x030200 for a GPU without a display; 0 when unknown.
	Class uint32 `json:",omitempty"`
	// Binding tells one binding of the kernel's driver to the GPU from every other since the
	// machine was booted: loading the driver, or taking the GPU off the bus, makes another one.
	// It is the kernel's and not NVML's; 0 when unknown.
	Binding uint64 `json:",omitempty"`
}

// Attributes say what a MIG device has of its GPU.
type Attributes = sharing.PartitionAttributes

// FabricInfo is a GPU's place in a fabric of NVLinks: of NVSwitches, or between machines.
type FabricInfo struct {
	// Cluster is a UUID in text, with Clique a number in it.
	Cluster string
	Clique  uint32
	// State is how far the GPU is in joining it, such as FabricCompleted, and Status how that ended.
	State  int
	Status Return
	// HealthMask and HealthSummary, such as FabricUnhealthy, are 0 for older drivers.
	HealthMask    uint32 `json:",omitempty"`
	HealthSummary int    `json:",omitempty"`
}

// Registered says that the GPU has joined the fabric, so that its place is known.
func (f FabricInfo) Registered() bool { return f.State == FabricCompleted && f.Status == Success }

// The states of FabricInfo (nvml.h, NVML_GPU_FABRIC_STATE_*).
const (
	FabricNotSupported = 0
	FabricNotStarted   = 1
	FabricInProgress   = 2
	FabricCompleted    = 3
)

// The summaries of FabricInfo (nvml.h, NVML_GPU_FABRIC_HEALTH_SUMMARY_*).
const (
	FabricHealthUnknown   = 0
	FabricHealthy         = 1
	FabricUnhealthy       = 2
	FabricLimitedCapacity = 3
)

// ConfComputeReady and ConfComputeNotReady are NVML_CC_ACCEPTING_CLIENT_REQUESTS_* (nvml.h).
const (
	ConfComputeNotReady uint32 = 0
	ConfComputeReady    uint32 = 1
)

// ComputeCapability is CUDA's, for example 9.0.
type ComputeCapability struct{ Major, Minor int }

// VirtualizationMode is NVML's (nvml.h, nvmlGpuVirtualizationMode_t); 0 for a GPU that no
// virtual machine has.
type VirtualizationMode int

// Passthrough says that a virtual machine has the GPU, and cannot reset it.
const Passthrough VirtualizationMode = 1

// ComputeMode is NVML's (nvml.h, nvmlComputeMode_t).
type ComputeMode int

// The modes that drivers have.
const (
	ComputeDefault          ComputeMode = 0
	ComputeProhibited       ComputeMode = 2
	ComputeExclusiveProcess ComputeMode = 3
)

// MIGMode says whether MIG is enabled now, and whether it will be after the next
// reset of the GPU.
type MIGMode struct{ Current, Pending bool }

// MemoryInfo is in bytes.
type MemoryInfo struct{ Total, Free, Used uint64 }

// Process is a host process that uses a device.
type Process struct {
	PID int
	// Memory is in bytes; MemoryUnknown when the driver cannot tell.
	Memory uint64
}

// MemoryUnknown is what NVML reports for memory that it cannot tell (all ones).
const MemoryUnknown = ^uint64(0)

// GPUInstanceInfo says what a GPU instance is and where it lies.
type GPUInstanceInfo struct {
	ID int
	// ProfileID is the published ID (nvidia-smi mig -lgip), the ID of a
	// GPUInstanceProfile.
	ProfileID int
	// Start and Size are in memory slots.
	Start, Size int
}

// GPUInstanceProfile is a kind of GPU instance that a GPU can have.
type GPUInstanceProfile struct {
	// ID is the published profile ID.
	ID int
	// Slices is the number of compute slices, the G of "Gg.Mgb".
	Slices int
	// Instances is how many of them fit on an empty GPU.
	Instances int
	// MemoryMB is the memory of one in MiB.
	MemoryMB uint64
	Engines  mig.Engines
	// Name is the driver's, for example "1g.5gb+me"; empty on drivers that have no
	// names.
	Name string
}

// ComputeInstanceInfo says what a compute instance is.
type ComputeInstanceInfo struct {
	ID int
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int
}

// EventTypes is a set of NVML event types.
type EventTypes uint64

// The event types that say something of a GPU's health (nvml.h,
// nvmlEventType*). Virgate registers for all but single-bit errors, which the
// GPU corrects by itself.
const (
	EventSingleBitECC EventTypes = 1 << 0
	EventDoubleBitECC EventTypes = 1 << 1
	EventXIDCritical  EventTypes = 1 << 3
	// EventGPUUnavailable and EventRecoveryAction say no more than their names: what the driver
	// advises has to be read.
	EventGPUUnavailable EventTypes = 1 << 14
	EventRecoveryAction EventTypes = 1 << 15
)

// Event is what EventSetWait returns.
type Event struct {
	Device Device
	Type   EventTypes
	// Data is the XID for EventXIDCritical.
	Data uint64
	// GI and CI name the partition, or are WholeGPU.
	GI, CI uint32
}

// WholeGPU in Event.GI and Event.CI says that no single partition is meant.
const WholeGPU = ^uint32(0)

// ComputeInstanceProfile is a kind of compute instance that a GPU instance can
// have.
type ComputeInstanceProfile struct {
	// ID is the published profile ID (nvidia-smi mig -lcip).
	ID int
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int
	// Instances is how many of them fit into an empty GPU instance.
	Instances int
}

// Utilization is in percent of the sample period.
type Utilization struct {
	// GPU is the time in which at least one kernel ran, Memory the time in which
	// the GPU's memory was read or written.
	GPU, Memory int
}

// ProcessSample is what a process did in one sample period.
type ProcessSample struct {
	PID int
	// Time is the driver's clock, in microseconds.
	Time uint64
	// SM is the use of the multiprocessors, Memory that of the bandwidth, both in
	// percent.
	SM, Memory int
}

// ClockReasons is a set of NVML's reasons for lower clocks. sharing.ClockReasons has the names
// of its bits.
type ClockReasons uint64

// The reasons that take speed from a busy GPU (nvml.h,
// nvmlClocksEventReasons).
const (
	SoftwarePowerCap        ClockReasons = 0x04
	HardwareSlowdown        ClockReasons = 0x08
	SoftwareThermalSlowdown ClockReasons = 0x20
	HardwareThermalSlowdown ClockReasons = 0x40
	HardwarePowerBrake      ClockReasons = 0x80
)

// Architecture is NVML's device architecture.
type Architecture uint32

// The architectures that NVML's header names (nvml.h, NVML_DEVICE_ARCH_*).
const (
	Kepler    Architecture = 2
	Maxwell   Architecture = 3
	Pascal    Architecture = 4
	Volta     Architecture = 5
	Turing    Architecture = 6
	Ampere    Architecture = 7
	Ada       Architecture = 8
	Hopper    Architecture = 9
	Blackwell Architecture = 10
)

// String is the lower-case family name, "" for an architecture that is newer
// than this list.
func (a Architecture) String() string {
	return map[Architecture]string{
		Kepler:    "kepler",
		Maxwell:   "maxwell",
		Pascal:    "pascal",
		Volta:     "volta",
		Turing:    "turing",
		Ampere:    "ampere",
		Ada:       "ada",
		Hopper:    "hopper",
		Blackwell: "blackwell",
	}[a]
}

// Brand is what NVIDIA sells a GPU as.
type Brand int

// The brands that current data center and workstation GPUs have (nvml.h, nvmlBrandType_t).
const (
	BrandNVIDIARTX Brand = 13
	BrandNVIDIA    Brand = 14
)

// String is the brand as NVIDIA's DRA driver writes it (go-nvlib, GetBrandAsString); "Unknown" for
// one that nvml.h does not have.
func (b Brand) String() string {
	names := []string{
		"Unknown", "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps", "NvidiaVPC", "NvidiaVCS",
		"NvidiaVWS", "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX",
	}
	if b < 0 || int(b) >= len(names) {
		return names[0]
	}
	return names[b]
}

// TopologyLevel is the lowest part of the bus that two GPUs share; a higher level
// is farther.
type TopologyLevel int

// The levels that NVML's header names (nvml.h, nvmlGpuTopologyLevel_t).
const (
	TopologyInternal   TopologyLevel = 0
	TopologySingle     TopologyLevel = 10
	TopologyMultiple   TopologyLevel = 20
	TopologyHostBridge TopologyLevel = 30
	TopologyNode       TopologyLevel = 40
	TopologySystem     TopologyLevel = 50
)

// String is the level in one word, "" for one that is not in this list.
func (l TopologyLevel) String() string {
	return map[TopologyLevel]string{
		TopologyInternal:   "internal",
		TopologySingle:     "single",
		TopologyMultiple:   "multiple",
		TopologyHostBridge: "hostbridge",
		TopologyNode:       "node",
		TopologySystem:     "system",
	}[l]
}

// RecoveryAction is the field that says what the driver advises to do with the GPU (nvml.h,
// NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and nvmlDeviceGpuRecoveryAction_t). Older
// drivers do not have it.
const RecoveryAction = 230

// TemperatureSlowdown is the threshold at which the hardware slows a GPU down (nvml.h,
// NVML_TEMPERATURE_THRESHOLD_SLOWDOWN).
const TemperatureSlowdown = 1

// SlowdownMargin is the field with the margin of temperature at which it does, a signed number
// (nvml.h, NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT).
const SlowdownMargin = 194

// The values of RecoveryAction (nvml.h; the last two are in the header of R595).
const (
	RecoverNone          uint32 = 0
	RecoverReset         uint32 = 1
	RecoverReboot        uint32 = 2
	RecoverDrainP2P      uint32 = 3
	RecoverDrainAndReset uint32 = 4
	RecoverIMEXDomain    uint32 = 5
	RecoverBusReset      uint32 = 6
	RecoverSystemReboot  uint32 = 7
)

// RemappedRows is the state of a GPU's spare memory rows.
type RemappedRows struct {
	// Correctable and Uncorrectable count the rows that were replaced after
	// errors of that kind.
	Correctable, Uncorrectable int
	// Pending says that a row waits for a reset to be replaced, Failed that one
	// could not be.
	Pending, Failed bool
}

// MemoryErrorCounter is one of NVML's counters of memory errors.
type MemoryErrorCounter struct {
	// Uncorrected and Aggregate are NVML's nvmlMemoryErrorType_t and nvmlEccCounterType_t:
	// an aggregate counter is of the GPU's life, the others begin when the driver is loaded.
	Uncorrected, Aggregate bool
	// Location is NVML's nvmlMemoryLocation_t.
	Location int
}

// The locations of errors that GPUs count from Turing on.
const (
	DRAM = 2
	SRAM = 7
)

// memoryLocations are the names of nvmlMemoryLocation_t (nvml.h), by number.
var memoryLocations = [...]string{
	"l1_cache", "l2_cache", "dram", "register_file", "texture_memory", "texture_shm", "cbu", "sram",
}

// Error is a failed NVML call.
type Error struct {
	// Call is the method with its interesting argument:
	// "DeviceGetHandleByIndex(3)".
	Call   string `json:"call"`
	Return Return `json:"return"`
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s", e.Call, e.Return) }

// Unwrap lets errors.Is find the return code: errors.Is(err, nvml.GPUIsLost).
func (e *Error) Unwrap() error { return e.Return }

// Return is NVML's return code (nvml.h, nvmlReturn_t). It is an error so that
// errors.Is(err, nvml.GPUIsLost) works on an *Error.
type Return int

// The return codes that somebody here tells apart; returnNames has all that NVML
// documents. Success is never in an error.
const (
	Success               Return = 0
	Uninitialized         Return = 1
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	LibraryNotFound       Return = 12
	FunctionNotFound      Return = 13
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	LibRMVersionMismatch  Return = 18
	InUse                 Return = 19
	InsufficientResources Return = 23
	Unknown               Return = 999
)

// returnNames are the names of the codes from 0 on, without "NVML_ERROR_".
var returnNames = [...]string{
	"SUCCESS", "UNINITIALIZED", "INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "ALREADY_INITIALIZED",
	"NOT_FOUND", "INSUFFICIENT_SIZE",
	"INSUFFICIENT_POWER", "DRIVER_NOT_LOADED", "TIMEOUT", "IRQ_ISSUE", "LIBRARY_NOT_FOUND", "FUNCTION_NOT_FOUND",
	"CORRUPTED_INFOROM", "GPU_IS_LOST",
	"RESET_REQUIRED", "OPERATING_SYSTEM", "LIB_RM_VERSION_MISMATCH", "IN_USE", "MEMORY", "NO_DATA",
	"VGPU_ECC_NOT_SUPPORTED", "INSUFFICIENT_RESOURCES",
	"FREQ_NOT_SUPPORTED", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED", "NOT_READY", "GPU_NOT_FOUND", "INVALID_STATE",
	"RESET_TYPE_NOT_SUPPORTED",
}

// String is NVML's name of the code without its "NVML_ERROR_" prefix.
func (r Return) String() string {
	switch {
	case r >= 0 && int(r) < len(returnNames):
		return returnNames[r]
	case r == Unknown:
		return "UNKNOWN"
	}
	return "ERROR_" + strconv.Itoa(int(r))
}

func (r Return) Error() string { return r.String() }

// ParseReturn is the return code of that name, as String writes it; false when
// there is none.
func ParseReturn(name string) (Return, bool) {
	if code := slices.Index(returnNames[:], name); code >= 0 {
		return Return(code), true
	}
	return Unknown, name == "UNKNOWN"
}
