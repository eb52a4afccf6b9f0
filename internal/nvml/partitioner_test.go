package nvml_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

// firstState is how the node's first GPU is partitioned.
func firstState(t *testing.T, lib nvml.Library) (gpu string, state sharing.MIGState) {
	t.Helper()
	gpus, err := nvml.Scan(lib)
	must(t, err)
	state, err = nvml.NewPartitioner(lib, nil).State(t.Context(), gpus[0].UUID)
	must(t, err)
	return gpus[0].UUID, state
}

// TestStateGeometry checks that the driver's geometry is the published one, with MIG on and off, and if the
// driver does not name or does not list its profiles.
func TestStateGeometry(t *testing.T) {
	for model, pci := range map[string]uint16{"a100-40": 0x20B0, "a100-80": 0x20B2, "h100": 0x2330, "h200": 0x2335, "b200": 0x2901, "a30": 0x20B7} {
		want, _ := mig.GeometryOf(pci)
		for name, lib := range map[string]nvml.Library{
			model: simulate(t, model), model + "+all-enabled": simulate(t, model+"+all-enabled"),
			model + " without names": nameless{simulate(t, model)}, model + " without profiles": bare{simulate(t, model)},
			model + " that counts wrong": stingy{simulate(t, model)},
		} {
			_, state := firstState(t, lib)
			_, silent := lib.(bare)
			want.Unlisted = silent
			for _, p := range want.Profiles {
				// The name has it in GiB, rounded up or down. A 1g.35gb of an H200 has 32.5 GiB.
				memory, said := state.Geometry.Memory[p.Profile]
				if off := int(memory) - p.Profile.MemoryGB<<10; said == silent || said && (off <= -3<<10 || off >= 1<<10) {
					t.Errorf("%s: %s has %d MiB", name, p.Profile, memory)
				}
			}
			for _, p := range want.Profiles {
				if has := state.Geometry.Engines[p.Profile]; (has.Multiprocessors == 0) != silent {
					t.Errorf("%s: %s has %+v", name, p.Profile, has)
				}
			}
			state.Geometry.Memory, state.Geometry.Engines = nil, nil
			if diff := cmp.Diff(want, state.Geometry); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			if uint16(state.GPU.Device>>16) != pci {
				t.Errorf("%s: PCI device %#x, want %#x", name, state.GPU.Device, pci)
			}
		}
	}
	if _, state := firstState(t, simulate(t, "t4")); len(state.Geometry.Profiles) > 0 || state.Enabled {
		t.Errorf("a T4 has %+v, want nothing of MIG", state)
	}
}

// TestGeometryOfLateProfiles checks that nothing is known of an unpublished model until MIG mode is on.
func TestGeometryOfLateProfiles(t *testing.T) {
	for layout, want := range map[string]bool{"": true, "+all-1g.10gb": false} {
		sim := simulate(t, "h100"+layout)
		must(t, sim.SetWorld("late-profiles"))
		_, state := firstState(t, unpublished{sim})
		if state.Geometry.Unlisted != want || (len(state.Geometry.Profiles) == 0) != want || state.Enabled == want {
			t.Errorf("h100%s: %+v", layout, state)
		}
	}
	if _, state := firstState(t, unpublished{simulate(t, "t4")}); state.Geometry.Unlisted {
		t.Error("a GPU without MIG seems to have some")
	}
}

// TestGeometryRenamed checks that the driver's name of a profile is used, and that the published name is an alias.
func TestGeometryRenamed(t *testing.T) {
	published, _ := mig.GeometryOf(0x2330)
	_, state := firstState(t, renaming{simulate(t, "h100")})
	got := state.Geometry
	for _, p := range published.Profiles {
		own := p.Profile
		own.MemoryGB++
		info, known := got.ProfileInfo(own)
		if alias, also := got.ProfileInfo(p.Profile); !known || !also || info.Enum != p.Enum || alias.Profile != own || info.Max != p.Max {
			t.Errorf("%s is %+v, and %s %+v", p.Profile, alias, own, info)
		}
	}
	layout, err := mig.NamedLayout("all-1c.3g.40gb", got)
	if err != nil || layout.String() != "6 × 1c.3g.41gb" {
		t.Errorf("%s, %v", layout, err)
	}
	if _, state := firstState(t, simulate(t, "h100")); state.Geometry.Renamed != nil {
		t.Errorf("%v is renamed", state.Geometry.Renamed)
	}
}

