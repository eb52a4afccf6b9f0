package nvmltest

import (
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// walkLimit is more than any walk of this suite has steps.
const walkLimit = 128

// partitions holds that the walk over a board's MIG devices ends, has holes and
// no other errors, and that each device leads to its instances.
func partitions(t *testing.T, lib nvml.Library, expect Expect) {
	found := 0
	uuids := map[string]bool{}
	for _, parent := range devices(t, lib) {
		enabled, _, err := lib.DeviceGetMigMode(parent)
		if !optional(t, "DeviceGetMigMode", err) {
			continue
		}
		most, err := lib.DeviceGetMaxMigDeviceCount(parent)
		if !optional(t, "DeviceGetMaxMigDeviceCount", err) {
			continue
		}
		between(t, "MIG devices at most", most, 0, walkLimit)
		for index := range most {
			device, err := lib.DeviceGetMigDeviceHandleByIndex(parent, index)
			if err != nil {
				fails(t, "DeviceGetMigDeviceHandleByIndex", err, nvml.NotFound)
				continue
			}
			if !enabled {
				t.Errorf("MIG device %d of a board without MIG", index)
			}
			found++
			partition(t, lib, parent, device, uuids)
		}
	}
	number(t, "partitions", found, expect.Partitions)
}

// partition holds what is said of one.
func partition(t *testing.T, lib nvml.Library, parent, device nvml.Device, uuids map[string]bool) {
	t.Helper()
	uuid, err := lib.DeviceGetUUID(device)
	must(t, err)
	matches(t, "UUID", uuid, migUUID)
	unique(t, "UUID", uuid, uuids)
	memory(t, lib, device)
	_, err = lib.DeviceGetName(device)
	must(t, err)

	gi, err := lib.DeviceGetGpuInstanceId(device)
	must(t, err)
	instance, err := lib.DeviceGetGpuInstanceById(parent, gi)
	if errors.Is(err, nvml.NoPermission) {
		return // Instances are for root.
	}
	must(t, err)
	info, err := lib.GpuInstanceGetInfo(instance)
	must(t, err)
	if info.ID != gi || info.Size < 1 || info.Start < 0 {
		t.Errorf("GPU instance %+v, want ID %d and a place", info, gi)
	}
	ci, err := lib.DeviceGetComputeInstanceId(device)
	must(t, err)
	compute, err := lib.GpuInstanceGetComputeInstanceById(instance, ci)
	must(t, err)
	slices, err := lib.ComputeInstanceGetInfo(compute)
	must(t, err)
	if slices.ID != ci || slices.Slices < 1 {
		t.Errorf("compute instance %+v, want ID %d and slices", slices, ci)
	}
}

// profiles holds that the enumeration of ways to cut a board has an end.
func profiles(t *testing.T, lib nvml.Library, _ Expect) {
	for _, device := range devices(t, lib) {
		for enum := range walkLimit + 1 {
			profile, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
			if errors.Is(err, nvml.InvalidArgument) || errors.Is(err, nvml.FunctionNotFound) || errors.Is(err, nvml.NoPermission) {
				break
			}
			switch {
			case enum == walkLimit:
				t.Errorf("no end of profiles after %d", enum)
			case err != nil:
				fails(t, "DeviceGetGpuInstanceProfileInfo", err, nvml.NotSupported)
			case profile.Slices < 1 || profile.Instances < 1 || profile.MemoryMB == 0:
				t.Errorf("profile %d: %+v is a cut of nothing", enum, profile)
			}
		}
	}
}

// neighbours holds what is said of pairs of boards and of links.
func neighbours(t *testing.T, lib nvml.Library, _ Expect) {
	found := devices(t, lib)
	for i, a := range found {
		for _, b := range found[i+1:] {
			there, err := lib.DeviceGetTopologyCommonAncestor(a, b)
			if !optional(t, "DeviceGetTopologyCommonAncestor", err) {
				continue
			}
			back, err := lib.DeviceGetTopologyCommonAncestor(b, a)
			must(t, err)
			if there != back || there.String() == "" {
				t.Errorf("levels %d there and %d back", there, back)
			}
		}
		links(t, lib, a)
	}
}

// links holds that the enumeration of a board's links has an end, and that an
// active one leads somewhere.
func links(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	for link := range walkLimit + 1 {
		active, err := lib.DeviceGetNvLinkState(device, link)
		if !optional(t, "DeviceGetNvLinkState", err) {
			return
		}
		if link == walkLimit {
			t.Errorf("no end of links after %d", link)
		}
		if !active {
			continue
		}
		if remote, err := lib.DeviceGetNvLinkRemotePciInfo(device, link); optional(t, "DeviceGetNvLinkRemotePciInfo", err) {
			matches(t, "bus ID at the other end", remote.BusID, busID)
		}
	}
}
