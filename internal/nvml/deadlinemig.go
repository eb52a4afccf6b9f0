package nvml

import "fmt"

func (d *deadlined) DeviceGetMigMode(device Device) (current, pending bool, err error) {
	mode, err := askDevice(d, "DeviceGetMigMode", device, func(device Device) ([2]bool, error) {
		current, pending, err := d.lib.DeviceGetMigMode(device)
		return [2]bool{current, pending}, err
	})
	return mode[0], mode[1], err
}

func (d *deadlined) DeviceGetMaxMigDeviceCount(device Device) (int, error) {
	return askDevice(d, "DeviceGetMaxMigDeviceCount", device, d.lib.DeviceGetMaxMigDeviceCount)
}

func (d *deadlined) DeviceGetMigDeviceHandleByIndex(parent Device, index int) (Device, error) {
	call := fmt.Sprintf("DeviceGetMigDeviceHandleByIndex(%d)", index)
	device, err := askDevice(d, call, parent, func(parent Device) (Device, error) {
		return d.lib.DeviceGetMigDeviceHandleByIndex(parent, index)
	})
	belongs(d.lanes, d.lanes.devices, device, of(d.lanes, d.lanes.devices, parent), err)
	return device, err
}

func (d *deadlined) DeviceGetGpuInstanceId(mig Device) (int, error) {
	return askDevice(d, "DeviceGetGpuInstanceId", mig, d.lib.DeviceGetGpuInstanceId)
}

func (d *deadlined) DeviceGetComputeInstanceId(mig Device) (int, error) {
	return askDevice(d, "DeviceGetComputeInstanceId", mig, d.lib.DeviceGetComputeInstanceId)
}

func (d *deadlined) DeviceGetGpuInstanceById(parent Device, id int) (GPUInstance, error) {
	call := fmt.Sprintf("DeviceGetGpuInstanceById(%d)", id)
	instance, err := askDevice(d, call, parent, func(parent Device) (GPUInstance, error) {
		return d.lib.DeviceGetGpuInstanceById(parent, id)
	})
	belongs(d.lanes, d.lanes.instances, instance, of(d.lanes, d.lanes.devices, parent), err)
	return instance, err
}

func (d *deadlined) GpuInstanceGetInfo(gi GPUInstance) (GPUInstanceInfo, error) {
	l := of(d.lanes, d.lanes.instances, gi)
	return limited(l, "GpuInstanceGetInfo", d.limits.Call, func() (GPUInstanceInfo, error) { return d.lib.GpuInstanceGetInfo(gi) })
}

func (d *deadlined) DeviceGetGpuInstanceProfileInfo(device Device, profile int) (GPUInstanceProfile, error) {
	call := fmt.Sprintf("DeviceGetGpuInstanceProfileInfo(%d)", profile)
	return askDevice(d, call, device, func(device Device) (GPUInstanceProfile, error) {
		return d.lib.DeviceGetGpuInstanceProfileInfo(device, profile)
	})
}

func (d *deadlined) GpuInstanceGetComputeInstanceById(gi GPUInstance, id int) (ComputeInstance, error) {
	l := of(d.lanes, d.lanes.instances, gi)
	call := fmt.Sprintf("GpuInstanceGetComputeInstanceById(%d)", id)
	compute, err := limited(l, call, d.limits.Call, func() (ComputeInstance, error) {
		return d.lib.GpuInstanceGetComputeInstanceById(gi, id)
	})
	belongs(d.lanes, d.lanes.computes, compute, l, err)
	return compute, err
}

func (d *deadlined) ComputeInstanceGetInfo(ci ComputeInstance) (ComputeInstanceInfo, error) {
	l := of(d.lanes, d.lanes.computes, ci)
	return limited(l, "ComputeInstanceGetInfo", d.limits.Call, func() (ComputeInstanceInfo, error) {
		return d.lib.ComputeInstanceGetInfo(ci)
	})
}
