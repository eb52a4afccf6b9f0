//go:build cgo

package driver

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
)

// sameCodes checks that testdata/fake.c and the simulated node return the same codes, with MIG rights and
// without.
func sameCodes(t *testing.T, lib nvml.Library) {
	node, err := simnode.New("mixed") // GPU 0 is whole, GPU 2 partitioned.
	must(t, err)
	grant(t, monitor)
	simulated, fake := newSubject(t, node, 0, 2), newSubject(t, lib, 0, 1)
	defer func() { must(t, node.Shutdown()) }()
	defer func() { must(t, lib.Shutdown()) }()

	for _, world := range []struct {
		name   string
		rights []string
	}{{"unprivileged", nil}, {"monitor-only", []string{monitor}}, {"", []string{isRoot, configure, monitor}}} {
		must(t, node.SetWorld(world.name))
		grant(t, world.rights...)
		if diff := cmp.Diff(simulated.codes(), fake.codes()); diff != "" {
			t.Errorf("with the rights %q (-simulated +C library):\n%s", world.rights, diff)
		}
	}
}

// The device nodes of the MIG rights, and a stand-in for being root.
const isRoot, configure, monitor = "nvidia-cap0", "nvidia-cap1", "nvidia-cap2"

// subject is a driver with a whole GPU and one that has a partition of one slice.
type subject struct {
	lib                      nvml.Library
	whole, parent, partition nvml.Device
	gi                       nvml.GPUInstance
	info                     nvml.GPUInstanceInfo
	ci                       nvml.ComputeInstance
	profile                  nvml.ComputeInstanceProfile
}

// newSubject opens the driver.
func newSubject(t *testing.T, lib nvml.Library, whole, parent int) *subject {
	t.Helper()
	must(t, lib.Init())
	s := &subject{lib: lib}
	var err error
	s.whole, err = lib.DeviceGetHandleByIndex(whole)
	must(t, err)
	s.parent, err = lib.DeviceGetHandleByIndex(parent)
	must(t, err)
	s.partition, err = lib.DeviceGetMigDeviceHandleByIndex(s.parent, 0)
	must(t, err)
	id, err := lib.DeviceGetGpuInstanceId(s.partition)
	must(t, err)
	s.gi, err = lib.DeviceGetGpuInstanceById(s.parent, id)
	must(t, err)
	s.info, err = lib.GpuInstanceGetInfo(s.gi)
	must(t, err)
	s.ci, err = lib.GpuInstanceGetComputeInstanceById(s.gi, 0)
	must(t, err)
	s.profile, err = lib.GpuInstanceGetComputeInstanceProfileInfo(s.gi, 0)
	must(t, err)
	return s
}

// asked is a call that returns its code.
type asked struct {
	name string
	code func() nvml.Return
}

// of is a call that returns a value and an error.
func of[T any](name string, ask func() (T, error)) asked {
	return asked{name, func() nvml.Return { _, err := ask(); return code(err) }}
}

func code(err error) nvml.Return {
	failed, ok := errors.AsType[*nvml.Error](err)
	if !ok {
		return nvml.Success
	}
	return failed.Return
}

// codes are the codes of all the calls below, which leave everything as it was.
func (s *subject) codes() map[string]nvml.Return {
	codes := map[string]nvml.Return{}
	for _, call := range append(s.reading(), s.changing()...) {
		codes[call.name] = call.code()
	}
	return codes
}

func (s *subject) memoryErrors(name string, device nvml.Device, counter nvml.MemoryErrorCounter) asked {
	return of(fmt.Sprintf("errors %+v %s", counter, name), func() (uint64, error) { return s.lib.DeviceGetMemoryErrorCounter(device, counter) })
}

const none = 99 // No memory, no profile and no instance has this number.