// unpublished is a GPU model with no published geometry.
type unpublished struct{ *simnode.Node }

func (d unpublished) DeviceGetPciInfo(device nvml.Device) (nvml.PCIInfo, error) {
	info, err := d.Node.DeviceGetPciInfo(device)
	info.DeviceID = 0x111110DE
	return info, err
}

// renaming has profiles with 1 GB more in their names.
type renaming struct{ *simnode.Node }

func (d renaming) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	info, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	if p, unnamed := mig.ParseProfile(info.Name); err == nil && unnamed == nil {
		p.MemoryGB++
		info.Name = p.String()
	}
	return info, err
}

// bare lists no profiles, as some drivers do while MIG mode is off.
type bare struct{ *simnode.Node }

func (bare) DeviceGetGpuInstanceProfileInfo(nvml.Device, int) (nvml.GPUInstanceProfile, error) {
	return nvml.GPUInstanceProfile{}, &nvml.Error{Call: "DeviceGetGpuInstanceProfileInfo", Return: nvml.NotSupported}
}

// stingy reports for every profile that one instance fits.
type stingy struct{ *simnode.Node }

func (d stingy) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	info, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	info.Instances = 1
	return info, err
}

// TestStateLists checks that a listing is complete: an instance without a compute instance, several in one, and
// partitions that are or may be in use.
func TestStateLists(t *testing.T) {
	sim := simulate(t, "a100-40+all-enabled")
	must(t, sim.Init())
	defer func() { must(t, sim.Shutdown()) }()
	create := func(profile, start int, computes ...int) {
		t.Helper()
		gi, err := nvmltest.CreateGPUInstance(sim, 0, profile, start)
		must(t, err)
		for _, slices := range computes {
			_, _, err := nvmltest.CreateComputeInstance(sim, 0, gi, slices)
			must(t, err)
		}
	}
	create(9, 4)        // 3g.20gb without a compute instance
	create(14, 0, 1, 1) // 2g.10gb
	create(19, 2, 1)
	must(t, sim.AddProcess(0, 1, 4711, 0))

	gpu, listed := firstState(t, sim)
	var got []string
	for _, i := range listed.Instances {
		text := i.Profile.String() + " at " + i.Placement.String()
		for _, c := range i.Computes {
			text += " " + i.Partition(c).String()
			if c.Busy {
				text += " busy"
			}
			if !strings.HasPrefix(c.UUID, "MIG-") {
				t.Errorf("compute instance %d has the UUID %q", c.CI, c.UUID)
			}
		}
		got = append(got, text)
	}
	want := []string{"2g.10gb at 0:2 1c.2g.10gb 1c.2g.10gb busy", "1g.5gb at 2:1 1g.5gb", "3g.20gb at 4:4"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}

	for _, call := range []string{"DeviceGetComputeRunningProcesses", "DeviceGetGraphicsRunningProcesses", "DeviceGetMPSComputeRunningProcesses"} {
		end := sim.InjectFault(call, simnode.Fault{Return: nvml.Unknown})
		if _, listed := firstState(t, sim); !listed.Instances[1].Computes[0].Busy {
			t.Errorf("a partition is free though %s fails", call)
		}
		end()
	}
	end := sim.InjectFault("DeviceGetGraphicsRunningProcesses", simnode.Fault{Return: nvml.NotSupported})
	if _, listed := firstState(t, sim); listed.Instances[1].Computes[0].Busy {
		t.Error("a partition is busy because the driver knows no graphics processes")
	}
	end()
	// A listing is exact or an error.
	for call, skip := range map[string]int{
		"DeviceGetMigMode": 0, "DeviceGetGpuInstances": 1, "GpuInstanceGetInfo": 1, "GpuInstanceGetComputeInstances": 1,
		"ComputeInstanceGetInfo": 1, "DeviceGetMigDeviceHandleByIndex": 1, "GpuInstanceGetComputeInstanceProfileInfo": 1,
		"DeviceGetGpuInstancePossiblePlacements": 1,
	} {
		end := sim.InjectFault(call, simnode.Fault{Return: nvml.NoPermission, Skip: skip})
		if _, err := nvml.NewPartitioner(sim, nil).State(t.Context(), gpu); !errors.Is(err, mig.ErrNoPermission) {
			t.Errorf("%s fails: %v, want no permission", call, err)
		}
		end()
	}
	if _, err := nvml.NewPartitioner(sim, nil).State(t.Context(), "GPU-none"); err == nil {
		t.Error("a GPU that is not there is listed")
	}
}

