package nvml_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// firstCut is how the node's first board is cut.
func firstCut(t *testing.T, lib nvml.Library) (gpu string, cut sharing.Cut) {
	t.Helper()
	gpus, err := nvml.Scan(lib)
	must(t, err)
	cut, err = nvml.NewPartitioner(lib, nil).Cut(t.Context(), gpus[0].UUID)
	must(t, err)
	return gpus[0].UUID, cut
}

// TestCutGeometry holds that the geometry that the driver tells is the published
// one, with MIG on and off, and when the driver does not name its profiles or
// does not list them.
func TestCutGeometry(t *testing.T) {
	for model, pci := range map[string]uint16{"a100-40": 0x20B0, "a100-80": 0x20B2, "h100": 0x2330, "h200": 0x2335, "b200": 0x2901, "a30": 0x20B7} {
		want, _ := mig.GeometryOf(pci)
		for name, lib := range map[string]nvml.Library{
			model: simulate(t, model), model + "+all-enabled": simulate(t, model+"+all-enabled"),
			model + " without names": nameless{simulate(t, model)}, model + " without profiles": bare{simulate(t, model)},
			model + " that counts wrong": stingy{simulate(t, model)},
		} {
			_, cut := firstCut(t, lib)
			if diff := cmp.Diff(want, cut.Geometry); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			if uint16(cut.Board.Device>>16) != pci {
				t.Errorf("%s: PCI device %#x, want %#x", name, cut.Board.Device, pci)
			}
		}
	}
	if _, cut := firstCut(t, simulate(t, "t4")); len(cut.Geometry.Shapes) > 0 || cut.MIG {
		t.Errorf("a T4 has %+v, want nothing of MIG", cut)
	}
}

// bare lists no profiles, as some drivers do while MIG mode is off.
type bare struct{ *simnode.Node }

func (bare) DeviceGetGpuInstanceProfileInfo(nvml.Device, int) (nvml.GPUInstanceProfile, error) {
	return nvml.GPUInstanceProfile{}, &nvml.Error{Call: "DeviceGetGpuInstanceProfileInfo", Return: nvml.NotSupported}
}

// stingy says of every profile that one instance fits.
type stingy struct{ *simnode.Node }

func (d stingy) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	info, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	info.Instances = 1
	return info, err
}

// TestCutLists holds that a listing has what is there: an instance without a
// compute instance, several in one, and what is in use or cannot be told.
func TestCutLists(t *testing.T) {
	sim := simulate(t, "a100-40+all-enabled")
	must(t, sim.Init())
	defer func() { must(t, sim.Shutdown()) }()
	cut := func(profile, start int, computes ...int) {
		t.Helper()
		gi, err := sim.CreateGPUInstance(0, profile, start)
		must(t, err)
		for _, slices := range computes {
			_, _, err := sim.CreateComputeInstance(0, gi, slices)
			must(t, err)
		}
	}
	cut(9, 4)        // 3g.20gb without a compute instance
	cut(14, 0, 1, 1) // 2g.10gb
	cut(19, 2, 1)
	must(t, sim.AddProcess(0, 1, 4711, 0))

	gpu, listed := firstCut(t, sim)
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
		end := sim.Script(call, simnode.Fault{Return: nvml.Unknown})
		if _, listed := firstCut(t, sim); !listed.Instances[1].Computes[0].Busy {
			t.Errorf("a partition is free though %s fails", call)
		}
		end()
	}
	end := sim.Script("DeviceGetGraphicsRunningProcesses", simnode.Fault{Return: nvml.NotSupported})
	if _, listed := firstCut(t, sim); listed.Instances[1].Computes[0].Busy {
		t.Error("a partition is busy because the driver knows no graphics processes")
	}
	end()
	// A listing is exact or an error.
	for call, skip := range map[string]int{
		"DeviceGetMigMode": 0, "DeviceGetGpuInstances": 1, "GpuInstanceGetInfo": 1, "GpuInstanceGetComputeInstances": 1,
		"ComputeInstanceGetInfo": 1, "DeviceGetMigDeviceHandleByIndex": 1, "GpuInstanceGetComputeInstanceProfileInfo": 1,
		"DeviceGetGpuInstancePossiblePlacements": 1,
	} {
		end := sim.Script(call, simnode.Fault{Return: nvml.NoPermission, Skip: skip})
		if _, err := nvml.NewPartitioner(sim, nil).Cut(t.Context(), gpu); !errors.Is(err, sharing.ErrNoPermission) {
			t.Errorf("%s fails: %v, want no permission", call, err)
		}
		end()
	}
	if _, err := nvml.NewPartitioner(sim, nil).Cut(t.Context(), "GPU-none"); err == nil {
		t.Error("a board that is not there is listed")
	}
}

