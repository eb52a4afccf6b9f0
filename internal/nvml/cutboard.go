package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// cutBoard is a board for the time of one listing or one step.
type cutBoard struct {
	lib    Library
	device Device
	index  int
	// profiles are the board's ways to be cut, by published ID; geometry fills them.
	profiles map[int]cutProfile
}

// cutProfile is a way to cut the board. Its profile is zero where the driver's
// name for it cannot be read.
type cutProfile struct {
	GPUInstanceProfile
	profile mig.Profile
}

// read lists how the board is cut.
func (b *cutBoard) read() (sharing.Cut, error) {
	pci, err := b.lib.DeviceGetPciInfo(b.device)
	if err != nil {
		return sharing.Cut{}, err
	}
	cut := sharing.Cut{Board: sharing.BoardID{Index: b.index, Device: pci.DeviceID, Subsystem: pci.SubsystemID}}
	cut.MIG, cut.Pending, err = b.lib.DeviceGetMigMode(b.device)
	if unsupported(err) {
		return cut, nil
	}
	if err != nil {
		return cut, err
	}
	if cut.Geometry, err = b.geometry(pci.DeviceID); err != nil {
		return cut, err
	}
	if !cut.MIG {
		cut.Busy = b.busy(b.device)
		return cut, nil
	}
	cut.Instances, err = b.instances()
	return cut, err
}

// errNotListed says that a listing is not exact: some driver calls answer that
// there is nothing where they mean that they cannot tell.
var errNotListed = errors.New("the driver does not list")

// instances lists the GPU instances, by placement. A MIG device that is in none of
// them is an error.
func (b *cutBoard) instances() ([]mig.Instance, error) {
	devices, err := b.migDevices()
	if err != nil {
		return nil, err
	}
	var list []mig.Instance
	for _, id := range slices.Sorted(maps.Keys(b.profiles)) {
		handles, err := b.lib.DeviceGetGpuInstances(b.device, id)
		switch {
		case unsupported(err), errors.Is(err, NotFound), errors.Is(err, InvalidArgument):
			continue
		case err != nil:
			return nil, err
		}
		for _, handle := range handles {
			instance, err := b.instance(handle, b.profiles[id], devices)
			if err != nil {
				return nil, err
			}
			for _, c := range instance.Computes {
				delete(devices, partitionKey{instance.GI, c.CI})
			}
			list = append(list, instance)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(devices), partitionKey.compare) {
		return nil, fmt.Errorf("MIG device %s is in GPU instance %d, compute instance %d, which %w", devices[key].uuid, key.gi, key.ci, errNotListed)
	}
	slices.SortFunc(list, func(a, b mig.Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	return list, nil
}

// instance lists one GPU instance with its compute instances.
func (b *cutBoard) instance(handle GPUInstance, way cutProfile, devices map[partitionKey]migDevice) (mig.Instance, error) {
	info, err := b.lib.GpuInstanceGetInfo(handle)
	if err != nil {
		return mig.Instance{}, err
	}
	instance := mig.Instance{
		GI: info.ID, Profile: way.profile, Placement: mig.Placement{Start: info.Start, Size: info.Size},
	}
	if instance.Profile.IsZero() {
		instance.Profile = mig.Profile{Compute: way.Slices, Slices: way.Slices, MemoryGB: int(way.MemoryMB >> 10)}
	}
	computes, err := b.computes(handle)
	if err != nil {
		return mig.Instance{}, err
	}
	for _, c := range computes {
		device, known := devices[partitionKey{info.ID, c.ID}]
		instance.Computes = append(instance.Computes, mig.Compute{
			CI: c.ID, Slices: c.Slices, UUID: device.uuid,
			// What has no name could not be made again, so it is not touched.
			Busy: !known || way.profile.IsZero() || b.busy(device.handle),
		})
	}
	return instance, nil
}

// computes lists the compute instances of a GPU instance, by ID.
func (b *cutBoard) computes(instance GPUInstance) ([]ComputeInstanceInfo, error) {
	ways, err := b.computeProfiles(instance)
	if err != nil {
		return nil, err
	}
	found := map[int]ComputeInstanceInfo{}
	for _, way := range ways {
		handles, err := b.lib.GpuInstanceGetComputeInstances(instance, way.ID)
		switch {
		case unsupported(err), errors.Is(err, NotFound), errors.Is(err, InvalidArgument):
			continue
		case err != nil:
			return nil, err
		}
		for _, handle := range handles {
			info, err := b.lib.ComputeInstanceGetInfo(handle)
			if err != nil {
				return nil, err
			}
			found[info.ID] = info
		}
	}
	var list []ComputeInstanceInfo
	for _, info := range found {
		list = append(list, info)
	}
	slices.SortFunc(list, func(a, b ComputeInstanceInfo) int { return cmp.Compare(a.ID, b.ID) })
	return list, nil
}

// computeProfiles are the ways to cut a GPU instance, in NVML's enumeration.
func (b *cutBoard) computeProfiles(instance GPUInstance) ([]ComputeInstanceProfile, error) {
	var ways []ComputeInstanceProfile
	for enum := range profileEnumerationBound {
		way, err := b.lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
		switch {
		case errors.Is(err, InvalidArgument):
			return ways, nil
		case unsupported(err):
		case err != nil:
			return nil, err
		default:
			ways = append(ways, way)
		}
	}
	return ways, nil
}

// partitionKey names a MIG device by the IDs of its instances, which are used
// again: only a listing of this moment may be looked up by it.
type partitionKey struct{ gi, ci int }

func (k partitionKey) compare(other partitionKey) int {
	return cmp.Or(cmp.Compare(k.gi, other.gi), cmp.Compare(k.ci, other.ci))
}

type migDevice struct {
	handle Device
	uuid   string
}

// migDevices lists the MIG devices.
func (b *cutBoard) migDevices() (map[partitionKey]migDevice, error) {
	most, err := b.lib.DeviceGetMaxMigDeviceCount(b.device)
	if err != nil {
		return nil, err
	}
	devices := map[partitionKey]migDevice{}
	for index := range most {
		handle, err := b.lib.DeviceGetMigDeviceHandleByIndex(b.device, index)
		if errors.Is(err, NotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var key partitionKey
		uuid, err := b.lib.DeviceGetUUID(handle)
		if err == nil {
			key.gi, err = b.lib.DeviceGetGpuInstanceId(handle)
		}
		if err == nil {
			key.ci, err = b.lib.DeviceGetComputeInstanceId(handle)
		}
		if err != nil {
			return nil, fmt.Errorf("MIG device %d: %w", index, err)
		}
		devices[key] = migDevice{handle: handle, uuid: uuid}
	}
	return devices, nil
}

// busy says that processes use the board or the MIG device, or that the driver
// does not tell.
func (b *cutBoard) busy(device Device) bool {
	processes, err := b.lib.DeviceGetComputeRunningProcesses(device)
	if err != nil || len(processes) > 0 {
		return true
	}
	for _, list := range []func(Device) ([]Process, error){
		b.lib.DeviceGetGraphicsRunningProcesses, b.lib.DeviceGetMPSComputeRunningProcesses,
	} {
		if processes, err = list(device); err != nil && !unsupported(err) || len(processes) > 0 {
			return true
		}
	}
	return false
}
