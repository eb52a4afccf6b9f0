package nvml

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Library is the part of NVML that Virgate uses: one method for each call, named as in NVML's
// header. Calls come from several goroutines at once: one for each GPU that is being read, one that
// waits for events, and one for the rest.
//
// Every method returns one value and an error, or only an error. A failed method returns an *Error
// with its name and NVML's return code: NotSupported for calls that a back-end does not support.
type Library interface {
	Init() error
	Shutdown() error
	SystemGetDriverVersion() (string, error)
	// SystemGetCudaDriverVersion returns the newest CUDA version that the driver supports: 12080
	// for 12.8.
	SystemGetCudaDriverVersion() (int, error)
	// SystemGetConfComputeState reports whether confidential computing is on, for all GPUs of the
	// machine.
	SystemGetConfComputeState() (bool, error)
	// SystemGetConfComputeGpusReadyState returns ConfComputeReady when the GPUs accept work. Only
	// an operator's program sets that state: with confidential computing CUDA fails until then.
	SystemGetConfComputeGpusReadyState() (uint32, error)

	DeviceGetCount() (int, error)
	DeviceGetHandleByIndex(index int) (Device, error)
	DeviceGetUUID(Device) (string, error)
	DeviceGetMinorNumber(Device) (int, error)
	DeviceGetPciInfo(Device) (PCIInfo, error)
	// DeviceGetName returns the product name. For a MIG device the driver appends " MIG " and the
	// profile.
	DeviceGetName(Device) (string, error)
	DeviceGetMemoryInfo(Device) (MemoryInfo, error)
	DeviceGetArchitecture(Device) (Architecture, error)
	DeviceGetBrand(Device) (Brand, error)
	DeviceGetCudaComputeCapability(Device) (ComputeCapability, error)
	// DeviceGetNumaNodeId returns the NUMA node closest to the GPU, -1 for none. It is not NVML's
	// call of that name, which is about GPUs that are nodes themselves. The value is read from
	// sysfs by the PCI bus ID.
	DeviceGetNumaNodeId(Device) (int, error)
	// DeviceGetTemperature returns the core temperature in degrees Celsius.
	DeviceGetTemperature(Device) (int, error)
	// DeviceGetTemperatureThreshold returns a temperature threshold of the GPU, such as
	// TemperatureSlowdown. Drivers are to drop it for GPUs from Ada on (nvml.h).
	DeviceGetTemperatureThreshold(d Device, threshold int) (int, error)
	// DeviceGetMarginTemperature returns by how many degrees the GPU may still heat up; it is below
	// 0 when the GPU is slowed down. The field SlowdownMargin tells how far below 0 the hardware
	// does that. Older GPUs and drivers do not support it.
	DeviceGetMarginTemperature(Device) (int, error)
	DeviceGetComputeRunningProcesses(Device) ([]Process, error)
	DeviceGetGraphicsRunningProcesses(Device) ([]Process, error)
	// DeviceGetMPSComputeRunningProcesses returns the clients of an MPS server.
	DeviceGetMPSComputeRunningProcesses(Device) ([]Process, error)
	// DeviceGetFieldValues reads one field, such as RecoveryAction.
	DeviceGetFieldValues(d Device, field int) (uint32, error)
	// DeviceGetRemappedRows returns NotSupported on GPUs that do not replace memory rows, which are
	// those before Ampere.
	DeviceGetRemappedRows(Device) (RemappedRows, error)
	// DeviceGetMemoryErrorCounter returns a count of the errors that ECC has found. It returns
	// NotSupported if ECC is off, for memory whose errors the GPU does not count, and with MIG
	// enabled for the counts since the driver was loaded (nvml.h).
	DeviceGetMemoryErrorCounter(Device, MemoryErrorCounter) (uint64, error)
	// DeviceGetRetiredPagesPendingStatus reports whether memory pages wait for a reset to be
	// retired. It returns NotSupported on GPUs that replace rows instead.
	DeviceGetRetiredPagesPendingStatus(Device) (bool, error)

	// The next methods return how busy a device is. The first two return NotSupported on a GPU with
	// MIG enabled (nvml.h), and all do on a MIG device: clocks and power are the GPU's.

	// DeviceGetUtilizationRates returns how busy the GPU was in the driver's last sample period,
	// which lasts between a sixth of a second and a second.
	DeviceGetUtilizationRates(Device) (Utilization, error)
	// DeviceGetProcessUtilization returns the samples taken after lastSeen, the latest Time of an
	// earlier call, or all samples that the driver has kept if lastSeen is 0. A process that did
	// nothing in the sample period has no sample. NotFound means that there are no samples at all;
	// it is not a failure.
	DeviceGetProcessUtilization(d Device, lastSeen uint64) ([]ProcessSample, error)
	// DeviceGetCurrentClocksEventReasons returns the reasons why the clocks are not higher.
	DeviceGetCurrentClocksEventReasons(Device) (ClockReasons, error)
	// DeviceGetPowerUsage returns milliwatts, including the memory: the mean of a second, or the
	// current value on GA100 and before Ampere.
	DeviceGetPowerUsage(Device) (int, error)
	// DeviceGetTotalEnergyConsumption returns millijoules since the driver was loaded. It returns
	// NotSupported before Volta.
	DeviceGetTotalEnergyConsumption(Device) (uint64, error)

	// DeviceGetTopologyCommonAncestor returns how close two GPUs are on the bus.
	DeviceGetTopologyCommonAncestor(a, b Device) (TopologyLevel, error)
	// DeviceGetNvLinkState reports whether a link, counted from 0, is active. It returns
	// NotSupported on a GPU without NVLink, and InvalidArgument after the last link.
	DeviceGetNvLinkState(d Device, link int) (bool, error)
	// DeviceGetNvLinkRemotePciInfo returns the device at the link's other end: a GPU or a switch.
	DeviceGetNvLinkRemotePciInfo(d Device, link int) (PCIInfo, error)

	// DeviceGetGpuFabricInfo is NVML's DeviceGetGpuFabricInfoV in the newest version that the
	// driver has, or its predecessor. It returns NotSupported on GPUs before Hopper.
	DeviceGetGpuFabricInfo(Device) (FabricInfo, error)

	// DeviceGetVirtualizationMode returns how a virtual machine has the GPU, if one has it.
	DeviceGetVirtualizationMode(Device) (VirtualizationMode, error)
	// DeviceGetComputeMode and DeviceSetComputeMode are for a GPU without MIG. Setting the mode
	// requires root, and returns NoPermission otherwise.
	DeviceGetComputeMode(Device) (ComputeMode, error)
	DeviceSetComputeMode(d Device, mode ComputeMode) error
	DeviceGetMigMode(Device) (MIGMode, error)
	DeviceGetMaxMigDeviceCount(Device) (int, error)
	// DeviceGetMigDeviceHandleByIndex returns NotFound if there is no device at the index: indices
	// have holes, up to the maximum.
	DeviceGetMigDeviceHandleByIndex(parent Device, index int) (Device, error)
	DeviceGetGpuInstanceId(mig Device) (int, error)
	DeviceGetComputeInstanceId(mig Device) (int, error)
	// DeviceGetAttributes returns NotSupported for a GPU.
	DeviceGetAttributes(mig Device) (Attributes, error)
	DeviceGetGpuInstanceById(parent Device, id int) (GPUInstance, error)
	GpuInstanceGetInfo(GPUInstance) (GPUInstanceInfo, error)
	// DeviceGetGpuInstanceProfileInfo expects an index in NVML's enumeration 0, 1, …, not a
	// published profile ID. It returns InvalidArgument at the end, and NotSupported for a hole.
	DeviceGetGpuInstanceProfileInfo(d Device, profile int) (GPUInstanceProfile, error)
	// GpuInstanceGetComputeInstanceById and ComputeInstanceGetInfo together tell on how many of its
	// GPU instance's slices a MIG device computes.
	GpuInstanceGetComputeInstanceById(gi GPUInstance, id int) (ComputeInstance, error)
	ComputeInstanceGetInfo(ComputeInstance) (ComputeInstanceInfo, error)

	// The other MIG methods list exactly how a GPU is partitioned, and change it. They require root
	// or MIG's capability files (NVIDIA MIG User Guide, "Device Nodes and Capabilities"), and
	// return NoPermission otherwise. A profile is a published profile ID here, as in
	// GPUInstanceProfile.ID, unless a method's comment states otherwise.

	// DeviceSetMigMode makes the mode the pending one and tries to activate it. activation is
	// Success, or the reason why the driver cannot activate it now, such as InUse or ResetRequired;
	// err is the error of the call itself. Check both.
	DeviceSetMigMode(d Device, on bool) (activation Return, err error)
	// DeviceGetGpuInstancePossiblePlacements depends neither on the mode nor on the instances on
	// the GPU.
	DeviceGetGpuInstancePossiblePlacements(d Device, profile int) ([]mig.Placement, error)
	// DeviceGetGpuInstances also returns instances without a compute instance, which are not MIG
	// devices but occupy their slots.
	DeviceGetGpuInstances(d Device, profile int) ([]GPUInstance, error)
	// DeviceCreateGpuInstanceWithPlacement returns InsufficientResources both if there is no room
	// and if the slots are occupied.
	DeviceCreateGpuInstanceWithPlacement(d Device, profile int, at mig.Placement) (GPUInstance, error)
	// GpuInstanceDestroy returns InUse while there are compute instances or processes, and for a
	// moment after the last one has gone.
	GpuInstanceDestroy(GPUInstance) error
	// GpuInstanceGetComputeInstanceProfileInfo expects an index in the enumeration 0, 1, …. It
	// returns InvalidArgument at the end, and NotSupported for a hole. The engines are shared,
	// which is the only kind that NVML has.
	GpuInstanceGetComputeInstanceProfileInfo(gi GPUInstance, profile int) (ComputeInstanceProfile, error)
	// GpuInstanceGetComputeInstances and GpuInstanceCreateComputeInstance expect a
	// ComputeInstanceProfile.ID.
	GpuInstanceGetComputeInstances(gi GPUInstance, profile int) ([]ComputeInstance, error)
	GpuInstanceCreateComputeInstance(gi GPUInstance, profile int) (ComputeInstance, error)
	// ComputeInstanceDestroy returns InUse while processes run on the instance.
	ComputeInstanceDestroy(ComputeInstance) error

	EventSetCreate() (EventSet, error)
	DeviceGetSupportedEventTypes(Device) (EventTypes, error)
	DeviceRegisterEvents(Device, EventTypes, EventSet) error
	// EventSetWait blocks for at most timeout, and then returns Timeout.
	EventSetWait(set EventSet, timeout time.Duration) (Event, error)
	EventSetFree(EventSet) error
}

