package nvmltest

import (
	"errors"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// The functions below change a GPU's partitions as nvidia-smi does, by index and IDs. They need
// opened libraries, and GPUs that nothing uses.

// SetMIG turns MIG mode on or off. On GPUs before Hopper the mode is pending until the GPU is
// reset. It returns IN_USE while there are GPU instances or processes.
func SetMIG(lib nvml.Library, gpu int, on bool) error {
	device, err := lib.DeviceGetHandleByIndex(gpu)
	if err != nil {
		return err
	}
	reason, err := lib.DeviceSetMigMode(device, on)
	if err == nil && reason == nvml.InUse {
		return reason
	}
	return err
}

// CreateGPUInstance creates a GPU instance of the published profile ID at the memory slot and
// returns its ID.
func CreateGPUInstance(lib nvml.Library, gpu, profile, start int) (id int, err error) {
	device, err := lib.DeviceGetHandleByIndex(gpu)
	if err != nil {
		return 0, err
	}
	at := mig.Placement{Start: start}
	// If the GPU does not have the profile, the next call returns the error.
	if possible, err := lib.DeviceGetGpuInstancePossiblePlacements(device, profile); err == nil {
		at.Size = possible[0].Size
	}
	instance, err := lib.DeviceCreateGpuInstanceWithPlacement(device, profile, at)
	if err != nil {
		return 0, err
	}
	info, err := lib.GpuInstanceGetInfo(instance)
	return info.ID, err
}

// CreateComputeInstance creates a compute instance on that many of the GPU instance's slices. The
// compute instance is a new MIG device. CreateComputeInstance returns its ID and UUID.
func CreateComputeInstance(lib nvml.Library, gpu, gi, count int) (id int, uuid string, err error) {
	device, err := lib.DeviceGetHandleByIndex(gpu)
	if err != nil {
		return 0, "", err
	}
	instance, err := lib.DeviceGetGpuInstanceById(device, gi)
	if err != nil {
		return 0, "", err
	}
	// The profiles' IDs are NVML's enumeration: NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE.
	compute, err := lib.GpuInstanceCreateComputeInstance(instance, slices.Index([]int{1, 2, 3, 4, 7}, count))
	if err != nil {
		return 0, "", err
	}
	info, err := lib.ComputeInstanceGetInfo(compute)
	if err != nil {
		return 0, "", err
	}
	uuid, err = uuidOf(lib, device, gi, info.ID)
	return info.ID, uuid, err
}

// uuidOf returns the UUID of the MIG device with these IDs.
func uuidOf(lib nvml.Library, device nvml.Device, gi, ci int) (string, error) {
	count, err := lib.DeviceGetMaxMigDeviceCount(device)
	if err != nil {
		return "", err
	}
	for index := range count {
		partition, err := lib.DeviceGetMigDeviceHandleByIndex(device, index)
		if err != nil {
			continue // NOT_FOUND is a hole.
		}
		itsGI, err := lib.DeviceGetGpuInstanceId(partition)
		if err != nil {
			return "", err
		}
		itsCI, err := lib.DeviceGetComputeInstanceId(partition)
		if err != nil {
			return "", err
		}
		if itsGI == gi && itsCI == ci {
			return lib.DeviceGetUUID(partition)
		}
	}
	return "", nvml.NotFound
}

// DestroyComputeInstance returns IN_USE while a process runs on the compute instance.
func DestroyComputeInstance(lib nvml.Library, gpu, gi, ci int) error {
	device, err := lib.DeviceGetHandleByIndex(gpu)
	if err != nil {
		return err
	}
	instance, err := lib.DeviceGetGpuInstanceById(device, gi)
	if err != nil {
		return err
	}
	compute, err := lib.GpuInstanceGetComputeInstanceById(instance, ci)
	if err != nil {
		return err
	}
	return lib.ComputeInstanceDestroy(compute)
}

// DestroyGPUInstance returns IN_USE while there are compute instances. It tries a second time,
// because the first call also returns IN_USE if the last of them has only just gone.
func DestroyGPUInstance(lib nvml.Library, gpu, gi int) error {
	device, err := lib.DeviceGetHandleByIndex(gpu)
	if err != nil {
		return err
	}
	instance, err := lib.DeviceGetGpuInstanceById(device, gi)
	if err != nil {
		return err
	}
	if err := lib.GpuInstanceDestroy(instance); !errors.Is(err, nvml.InUse) {
		return err
	}
	return lib.GpuInstanceDestroy(instance)
}
