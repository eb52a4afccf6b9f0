//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

func (l *library) DeviceGetVirtualizationMode(d nvml.Device) (nvml.VirtualizationMode, error) {
	mode, err := callDevice(l, "DeviceGetVirtualizationMode", d, gonvml.Device.GetVirtualizationMode)
	return nvml.VirtualizationMode(mode), err
}

func (l *library) DeviceGetMigMode(d nvml.Device) (nvml.MIGMode, error) {
	return callDevice(l, "DeviceGetMigMode", d, func(d gonvml.Device) (nvml.MIGMode, gonvml.Return) {
		current, pending, code := d.GetMigMode()
		return nvml.MIGMode{Current: current == gonvml.DEVICE_MIG_ENABLE, Pending: pending == gonvml.DEVICE_MIG_ENABLE},
			code
	})
}

func (l *library) DeviceGetMaxMigDeviceCount(d nvml.Device) (int, error) {
	return callDevice(l, "DeviceGetMaxMigDeviceCount", d, gonvml.Device.GetMaxMigDeviceCount)
}

func (l *library) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	return l.devices.numbered(callWith(l, "DeviceGetMigDeviceHandleByIndex", &l.devices, parent, index,
		gonvml.Device.GetMigDeviceHandleByIndex))
}

func (l *library) DeviceGetGpuInstanceId(d nvml.Device) (int, error) {
	return callDevice(l, "DeviceGetGpuInstanceId", d, gonvml.Device.GetGpuInstanceId)
}

func (l *library) DeviceGetComputeInstanceId(d nvml.Device) (int, error) {
	return callDevice(l, "DeviceGetComputeInstanceId", d, gonvml.Device.GetComputeInstanceId)
}

func (l *library) DeviceGetAttributes(d nvml.Device) (nvml.Attributes, error) {
	a, err := callDevice(l, "DeviceGetAttributes", d, gonvml.Device.GetAttributes)
	return nvml.Attributes{
		MemoryMiB:       a.MemorySizeMB,
		Multiprocessors: int(a.MultiprocessorCount),
		GPUSlices:       int(a.GpuInstanceSliceCount),
		ComputeSlices:   int(a.ComputeInstanceSliceCount),
		CopyEngines:     int(a.SharedCopyEngineCount),
		Decoders:        int(a.SharedDecoderCount),
		Encoders:        int(a.SharedEncoderCount),
		JPEGEngines:     int(a.SharedJpegCount),
		OFAEngines:      int(a.SharedOfaCount),
	}, err
}

func (l *library) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	return l.instances.numbered(callWith(l, "DeviceGetGpuInstanceById", &l.devices, parent, id,
		gonvml.Device.GetGpuInstanceById))
}

func (l *library) GpuInstanceGetInfo(gi nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	info, err := call(l, "GpuInstanceGetInfo", &l.instances, gi, gonvml.GpuInstance.GetInfo)
	return nvml.GPUInstanceInfo{
		ID:        int(info.Id),
		ProfileID: int(info.ProfileId),
		Start:     int(info.Placement.Start),
		Size:      int(info.Placement.Size),
	}, err
}

// DeviceGetGpuInstanceProfileInfo gets the profile with its name, or without a name if the driver
// lacks that call or that version of it.
func (l *library) DeviceGetGpuInstanceProfileInfo(d nvml.Device, profile int) (nvml.GPUInstanceProfile, error) {
	return callWith(l, "DeviceGetGpuInstanceProfileInfo", &l.devices, d, profile,
		func(d gonvml.Device, profile int) (nvml.GPUInstanceProfile, gonvml.Return) {
			named, code := d.GetGpuInstanceProfileInfoV(profile).V2()
			if code == gonvml.ERROR_FUNCTION_NOT_FOUND || code == gonvml.ERROR_ARGUMENT_VERSION_MISMATCH {
				plain, code := d.GetGpuInstanceProfileInfo(profile)
				return nvml.GPUInstanceProfile{
					ID:        int(plain.Id),
					Slices:    int(plain.SliceCount),
					Instances: int(plain.InstanceCount),
					MemoryMB:  plain.MemorySizeMB,
					Engines: engines(plain.MultiprocessorCount, plain.CopyEngineCount, plain.DecoderCount,
						plain.EncoderCount, plain.JpegCount, plain.OfaCount),
				}, code
			}
			return nvml.GPUInstanceProfile{
				ID:        int(named.Id),
				Slices:    int(named.SliceCount),
				Instances: int(named.InstanceCount),
				MemoryMB:  named.MemorySizeMB,
				Name:      text(named.Name[:]),
				Engines: engines(named.MultiprocessorCount, named.CopyEngineCount, named.DecoderCount,
					named.EncoderCount,
					named.JpegCount, named.OfaCount),
			}, code
		})
}

func engines(multiprocessors, copying, decoders, encoders, jpeg, ofa uint32) mig.Engines {
	return mig.Engines{
		Multiprocessors: int(multiprocessors),
		CopyEngines:     int(copying),
		Decoders:        int(decoders),
		Encoders:        int(encoders),
		JPEGEngines:     int(jpeg),
		OFAEngines:      int(ofa),
	}
}