// Device, GPUInstance, ComputeInstance and EventSet are the back-end's handles. They are opaque and
// comparable, and are valid until Shutdown or until their object is gone.
type (
	Device          uint64
	GPUInstance     uint64
	ComputeInstance uint64
	EventSet        uint64
)

// PCIInfo is a GPU's place on the PCI bus.
type PCIInfo struct {
	// BusID is domain:bus:device.function, for example "00000000:3B:00.0".
	BusID string
	// DeviceID is the PCI device ID in the upper and the vendor ID in the lower
	// 16 bits, for example 0x20B010DE.
	DeviceID uint32
	// SubsystemID has the same format; 0 if unknown.
	SubsystemID uint32
	// Class is the kernel's device class, 0x030200 for a GPU without a display; 0 if unknown.
	Class uint32 `json:",omitempty"`
	// Binding distinguishes one binding of the kernel driver to the GPU from every other since the
	// machine was booted: loading the driver, or removing the GPU from the bus, makes a new one. It
	// comes from the kernel, not from NVML; 0 if unknown.
	Binding uint64 `json:",omitempty"`
}

// Attributes are a MIG device's share of its GPU.
type Attributes = sharing.PartitionAttributes

// FabricInfo is a GPU's place in a fabric of NVLinks, either of NVSwitches or between machines.
type FabricInfo struct {
	// Cluster is a UUID as text, and Clique is a number in the cluster.
	Cluster string
	Clique  uint32
	// State is the GPU's progress in joining the fabric, such as FabricCompleted, and Status is the
	// result.
	State  int
	Status Return
	// HealthMask and HealthSummary, such as FabricUnhealthy, are 0 with older drivers.
	HealthMask    uint32 `json:",omitempty"`
	HealthSummary int    `json:",omitempty"`
}

