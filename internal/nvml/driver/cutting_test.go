//go:build cgo

package driver

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// cuts holds what becomes of the calls that list and change how a board is cut,
// against the fake with those calls.
func cuts(t *testing.T, lib nvml.Library) {
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	first, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	board, err := lib.DeviceGetHandleByIndex(1)
	must(t, err)

	// The status of the activation and that of the call must not be mixed up.
	activation, err := lib.DeviceSetMigMode(first, true)
	if activation != nvml.ResetRequired || err != nil {
		t.Errorf("MIG on: %v, %v, want RESET_REQUIRED and no error", activation, err)
	}
	if activation, err = lib.DeviceSetMigMode(first, false); activation != nvml.InUse || err != nil {
		t.Errorf("MIG off: %v, %v, want IN_USE and no error", activation, err)
	}
	if activation, err = lib.DeviceSetMigMode(board, true); activation != nvml.Success || !errors.Is(err, nvml.NoPermission) {
		t.Errorf("MIG on: %v, %v, want an error NO_PERMISSION", activation, err)
	}

	placements, err := lib.DeviceGetGpuInstancePossiblePlacements(board, 19)
	must(t, err)
	if len(placements) != 7 || placements[6] != (mig.Placement{Start: 6, Size: 1}) {
		t.Errorf("placements %v, want 0:1 to 6:1", placements)
	}
	instances, err := lib.DeviceGetGpuInstances(board, 19)
	must(t, err)
	known, err := lib.DeviceGetGpuInstanceById(board, 9)
	must(t, err)
	if len(instances) != 2 || instances[1] != known {
		t.Errorf("instances %v, want two, the second %d", instances, known)
	}
	if _, err := lib.DeviceGetGpuInstances(board, -1); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("profile -1: %v, want INVALID_ARGUMENT", err)
	}
	if err := lib.GpuInstanceDestroy(known); !errors.Is(err, nvml.InUse) {
		t.Errorf("destroy one in use: %v, want IN_USE", err)
	}
	processes, err := lib.DeviceGetMPSComputeRunningProcesses(board)
	must(t, err)
	if diff := cmp.Diff([]nvml.Process{{PID: 4713}}, processes); diff != "" {
		t.Errorf("MPS clients (-want +got):\n%s", diff)
	}
	if processes, err = lib.DeviceGetGraphicsRunningProcesses(board); len(processes) > 0 || err != nil {
		t.Errorf("graphics processes %v, %v, want none", processes, err)
	}
	cutHole(t, lib, board)
}

// cutHole makes an instance, with a compute instance, and destroys both.
func cutHole(t *testing.T, lib nvml.Library, board nvml.Device) {
	t.Helper()
	if _, err := lib.DeviceCreateGpuInstanceWithPlacement(board, 19, mig.Placement{Start: 0, Size: 1}); !errors.Is(err, nvml.InsufficientResources) {
		t.Errorf("create where there is no room: %v, want INSUFFICIENT_RESOURCES", err)
	}
	instance, err := lib.DeviceCreateGpuInstanceWithPlacement(board, 19, mig.Placement{Start: 1, Size: 1})
	must(t, err)
	profile, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, 0)
	if want := (nvml.ComputeInstanceProfile{ID: 5, Slices: 1, Instances: 1}); profile != want || err != nil {
		t.Errorf("profile %+v, %v, want %+v", profile, err, want)
	}
	if _, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, 9); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("profile 9: %v, want INVALID_ARGUMENT", err)
	}
	compute, err := lib.GpuInstanceCreateComputeInstance(instance, profile.ID)
	must(t, err)
	listed, err := lib.GpuInstanceGetComputeInstances(instance, profile.ID)
	if err != nil || len(listed) != 1 || listed[0] != compute {
		t.Errorf("compute instances %v, %v, want %d", listed, err, compute)
	}
	must(t, lib.ComputeInstanceDestroy(compute))
	must(t, lib.GpuInstanceDestroy(instance))
	for name, err := range map[string]error{
		"ComputeInstanceDestroy": lib.ComputeInstanceDestroy(compute), "GpuInstanceDestroy": lib.GpuInstanceDestroy(instance),
	} {
		if !errors.Is(err, nvml.InvalidArgument) {
			t.Errorf("%s again: %v, want INVALID_ARGUMENT: the handle may be another's by now", name, err)
		}
	}
}