func (s *subject) reading() []asked {
	calls := []asked{
		of("MIG device of no index", func() (nvml.Device, error) { return s.lib.DeviceGetMigDeviceHandleByIndex(s.parent, none) }),
		of("MIG device of a whole GPU", func() (nvml.Device, error) { return s.lib.DeviceGetMigDeviceHandleByIndex(s.whole, 0) }),
		of("GPU instance ID of a GPU", func() (int, error) { return s.lib.DeviceGetGpuInstanceId(s.whole) }),
		of("compute instance ID of a GPU", func() (int, error) { return s.lib.DeviceGetComputeInstanceId(s.whole) }),
		of("GPU instance", func() (nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstanceById(s.parent, s.info.ID) }),
		of("no GPU instance", func() (nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstanceById(s.parent, none) }),
		of("GPU instance of a whole GPU", func() (nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstanceById(s.whole, s.info.ID) }),
		of("about a GPU instance", func() (nvml.GPUInstanceInfo, error) { return s.lib.GpuInstanceGetInfo(s.gi) }),
		of("compute instance", func() (nvml.ComputeInstance, error) { return s.lib.GpuInstanceGetComputeInstanceById(s.gi, 0) }),
		of("no compute instance", func() (nvml.ComputeInstance, error) { return s.lib.GpuInstanceGetComputeInstanceById(s.gi, none) }),
		of("about a compute instance", func() (nvml.ComputeInstanceInfo, error) { return s.lib.ComputeInstanceGetInfo(s.ci) }),
		of("profile", func() (nvml.GPUInstanceProfile, error) { return s.lib.DeviceGetGpuInstanceProfileInfo(s.parent, 0) }),
		of("no profile", func() (nvml.GPUInstanceProfile, error) { return s.lib.DeviceGetGpuInstanceProfileInfo(s.parent, 5) }),
		of("end of profiles", func() (nvml.GPUInstanceProfile, error) { return s.lib.DeviceGetGpuInstanceProfileInfo(s.parent, none) }),
		of("compute profile", func() (nvml.ComputeInstanceProfile, error) {
			return s.lib.GpuInstanceGetComputeInstanceProfileInfo(s.gi, 0)
		}),
		of("too large compute profile", func() (nvml.ComputeInstanceProfile, error) {
			return s.lib.GpuInstanceGetComputeInstanceProfileInfo(s.gi, 4)
		}),
		of("end of compute profiles", func() (nvml.ComputeInstanceProfile, error) {
			return s.lib.GpuInstanceGetComputeInstanceProfileInfo(s.gi, none)
		}),
		of("GPU instances", func() ([]nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstances(s.parent, s.info.ProfileID) }),
		of("GPU instances of no profile", func() ([]nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstances(s.parent, none) }),
		of("GPU instances of a whole GPU", func() ([]nvml.GPUInstance, error) { return s.lib.DeviceGetGpuInstances(s.whole, s.info.ProfileID) }),
		of("compute instances", func() ([]nvml.ComputeInstance, error) {
			return s.lib.GpuInstanceGetComputeInstances(s.gi, s.profile.ID)
		}),
		of("compute instances, too large", func() ([]nvml.ComputeInstance, error) {
			return s.lib.GpuInstanceGetComputeInstances(s.gi, s.profile.ID+4)
		}),
		of("compute instances of no profile", func() ([]nvml.ComputeInstance, error) {
			return s.lib.GpuInstanceGetComputeInstances(s.gi, none)
		}),
	}
	for name, device := range map[string]nvml.Device{"whole GPU": s.whole, "GPU with MIG": s.parent, "partition": s.partition} {
		calls = append(calls,
			of("attributes of a "+name, func() (nvml.Attributes, error) { return s.lib.DeviceGetAttributes(device) }),
			of("memory of a "+name, func() (nvml.MemoryInfo, error) { return s.lib.DeviceGetMemoryInfo(device) }),
			of("processes of a "+name, func() ([]nvml.Process, error) { return s.lib.DeviceGetComputeRunningProcesses(device) }),
			of("graphics processes of a "+name, func() ([]nvml.Process, error) { return s.lib.DeviceGetGraphicsRunningProcesses(device) }),
			s.memoryErrors("of a "+name, device, nvml.MemoryErrorCounter{Location: nvml.DRAM}),
			s.memoryErrors("of a "+name, device, nvml.MemoryErrorCounter{Location: nvml.SRAM, Uncorrected: true}),
			s.memoryErrors("of a "+name, device, nvml.MemoryErrorCounter{Location: nvml.SRAM, Uncorrected: true, Aggregate: true}),
			s.memoryErrors("of a "+name, device, nvml.MemoryErrorCounter{Aggregate: true}),
			s.memoryErrors("of a "+name, device, nvml.MemoryErrorCounter{Aggregate: true, Location: none}),
			of("MPS clients of a "+name, func() ([]nvml.Process, error) { return s.lib.DeviceGetMPSComputeRunningProcesses(device) }),
		)
	}
	for name, device := range map[string]nvml.Device{"whole GPU": s.whole, "GPU with MIG": s.parent} {
		calls = append(calls,
			of("recovery action of a "+name, func() (uint32, error) { return s.lib.DeviceGetFieldValues(device, nvml.RecoveryAction) }),
			of("slowdown of a "+name, func() (int, error) {
				return s.lib.DeviceGetTemperatureThreshold(device, nvml.TemperatureSlowdown)
			}),
			of("other threshold of a "+name, func() (int, error) { return s.lib.DeviceGetTemperatureThreshold(device, 0) }),
			of("no threshold of a "+name, func() (int, error) { return s.lib.DeviceGetTemperatureThreshold(device, 8) }),
			of("margin of a "+name, func() (int, error) { return s.lib.DeviceGetMarginTemperature(device) }),
			of("field of the margin of a "+name, func() (uint32, error) { return s.lib.DeviceGetFieldValues(device, nvml.SlowdownMargin) }),
			of("no field of a "+name, func() (uint32, error) { return s.lib.DeviceGetFieldValues(device, 1) }),
			of("compute mode of a "+name, func() (nvml.ComputeMode, error) { return s.lib.DeviceGetComputeMode(device) }),
			of("rows of a "+name, func() (nvml.RemappedRows, error) { return s.lib.DeviceGetRemappedRows(device) }),
			of("utilization of a "+name, func() (nvml.Utilization, error) { return s.lib.DeviceGetUtilizationRates(device) }),
			of("power of a "+name, func() (int, error) { return s.lib.DeviceGetPowerUsage(device) }),
			of("energy of a "+name, func() (uint64, error) { return s.lib.DeviceGetTotalEnergyConsumption(device) }),
			of("placements on a "+name, func() ([]mig.Placement, error) {
				return s.lib.DeviceGetGpuInstancePossiblePlacements(device, s.info.ProfileID)
			}),
			of("placements of no profile on a "+name, func() ([]mig.Placement, error) {
				return s.lib.DeviceGetGpuInstancePossiblePlacements(device, none)
			}),
		)
	}
	return calls
}