// Registered reports whether the GPU has joined the fabric, so that its place is known.
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

// ComputeCapability is the GPU's CUDA compute capability, for example 9.0.
type ComputeCapability struct{ Major, Minor int }

// VirtualizationMode is NVML's mode (nvml.h, nvmlGpuVirtualizationMode_t); 0 for a GPU that no
// virtual machine has.
type VirtualizationMode int

// Passthrough means that the GPU is passed through to a virtual machine, which cannot reset it.
const Passthrough VirtualizationMode = 1

// ComputeMode is NVML's compute mode (nvml.h, nvmlComputeMode_t).
type ComputeMode int

// The compute modes that drivers have.
const (
	ComputeDefault          ComputeMode = 0
	ComputeProhibited       ComputeMode = 2
	ComputeExclusiveProcess ComputeMode = 3
)

// MIGMode is whether MIG is enabled now, and whether it will be after the next reset of the GPU.
type MIGMode struct{ Current, Pending bool }

// MemoryInfo is in bytes.
type MemoryInfo struct{ Total, Free, Used uint64 }

// Process is a host process that uses a device.
type Process struct {
	PID int
	// Memory is in bytes; MemoryUnknown if the driver cannot tell.
	Memory uint64
}

// MemoryUnknown is NVML's value for unknown memory (all ones).
const MemoryUnknown = ^uint64(0)

