package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// The methods here are NVML's own, with handles; those of mig.go do the same by
// a board's index. What they have in common is in change.go.

// DeviceGetGraphicsRunningProcesses is empty: simulated processes compute.
func (n *Node) DeviceGetGraphicsRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return ask(n, "DeviceGetGraphicsRunningProcesses", d, noProcesses)
}

// DeviceGetMPSComputeRunningProcesses is empty too.
func (n *Node) DeviceGetMPSComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return ask(n, "DeviceGetMPSComputeRunningProcesses", d, noProcesses)
}

func noProcesses(target) ([]nvml.Process, nvml.Return) { return nil, nvml.Success }

// DeviceSetMigMode is SetMIG: what keeps the mode from its activation is told
// apart from an error of the call.
func (n *Node) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	return askBoard(n, "DeviceSetMigMode", d, func(b *board) (nvml.Return, nvml.Return) {
		switch code := b.setMode(on); code {
		case nvml.InUse:
			return code, nvml.Success
		case nvml.Success:
			if b.mig != b.migPending {
				return nvml.ResetRequired, nvml.Success
			}
			return nvml.Success, nvml.Success
		default:
			return nvml.Success, code
		}
	})
}

// DeviceGetGpuInstancePossiblePlacements are those of an empty board.
func (n *Node) DeviceGetGpuInstancePossiblePlacements(d nvml.Device, profile int) ([]mig.Placement, error) {
	return askBoard(n, "DeviceGetGpuInstancePossiblePlacements", d, func(b *board) ([]mig.Placement, nvml.Return) {
		shape, known := b.shape(profile)
		if !known {
			return nil, nvml.InvalidArgument
		}
		var placements []mig.Placement
		for _, start := range shape.Starts {
			placements = append(placements, mig.Placement{Start: start, Size: shape.Size})
		}
		return placements, nvml.Success
	})
}

// DeviceGetGpuInstances are in the order of their creation.
func (n *Node) DeviceGetGpuInstances(d nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	return askBoard(n, "DeviceGetGpuInstances", d, func(b *board) ([]nvml.GPUInstance, nvml.Return) {
		if !b.mig {
			return nil, nvml.NotSupported
		}
		if _, known := b.shape(profile); !known {
			return nil, nvml.InvalidArgument
		}
		var handles []nvml.GPUInstance
		for _, i := range b.instances {
			if i.shape.ID == profile {
				handles = append(handles, i.handle)
			}
		}
		return handles, nvml.Success
	})
}

// DeviceCreateGpuInstanceWithPlacement is CreateGPUInstance.
func (n *Node) DeviceCreateGpuInstanceWithPlacement(d nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	return askBoard(n, "DeviceCreateGpuInstanceWithPlacement", d, func(b *board) (nvml.GPUInstance, nvml.Return) {
		if shape, known := b.shape(profile); known && shape.Size != at.Size {
			return 0, nvml.InvalidArgument
		}
		i, code := n.createInstance(b, profile, at.Start)
		if code != nvml.Success {
			return 0, code
		}
		return i.handle, code
	})
}

// GpuInstanceDestroy is DestroyGPUInstance.
func (n *Node) GpuInstanceDestroy(handle nvml.GPUInstance) error {
	_, err := askInstance(n, "GpuInstanceDestroy", handle, func(b *board, i *gpuInstance) (struct{}, nvml.Return) {
		return struct{}{}, b.destroyInstance(i)
	})
	return err
}

// computeSlices are the compute slices by NVML's enumeration, which is also the
// published ID here (nvml.h, NVML_COMPUTE_INSTANCE_PROFILE_*).
var computeSlices = [...]int{1, 2, 3, 4, 7}

// computeProfileCount is the number of compute instance profiles that NVML
// enumerates (nvml.h, NVML_COMPUTE_INSTANCE_PROFILE_COUNT).
const computeProfileCount = 9

// GpuInstanceGetComputeInstanceProfileInfo takes NVML's enumeration.
func (n *Node) GpuInstanceGetComputeInstanceProfileInfo(handle nvml.GPUInstance, enum int) (nvml.ComputeInstanceProfile, error) {
	return askInstance(n, "GpuInstanceGetComputeInstanceProfileInfo", handle, func(_ *board, i *gpuInstance) (nvml.ComputeInstanceProfile, nvml.Return) {
		whole := i.shape.Profile.Slices
		switch {
		case enum < 0 || enum >= computeProfileCount:
			return nvml.ComputeInstanceProfile{}, nvml.InvalidArgument
		case enum >= len(computeSlices) || computeSlices[enum] > whole:
			return nvml.ComputeInstanceProfile{}, nvml.NotSupported
		}
		count := computeSlices[enum]
		return nvml.ComputeInstanceProfile{ID: enum, Slices: count, Instances: whole / count}, nvml.Success
	})
}

// GpuInstanceGetComputeInstances are in the order of their creation.
func (n *Node) GpuInstanceGetComputeInstances(handle nvml.GPUInstance, profile int) ([]nvml.ComputeInstance, error) {
	return askInstance(n, "GpuInstanceGetComputeInstances", handle, func(_ *board, i *gpuInstance) ([]nvml.ComputeInstance, nvml.Return) {
		if profile < 0 || profile >= len(computeSlices) {
			return nil, nvml.InvalidArgument
		}
		var handles []nvml.ComputeInstance
		for _, c := range i.computes {
			if c.slices == computeSlices[profile] {
				handles = append(handles, c.instanceHandle)
			}
		}
		return handles, nvml.Success
	})
}

// GpuInstanceCreateComputeInstance is CreateComputeInstance.
func (n *Node) GpuInstanceCreateComputeInstance(handle nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	return askInstance(n, "GpuInstanceCreateComputeInstance", handle, func(b *board, i *gpuInstance) (nvml.ComputeInstance, nvml.Return) {
		if profile < 0 || profile >= len(computeSlices) {
			return 0, nvml.InvalidArgument
		}
		c, code := n.createCompute(b, i, computeSlices[profile])
		if code != nvml.Success {
			return 0, code
		}
		return c.instanceHandle, code
	})
}

// ComputeInstanceDestroy is DestroyComputeInstance.
func (n *Node) ComputeInstanceDestroy(handle nvml.ComputeInstance) error {
	_, err := askCompute(n, "ComputeInstanceDestroy", handle, func(c *computeInstance) (struct{}, nvml.Return) {
		return struct{}{}, n.destroyCompute(c)
	})
	return err
}

// shape is the board's shape of that published ID.
func (b *board) shape(profile int) (mig.Shape, bool) {
	at := slices.IndexFunc(b.geometry.Shapes, func(s mig.Shape) bool { return s.ID == profile })
	if at < 0 {
		return mig.Shape{}, false
	}
	return b.geometry.Shapes[at], true
}