// TestMake holds what each step does and what of it is no error.
func TestMake(t *testing.T) {
	sim := simulate(t, "h100+all-enabled")
	gpu, _ := firstCut(t, sim)
	partitioner := nvml.NewPartitioner(sim, nil)
	profile, err := mig.ParseProfile("1c.2g.20gb")
	must(t, err)
	at := mig.Placement{Start: 2, Size: 2}
	makes := func(step mig.Step) {
		t.Helper()
		must(t, partitioner.Make(t.Context(), gpu, step))
	}
	makes(mig.Step{Action: mig.CreateInstance, Profile: profile.Instance(), Placement: at})
	makes(mig.Step{Action: mig.CreateCompute, Profile: profile, Placement: at})
	_, cut := firstCut(t, sim)
	instance := cut.Instances[0]
	compute := instance.Computes[0]
	if instance.Placement != at || instance.Partition(compute) != profile {
		t.Fatalf("made %+v, want %s at %s", cut.Instances, profile, at)
	}
	destroy := mig.Step{Action: mig.DestroyCompute, Profile: profile, Placement: at, GI: instance.GI, CI: compute.CI, UUID: compute.UUID}
	whole := mig.Step{Action: mig.DestroyInstance, Profile: profile.Instance(), Placement: at, GI: instance.GI}
	if err := partitioner.Make(t.Context(), gpu, whole); !errors.Is(err, sharing.ErrInUse) {
		t.Errorf("destroy an instance with a partition: %v, want in use", err)
	}
	must(t, sim.AddProcess(0, 0, 1, 0))
	if err := partitioner.Make(t.Context(), gpu, destroy); !errors.Is(err, sharing.ErrInUse) {
		t.Errorf("destroy a partition with a process: %v, want in use", err)
	}
	must(t, sim.RemoveProcess(0, 0, 1))
	other := destroy
	other.UUID = "MIG-of-another-time"
	makes(other)
	if _, cut := firstCut(t, sim); len(cut.Instances[0].Computes) != 1 {
		t.Error("another MIG device with the IDs of the step was destroyed")
	}
	makes(destroy)
	makes(destroy)
	wrong := whole
	wrong.Placement.Start = 0
	if err := partitioner.Make(t.Context(), gpu, wrong); err == nil {
		t.Error("an instance at another place was destroyed")
	}
	// For a moment after its compute instance went it is in use.
	sim.Script("GpuInstanceDestroy", simnode.Fault{Return: nvml.InUse, Times: 2})
	makes(whole)
	makes(whole)
	makes(mig.Step{Action: mig.DisableMIG})
	if _, cut := firstCut(t, sim); cut.MIG || cut.Pending {
		t.Error("MIG mode is still on")
	}
}

// TestMakeModePending holds that a mode which waits for a reset is an error of
// its own.
func TestMakeModePending(t *testing.T) {
	sim := simulate(t, "a100-40")
	gpu, _ := firstCut(t, sim)
	partitioner := nvml.NewPartitioner(sim, nil)
	if err := partitioner.Make(t.Context(), gpu, mig.Step{Action: mig.EnableMIG}); !errors.Is(err, sharing.ErrResetRequired) {
		t.Errorf("enable MIG before Hopper: %v, want a reset required", err)
	}
	if _, cut := firstCut(t, sim); cut.MIG || !cut.Pending {
		t.Errorf("mode %t, pending %t", cut.MIG, cut.Pending)
	}
	must(t, sim.Heal(0))
	must(t, sim.Init())
	defer func() { must(t, sim.Shutdown()) }()
	if _, cut := firstCut(t, sim); !cut.MIG {
		t.Error("MIG is off after the reset")
	}
}

// TestCutIsExact holds that a board of which a part is not listed, by an answer
// that there is nothing, is an error and not an emptier board.
func TestCutIsExact(t *testing.T) {
	for _, call := range []string{
		"DeviceGetGpuInstanceProfileInfo", "DeviceGetGpuInstances", "GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceGetComputeInstances",
	} {
		for _, code := range []nvml.Return{nvml.NotSupported, nvml.InvalidArgument} {
			sim, err := simnode.New("a100-40+all-balanced")
			if err != nil {
				t.Fatal(err)
			}
			gpu, whole := firstCut(t, sim)
			sim.Script(call, simnode.Fault{Return: code})
			cut, err := nvml.NewPartitioner(sim, nil).Cut(t.Context(), gpu)
			if err == nil && len(cut.Instances) != len(whole.Instances) {
				t.Errorf("%s answers %s: %d GPU instances of %d", call, code, len(cut.Instances), len(whole.Instances))
			}
			if err != nil && !strings.Contains(err.Error(), "does not list") {
				t.Errorf("%s answers %s: %v", call, code, err)
			}
		}
	}
}

// TestPartitionerMinds holds that a board which was let go of for its mode is
// taken up again, whatever came of it, and that another board which cannot be
// read is in nobody's way.
func TestPartitionerMinds(t *testing.T) {
	sim, err := simnode.New("h100x2")
	must(t, err)
	gpus, err := nvml.Scan(sim)
	must(t, err)
	_, err = sim.ScriptGPU(0, "DeviceGetUUID", simnode.Fault{Return: nvml.GPUIsLost})
	must(t, err)
	quiet := 0
	p := nvml.NewPartitioner(sim, func(context.Context, string) (func(), error) {
		quiet++
		return func() { quiet-- }, nil
	})
	for _, on := range []mig.Action{mig.EnableMIG, mig.DisableMIG} {
		must(t, p.Make(t.Context(), gpus[1].UUID, mig.Step{Action: on, GI: -1, CI: -1}))
	}
	if err := p.Make(t.Context(), gpus[0].UUID, mig.Step{Action: mig.EnableMIG, GI: -1, CI: -1}); !errors.Is(err, nvml.GPUIsLost) || !strings.Contains(err.Error(), "read GPU 0") {
		t.Errorf("of the board that cannot be read: %v", err)
	}
	if quiet != 0 {
		t.Errorf("%d boards are not listened to any more", quiet)
	}
}