// TestApply checks each step's effect, and which results are not errors.
func TestApply(t *testing.T) {
	sim := simulate(t, "h100+all-enabled")
	gpu, _ := firstState(t, sim)
	partitioner := nvml.NewPartitioner(sim, nil)
	profile, err := mig.ParseProfile("1c.2g.20gb")
	must(t, err)
	at := mig.Placement{Start: 2, Size: 2}
	makes := func(step mig.Step) {
		t.Helper()
		must(t, partitioner.Apply(t.Context(), gpu, step))
	}
	makes(mig.Step{Action: mig.CreateInstance, Profile: profile.Instance(), Placement: at})
	makes(mig.Step{Action: mig.CreateCompute, Profile: profile, Placement: at})
	_, state := firstState(t, sim)
	instance := state.Instances[0]
	compute := instance.Computes[0]
	if instance.Placement != at || instance.Partition(compute) != profile {
		t.Fatalf("made %+v, want %s at %s", state.Instances, profile, at)
	}
	destroy := mig.Step{Action: mig.DestroyCompute, Profile: profile, Placement: at, GI: instance.GI, CI: compute.CI, UUID: compute.UUID}
	whole := mig.Step{Action: mig.DestroyInstance, Profile: profile.Instance(), Placement: at, GI: instance.GI}
	if err := partitioner.Apply(t.Context(), gpu, whole); !errors.Is(err, mig.ErrInUse) {
		t.Errorf("destroy an instance with a partition: %v, want in use", err)
	}
	must(t, sim.AddProcess(0, 0, 1, 0))
	if err := partitioner.Apply(t.Context(), gpu, destroy); !errors.Is(err, mig.ErrInUse) {
		t.Errorf("destroy a partition with a process: %v, want in use", err)
	}
	must(t, sim.RemoveProcess(0, 0, 1))
	other := destroy
	other.UUID = "MIG-of-another-time"
	makes(other)
	if _, state := firstState(t, sim); len(state.Instances[0].Computes) != 1 {
		t.Error("another MIG device with the IDs of the step was destroyed")
	}
	makes(destroy)
	makes(destroy)
	wrong := whole
	wrong.Placement.Start = 0
	if err := partitioner.Apply(t.Context(), gpu, wrong); err == nil {
		t.Error("an instance at another place was destroyed")
	}
	// For a moment after its compute instance is destroyed, it is in use.
	sim.InjectFault("GpuInstanceDestroy", simnode.Fault{Return: nvml.InUse, Times: 2})
	makes(whole)
	makes(whole)
	makes(mig.Step{Action: mig.DisableMIG})
	if _, state := firstState(t, sim); state.Enabled || state.Pending {
		t.Error("MIG mode is still on")
	}
}

