package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *replay) DeviceGetMigMode(device nvml.Device) (current, pending bool, err error) {
	mode, err := play[mode](r, "DeviceGetMigMode", uint64(device))
	return mode.Current, mode.Pending, err
}

func (r *replay) DeviceGetMaxMigDeviceCount(device nvml.Device) (int, error) {
	return play[int](r, "DeviceGetMaxMigDeviceCount", uint64(device))
}

func (r *replay) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	return play[nvml.Device](r, "DeviceGetMigDeviceHandleByIndex", uint64(parent), uint64(index))
}

func (r *replay) DeviceGetGpuInstanceId(mig nvml.Device) (int, error) {
	return play[int](r, "DeviceGetGpuInstanceId", uint64(mig))
}

func (r *replay) DeviceGetComputeInstanceId(mig nvml.Device) (int, error) {
	return play[int](r, "DeviceGetComputeInstanceId", uint64(mig))
}

func (r *replay) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	return play[nvml.GPUInstance](r, "DeviceGetGpuInstanceById", uint64(parent), uint64(id))
}

func (r *replay) GpuInstanceGetInfo(gi nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	return play[nvml.GPUInstanceInfo](r, "GpuInstanceGetInfo", uint64(gi))
}

func (r *replay) DeviceGetGpuInstanceProfileInfo(device nvml.Device, profile int) (nvml.GPUInstanceProfile, error) {
	return play[nvml.GPUInstanceProfile](r, "DeviceGetGpuInstanceProfileInfo", uint64(device), uint64(profile))
}

func (r *replay) GpuInstanceGetComputeInstanceById(gi nvml.GPUInstance, id int) (nvml.ComputeInstance, error) {
	return play[nvml.ComputeInstance](r, "GpuInstanceGetComputeInstanceById", uint64(gi), uint64(id))
}

func (r *replay) ComputeInstanceGetInfo(ci nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	return play[nvml.ComputeInstanceInfo](r, "ComputeInstanceGetInfo", uint64(ci))
}
