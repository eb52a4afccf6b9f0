//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

func (l *library) DeviceGetMigMode(d nvml.Device) (current, pending bool, err error) {
	mode, err := askDevice(l, "DeviceGetMigMode", d, func(d gonvml.Device) ([2]bool, gonvml.Return) {
		current, pending, code := d.GetMigMode()
		return [2]bool{current == gonvml.DEVICE_MIG_ENABLE, pending == gonvml.DEVICE_MIG_ENABLE}, code
	})
	return mode[0], mode[1], err
}

func (l *library) DeviceGetMaxMigDeviceCount(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetMaxMigDeviceCount", d, gonvml.Device.GetMaxMigDeviceCount)
}

func (l *library) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	return askWith(l, "DeviceGetMigDeviceHandleByIndex", &l.devices, parent, index, func(d gonvml.Device, index int) (nvml.Device, gonvml.Return) {
		return l.devices.numbered(d.GetMigDeviceHandleByIndex(index))
	})
}

func (l *library) DeviceGetGpuInstanceId(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetGpuInstanceId", d, gonvml.Device.GetGpuInstanceId)
}

func (l *library) DeviceGetComputeInstanceId(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetComputeInstanceId", d, gonvml.Device.GetComputeInstanceId)
}

func (l *library) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	return askWith(l, "DeviceGetGpuInstanceById", &l.devices, parent, id, func(d gonvml.Device, id int) (nvml.GPUInstance, gonvml.Return) {
		return l.instances.numbered(d.GetGpuInstanceById(id))
	})
}

func (l *library) GpuInstanceGetInfo(gi nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	info, err := ask(l, "GpuInstanceGetInfo", &l.instances, gi, gonvml.GpuInstance.GetInfo)
	return nvml.GPUInstanceInfo{
		ID: int(info.Id), ProfileID: int(info.ProfileId),
		Start: int(info.Placement.Start), Size: int(info.Placement.Size),
	}, err
}

// DeviceGetGpuInstanceProfileInfo asks for the profile with its name, and where
// the driver has no call for that, or not in this form, without.
func (l *library) DeviceGetGpuInstanceProfileInfo(d nvml.Device, profile int) (nvml.GPUInstanceProfile, error) {
	const call = "DeviceGetGpuInstanceProfileInfo"
	return askWith(l, call, &l.devices, d, profile, func(d gonvml.Device, profile int) (nvml.GPUInstanceProfile, gonvml.Return) {
		named, code := d.GetGpuInstanceProfileInfoV(profile).V2()
		if code == gonvml.ERROR_FUNCTION_NOT_FOUND || code == gonvml.ERROR_ARGUMENT_VERSION_MISMATCH {
			plain, code := d.GetGpuInstanceProfileInfo(profile)
			return nvml.GPUInstanceProfile{
				ID: int(plain.Id), Slices: int(plain.SliceCount),
				Instances: int(plain.InstanceCount), MemoryMB: plain.MemorySizeMB,
			}, code
		}
		return nvml.GPUInstanceProfile{
			ID: int(named.Id), Slices: int(named.SliceCount),
			Instances: int(named.InstanceCount), MemoryMB: named.MemorySizeMB, Name: text(named.Name[:]),
		}, code
	})
}

// text is a C string in an array.
func text(characters []int8) string {
	var bytes []byte
	for _, c := range characters {
		if c == 0 {
			break
		}
		bytes = append(bytes, byte(c))
	}
	return string(bytes)
}

func (l *library) GpuInstanceGetComputeInstanceById(gi nvml.GPUInstance, id int) (nvml.ComputeInstance, error) {
	const call = "GpuInstanceGetComputeInstanceById"
	return askWith(l, call, &l.instances, gi, id, func(instance gonvml.GpuInstance, id int) (nvml.ComputeInstance, gonvml.Return) {
		return l.computes.numbered(instance.GetComputeInstanceById(id))
	})
}

func (l *library) ComputeInstanceGetInfo(ci nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	return ask(l, "ComputeInstanceGetInfo", &l.computes, ci, func(compute gonvml.ComputeInstance) (nvml.ComputeInstanceInfo, gonvml.Return) {
		info, code := compute.GetInfo()
		return nvml.ComputeInstanceInfo{ID: int(info.Id), Slices: int(info.Placement.Size)}, code
	})
}