// TestApplyMode checks that a mode that is pending but not active is an error with the reason and, if listed, the
// GPU's users. NeedsReboot is set if only a reboot activates the mode.
func TestApplyMode(t *testing.T) {
	for _, test := range []struct {
		node, world string
		process     bool
		want        error
		says        string
		reboot      bool
	}{
		{"a100-40", "passthrough", false, mig.ErrResetRequired, "activation: RESET_REQUIRED", true},
		{"h100", "passthrough", false, nil, "", false},
		{"a100-40", "client=dcgm", false, mig.ErrInUse, "by a program that is in no list of the driver", false},
		{"a100-40", "", true, mig.ErrInUse, "by the processes [4711]", false},
		{"a100-40", "own-pids", true, mig.ErrInUse, "by a program that is in no list of the driver", false},
		{"a100-40", "unprivileged", false, mig.ErrNoPermission, "NO_PERMISSION", false},
	} {
		t.Run(test.node+" "+test.world, func(t *testing.T) {
			sim := simulate(t, test.node)
			if gpu, state := firstState(t, sim); state.NeedsReboot {
				t.Errorf("%s needs a reboot on bare metal", gpu)
			}
			must(t, sim.SetWorld(test.world))
			if test.process {
				must(t, sim.AddProcess(0, simnode.WholeGPU, 4711, 0))
			}
			gpus, err := nvml.Scan(sim)
			must(t, err)
			err = nvml.NewPartitioner(sim, nil).Apply(t.Context(), gpus[0].UUID, mig.Step{Action: mig.EnableMIG})
			if !errors.Is(err, test.want) || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("enable MIG: %v, want %v that says %q", err, test.want, test.says)
			}
			if unlisted := strings.Contains(test.says, "in no list"); errors.Is(err, mig.ErrUnlistedClient) != unlisted {
				t.Errorf("%v is of a program in no list: %t", err, !unlisted)
			}
			if errors.Is(test.want, mig.ErrNoPermission) {
				return
			}
			if _, state := firstState(t, sim); state.Enabled != (err == nil) || !state.Pending || state.NeedsReboot != test.reboot {
				t.Errorf("mode %t, pending %t, needs a reboot %t", state.Enabled, state.Pending, state.NeedsReboot)
			}
			sim.InjectFault("DeviceGetVirtualizationMode", simnode.Fault{Return: nvml.Unknown})
			if _, state := firstState(t, sim); state.NeedsReboot {
				t.Error("a driver that does not tell is not tried")
			}
		})
	}
}

// TestUnlistedClientOfAPartition checks that a process on one partition is not given as the reason why another
// cannot be destroyed.
func TestUnlistedClientOfAPartition(t *testing.T) {
	sim := simulate(t, "a100-40+all-3g.20gb")
	must(t, sim.SetWorld("client=dcgm"))
	must(t, sim.AddProcess(0, 1, 4711, 0))
	gpus, err := nvml.Scan(sim)
	must(t, err)
	for i, want := range []bool{true, false} {
		p := gpus[0].Partitions[i]
		err := nvml.NewPartitioner(sim, nil).Apply(t.Context(), gpus[0].UUID, mig.Step{Action: mig.DestroyCompute, GI: p.GI, CI: p.CI, UUID: p.UUID})
		if got := errors.Is(err, mig.ErrUnlistedClient); !errors.Is(err, mig.ErrInUse) || got != want || strings.Contains(err.Error(), "4711") == want {
			t.Errorf("partition %d: %v, want one that is in no list: %t", i, err, want)
		}
	}
}

// TestClients checks that unlisted programs that have a GPU open are named if they can be found, and are looked
// up only if needed.
func TestClients(t *testing.T) {
	for _, test := range []struct {
		name, world string
		clients     []string
		err         error
		says        string
		asked       []int
	}{
		{"named", "client=dcgm", []string{"dcgm (PID 1)", "b (PID 2)"}, errors.New("not all"), "in no list of the driver: dcgm (PID 1), b (PID 2)", []int{1}},
		{"not known", "client=dcgm", nil, errors.New("no hostPID"), "such as DCGM or the persistence daemon; which is unknown: no hostPID", []int{1}},
		{"no program", "client=dcgm", nil, nil, "nvidia_drm", []int{1}},
		{"nothing in the way", "", nil, nil, "", nil},
		{"not permitted", "unprivileged", nil, nil, "NO_PERMISSION", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			sim := simulate(t, "a100-40")
			must(t, sim.SetWorld(test.world))
			gpus, err := nvml.Scan(sim)
			must(t, err)
			var asked []int
			p := nvml.NewPartitioner(sim, nil)
			p.Clients = func(minor int) ([]string, error) {
				asked = append(asked, minor)
				return test.clients, test.err
			}
			err = p.Apply(t.Context(), gpus[0].UUID, mig.Step{Action: mig.EnableMIG})
			if (err != nil) != (test.says != "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %q", err, test.says)
			}
			if !slices.Equal(asked, test.asked) {
				t.Errorf("asked for minors %v, want %v", asked, test.asked)
			}
		})
	}
}

