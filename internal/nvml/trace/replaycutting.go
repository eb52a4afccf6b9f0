package trace

import (
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

func (r *replay) DeviceSetMigMode(device nvml.Device, on bool) (nvml.Return, error) {
	return play[nvml.Return](r, "DeviceSetMigMode", uint64(device), flag(on))
}

func (r *replay) DeviceGetGpuInstancePossiblePlacements(device nvml.Device, profile int) ([]mig.Placement, error) {
	return play[[]mig.Placement](r, "DeviceGetGpuInstancePossiblePlacements", uint64(device), uint64(profile))
}

func (r *replay) DeviceGetGpuInstances(device nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	return play[[]nvml.GPUInstance](r, "DeviceGetGpuInstances", uint64(device), uint64(profile))
}

func (r *replay) DeviceCreateGpuInstanceWithPlacement(device nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	return play[nvml.GPUInstance](r, "DeviceCreateGpuInstanceWithPlacement", uint64(device), uint64(profile), uint64(at.Start), uint64(at.Size))
}

func (r *replay) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	_, err := play[struct{}](r, "GpuInstanceDestroy", uint64(gi))
	return err
}

func (r *replay) GpuInstanceGetComputeInstanceProfileInfo(gi nvml.GPUInstance, profile int) (nvml.ComputeInstanceProfile, error) {
	return play[nvml.ComputeInstanceProfile](r, "GpuInstanceGetComputeInstanceProfileInfo", uint64(gi), uint64(profile))
}

func (r *replay) GpuInstanceGetComputeInstances(gi nvml.GPUInstance, profile int) ([]nvml.ComputeInstance, error) {
	return play[[]nvml.ComputeInstance](r, "GpuInstanceGetComputeInstances", uint64(gi), uint64(profile))
}

func (r *replay) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	return play[nvml.ComputeInstance](r, "GpuInstanceCreateComputeInstance", uint64(gi), uint64(profile))
}

func (r *replay) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	_, err := play[struct{}](r, "ComputeInstanceDestroy", uint64(ci))
	return err
}
