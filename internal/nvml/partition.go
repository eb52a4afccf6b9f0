package nvml

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// readPartitions walks the board's MIG devices. The indices have holes and a
// broken device hides no other, so the walk goes to the maximum; what could not
// be read is in the reading's problems. A lost board is an error.
func (b *board) readPartitions(lib Library, r *reading) error {
	most, err := lib.DeviceGetMaxMigDeviceCount(b.device)
	if err != nil {
		return err
	}
	if b.shapes == nil {
		if b.shapes, err = readShapes(lib, b.device); err != nil {
			return err
		}
	}
	r.partitions = map[string]Device{}
	var failed []error
	for index := range most {
		device, err := lib.DeviceGetMigDeviceHandleByIndex(b.device, index)
		if errors.Is(err, NotFound) {
			continue
		}
		var partition sharing.Partition
		if err == nil {
			partition, err = b.partition(lib, device, index)
		}
		switch {
		case errors.Is(err, GPUIsLost):
			return err
		case err != nil:
			failed = append(failed, fmt.Errorf("read MIG device %d: %w", index, err))
		default:
			r.gpu.Partitions = append(r.gpu.Partitions, partition)
			r.partitions[partition.UUID] = device
		}
	}
	r.problems = errors.Join(failed...)
	return nil
}

// partition reads one MIG device.
func (b *board) partition(lib Library, device Device, index int) (sharing.Partition, error) {
	p := sharing.Partition{Index: index}
	var err error
	if p.UUID, err = lib.DeviceGetUUID(device); err != nil {
		return p, err
	}
	if p.GI, err = lib.DeviceGetGpuInstanceId(device); err != nil {
		return p, err
	}
	if p.CI, err = lib.DeviceGetComputeInstanceId(device); err != nil {
		return p, err
	}
	handle, err := lib.DeviceGetGpuInstanceById(b.device, p.GI)
	if err != nil {
		return p, err
	}
	instance, err := lib.GpuInstanceGetInfo(handle)
	if err != nil {
		return p, err
	}
	p.Placement = mig.Placement{Start: instance.Start, Size: instance.Size}
	p.Profile, err = b.profile(lib, device, handle, instance.ProfileID, p.CI)
	return p, err
}

// profile is what a MIG device was cut as: the driver's name for its GPU
// instance, and the compute slices of its compute instance. Drivers that do not
// name profiles still write the whole into the MIG device's product name.
func (b *board) profile(lib Library, device Device, handle GPUInstance, id, ci int) (mig.Profile, error) {
	profile, named := b.shapes[id]
	if !named {
		return profileOfName(lib, device)
	}
	compute, err := lib.GpuInstanceGetComputeInstanceById(handle, ci)
	if err != nil {
		return mig.Profile{}, err
	}
	info, err := lib.ComputeInstanceGetInfo(compute)
	if err != nil {
		return mig.Profile{}, err
	}
	profile.Compute = info.Slices
	return profile, nil
}

// profileOfName reads the profile off the end of a MIG device's product name,
// "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
func profileOfName(lib Library, device Device) (mig.Profile, error) {
	name, err := lib.DeviceGetName(device)
	if err != nil {
		return mig.Profile{}, err
	}
	at := strings.LastIndex(name, " MIG ")
	if at < 0 {
		return mig.Profile{}, fmt.Errorf("product name %q tells no MIG profile", name)
	}
	return mig.ParseProfile(name[at+len(" MIG "):])
}

// readShapes asks for the board's GPU instance profiles, in NVML's enumeration,
// which ends with INVALID_ARGUMENT and has holes. A profile with a name that
// this program cannot read is left out; its partitions are told by their
// product name.
func readShapes(lib Library, device Device) (map[int]mig.Profile, error) {
	shapes := map[int]mig.Profile{}
	for enum := range profileEnumerationBound {
		info, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
		switch {
		case errors.Is(err, InvalidArgument):
			return shapes, nil
		case errors.Is(err, GPUIsLost):
			return nil, err
		case err != nil:
			continue
		}
		if profile, err := info.named(); err == nil {
			shapes[info.ID] = profile
		}
	}
	return shapes, nil
}

// named is the profile that the driver's name says; some drivers begin it with
// "MIG ".
func (p GPUInstanceProfile) named() (mig.Profile, error) {
	return mig.ParseProfile(strings.TrimPrefix(p.Name, "MIG "))
}

// profileEnumerationBound ends the enumeration of a driver that never says
// INVALID_ARGUMENT. NVML has 18 profiles (nvml.h, NVML_GPU_INSTANCE_PROFILE_COUNT).
const profileEnumerationBound = 64

// missingFrom are the partitions of before that now does not have.
func missingFrom(now, before []sharing.Partition) []sharing.Partition {
	var missing []sharing.Partition
	for _, partition := range before {
		if !slices.ContainsFunc(now, func(p sharing.Partition) bool { return p.UUID == partition.UUID }) {
			missing = append(missing, partition)
		}
	}
	return missing
}
