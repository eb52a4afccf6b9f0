package simnode_test

import (
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
)

// The published profile IDs of 7-slice boards (nvidia-smi mig -lgip).
const (
	whole7g, half4g, half3g, quarter2g, quarter1g, eighth1g, eighth1gMedia = 0, 5, 9, 14, 15, 19, 20
)

func TestCreateGPUInstance(t *testing.T) {
	type instance struct{ profile, start int }
	tests := []struct {
		name string
		node string
		have []instance
		add  instance
		want nvml.Return
	}{
		{"empty board", "dgx-a100+all-enabled", nil, instance{eighth1g, 6}, nvml.Success},
		{"MIG off", "dgx-a100", nil, instance{eighth1g, 0}, nvml.NotSupported},
		{"board without MIG", "t4", nil, instance{eighth1g, 0}, nvml.NotSupported},
		{"no such profile", "dgx-a100+all-enabled", nil, instance{1, 0}, nvml.InvalidArgument},
		{"slot the shape cannot start at", "dgx-a100+all-enabled", nil, instance{quarter2g, 1}, nvml.InvalidArgument},
		{"slot taken", "dgx-a100+all-enabled", []instance{{eighth1g, 0}}, instance{eighth1g, 0}, nvml.InsufficientResources},
		{"slot overlapped", "dgx-a100+all-enabled", []instance{{half3g, 0}}, instance{quarter2g, 2}, nvml.InsufficientResources},
		{"no slot left", "dgx-a100+all-enabled", []instance{{whole7g, 0}}, instance{eighth1g, simnode.AnyPlacement}, nvml.InsufficientResources},
		{"no slice left", "dgx-a100+all-enabled", []instance{{half3g, 0}, {half3g, 4}}, instance{eighth1g, simnode.AnyPlacement}, nvml.InsufficientResources},
		{"beside", "dgx-a100+all-enabled", []instance{{half4g, 0}}, instance{half3g, simnode.AnyPlacement}, nvml.Success},
		{"more than there are", "dgx-a100+all-enabled", []instance{{eighth1gMedia, 0}}, instance{eighth1gMedia, 1}, nvml.InsufficientResources},
		{"double memory", "dgx-a100+all-enabled", []instance{{quarter1g, 0}, {quarter1g, 2}, {quarter1g, 4}}, instance{quarter1g, 6}, nvml.Success},
		{"all media engines taken", "rtx-pro-6000+all-enabled", []instance{{65, 0}}, instance{14, 1}, nvml.InsufficientResources},
		{"without media engines beside all", "rtx-pro-6000+all-enabled", []instance{{65, 0}}, instance{67, 1}, nvml.Success},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			node := open(t, test.node)
			for _, i := range test.have {
				_, err := node.CreateGPUInstance(0, i.profile, i.start)
				must(t, err)
			}
			if _, err := node.CreateGPUInstance(0, test.add.profile, test.add.start); returned(err) != test.want {
				t.Errorf("returned %v, want %s", err, test.want)
			}
		})
	}
}

// returned is the return code in an error.
func returned(err error) nvml.Return {
	if err == nil {
		return nvml.Success
	}
	code, _ := errors.AsType[nvml.Return](err)
	return code
}

