package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *recorder) DeviceGetMigMode(device nvml.Device) (current, pending bool, err error) {
	current, pending, err = r.lib.DeviceGetMigMode(device)
	r.note("DeviceGetMigMode", mode{current, pending}, err, uint64(device))
	return current, pending, err
}

func (r *recorder) DeviceGetMaxMigDeviceCount(device nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetMaxMigDeviceCount(device)
	r.note("DeviceGetMaxMigDeviceCount", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	answer, err := r.lib.DeviceGetMigDeviceHandleByIndex(parent, index)
	r.note("DeviceGetMigDeviceHandleByIndex", answer, err, uint64(parent), uint64(index))
	return answer, err
}

func (r *recorder) DeviceGetGpuInstanceId(mig nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetGpuInstanceId(mig)
	r.note("DeviceGetGpuInstanceId", answer, err, uint64(mig))
	return answer, err
}

func (r *recorder) DeviceGetComputeInstanceId(mig nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetComputeInstanceId(mig)
	r.note("DeviceGetComputeInstanceId", answer, err, uint64(mig))
	return answer, err
}

func (r *recorder) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	answer, err := r.lib.DeviceGetGpuInstanceById(parent, id)
	r.note("DeviceGetGpuInstanceById", answer, err, uint64(parent), uint64(id))
	return answer, err
}

func (r *recorder) GpuInstanceGetInfo(gi nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	answer, err := r.lib.GpuInstanceGetInfo(gi)
	r.note("GpuInstanceGetInfo", answer, err, uint64(gi))
	return answer, err
}

func (r *recorder) DeviceGetGpuInstanceProfileInfo(device nvml.Device, profile int) (nvml.GPUInstanceProfile, error) {
	answer, err := r.lib.DeviceGetGpuInstanceProfileInfo(device, profile)
	r.note("DeviceGetGpuInstanceProfileInfo", answer, err, uint64(device), uint64(profile))
	return answer, err
}

func (r *recorder) GpuInstanceGetComputeInstanceById(gi nvml.GPUInstance, id int) (nvml.ComputeInstance, error) {
	answer, err := r.lib.GpuInstanceGetComputeInstanceById(gi, id)
	r.note("GpuInstanceGetComputeInstanceById", answer, err, uint64(gi), uint64(id))
	return answer, err
}

func (r *recorder) ComputeInstanceGetInfo(ci nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	answer, err := r.lib.ComputeInstanceGetInfo(ci)
	r.note("ComputeInstanceGetInfo", answer, err, uint64(ci))
	return answer, err
}
