package nvml

import (
	"fmt"

	"github.com/virgate/virgate/mig"
)

// The calls that change something are not undone when they succeed after they
// were abandoned: whoever made them cannot know what became of them, and lists
// what there is before the next one.

func (d *deadlined) DeviceSetMigMode(device Device, on bool) (activation Return, err error) {
	l := of(d.lanes, d.lanes.devices, device)
	return limited(l, fmt.Sprintf("DeviceSetMigMode(%t)", on), d.limits.Change, func() (Return, error) {
		return d.lib.DeviceSetMigMode(device, on)
	})
}

func (d *deadlined) DeviceGetGpuInstancePossiblePlacements(device Device, profile int) ([]mig.Placement, error) {
	call := fmt.Sprintf("DeviceGetGpuInstancePossiblePlacements(%d)", profile)
	return askDevice(d, call, device, func(device Device) ([]mig.Placement, error) {
		return d.lib.DeviceGetGpuInstancePossiblePlacements(device, profile)
	})
}

func (d *deadlined) DeviceGetGpuInstances(device Device, profile int) ([]GPUInstance, error) {
	call := fmt.Sprintf("DeviceGetGpuInstances(%d)", profile)
	instances, err := askDevice(d, call, device, func(device Device) ([]GPUInstance, error) {
		return d.lib.DeviceGetGpuInstances(device, profile)
	})
	l := of(d.lanes, d.lanes.devices, device)
	for _, instance := range instances {
		belongs(d.lanes, d.lanes.instances, instance, l, err)
	}
	return instances, err
}

func (d *deadlined) DeviceCreateGpuInstanceWithPlacement(device Device, profile int, at mig.Placement) (GPUInstance, error) {
	l := of(d.lanes, d.lanes.devices, device)
	call := fmt.Sprintf("DeviceCreateGpuInstanceWithPlacement(%d, %s)", profile, at)
	instance, err := limited(l, call, d.limits.Change, func() (GPUInstance, error) {
		return d.lib.DeviceCreateGpuInstanceWithPlacement(device, profile, at)
	})
	belongs(d.lanes, d.lanes.instances, instance, l, err)
	return instance, err
}

func (d *deadlined) GpuInstanceDestroy(gi GPUInstance) error {
	l := of(d.lanes, d.lanes.instances, gi)
	return limitedDo(l, "GpuInstanceDestroy", d.limits.Change, func() error { return d.lib.GpuInstanceDestroy(gi) })
}

func (d *deadlined) GpuInstanceGetComputeInstanceProfileInfo(gi GPUInstance, profile int) (ComputeInstanceProfile, error) {
	l := of(d.lanes, d.lanes.instances, gi)
	call := fmt.Sprintf("GpuInstanceGetComputeInstanceProfileInfo(%d)", profile)
	return limited(l, call, d.limits.Call, func() (ComputeInstanceProfile, error) {
		return d.lib.GpuInstanceGetComputeInstanceProfileInfo(gi, profile)
	})
}

func (d *deadlined) GpuInstanceGetComputeInstances(gi GPUInstance, profile int) ([]ComputeInstance, error) {
	l := of(d.lanes, d.lanes.instances, gi)
	call := fmt.Sprintf("GpuInstanceGetComputeInstances(%d)", profile)
	computes, err := limited(l, call, d.limits.Call, func() ([]ComputeInstance, error) {
		return d.lib.GpuInstanceGetComputeInstances(gi, profile)
	})
	for _, compute := range computes {
		belongs(d.lanes, d.lanes.computes, compute, l, err)
	}
	return computes, err
}

func (d *deadlined) GpuInstanceCreateComputeInstance(gi GPUInstance, profile int) (ComputeInstance, error) {
	l := of(d.lanes, d.lanes.instances, gi)
	call := fmt.Sprintf("GpuInstanceCreateComputeInstance(%d)", profile)
	compute, err := limited(l, call, d.limits.Change, func() (ComputeInstance, error) {
		return d.lib.GpuInstanceCreateComputeInstance(gi, profile)
	})
	belongs(d.lanes, d.lanes.computes, compute, l, err)
	return compute, err
}

func (d *deadlined) ComputeInstanceDestroy(ci ComputeInstance) error {
	l := of(d.lanes, d.lanes.computes, ci)
	return limitedDo(l, "ComputeInstanceDestroy", d.limits.Change, func() error { return d.lib.ComputeInstanceDestroy(ci) })
}