// TestCutLife follows a partition from its creation to its end.
func TestCutLife(t *testing.T) {
	node := open(t, "dgx-a100+all-enabled")
	expect := func(what string, err error, want nvml.Return) {
		t.Helper()
		if returned(err) != want {
			t.Fatalf("%s: %v, want %s", what, err, want)
		}
	}
	gi, err := node.CreateGPUInstance(2, half3g, 4)
	must(t, err)
	_, _, err = node.CreateComputeInstance(2, gi, 4)
	expect("more slices than the instance has", err, nvml.InvalidArgument)
	first, uuid, err := node.CreateComputeInstance(2, gi, 1)
	must(t, err)
	second, _, err := node.CreateComputeInstance(2, gi, 2)
	must(t, err)
	_, _, err = node.CreateComputeInstance(2, gi, 1)
	expect("more slices than are left", err, nvml.InsufficientResources)
	_, _, err = node.CreateComputeInstance(2, gi+1, 1)
	expect("in an instance that there is not", err, nvml.NotFound)

	partitions := scan(t, node)[2].Partitions
	if len(partitions) != 2 {
		t.Fatalf("%d partitions, want 2", len(partitions))
	}
	p := partitions[0]
	if p.UUID != uuid || p.Profile.String() != "1c.3g.20gb" || p.Placement != (mig.Placement{Start: 4, Size: 4}) || p.Memory != 20<<30 {
		t.Errorf("first partition is %+v", p)
	}
	if got := partitions[1].Profile.String(); got != "2c.3g.20gb" {
		t.Errorf("second partition is %s", got)
	}

	expect("MIG off with partitions", node.SetMIG(2, false), nvml.InUse)
	expect("instance with partitions", node.DestroyGPUInstance(2, gi), nvml.InUse)
	must(t, node.AddProcess(2, 0, 4711, 1<<30))
	expect("partition with a process", node.DestroyComputeInstance(2, gi, first), nvml.InUse)
	must(t, node.RemoveProcess(2, 0, 4711))
	must(t, node.DestroyComputeInstance(2, gi, first))
	expect("partition that is gone", node.DestroyComputeInstance(2, gi, first), nvml.NotFound)

	again, other, err := node.CreateComputeInstance(2, gi, 1)
	must(t, err)
	if again != first || other == uuid {
		t.Errorf("cut anew it has ID %d and UUID %s, want %d and another than %s", again, other, first, uuid)
	}
	must(t, node.DestroyComputeInstance(2, gi, again))
	must(t, node.DestroyComputeInstance(2, gi, second))
	must(t, node.DestroyGPUInstance(2, gi))
	expect("instance that is gone", node.DestroyGPUInstance(2, gi), nvml.NotFound)
	if left := scan(t, node)[2].Partitions; left != nil {
		t.Errorf("left: %v", left)
	}
	must(t, node.Lose(2))
	_, err = node.CreateGPUInstance(2, half3g, 4)
	expect("on a lost board", err, nvml.GPUIsLost)
	_, err = node.CreateGPUInstance(8, half3g, 4)
	expect("on a board that there is not", err, nvml.InvalidArgument)
}

// TestSetMIG holds that a new mode is pending until a reset before Hopper, and
// in force at once since.
func TestSetMIG(t *testing.T) {
	tests := []struct {
		node string
		// now is whether the mode is in force before a reset.
		now  bool
		want nvml.Return
	}{
		{"dgx-a100", false, nvml.Success},
		{"dgx-h100", true, nvml.Success},
		{"t4", false, nvml.NotSupported},
	}
	for _, test := range tests {
		t.Run(test.node, func(t *testing.T) {
			node := open(t, test.node)
			device, err := node.DeviceGetHandleByIndex(0)
			must(t, err)
			if err := node.SetMIG(0, true); returned(err) != test.want {
				t.Fatalf("SetMIG: %v, want %s", err, test.want)
			}
			current, pending, err := node.DeviceGetMigMode(device)
			if test.want != nvml.Success {
				if returned(err) != nvml.NotSupported {
					t.Errorf("mode: %v, want NOT_SUPPORTED", err)
				}
				return
			}
			if current != test.now || !pending || err != nil {
				t.Errorf("mode now %t, pending %t, %v", current, pending, err)
			}
			must(t, node.Heal(0))
			if !scan(t, node)[0].MIG {
				t.Error("MIG is off after a reset")
			}
		})
	}
}

// TestProfileNumbers holds that NVML's enumeration and the published profile
// IDs are two things, with holes and an end.
func TestProfileNumbers(t *testing.T) {
	node := open(t, "dgx-a100")
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	want := map[int]nvml.GPUInstanceProfile{
		0: {ID: eighth1g, Slices: 1, Instances: 7, MemoryMB: 5120, Name: "1g.5gb"},
		4: {ID: whole7g, Slices: 7, Instances: 1, MemoryMB: 40960, Name: "7g.40gb"},
		9: {ID: quarter1g, Slices: 1, Instances: 4, MemoryMB: 10240, Name: "1g.10gb"},
	}
	for enum, profile := range want {
		if got, err := node.DeviceGetGpuInstanceProfileInfo(device, enum); got != profile || err != nil {
			t.Errorf("profile %d is %+v, %v, want %+v", enum, got, err, profile)
		}
	}
	if _, err := node.DeviceGetGpuInstanceProfileInfo(device, 5); returned(err) != nvml.NotSupported {
		t.Errorf("a hole: %v, want NOT_SUPPORTED", err)
	}
	if _, err := node.DeviceGetGpuInstanceProfileInfo(device, 18); returned(err) != nvml.InvalidArgument {
		t.Errorf("the end: %v, want INVALID_ARGUMENT", err)
	}
}