// changing are calls that change nothing in the end: they fail, or the last undoes the first.
func (s *subject) changing() []asked {
	place := mig.Placement{Start: s.info.Start, Size: s.info.Size}
	create := func(device nvml.Device, profile int, at mig.Placement) func() (nvml.GPUInstance, error) {
		return func() (nvml.GPUInstance, error) {
			return s.lib.DeviceCreateGpuInstanceWithPlacement(device, profile, at)
		}
	}
	mode := func(name string, device nvml.Device, on bool) asked {
		return asked{name, func() nvml.Return {
			activation, err := s.lib.DeviceSetMigMode(device, on)
			if err != nil {
				return code(err)
			}
			return activation
		}}
	}
	computeMode := func(device nvml.Device, mode nvml.ComputeMode) func() nvml.Return {
		return func() nvml.Return { return code(s.lib.DeviceSetComputeMode(device, mode)) }
	}
	return []asked{
		{"compute mode that nobody has any more", computeMode(s.whole, 1)}, {"no compute mode", computeMode(s.whole, none)},
		{"compute mode of a GPU with MIG", computeMode(s.parent, nvml.ComputeExclusiveProcess)},
		{"compute mode", computeMode(s.whole, nvml.ComputeExclusiveProcess)},
		of("compute mode as set", func() (any, error) {
			mode, err := s.lib.DeviceGetComputeMode(s.whole)
			if err == nil && mode != nvml.ComputeDefault {
				err = &nvml.Error{Return: nvml.Return(1000 + mode)} // To be compared, as the codes are.
			}
			return nil, err
		}),
		{"compute mode as before", computeMode(s.whole, nvml.ComputeDefault)},
		of("a GPU instance of a whole GPU", create(s.whole, s.info.ProfileID, place)),
		of("a GPU instance of no profile", create(s.parent, none, place)),
		of("a GPU instance of another size", create(s.parent, s.info.ProfileID, mig.Placement{Start: s.info.Start, Size: 3})),
		of("a GPU instance beyond the last slot", create(s.parent, s.info.ProfileID, mig.Placement{Start: 7, Size: s.info.Size})),
		of("a GPU instance where one is", create(s.parent, s.info.ProfileID, place)),
		of("a second compute instance", func() (nvml.ComputeInstance, error) {
			return s.lib.GpuInstanceCreateComputeInstance(s.gi, s.profile.ID)
		}),
		of("a compute instance that is too large", func() (nvml.ComputeInstance, error) {
			return s.lib.GpuInstanceCreateComputeInstance(s.gi, s.profile.ID+4)
		}),
		{"destroy a GPU instance with a compute instance", func() nvml.Return { return code(s.lib.GpuInstanceDestroy(s.gi)) }},
		mode("MIG off, with instances", s.parent, false), mode("MIG stays on", s.parent, true),
		mode("MIG on", s.whole, true), mode("MIG off", s.whole, false),
	}
}