// GPUInstanceInfo is a GPU instance's profile and placement.
type GPUInstanceInfo struct {
	ID int
	// ProfileID is the published ID (nvidia-smi mig -lgip), which is a GPUInstanceProfile's ID.
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
	// Instances is how many instances of this profile fit on an empty GPU.
	Instances int
	// MemoryMB is the memory of one instance in MiB.
	MemoryMB uint64
	Engines  mig.Engines
	// Name is the driver's name, for example "1g.5gb+me"; empty with drivers that have no names.
	Name string
}

// ComputeInstanceInfo describes a compute instance.
type ComputeInstanceInfo struct {
	ID int
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int
}

// EventTypes is a set of NVML event types.
type EventTypes uint64

// The event types that concern a GPU's health (nvml.h, nvmlEventType*). Virgate registers for all
// except single-bit errors, which the GPU corrects by itself.
const (
	EventSingleBitECC EventTypes = 1 << 0
	EventDoubleBitECC EventTypes = 1 << 1
	EventXIDCritical  EventTypes = 1 << 3
	// EventGPUUnavailable and EventRecoveryAction have no details: the driver's advice has to be
	// read.
	EventGPUUnavailable EventTypes = 1 << 14
	EventRecoveryAction EventTypes = 1 << 15
)

// Event is what EventSetWait returns.
type Event struct {
	Device Device
	Type   EventTypes
	// Data is the XID for EventXIDCritical.
	Data uint64
	// GI and CI identify the partition, or are WholeGPU.
	GI, CI uint32
}

// WholeGPU in Event.GI and Event.CI means that the event is not about a single partition.
const WholeGPU = ^uint32(0)

// ComputeInstanceProfile is a kind of compute instance that a GPU instance can have.
type ComputeInstanceProfile struct {
	// ID is the published profile ID (nvidia-smi mig -lcip).
	ID int
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int
	// Instances is how many instances of this profile fit into an empty GPU instance.
	Instances int
}

