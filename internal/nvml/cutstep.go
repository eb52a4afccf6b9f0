package nvml

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/virgate/virgate/mig"
)

// setMode changes the MIG mode. The driver says in two places whether it could.
func (b *cutBoard) setMode(on bool) error {
	activation, err := b.lib.DeviceSetMigMode(b.device, on)
	if err != nil {
		return err
	}
	if activation != Success {
		return &Error{Call: "DeviceSetMigMode: activation", Return: activation}
	}
	return nil
}

// destroyCompute destroys the compute instance that is the step's MIG device.
// IDs are used again, so it goes by the UUID.
func (b *cutBoard) destroyCompute(step mig.Step) error {
	devices, err := b.migDevices()
	if err != nil {
		return err
	}
	for key, device := range devices {
		if device.uuid != step.UUID {
			continue
		}
		instance, err := b.lib.DeviceGetGpuInstanceById(b.device, key.gi)
		if err != nil {
			return err
		}
		compute, err := b.lib.GpuInstanceGetComputeInstanceById(instance, key.ci)
		if err == nil {
			err = b.lib.ComputeInstanceDestroy(compute)
		}
		return gone(err)
	}
	return nil
}

// destroyInstance destroys the GPU instance of the step's ID, if it is the one
// at the step's place.
func (b *cutBoard) destroyInstance(ctx context.Context, step mig.Step) error {
	instance, err := b.lib.DeviceGetGpuInstanceById(b.device, step.GI)
	if err != nil {
		return gone(err)
	}
	info, err := b.lib.GpuInstanceGetInfo(instance)
	if err != nil {
		return err
	}
	if at := (mig.Placement{Start: info.Start, Size: info.Size}); at != step.Placement {
		return fmt.Errorf("GPU instance %d is at %s now", step.GI, at)
	}
	for try := 1; ; try++ {
		err := b.lib.GpuInstanceDestroy(instance)
		if !errors.Is(err, InUse) || try == settleTries {
			return gone(err)
		}
		select {
		case <-time.After(settlePause):
		case <-ctx.Done():
			return err
		}
	}
}

// settleTries and settlePause are how often a GPU instance is tried to be
// destroyed that the driver calls in use: for a moment after its last compute
// instance went it does.
const (
	settleTries = 4
	settlePause = 100 * time.Millisecond
)

// gone says that there being nothing to destroy is as good as having done it.
func gone(err error) error {
	if errors.Is(err, NotFound) {
		return nil
	}
	return err
}

func (b *cutBoard) createInstance(step mig.Step) error {
	way, err := b.way(step.Profile)
	if err != nil {
		return err
	}
	_, err = b.lib.DeviceCreateGpuInstanceWithPlacement(b.device, way.ID, step.Placement)
	return err
}

// createCompute makes a compute instance in the GPU instance at the step's
// place.
func (b *cutBoard) createCompute(step mig.Step) error {
	way, err := b.way(step.Profile)
	if err != nil {
		return err
	}
	instances, err := b.lib.DeviceGetGpuInstances(b.device, way.ID)
	if err != nil {
		return err
	}
	for _, instance := range instances {
		info, err := b.lib.GpuInstanceGetInfo(instance)
		if err != nil {
			return err
		}
		if (mig.Placement{Start: info.Start, Size: info.Size}) != step.Placement {
			continue
		}
		ways, err := b.computeProfiles(instance)
		if err != nil {
			return err
		}
		for _, way := range ways {
			if way.Slices == step.Profile.Compute {
				_, err := b.lib.GpuInstanceCreateComputeInstance(instance, way.ID)
				return err
			}
		}
		return fmt.Errorf("the GPU instance has no compute instances of %d slices", step.Profile.Compute)
	}
	return fmt.Errorf("there is no GPU instance %s at %s", step.Profile.Instance(), step.Placement)
}

// way is the driver's way to cut a GPU instance for the partition.
func (b *cutBoard) way(profile mig.Profile) (cutProfile, error) {
	pci, err := b.lib.DeviceGetPciInfo(b.device)
	if err != nil {
		return cutProfile{}, err
	}
	if _, err := b.geometry(pci.DeviceID); err != nil {
		return cutProfile{}, err
	}
	for _, way := range b.profiles {
		if way.profile == profile.Instance() {
			return way, nil
		}
	}
	return cutProfile{}, fmt.Errorf("%s: %w", profile, mig.ErrUnknownProfile)
}
