package nvmltest

import (
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// cutting holds that the exact listing of a board agrees with its profiles, and
// that each placement lies on the board. It changes nothing. Listing is for root.
func cutting(t *testing.T, lib nvml.Library, _ Expect) {
	for _, device := range devices(t, lib) {
		for enum := range walkLimit {
			profile, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
			if errors.Is(err, nvml.InvalidArgument) {
				break
			}
			if err != nil {
				continue
			}
			placements, err := lib.DeviceGetGpuInstancePossiblePlacements(device, profile.ID)
			if !optional(t, "DeviceGetGpuInstancePossiblePlacements", err) {
				continue
			}
			for _, at := range placements {
				if at.Start < 0 || at.Size < 1 || at.Start+at.Size > walkLimit {
					t.Errorf("profile %d can lie at %s", profile.ID, at)
				}
			}
			instances, err := lib.DeviceGetGpuInstances(device, profile.ID)
			if !optional(t, "DeviceGetGpuInstances", err) {
				continue
			}
			for _, instance := range instances {
				listed(t, lib, instance, profile.ID)
			}
		}
	}
}

// listed holds that an instance which was listed by its profile is of it, and so
// for its compute instances.
func listed(t *testing.T, lib nvml.Library, instance nvml.GPUInstance, profile int) {
	t.Helper()
	info, err := lib.GpuInstanceGetInfo(instance)
	must(t, err)
	if info.ProfileID != profile {
		t.Errorf("GPU instance %d is of profile %d and listed by %d", info.ID, info.ProfileID, profile)
	}
	for enum := range walkLimit {
		way, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
		if errors.Is(err, nvml.InvalidArgument) || errors.Is(err, nvml.NoPermission) {
			return
		}
		if !optional(t, "GpuInstanceGetComputeInstanceProfileInfo", err) {
			continue
		}
		computes, err := lib.GpuInstanceGetComputeInstances(instance, way.ID)
		if !optional(t, "GpuInstanceGetComputeInstances", err) {
			continue
		}
		for _, compute := range computes {
			info, err := lib.ComputeInstanceGetInfo(compute)
			must(t, err)
			if info.Slices != way.Slices {
				t.Errorf("compute instance %d has %d slices and is listed by %d", info.ID, info.Slices, way.Slices)
			}
		}
	}
}