// Utilization is in percent of the sample period.
type Utilization struct {
	// GPU is the share of time in which at least one kernel ran; Memory is the share in which the
	// GPU's memory was read or written.
	GPU, Memory int
}

// ProcessSample is what a process did in one sample period.
type ProcessSample struct {
	PID int
	// Time is a time of the driver's clock, in microseconds.
	Time uint64
	// SM is the use of the multiprocessors, and Memory is the use of the bandwidth, both in
	// percent.
	SM, Memory int
}

// ClockReasons is a set of NVML's reasons for lower clocks. sharing.ClockReasons has the names of
// the bits.
type ClockReasons uint64

// The reasons that slow down a busy GPU (nvml.h, nvmlClocksEventReasons).
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

// String returns the family name in lower case; empty for an architecture that is newer than this
// list.
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

// Brand is the brand under which NVIDIA sells a GPU.
type Brand int

// The brands that current data center and workstation GPUs have (nvml.h, nvmlBrandType_t).
const (
	BrandNVIDIARTX Brand = 13
	BrandNVIDIA    Brand = 14
)

// String returns the brand as NVIDIA's DRA driver writes it (go-nvlib, GetBrandAsString); "Unknown"
// for a brand that nvml.h does not have.
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

// TopologyLevel is the lowest part of the bus that two GPUs share. A higher level means farther
// apart.
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

// String returns the level in one word; empty for a level that is not in this list.
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

// RecoveryAction is the field with the driver's advice on what to do with the GPU (nvml.h,
// NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and nvmlDeviceGpuRecoveryAction_t). Older drivers do not have
// it.
const RecoveryAction = 230

// TemperatureSlowdown is the threshold at which the hardware slows a GPU down (nvml.h,
// NVML_TEMPERATURE_THRESHOLD_SLOWDOWN).
const TemperatureSlowdown = 1

// SlowdownMargin is the field with the temperature margin at which the hardware does so, a signed
// number (nvml.h, NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT).
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
	// Correctable and Uncorrectable count the rows that were replaced after errors of that kind.
	Correctable, Uncorrectable int
	// Pending is true if a row waits for a reset to be replaced, Failed if a row could not be
	// replaced.
	Pending, Failed bool
}

// MemoryErrorCounter is one of NVML's counters of memory errors.
type MemoryErrorCounter struct {
	// Uncorrected and Aggregate are NVML's nvmlMemoryErrorType_t and nvmlEccCounterType_t. An
	// aggregate counter covers the GPU's life; the others start when the driver is loaded.
	Uncorrected, Aggregate bool
	// Location is NVML's nvmlMemoryLocation_t.
	Location int
}

// The locations whose errors GPUs count from Turing on.
const (
	DRAM = 2
	SRAM = 7
)

// memoryLocations holds the names of nvmlMemoryLocation_t (nvml.h), by number.
var memoryLocations = [...]string{
	"l1_cache", "l2_cache", "dram", "register_file", "texture_memory", "texture_shm", "cbu", "sram",
}

// Error is a failed NVML call.
type Error struct {
	// Call is the method with its telling argument: "DeviceGetHandleByIndex(3)".
	Call   string `json:"call"`
	Return Return `json:"return"`
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s", e.Call, e.Return) }

// Unwrap lets errors.Is find the return code: errors.Is(err, nvml.GPUIsLost).
func (e *Error) Unwrap() error { return e.Return }

// Return is NVML's return code (nvml.h, nvmlReturn_t). It is an error so that
// errors.Is(err, nvml.GPUIsLost) works on an *Error.
type Return int

// The return codes that Virgate distinguishes; returnNames has all codes that NVML documents.
// Success is never in an error.
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

// returnNames holds the names of the codes from 0 on, without "NVML_ERROR_".
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

// String returns NVML's name of the code without the "NVML_ERROR_" prefix.
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

// ParseReturn returns the code with that name, as String writes it; false if there is none.
func ParseReturn(name string) (Return, bool) {
	if code := slices.Index(returnNames[:], name); code >= 0 {
		return Return(code), true
	}
	return Unknown, name == "UNKNOWN"
}