// text returns the C string in an array.
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
	return l.computes.numbered(callWith(l, "GpuInstanceGetComputeInstanceById", &l.instances, gi, id,
		gonvml.GpuInstance.GetComputeInstanceById))
}

func (l *library) ComputeInstanceGetInfo(ci nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	return call(l, "ComputeInstanceGetInfo", &l.computes, ci,
		func(compute gonvml.ComputeInstance) (nvml.ComputeInstanceInfo, gonvml.Return) {
			info, code := compute.GetInfo()
			return nvml.ComputeInstanceInfo{ID: int(info.Id), Slices: int(info.Placement.Size)}, code
		})
}

// mostInstances is enough for all GPU instances of one profile on a GPU, or all compute instances
// in a GPU instance: no GPU has more than eight slots. The driver trusts the count that it gets.
const mostInstances = 32

// DeviceSetMigMode sets the mode. go-nvml returns the result of the activation first, and then the
// result of the call.
func (l *library) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	mode := gonvml.DEVICE_MIG_DISABLE
	if on {
		mode = gonvml.DEVICE_MIG_ENABLE
	}
	return callDevice(l, "DeviceSetMigMode", d, func(d gonvml.Device) (nvml.Return, gonvml.Return) {
		activation, code := d.SetMigMode(mode)
		return nvml.Return(activation), code
	})
}

func (l *library) DeviceGetGpuInstancePossiblePlacements(d nvml.Device, profile int) ([]mig.Placement, error) {
	return callWith(l, "DeviceGetGpuInstancePossiblePlacements", &l.devices, d, profile,
		func(d gonvml.Device, profile int) ([]mig.Placement, gonvml.Return) {
			possible, code := d.GetGpuInstancePossiblePlacements(&gonvml.GpuInstanceProfileInfo{Id: uint32(profile)})
			var placements []mig.Placement
			for _, p := range possible {
				placements = append(placements, mig.Placement{Start: int(p.Start), Size: int(p.Size)})
			}
			return placements, code
		})
}

func (l *library) DeviceGetGpuInstances(d nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	return l.instances.allNumbered(
		callWith(l, "DeviceGetGpuInstances", &l.devices, d, profile,
			func(d gonvml.Device, profile int) ([]gonvml.GpuInstance, gonvml.Return) {
				return d.GetGpuInstances(&gonvml.GpuInstanceProfileInfo{
					Id:            uint32(profile),
					InstanceCount: mostInstances,
				})
			}))
}

func (l *library) DeviceCreateGpuInstanceWithPlacement(
	d nvml.Device,
	profile int,
	at mig.Placement,
) (nvml.GPUInstance, error) {
	return l.instances.numbered(callWith(l, "DeviceCreateGpuInstanceWithPlacement", &l.devices, d, profile,
		func(d gonvml.Device, profile int) (gonvml.GpuInstance, gonvml.Return) {
			if !ordinal(at.Start) || !ordinal(at.Size) {
				return nil, gonvml.ERROR_INVALID_ARGUMENT
			}
			return d.CreateGpuInstanceWithPlacement(
				&gonvml.GpuInstanceProfileInfo{Id: uint32(profile)},
				&gonvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)},
			)
		}))
}

func (l *library) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	return free(l, "GpuInstanceDestroy", &l.instances, gi, gonvml.GpuInstance.Destroy)
}

func (l *library) GpuInstanceGetComputeInstanceProfileInfo(
	gi nvml.GPUInstance,
	profile int,
) (nvml.ComputeInstanceProfile, error) {
	return callWith(l, "GpuInstanceGetComputeInstanceProfileInfo", &l.instances, gi, profile,
		func(instance gonvml.GpuInstance, profile int) (nvml.ComputeInstanceProfile, gonvml.Return) {
			info, code := instance.GetComputeInstanceProfileInfo(profile, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
			return nvml.ComputeInstanceProfile{
				ID:        int(info.Id),
				Slices:    int(info.SliceCount),
				Instances: int(info.InstanceCount),
			}, code
		})
}

func (l *library) GpuInstanceGetComputeInstances(gi nvml.GPUInstance, profile int) ([]nvml.ComputeInstance, error) {
	return l.computes.allNumbered(
		callWith(l, "GpuInstanceGetComputeInstances", &l.instances, gi, profile,
			func(instance gonvml.GpuInstance, profile int) ([]gonvml.ComputeInstance, gonvml.Return) {
				return instance.GetComputeInstances(
					&gonvml.ComputeInstanceProfileInfo{Id: uint32(profile), InstanceCount: mostInstances})
			}))
}

func (l *library) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	return l.computes.numbered(callWith(l, "GpuInstanceCreateComputeInstance", &l.instances, gi, profile,
		func(instance gonvml.GpuInstance, profile int) (gonvml.ComputeInstance, gonvml.Return) {
			return instance.CreateComputeInstance(&gonvml.ComputeInstanceProfileInfo{Id: uint32(profile)})
		}))
}

func (l *library) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	return free(l, "ComputeInstanceDestroy", &l.computes, ci, gonvml.ComputeInstance.Destroy)
}
