package nvml

import (
	"fmt"
	"time"
)

// Library is the part of NVML that Virgate uses, one method a call, named as
// in NVML's header. Calls come from several goroutines at once: one for each
// board that is being looked at, one that waits for events, and one for the rest.
//
// A failing method returns an *Error that names the call and keeps NVML's
// return code. A method that a back-end cannot serve returns NotSupported.
type Library interface {
	Init() error
	Shutdown() error
	SystemGetDriverVersion() (string, error)

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
	DeviceGetCudaComputeCapability(Device) (major, minor int, err error)
	// DeviceGetNumaNodeId is the NUMA node next to the board, -1 for none. (Not
	// NVML's call of that name, which knows only boards that are a node
	// themselves: a driver reads it from sysfs by the PCI bus ID.)
	DeviceGetNumaNodeId(Device) (int, error)
	// DeviceGetTemperature is the core temperature in degrees Celsius.
	DeviceGetTemperature(Device) (int, error)
	DeviceGetComputeRunningProcesses(Device) ([]Process, error)
	DeviceGetGraphicsRunningProcesses(Device) ([]Process, error)
	// DeviceGetMPSComputeRunningProcesses are the clients of an MPS server.
	DeviceGetMPSComputeRunningProcesses(Device) ([]Process, error)
	// DeviceGetRemappedRows is NotSupported on boards that replace no memory
	// rows, which are those before Ampere.
	DeviceGetRemappedRows(Device) (RemappedRows, error)
	// DeviceGetRetiredPagesPendingStatus says that memory pages wait for a reset
	// to be retired. It is NotSupported on boards that replace rows instead.
	DeviceGetRetiredPagesPendingStatus(Device) (bool, error)
	Metering

	// DeviceGetTopologyCommonAncestor says how near two boards are on the bus.
	DeviceGetTopologyCommonAncestor(a, b Device) (TopologyLevel, error)
	// DeviceGetNvLinkState says whether a link, counted from 0, is active. A
	// board without NVLink answers NotSupported; InvalidArgument is the end.
	DeviceGetNvLinkState(d Device, link int) (bool, error)
	// DeviceGetNvLinkRemotePciInfo is what is at the link's other end: a board
	// or a switch.
	DeviceGetNvLinkRemotePciInfo(d Device, link int) (PCIInfo, error)

	DeviceGetMigMode(Device) (current, pending bool, err error)
	DeviceGetMaxMigDeviceCount(Device) (int, error)
	// DeviceGetMigDeviceHandleByIndex returns NotFound for a hole; walk to the
	// maximum.
	DeviceGetMigDeviceHandleByIndex(parent Device, index int) (Device, error)
	DeviceGetGpuInstanceId(mig Device) (int, error)
	DeviceGetComputeInstanceId(mig Device) (int, error)
	DeviceGetGpuInstanceById(parent Device, id int) (GPUInstance, error)
	GpuInstanceGetInfo(GPUInstance) (GPUInstanceInfo, error)
	// DeviceGetGpuInstanceProfileInfo takes the enumeration 0, 1, …, not the
	// published profile ID; InvalidArgument is the end, NotSupported a hole.
	DeviceGetGpuInstanceProfileInfo(d Device, profile int) (GPUInstanceProfile, error)
	// GpuInstanceGetComputeInstanceById and ComputeInstanceGetInfo together say
	// how many of its GPU instance's slices a MIG device computes on.
	GpuInstanceGetComputeInstanceById(gi GPUInstance, id int) (ComputeInstance, error)
	ComputeInstanceGetInfo(ComputeInstance) (ComputeInstanceInfo, error)
	Cutting

	EventSetCreate() (EventSet, error)
	DeviceGetSupportedEventTypes(Device) (EventTypes, error)
	DeviceRegisterEvents(Device, EventTypes, EventSet) error
	// EventSetWait blocks for at most timeout and then returns Timeout.
	EventSetWait(set EventSet, timeout time.Duration) (Event, error)
	EventSetFree(EventSet) error
}

// Device, GPUInstance, ComputeInstance and EventSet are the back-end's
// handles: opaque, comparable, valid until Shutdown or until the hardware
// behind them goes.
type (
	Device          uint64
	GPUInstance     uint64
	ComputeInstance uint64
	EventSet        uint64
)

// PCIInfo is where a board sits.
type PCIInfo struct {
	// BusID is domain:bus:device.function, for example "00000000:3B:00.0".
	BusID string
	// DeviceID is the PCI device ID in the upper and the vendor ID in the lower
	// 16 bits, for example 0x20B010DE.
	DeviceID uint32
	// SubsystemID likewise; 0 when unknown.
	SubsystemID uint32
}

// MemoryInfo is in bytes.
type MemoryInfo struct{ Total, Free, Used uint64 }

// Process is a host process that uses a device.
type Process struct {
	PID int
	// Memory is in bytes; MemoryUnknown when the driver cannot tell.
	Memory uint64
}

// MemoryUnknown is what NVML reports for memory it cannot tell (all ones).
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

// GPUInstanceProfile is one way to cut a board.
type GPUInstanceProfile struct {
	// ID is the published profile ID.
	ID int
	// Slices is the number of compute slices, the G of "Gg.Mgb".
	Slices int
	// Instances is how many of them fit on an empty board.
	Instances int
	// MemoryMB is the memory of one in MiB.
	MemoryMB uint64
	// Name is the driver's, for example "1g.5gb+me"; empty on drivers that do
	// not tell.
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

// The event types that say something of a board's health (nvml.h,
// nvmlEventType*). Virgate registers for all but single-bit errors, which the
// board corrects by itself.
const (
	EventSingleBitECC EventTypes = 1 << 0
	EventDoubleBitECC EventTypes = 1 << 1
	EventXIDCritical  EventTypes = 1 << 3
)

// Event is what EventSetWait returns.
type Event struct {
	Device Device
	Type   EventTypes
	// Data is the XID for EventXIDCritical.
	Data uint64
	// GI and CI name the partition, or are WholeBoard.
	GI, CI uint32
}

// WholeBoard in Event.GI and Event.CI says that no single partition is meant.
const WholeBoard = ^uint32(0)

// Error is a failed NVML call.
type Error struct {
	// Call is the method with its interesting argument:
	// "DeviceGetHandleByIndex(3)".
	Call   string
	Return Return
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s", e.Call, e.Return) }

// Unwrap lets errors.Is find the return code: errors.Is(err, nvml.GPUIsLost).
func (e *Error) Unwrap() error { return e.Return }
