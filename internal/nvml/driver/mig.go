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
	return askDevice(l, with("DeviceGetMigDeviceHandleByIndex", index), parent, func(d gonvml.Device) (nvml.Device, gonvml.Return) {
		if !ordinal(index) {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		device, code := d.GetMigDeviceHandleByIndex(index)
		if code != gonvml.SUCCESS {
			return 0, code
		}
		return l.devices.number(device), code
	})
}

func (l *library) DeviceGetGpuInstanceId(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetGpuInstanceId", d, gonvml.Device.GetGpuInstanceId)
}

func (l *library) DeviceGetComputeInstanceId(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetComputeInstanceId", d, gonvml.Device.GetComputeInstanceId)
}

func (l *library) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	return askDevice(l, with("DeviceGetGpuInstanceById", id), parent, func(d gonvml.Device) (nvml.GPUInstance, gonvml.Return) {
		if !ordinal(id) {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		instance, code := d.GetGpuInstanceById(id)
		if code != gonvml.SUCCESS {
			return 0, code
		}
		return l.instances.number(instance), code
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
	call := with("DeviceGetGpuInstanceProfileInfo", profile)
	return askDevice(l, call, d, func(d gonvml.Device) (nvml.GPUInstanceProfile, gonvml.Return) {
		if !ordinal(profile) {
			return nvml.GPUInstanceProfile{}, gonvml.ERROR_INVALID_ARGUMENT
		}
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
	call := with("GpuInstanceGetComputeInstanceById", id)
	return ask(l, call, &l.instances, gi, func(instance gonvml.GpuInstance) (nvml.ComputeInstance, gonvml.Return) {
		if !ordinal(id) {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		compute, code := instance.GetComputeInstanceById(id)
		if code != gonvml.SUCCESS {
			return 0, code
		}
		return l.computes.number(compute), code
	})
}

func (l *library) ComputeInstanceGetInfo(ci nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	return ask(l, "ComputeInstanceGetInfo", &l.computes, ci, func(compute gonvml.ComputeInstance) (nvml.ComputeInstanceInfo, gonvml.Return) {
		info, code := compute.GetInfo()
		return nvml.ComputeInstanceInfo{ID: int(info.Id), Slices: int(info.Placement.Size)}, code
	})
}