// TestStateIsExact checks that a GPU is an error, not one with fewer partitions, if the driver answers that a
// part of it is empty.
func TestStateIsExact(t *testing.T) {
	for _, call := range []string{
		"DeviceGetGpuInstanceProfileInfo", "DeviceGetGpuInstances", "GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceGetComputeInstances",
	} {
		for _, code := range []nvml.Return{nvml.NotSupported, nvml.InvalidArgument} {
			sim, err := simnode.New("a100-40+all-balanced")
			if err != nil {
				t.Fatal(err)
			}
			gpu, whole := firstState(t, sim)
			sim.InjectFault(call, simnode.Fault{Return: code})
			state, err := nvml.NewPartitioner(sim, nil).State(t.Context(), gpu)
			if err == nil && len(state.Instances) != len(whole.Instances) {
				t.Errorf("%s answers %s: %d GPU instances of %d", call, code, len(state.Instances), len(whole.Instances))
			}
			if err != nil && !strings.Contains(err.Error(), "does not list") {
				t.Errorf("%s answers %s: %v", call, code, err)
			}
		}
	}
}

// TestPartitionerMinds checks that a GPU's events are paused while its mode changes and resumed in any case, and
// that another, unreadable GPU does not matter.
func TestPartitionerMinds(t *testing.T) {
	sim, err := simnode.New("h100x2")
	must(t, err)
	gpus, err := nvml.Scan(sim)
	must(t, err)
	_, err = sim.InjectGPUFault(0, "DeviceGetUUID", simnode.Fault{Return: nvml.GPUIsLost})
	must(t, err)
	quiet := 0
	watched := answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
		if call.Method == "DeviceSetMigMode" && quiet != 1 {
			t.Error("the mode is changed of a GPU that is listened to")
		}
		return answer, err
	})
	p := nvml.NewPartitioner(watched, func(context.Context, string) (func(), error) {
		quiet++
		return func() { quiet-- }, nil
	})
	for _, on := range []mig.Action{mig.EnableMIG, mig.DisableMIG} {
		must(t, p.Apply(t.Context(), gpus[1].UUID, mig.Step{Action: on, GI: -1, CI: -1}))
	}
	if err := p.Apply(t.Context(), gpus[0].UUID, mig.Step{Action: mig.EnableMIG, GI: -1, CI: -1}); !errors.Is(err, nvml.GPUIsLost) || !strings.Contains(err.Error(), "read GPU 0") {
		t.Errorf("of the GPU that cannot be read: %v", err)
	}
	if quiet != 0 {
		t.Errorf("%d GPUs are not listened to any more", quiet)
	}
}

// holed is a driver that returns INVALID_ARGUMENT for each profile that it lacks, as some do.
type holed struct{ *simnode.Node }

func (d holed) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	info, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	return info, lacking(err)
}

func (d holed) GpuInstanceGetComputeInstanceProfileInfo(instance nvml.GPUInstance, enum int) (nvml.ComputeInstanceProfile, error) {
	info, err := d.Node.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
	return info, lacking(err)
}

func lacking(err error) error {
	if failed, ok := errors.AsType[*nvml.Error](err); ok && failed.Return == nvml.NotSupported {
		return &nvml.Error{Call: failed.Call, Return: nvml.InvalidArgument}
	}
	return err
}

// TestEnumerationWithHoles checks that INVALID_ARGUMENT does not end the enumeration of nvml.h's profiles.
func TestEnumerationWithHoles(t *testing.T) {
	for _, name := range []string{"a100-40+all-balanced", "h100+all-1g.20gb", "rtx-pro-6000+all-2g.48gb.gfx"} {
		sim := simulate(t, name)
		gpus, err := nvml.Scan(sim)
		must(t, err)
		_, want := firstState(t, sim)
		asked := sim.Calls("DeviceGetGpuInstanceProfileInfo")
		_, got := firstState(t, holed{sim})
		if diff := cmp.Diff(want, got); diff != "" || len(want.Instances) == 0 {
			t.Errorf("%s: %d instances (-want +got):\n%s", name, len(want.Instances), diff)
		}
		// 18 are in nvml.h; they are asked for by the scan and for the state.
		if asked := sim.Calls("DeviceGetGpuInstanceProfileInfo") - asked; asked != 2*19 {
			t.Errorf("%s: asked for %d profiles, want 2 × 19", name, asked)
		}
		again, err := nvml.Scan(holed{sim})
		must(t, err)
		if diff := cmp.Diff(gpus, again); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
