//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// mostInstances is room for every GPU instance of a board, or compute instance
// of a GPU instance, of one profile: no board has more than eight slots. The
// driver trusts the count that it is given.
const mostInstances = 32

// DeviceSetMigMode asks for the mode. go-nvml returns what became of its
// activation first, and what became of the call after that.
func (l *library) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	mode := gonvml.DEVICE_MIG_DISABLE
	if on {
		mode = gonvml.DEVICE_MIG_ENABLE
	}
	return askDevice(l, "DeviceSetMigMode", d, func(d gonvml.Device) (nvml.Return, gonvml.Return) {
		activation, code := d.SetMigMode(mode)
		return nvml.Return(activation), code
	})
}

func (l *library) DeviceGetGpuInstancePossiblePlacements(d nvml.Device, profile int) ([]mig.Placement, error) {
	const call = "DeviceGetGpuInstancePossiblePlacements"
	return askWith(l, call, &l.devices, d, profile, func(d gonvml.Device, profile int) ([]mig.Placement, gonvml.Return) {
		possible, code := d.GetGpuInstancePossiblePlacements(&gonvml.GpuInstanceProfileInfo{Id: uint32(profile)})
		var placements []mig.Placement
		for _, p := range possible {
			placements = append(placements, mig.Placement{Start: int(p.Start), Size: int(p.Size)})
		}
		return placements, code
	})
}

func (l *library) DeviceGetGpuInstances(d nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	const call = "DeviceGetGpuInstances"
	return askWith(l, call, &l.devices, d, profile, func(d gonvml.Device, profile int) ([]nvml.GPUInstance, gonvml.Return) {
		info := gonvml.GpuInstanceProfileInfo{Id: uint32(profile), InstanceCount: mostInstances}
		instances, code := d.GetGpuInstances(&info)
		if code != gonvml.SUCCESS {
			return nil, code
		}
		return numbers(&l.instances, instances), code
	})
}

// numbers are the numbers of the handles.
func numbers[Handle comparable, Number ~uint64](things *table[Handle, Number], handles []Handle) []Number {
	var list []Number
	for _, handle := range handles {
		list = append(list, things.number(handle))
	}
	return list
}

func (l *library) DeviceCreateGpuInstanceWithPlacement(d nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	const call = "DeviceCreateGpuInstanceWithPlacement"
	return askWith(l, call, &l.devices, d, profile, func(d gonvml.Device, profile int) (nvml.GPUInstance, gonvml.Return) {
		if !ordinal(at.Start) || !ordinal(at.Size) {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		return l.instances.numbered(d.CreateGpuInstanceWithPlacement(
			&gonvml.GpuInstanceProfileInfo{Id: uint32(profile)},
			&gonvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)},
		))
	})
}

// GpuInstanceDestroy forgets the handle with the instance.
func (l *library) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	_, err := ask(l, "GpuInstanceDestroy", &l.instances, gi, func(instance gonvml.GpuInstance) (struct{}, gonvml.Return) {
		return struct{}{}, instance.Destroy()
	})
	if err == nil {
		l.instances.forget(gi)
	}
	return err
}

func (l *library) GpuInstanceGetComputeInstanceProfileInfo(gi nvml.GPUInstance, profile int) (nvml.ComputeInstanceProfile, error) {
	const call = "GpuInstanceGetComputeInstanceProfileInfo"
	return askWith(l, call, &l.instances, gi, profile, func(instance gonvml.GpuInstance, profile int) (nvml.ComputeInstanceProfile, gonvml.Return) {
		info, code := instance.GetComputeInstanceProfileInfo(profile, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		return nvml.ComputeInstanceProfile{ID: int(info.Id), Slices: int(info.SliceCount), Instances: int(info.InstanceCount)}, code
	})
}

func (l *library) GpuInstanceGetComputeInstances(gi nvml.GPUInstance, profile int) ([]nvml.ComputeInstance, error) {
	const call = "GpuInstanceGetComputeInstances"
	return askWith(l, call, &l.instances, gi, profile, func(instance gonvml.GpuInstance, profile int) ([]nvml.ComputeInstance, gonvml.Return) {
		info := gonvml.ComputeInstanceProfileInfo{Id: uint32(profile), InstanceCount: mostInstances}
		computes, code := instance.GetComputeInstances(&info)
		if code != gonvml.SUCCESS {
			return nil, code
		}
		return numbers(&l.computes, computes), code
	})
}

func (l *library) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	const call = "GpuInstanceCreateComputeInstance"
	return askWith(l, call, &l.instances, gi, profile, func(instance gonvml.GpuInstance, profile int) (nvml.ComputeInstance, gonvml.Return) {
		return l.computes.numbered(instance.CreateComputeInstance(&gonvml.ComputeInstanceProfileInfo{Id: uint32(profile)}))
	})
}

// ComputeInstanceDestroy forgets the handle with the instance.
func (l *library) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	_, err := ask(l, "ComputeInstanceDestroy", &l.computes, ci, func(compute gonvml.ComputeInstance) (struct{}, gonvml.Return) {
		return struct{}{}, compute.Destroy()
	})
	if err == nil {
		l.computes.forget(ci)
	}
	return err
}
