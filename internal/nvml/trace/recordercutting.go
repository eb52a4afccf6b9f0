package trace

import (
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// flag is a truth value as an argument.
func flag(on bool) uint64 {
	if on {
		return 1
	}
	return 0
}

func (r *recorder) DeviceSetMigMode(device nvml.Device, on bool) (nvml.Return, error) {
	answer, err := r.lib.DeviceSetMigMode(device, on)
	r.note("DeviceSetMigMode", answer, err, uint64(device), flag(on))
	return answer, err
}

func (r *recorder) DeviceGetGpuInstancePossiblePlacements(device nvml.Device, profile int) ([]mig.Placement, error) {
	answer, err := r.lib.DeviceGetGpuInstancePossiblePlacements(device, profile)
	r.note("DeviceGetGpuInstancePossiblePlacements", answer, err, uint64(device), uint64(profile))
	return answer, err
}

func (r *recorder) DeviceGetGpuInstances(device nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	answer, err := r.lib.DeviceGetGpuInstances(device, profile)
	r.note("DeviceGetGpuInstances", answer, err, uint64(device), uint64(profile))
	return answer, err
}

func (r *recorder) DeviceCreateGpuInstanceWithPlacement(device nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	answer, err := r.lib.DeviceCreateGpuInstanceWithPlacement(device, profile, at)
	r.note("DeviceCreateGpuInstanceWithPlacement", answer, err, uint64(device), uint64(profile), uint64(at.Start), uint64(at.Size))
	return answer, err
}

func (r *recorder) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	err := r.lib.GpuInstanceDestroy(gi)
	r.note("GpuInstanceDestroy", nil, err, uint64(gi))
	return err
}

func (r *recorder) GpuInstanceGetComputeInstanceProfileInfo(gi nvml.GPUInstance, profile int) (nvml.ComputeInstanceProfile, error) {
	answer, err := r.lib.GpuInstanceGetComputeInstanceProfileInfo(gi, profile)
	r.note("GpuInstanceGetComputeInstanceProfileInfo", answer, err, uint64(gi), uint64(profile))
	return answer, err
}

func (r *recorder) GpuInstanceGetComputeInstances(gi nvml.GPUInstance, profile int) ([]nvml.ComputeInstance, error) {
	answer, err := r.lib.GpuInstanceGetComputeInstances(gi, profile)
	r.note("GpuInstanceGetComputeInstances", answer, err, uint64(gi), uint64(profile))
	return answer, err
}

func (r *recorder) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	answer, err := r.lib.GpuInstanceCreateComputeInstance(gi, profile)
	r.note("GpuInstanceCreateComputeInstance", answer, err, uint64(gi), uint64(profile))
	return answer, err
}

func (r *recorder) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	err := r.lib.ComputeInstanceDestroy(ci)
	r.note("ComputeInstanceDestroy", nil, err, uint64(ci))
	return err
}
