package nvml

import "github.com/virgate/virgate/mig"

// Cutting is the part of Library that lists exactly how a board is cut, and
// changes it. All of it needs root, or the capability files of MIG (nvml.h and
// NVIDIA MIG User Guide, "Device Nodes and Capabilities"); without them calls
// answer NoPermission.
//
// A profile is here a published profile ID, as GPUInstanceProfile.ID has it,
// unless a method says otherwise.
type Cutting interface {
	// DeviceSetMigMode makes the mode the pending one and tries to activate it:
	// activation is Success, or why that cannot be now, such as InUse or
	// ResetRequired, while err is about the call. Both must be looked at.
	DeviceSetMigMode(d Device, on bool) (activation Return, err error)
	// DeviceGetGpuInstancePossiblePlacements does not depend on the mode or on
	// what is on the board.
	DeviceGetGpuInstancePossiblePlacements(d Device, profile int) ([]mig.Placement, error)
	// DeviceGetGpuInstances has also those without a compute instance, which take
	// their slots and are no MIG devices.
	DeviceGetGpuInstances(d Device, profile int) ([]GPUInstance, error)
	// DeviceCreateGpuInstanceWithPlacement answers InsufficientResources both
	// where there is no room and where the slots are taken.
	DeviceCreateGpuInstanceWithPlacement(d Device, profile int, at mig.Placement) (GPUInstance, error)
	// GpuInstanceDestroy answers InUse while there are compute instances or
	// processes, and for a moment after the last one went.
	GpuInstanceDestroy(GPUInstance) error
	// GpuInstanceGetComputeInstanceProfileInfo takes the enumeration 0, 1, …;
	// InvalidArgument is the end, NotSupported a hole. The engines are shared,
	// which is all that NVML has.
	GpuInstanceGetComputeInstanceProfileInfo(gi GPUInstance, profile int) (ComputeInstanceProfile, error)
	// GpuInstanceGetComputeInstances and GpuInstanceCreateComputeInstance take a
	// ComputeInstanceProfile.ID.
	GpuInstanceGetComputeInstances(gi GPUInstance, profile int) ([]ComputeInstance, error)
	GpuInstanceCreateComputeInstance(gi GPUInstance, profile int) (ComputeInstance, error)
	// ComputeInstanceDestroy answers InUse while processes run on it.
	ComputeInstanceDestroy(ComputeInstance) error
}

// ComputeInstanceProfile is one way to cut a GPU instance.
type ComputeInstanceProfile struct {
	// ID is the published profile ID (nvidia-smi mig -lcip).
	ID int
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int
	// Instances is how many of them fit into an empty GPU instance.
	Instances int
}
