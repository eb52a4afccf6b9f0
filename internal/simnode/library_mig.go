package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// DeviceGetMigMode is NOT_SUPPORTED on a board without MIG.
func (n *Node) DeviceGetMigMode(d nvml.Device) (current, pending bool, err error) {
	mode, err := askBoard(n, "DeviceGetMigMode", d, func(b *board) ([2]bool, nvml.Return) {
		if b.geometry.Shapes == nil {
			return [2]bool{}, nvml.NotSupported
		}
		return [2]bool{b.mig, b.migPending}, nvml.Success
	})
	return mode[0], mode[1], err
}

// DeviceGetMaxMigDeviceCount is 0 with MIG off.
func (n *Node) DeviceGetMaxMigDeviceCount(d nvml.Device) (int, error) {
	return askBoard(n, "DeviceGetMaxMigDeviceCount", d, func(b *board) (int, nvml.Return) {
		if !b.mig {
			return 0, nvml.Success
		}
		return b.geometry.Slices, nvml.Success
	})
}

// DeviceGetMigDeviceHandleByIndex is NOT_FOUND for a hole.
func (n *Node) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	return askBoard(n, "DeviceGetMigDeviceHandleByIndex", parent, func(b *board) (nvml.Device, nvml.Return) {
		if index < 0 || index >= b.geometry.Slices {
			return 0, nvml.InvalidArgument
		}
		c := b.computeAt(index)
		if c == nil {
			return 0, nvml.NotFound
		}
		return c.handle, nvml.Success
	})
}

// DeviceGetGpuInstanceId is a MIG device's.
func (n *Node) DeviceGetGpuInstanceId(d nvml.Device) (int, error) {
	return askMIG(n, "DeviceGetGpuInstanceId", d, func(c *computeInstance) (int, nvml.Return) {
		return c.instance.id, nvml.Success
	})
}

// DeviceGetComputeInstanceId is a MIG device's.
func (n *Node) DeviceGetComputeInstanceId(d nvml.Device) (int, error) {
	return askMIG(n, "DeviceGetComputeInstanceId", d, func(c *computeInstance) (int, nvml.Return) {
		return c.id, nvml.Success
	})
}

// DeviceGetGpuInstanceById is NOT_FOUND when there is none of that ID.
func (n *Node) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	return askBoard(n, "DeviceGetGpuInstanceById", parent, func(b *board) (nvml.GPUInstance, nvml.Return) {
		if !b.mig {
			return 0, nvml.NotSupported
		}
		i := b.instance(id)
		if i == nil {
			return 0, nvml.NotFound
		}
		return i.handle, nvml.Success
	})
}

// GpuInstanceGetInfo gives the published profile ID.
func (n *Node) GpuInstanceGetInfo(handle nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	return askInstance(n, "GpuInstanceGetInfo", handle, func(_ *board, i *gpuInstance) (nvml.GPUInstanceInfo, nvml.Return) {
		return nvml.GPUInstanceInfo{
			ID: i.id, ProfileID: i.shape.ID, Start: i.placement.Start, Size: i.placement.Size,
		}, nvml.Success
	})
}

// profileCount is the number of GPU instance profiles that NVML enumerates
// (nvml.h, NVML_GPU_INSTANCE_PROFILE_COUNT).
const profileCount = 18

// DeviceGetGpuInstanceProfileInfo takes NVML's enumeration, not the published
// profile ID.
func (n *Node) DeviceGetGpuInstanceProfileInfo(d nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	return askBoard(n, "DeviceGetGpuInstanceProfileInfo", d, func(b *board) (nvml.GPUInstanceProfile, nvml.Return) {
		if enum < 0 || enum >= profileCount {
			return nvml.GPUInstanceProfile{}, nvml.InvalidArgument
		}
		i := slices.IndexFunc(b.geometry.Shapes, func(s mig.Shape) bool { return s.Enum == enum })
		if i < 0 {
			return nvml.GPUInstanceProfile{}, nvml.NotSupported
		}
		shape := b.geometry.Shapes[i]
		return nvml.GPUInstanceProfile{
			ID: shape.ID, Slices: shape.Profile.Slices, Instances: shape.Max,
			MemoryMB: b.share(shape.Size) >> 20, Name: shape.Profile.String(),
		}, nvml.Success
	})
}

// GpuInstanceGetComputeInstanceById is NOT_FOUND when there is none of that ID.
func (n *Node) GpuInstanceGetComputeInstanceById(handle nvml.GPUInstance, id int) (nvml.ComputeInstance, error) {
	return askInstance(n, "GpuInstanceGetComputeInstanceById", handle, func(_ *board, i *gpuInstance) (nvml.ComputeInstance, nvml.Return) {
		c := i.compute(id)
		if c == nil {
			return 0, nvml.NotFound
		}
		return c.instanceHandle, nvml.Success
	})
}

// ComputeInstanceGetInfo tells the compute slices.
func (n *Node) ComputeInstanceGetInfo(handle nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	return askCompute(n, "ComputeInstanceGetInfo", handle, func(c *computeInstance) (nvml.ComputeInstanceInfo, nvml.Return) {
		return nvml.ComputeInstanceInfo{ID: c.id, Slices: c.slices}, nvml.Success
	})
}
