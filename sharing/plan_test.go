package sharing

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

// planCase is a row of a table of plans.
type planCase struct {
	name     string
	gpus     []GPU
	profile  Profile
	want     []string
	warnings []string
}

func (c planCase) run(t *testing.T) {
	t.Run(c.name, func(t *testing.T) {
		plan := NewPlan(c.gpus, c.profile)
		if diff := cmp.Diff(c.want, show(plan)); diff != "" {
			t.Errorf("resources (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(c.warnings, plan.Warnings); diff != "" {
			t.Errorf("warnings (-want +got):\n%s", diff)
		}
	})
}

func TestPlanOfNothing(t *testing.T) {
	plan := NewPlan(nil, Profile{})
	if diff := cmp.Diff(Plan{Health: map[string]Health{}}, plan); diff != "" {
		t.Errorf("plan of no GPUs (-want +got):\n%s", diff)
	}
}

// One whole answer, field by field; the tables check parts of it.
func TestPlanFields(t *testing.T) {
	gpu := cut(1, oneG(), twoG())
	gpu.Partitions[1].CI = 3
	profile := defaults(ReplicatedResource{Resource: "nvidia.com/mig-2g.10gb", Replicas: 2, Policy: Spread, SpreadStrict: true})
	profile.Policy = Packed
	profile.FailRequestsGreaterThanOne = true
	profile.DeviceIDs = ByIndex

	const first, second = "MIG-00000000-0000-0000-0000-000001000000", "MIG-00000000-0000-0000-0000-000001000001"
	gpu0, gpu1 := whole(0, t4).UUID, gpu.UUID
	want := Plan{
		Resources: []Resource{{
			Name: "nvidia.com/gpu",
			Units: []Unit{{
				ID: gpu0, GPU: gpu0, Index: "0", Minor: 10, Model: t4, GI: -1, CI: -1, Replicas: 1,
			}},
			Devices:                    []Device{{ID: gpu0, Unit: gpu0, Healthy: true}},
			Policy:                     Packed,
			FailRequestsGreaterThanOne: true,
			DeviceIDs:                  ByIndex,
		}, {
			Name: "nvidia.com/mig-1g.5gb",
			Units: []Unit{{
				ID: first, GPU: gpu1, Index: "1:0", Minor: 11, Model: a100, Profile: oneG(), GI: 7, Replicas: 1,
			}},
			Devices:                    []Device{{ID: first, Unit: first, Healthy: true}},
			Policy:                     Packed,
			FailRequestsGreaterThanOne: true,
			DeviceIDs:                  ByIndex,
		}, {
			Name: "nvidia.com/mig-2g.10gb",
			Units: []Unit{{
				ID: second, GPU: gpu1, Index: "1:1", Minor: 11, Model: a100, Profile: twoG(), GI: 8, CI: 3, Replicas: 2,
			}},
			Devices: []Device{
				{ID: second + "::0", Unit: second, Healthy: true},
				{ID: second + "::1", Unit: second, Healthy: true},
			},
			Policy:                     Spread,
			SpreadStrict:               true,
			FailRequestsGreaterThanOne: true,
			DeviceIDs:                  ByIndex,
		}},
		Health: map[string]Health{gpu0: {}, gpu1: {}, first: {}, second: {}},
	}
	got := NewPlan([]GPU{gpu, whole(0, t4)}, profile)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	if whole, part := got.Resources[0].Units[0], got.Resources[1].Units[0]; whole.Partition() || !part.Partition() {
		t.Error("Partition is wrong")
	}
}

// The driver's order counts, not the order of UUIDs, nor of indexes as text.
func TestPlanOrder(t *testing.T) {
	gpus := []GPU{whole(10, a100), whole(9, a100), cut(2, oneG(), oneG())}
	gpus[0].UUID, gpus[1].UUID = "GPU-a", "GPU-b"
	parts := gpus[2].Partitions
	parts[0].Index, parts[1].Index = 11, 3
	want := []string{"nvidia.com/gpu: 9×1 10×1", "nvidia.com/mig-1g.5gb: 2:3×1 2:11×1"}
	if diff := cmp.Diff(want, show(NewPlan(gpus, defaults()))); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
}

// A GPU's NUMA node applies to all of its devices.
func TestPlanNUMANode(t *testing.T) {
	gpu := cut(5, oneG())
	plan := NewPlan([]GPU{whole(4, t4), gpu}, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2}))
	for _, resource := range plan.Resources {
		for _, device := range resource.Devices {
			if device.NUMANode != 1 {
				t.Errorf("%s %s is on NUMA node %d, want 1", resource.Name, device.ID, device.NUMANode)
			}
		}
	}
}

func TestPlanHealth(t *testing.T) {
	sick := whole(0, a100)
	sick.Health = Faulty("xid 79")
	part := cut(1, oneG(), oneG())
	part.Partitions[1].Health = Faulty("xid 43")
	gpu := cut(2, oneG(), oneG())
	gpu.Health = Faulty("lost")
	gpu.Partitions[0].Health = Faulty("xid 43")

	plan := NewPlan([]GPU{sick, part, gpu, whole(3, a100)},
		defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 3}))
	if diff := cmp.Diff([]string{
		"nvidia.com/gpu: 0×3! 3×3",
		"nvidia.com/mig-1g.5gb: 1:0×1 1:1×1! 2:0×1! 2:1×1!",
	}, show(plan)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	var healthy []int
	for _, resource := range plan.Resources {
		healthy = append(healthy, resource.HealthyDevices())
	}
	if !slices.Equal(healthy, []int{3, 1}) {
		t.Errorf("healthy devices %v, want [3 1]", healthy)
	}
	if diff := cmp.Diff(map[string]Health{
		sick.UUID:               Faulty("xid 79"),
		part.UUID:               {},
		part.Partitions[0].UUID: {},
		part.Partitions[1].UUID: Faulty("xid 43"),
		gpu.UUID:                Faulty("lost"),
		gpu.Partitions[0].UUID:  Faulty("lost"),
		gpu.Partitions[1].UUID:  Faulty("lost"),
		whole(3, a100).UUID:     {},
	}, plan.Health); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
	if plan.Warnings != nil {
		t.Errorf("a fault is not a warning: %q", plan.Warnings)
	}
}

// A unit that is not offered keeps its health entry: this differs from a unit that is gone.
func TestPlanHealthOfUnoffered(t *testing.T) {
	gpu := cut(0, oneG())
	gpu.Partitions[0].Health = Faulty("xid 43")
	profile := defaults()
	profile.Exclude = selectors(t, "0", "1")
	plan := NewPlan([]GPU{gpu, whole(1, a100)}, profile)
	want := map[string]Health{gpu.UUID: {}, gpu.Partitions[0].UUID: Faulty("xid 43"), whole(1, a100).UUID: {}}
	if diff := cmp.Diff(want, plan.Health); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
}

func TestPlanNaming(t *testing.T) {
	profile := defaults()
	profile.GPUNames = []NamingRule{
		{"A100", "nvidia.com/a100"}, {"*SXM4*", "nvidia.com/sxm4"}, {"*", "nvidia.com/gpu"},
	}
	profile.MIGNames = []NamingRule{{"2g.*", "nvidia.com/medium"}, {"2g.10gb", "nvidia.com/never"}}
	unnamed := defaults()
	unnamed.GPUNames = nil

	for _, test := range []planCase{
		{
			name:    "first matching rule",
			gpus:    []GPU{whole(0, a100), whole(1, t4), whole(2, "NVIDIA H100-SXM4")},
			profile: profile,
			want:    []string{"nvidia.com/a100: 0×1", "nvidia.com/gpu: 1×1", "nvidia.com/sxm4: 2×1"},
		}, {
			name:    "partitions by profile, the rest by NVIDIA's rule",
			gpus:    []GPU{cut(0, twoG(), oneG(), oneGME(), halfG())},
			profile: profile,
			want: []string{
				"nvidia.com/medium: 0:0×1", "nvidia.com/mig-1c.2g.10gb: 0:3×1", "nvidia.com/mig-1g.5gb: 0:1×1", "nvidia.com/mig-1g.5gb.me: 0:2×1",
			},
		}, {
			name:    "a compute slice is a resource like any other",
			gpus:    []GPU{cut(0, halfG(), halfG())},
			profile: defaults(),
			want:    []string{"nvidia.com/mig-1c.2g.10gb: 0:0×1 0:1×1"},
		}, {
			name:    "without rules",
			gpus:    node(1),
			profile: unnamed,
			want:    []string{"nvidia.com/gpu: 0×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanLeavesInputAlone(t *testing.T) {
	gpus := []GPU{cut(1, oneG(), oneG(), twoG()), whole(0, t4)}
	slices.Reverse(gpus[0].Partitions)
	profile := defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2})
	profile.Exclude = selectors(t, "1:1")
	before := []GPU{gpus[0], gpus[1]}
	before[0].Partitions = slices.Clone(gpus[0].Partitions)

	NewPlan(gpus, profile)
	if diff := cmp.Diff(before, gpus); diff != "" {
		t.Errorf("the GPUs changed (-before +after):\n%s", diff)
	}
}

func TestPrevailing(t *testing.T) {
	off := cut(1, twoG(), twoG())
	off.MIG = false
	for _, test := range []struct {
		name string
		gpus []GPU
		want mig.Profile
	}{
		{"nothing", nil, mig.Profile{}},
		{"most numerous", []GPU{cut(0, oneG(), twoG()), cut(1, twoG())}, twoG()},
		{"smaller of two", []GPU{cut(0, threeG(), twoG(), threeG(), twoG())}, twoG()},
		{"smaller of two by attributes", []GPU{cut(0, oneGME(), oneG())}, oneG()},
		{"unknown profiles do not count", []GPU{cut(0, mig.Profile{}, mig.Profile{}, twoG())}, twoG()},
		{"GPUs with MIG off do not count", []GPU{cut(0, oneG()), off}, oneG()},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := mostCommonProfile(test.gpus); got != test.want {
				t.Errorf("mostCommonProfile = %v, want %v", got, test.want)
			}
		})
	}
}

// strategy is the default profile with this MIG strategy.
func strategy(s MIGStrategy, exclude ...Selector) Profile {
	profile := defaults()
	profile.MIGStrategy = s
	profile.Exclude = exclude
	return profile
}

func denied(gpu GPU) GPU {
	gpu.Denied = true
	return gpu
}

func TestPlanMIGStrategy(t *testing.T) {
	sick := cut(0, oneG(), oneG(), twoG())
	sick.Health = Faulty("lost")
	for _, test := range []planCase{
		{
			name:    "none offers whole GPUs",
			gpus:    node(2),
			profile: strategy(MIGNone),
			want:    []string{"nvidia.com/gpu: 0×1 1×1"},
		}, {
			name:     "a whole GPU that may not be read is told of",
			gpus:     []GPU{whole(0, a100), denied(whole(1, a100))},
			profile:  strategy(MIGNone),
			want:     []string{"nvidia.com/gpu: 0×1 1×1"},
			warnings: []string{"GPU 1 (GPU-00000000-0000-0000-0000-000000000001): the driver does not let this program read it: it is offered as it was, and its faults are not seen"},
		}, {
			name:    "none withholds GPUs with MIG",
			gpus:    []GPU{whole(0, a100), cut(1, oneG()), cut(2)},
			profile: strategy(MIGNone),
			want:    []string{"nvidia.com/gpu: 0×1"},
			warnings: []string{
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
				`GPU 2 (GPU-00000000-0000-0000-0000-000000000002): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
			},
		}, {
			name:    "partitions that the driver tells too little of are offered",
			gpus:    []GPU{denied(whole(0, a100)), denied(cut(1, oneG())), denied(cut(2))},
			profile: strategy(MIGMixed),
			want:    []string{"nvidia.com/gpu: 0×1", "nvidia.com/mig-1g.5gb: 1:0×1"},
			warnings: []string{
				"GPU 0 (GPU-00000000-0000-0000-0000-000000000000): the driver does not let this program read it: it is offered as it was, and its faults are not seen",
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): its partitions cannot be read, or not all about them: ` + NoMIGRight,
				`GPU 2 (GPU-00000000-0000-0000-0000-000000000002): its partitions cannot be read, or not all about them: ` + NoMIGRight,
			},
		}, {
			name:    "no strategy is none",
			gpus:    []GPU{cut(0, oneG())},
			profile: strategy(""),
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
			},
		}, {
			name:    "mixed offers everything under its own name",
			gpus:    []GPU{whole(0, a100), cut(1, oneG(), twoG(), oneG()), cut(2, oneG())},
			profile: strategy(MIGMixed),
			want: []string{
				"nvidia.com/gpu: 0×1", "nvidia.com/mig-1g.5gb: 1:0×1 1:2×1 2:0×1", "nvidia.com/mig-2g.10gb: 1:1×1",
			},
		}, {
			name:    "mixed mentions an empty GPU",
			gpus:    []GPU{cut(0), cut(1, oneG())},
			profile: strategy(MIGMixed),
			want:    []string{"nvidia.com/mig-1g.5gb: 1:0×1"},
			warnings: []string{
				"GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is enabled, and there are no partitions",
			},
		}, {
			name:    "mixed mentions a partition it cannot name",
			gpus:    []GPU{cut(0, mig.Profile{}, oneG())},
			profile: strategy(MIGMixed),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:1×1"},
			warnings: []string{
				"GPU 0 (GPU-00000000-0000-0000-0000-000000000000): partition 0 (MIG-00000000-0000-0000-0000-000000000000) not offered: its MIG profile is unknown",
			},
		}, {
			name:    "single without MIG offers whole GPUs",
			gpus:    node(2),
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0×1 1×1"},
		}, {
			name:    "single calls partitions as their GPUs",
			gpus:    []GPU{cut(0, twoG(), twoG()), cut(1, twoG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0:0×1 0:1×1 1:0×1"},
		}, {
			name:    "single offers one kind",
			gpus:    []GPU{whole(0, a100), cut(1, twoG(), oneG(), oneG()), cut(2), cut(3, twoG(), threeG(), oneG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 1:1×1 1:2×1 3:2×1"},
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is off, while MIG strategy "single" offers partitions only on this node`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 2 (GPU-00000000-0000-0000-0000-000000000002): not offered: MIG is enabled, and there are no partitions`,
				`GPU 3 (GPU-00000000-0000-0000-0000-000000000003): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 3 (GPU-00000000-0000-0000-0000-000000000003): 1 × 3g.20gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
			},
		}, {
			name:    "single does not fall back to whole GPUs while MIG is being cut",
			gpus:    []GPU{whole(0, a100), cut(1)},
			profile: strategy(MIGSingle),
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is off, while MIG strategy "single" offers partitions only on this node`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): not offered: MIG is enabled, and there are no partitions`,
			},
		}, {
			name:    "single does not let a fault change the kind",
			gpus:    []GPU{sick, cut(1, twoG(), oneG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0:0×1! 0:1×1! 1:1×1"},
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
			},
		}, {
			name:    "single looks at what is not excluded",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGSingle, selectors(t, "1")...),
			want:    []string{"nvidia.com/gpu: 0×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanExclude(t *testing.T) {
	for _, test := range []planCase{
		{
			name:    "by index, UUID and bus ID",
			gpus:    node(5),
			profile: strategy(MIGMixed, selectors(t, "0", node(5)[2].UUID, "0000:04:00.0")...),
			want:    []string{"nvidia.com/gpu: 1×1 3×1"},
		}, {
			name:    "a GPU with all of its partitions",
			gpus:    []GPU{cut(0, oneG(), oneG()), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "0")...),
			want:    []string{"nvidia.com/mig-1g.5gb: 1:0×1"},
		}, {
			name:    "single partitions",
			gpus:    []GPU{cut(0, oneG(), oneG(), twoG())},
			profile: strategy(MIGMixed, selectors(t, "0:0", cut(0, oneG(), oneG(), twoG()).Partitions[2].UUID)...),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:1×1"},
		}, {
			name:    "every partition one by one is not an empty GPU",
			gpus:    []GPU{cut(0, oneG(), twoG())},
			profile: strategy(MIGMixed, selectors(t, "0:0", "0:1")...),
		}, {
			name:    "everything",
			gpus:    node(1),
			profile: strategy(MIGMixed, selectors(t, "0")...),
		}, {
			name:    "what is not there",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "7", "0:0", "1:3", "0000:3b:00.0")...),
			want:    []string{"nvidia.com/gpu: 0×1", "nvidia.com/mig-1g.5gb: 1:0×1"},
			warnings: []string{
				`exclude[0]: "7" names nothing on this node`,
				`exclude[1]: "0:0" names nothing on this node`,
				`exclude[2]: "1:3" names nothing on this node`,
				`exclude[3]: "00000000:3B:00.0" names nothing on this node`,
			},
		}, {
			name:    "twice",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "1", "0", "1:0", whole(0, a100).UUID)...),
		},
	} {
		test.run(t)
	}
}

func TestPlanShares(t *testing.T) {
	const gpu, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
	for _, test := range []planCase{
		{
			name:    "all",
			gpus:    node(3),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 4}),
			want:    []string{"nvidia.com/gpu: 0×4 1×4 2×4"},
		}, {
			name:    "renamed",
			gpus:    node(2),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 4, Rename: shared}),
			want:    []string{"nvidia.com/gpu.shared: 0×4 1×4"},
		}, {
			name:    "first N, the rest exclusive",
			gpus:    []GPU{whole(2, a100), whole(0, a100), whole(10, a100), whole(1, a100)},
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 4, Rename: shared, Select: Selection{Count: 2}}),
			want:    []string{"nvidia.com/gpu: 2×1 10×1", "nvidia.com/gpu.shared: 0×4 1×4"},
		}, {
			name:    "listed",
			gpus:    node(4),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 4, Select: list(t, "3", node(4)[1].UUID)}),
			want:    []string{"nvidia.com/gpu: 0×1 1×4 2×1 3×4"},
		}, {
			name: "the first entry that selects a unit has it",
			gpus: node(4),
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 2, Select: list(t, "1")},
				ReplicatedResource{Resource: gpu, Replicas: 3, Select: Selection{Count: 2}},
				ReplicatedResource{Resource: gpu, Replicas: 5},
			),
			want: []string{"nvidia.com/gpu: 0×3 1×2 2×3 3×5"},
		}, {
			name: "whole, shared and partitioned side by side",
			gpus: []GPU{whole(0, a100), whole(1, a100), cut(2, oneG(), oneG(), twoG())},
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 8, Rename: shared, Select: list(t, "0")},
				ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: 2},
			),
			want: []string{
				"nvidia.com/gpu: 1×1", "nvidia.com/gpu.shared: 0×8",
				"nvidia.com/mig-1g.5gb: 2:0×2 2:1×2", "nvidia.com/mig-2g.10gb: 2:2×1",
			},
		}, {
			name:    "a GPU selects its partitions",
			gpus:    []GPU{cut(0, oneG(), oneG()), cut(1, oneG(), oneG())},
			profile: defaults(ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: 3, Select: list(t, "0", "1:1")}),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:0×3 0:1×3 1:0×1 1:1×3"},
		}, {
			name: "one replica is exclusive, by the name the entry gives",
			gpus: node(2),
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 1, Rename: "nvidia.com/alone", Select: list(t, "1")},
				ReplicatedResource{Resource: gpu, Replicas: 0},
			),
			want: []string{"nvidia.com/alone: 1×1", "nvidia.com/gpu: 0×1"},
		}, {
			name: "names before renaming",
			gpus: node(2),
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 2, Rename: shared},
				ReplicatedResource{Resource: shared, Replicas: 7},
			),
			want:     []string{"nvidia.com/gpu.shared: 0×2 1×2"},
			warnings: []string{"resources[1]: no unit of nvidia.com/gpu.shared on this node"},
		}, {
			name: "renamed to a name that others have",
			gpus: []GPU{whole(1, a100), cut(0, oneG()), whole(2, a100)},
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 2, Rename: "nvidia.com/any", Select: list(t, "2")},
				ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: 3, Rename: "nvidia.com/any"},
			),
			want: []string{"nvidia.com/any: 0:0×3 2×2", "nvidia.com/gpu: 1×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanSharesInVain(t *testing.T) {
	const gpu = "nvidia.com/gpu"
	for _, test := range []planCase{
		{
			name: "no such resource",
			gpus: node(1),
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 2},
				ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: 2, Select: list(t, "0:0")},
			),
			want:     []string{"nvidia.com/gpu: 0×2"},
			warnings: []string{"resources[1]: no unit of nvidia.com/mig-1g.5gb on this node"},
		}, {
			name:     "everything taken",
			gpus:     node(1),
			profile:  defaults(ReplicatedResource{Resource: gpu, Replicas: 2}, ReplicatedResource{Resource: gpu, Replicas: 3}),
			want:     []string{"nvidia.com/gpu: 0×2"},
			warnings: []string{"resources[1]: earlier entries take every unit of nvidia.com/gpu"},
		}, {
			name:     "more than there are",
			gpus:     node(2),
			profile:  defaults(ReplicatedResource{Resource: gpu, Replicas: 2, Select: Selection{Count: 3}}),
			want:     []string{"nvidia.com/gpu: 0×2 1×2"},
			warnings: []string{"resources[0].devices: 3 units of nvidia.com/gpu wanted, 2 free on this node"},
		}, {
			name:    "as many as there are",
			gpus:    node(2),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 2, Select: Selection{Count: 2}}),
			want:    []string{"nvidia.com/gpu: 0×2 1×2"},
		}, {
			name: "selectors",
			gpus: []GPU{whole(0, a100), whole(1, a100), cut(2, oneG())},
			profile: defaults(
				ReplicatedResource{Resource: gpu, Replicas: 2, Select: list(t, "0")},
				ReplicatedResource{Resource: gpu, Replicas: 3, Select: list(t, "0", "1", "2", "9")},
			),
			want: []string{"nvidia.com/gpu: 0×2 1×3", "nvidia.com/mig-1g.5gb: 2:0×1"},
			warnings: []string{
				`resources[1].devices[0]: earlier entries take what "0" selects of nvidia.com/gpu`,
				`resources[1].devices[2]: "2" selects no unit of nvidia.com/gpu on this node`,
				`resources[1].devices[3]: "9" selects no unit of nvidia.com/gpu on this node`,
			},
		}, {
			name:    "two selectors for one unit are fine",
			gpus:    node(2),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 2, Select: list(t, "0", node(1)[0].UUID)}),
			want:    []string{"nvidia.com/gpu: 0×2 1×1"},
		}, {
			name:    "empty list",
			gpus:    node(1),
			profile: defaults(ReplicatedResource{Resource: gpu, Replicas: 2, Select: Selection{List: []Selector{}}}),
			want:    []string{"nvidia.com/gpu: 0×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanPolicy(t *testing.T) {
	const gpu, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
	type answer struct {
		Policy AllocationPolicy
		Strict bool
	}
	for _, test := range []struct {
		name     string
		shares   []ReplicatedResource
		want     map[string]answer
		warnings []string
	}{
		{
			name: "the profile's where nothing is shared",
			want: map[string]answer{gpu: {Policy: Distributed}},
		}, {
			name:   "the share's",
			shares: []ReplicatedResource{{Resource: gpu, Replicas: 2, Policy: Packed}},
			want:   map[string]answer{gpu: {Policy: Packed}},
		}, {
			name:   "the share's for exclusive units beside shared ones",
			shares: []ReplicatedResource{{Resource: gpu, Replicas: 2, Policy: Spread, SpreadStrict: true, Select: list(t, "1")}},
			want:   map[string]answer{gpu: {Spread, true}},
		}, {
			name:   "each name its own",
			shares: []ReplicatedResource{{Resource: gpu, Replicas: 2, Rename: shared, Policy: Packed, Select: list(t, "0")}},
			want:   map[string]answer{gpu: {Policy: Distributed}, shared: {Policy: Packed}},
		}, {
			name: "the first share's in the document, whatever the order of the units",
			shares: []ReplicatedResource{
				{Resource: gpu, Replicas: 2, Policy: Packed, Select: list(t, "2")},
				{Resource: gpu, Replicas: 3, Policy: Packed, Select: list(t, "1")},
				{Resource: gpu, Replicas: 4, Policy: Spread, Select: list(t, "0")},
			},
			want:     map[string]answer{gpu: {Policy: Packed}},
			warnings: []string{"resources[2]: the policy of nvidia.com/gpu is that of resources[0]"},
		}, {
			name: "strictness is part of it",
			shares: []ReplicatedResource{
				{Resource: gpu, Replicas: 2, Policy: Spread, Select: list(t, "2")},
				{Resource: gpu, Replicas: 2, Policy: Spread, SpreadStrict: true},
			},
			want:     map[string]answer{gpu: {Policy: Spread}},
			warnings: []string{"resources[1]: the policy of nvidia.com/gpu is that of resources[0]"},
		}, {
			name: "a share without units has no say",
			shares: []ReplicatedResource{
				{Resource: gpu, Replicas: 2, Policy: Packed, Select: list(t, "9")},
				{Resource: gpu, Replicas: 2, Policy: Spread},
			},
			want:     map[string]answer{gpu: {Policy: Spread}},
			warnings: []string{`resources[0].devices[0]: "9" selects no unit of nvidia.com/gpu on this node`},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan := NewPlan(node(3), defaults(test.shares...))
			got := make(map[string]answer)
			for _, resource := range plan.Resources {
				got[resource.Name] = answer{resource.Policy, resource.SpreadStrict}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("policies (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.warnings, plan.Warnings); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

// TestListLimit checks that a resource has at most the units that a kubelet's list can hold, and that a warning
// names the entry of those left out.
func TestListLimit(t *testing.T) {
	const gpu = "nvidia.com/gpu"
	tests := []struct {
		name   string
		gpus   int
		shares []ReplicatedResource
		// devices is the resource's number of devices; warning is part of a warning, or "" without one.
		devices int
		warning string
	}{
		{"exactly full", 3, []ReplicatedResource{{Resource: gpu, Replicas: MaxDevices / 3}}, MaxDevices, ""},
		{"one too many", 3, []ReplicatedResource{{Resource: gpu, Replicas: MaxDevices/3 + 1}}, 2 * (MaxDevices/3 + 1), "resources[0].replicas: 1 of 3 units with 13108 replicas"},
		{"one GPU alone", 1, []ReplicatedResource{{Resource: gpu, Replicas: MaxDevices + 1}}, 0, "resources[0].replicas: 1 of 1 units with 39322 replicas"},
		{"64 GPUs", 64, []ReplicatedResource{{Resource: gpu, Replicas: 2457}}, 16 * 2457, "resources[0].replicas: 48 of 64 units with 2457 replicas are not offered as nvidia.com/gpu: the kubelet takes no list beyond 4 MiB, which is 39321 devices"},
		{
			"what is smaller still fits", 3, []ReplicatedResource{{Resource: gpu, Select: Selection{Count: 2}, Replicas: 30000}, {Resource: gpu, Replicas: 9000}},
			39000, "resources[0].replicas: 1 of 3 units with 30000 replicas",
		},
		{
			"two names have a list each", 2, []ReplicatedResource{{Resource: gpu, Select: Selection{Count: 1}, Replicas: 30000, Rename: "nvidia.com/many"}, {Resource: gpu, Replicas: 30000}},
			30000, "",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			plan := NewPlan(node(test.gpus), defaults(test.shares...))
			i := slices.IndexFunc(plan.Resources, func(r Resource) bool { return r.Name == gpu })
			resource := plan.Resources[i]
			count := 0
			for _, unit := range resource.Units {
				count += unit.Replicas
			}
			if len(resource.Devices) != test.devices || count != test.devices {
				t.Errorf("%d devices of %d, want %d", len(resource.Devices), count, test.devices)
			}
			warned := slices.ContainsFunc(plan.Warnings, func(w string) bool { return test.warning != "" && strings.Contains(w, test.warning) })
			if leftOut := plan.LeftOut; (leftOut != nil) != warned || warned && (leftOut[0].Path != "resources[0]" || leftOut[0].Resource != gpu) {
				t.Errorf("left out: %+v", leftOut)
			}
			if warned != (test.warning != "") || len(plan.Warnings) > 1 {
				t.Errorf("warnings %q, want %q", plan.Warnings, test.warning)
			}
		})
	}
}

// TestPlanOfAMissingGPU checks how a GPU that the driver does not list affects others: their indexes, counts and
// MIG strategies.
func TestPlanOfAMissingGPU(t *testing.T) {
	missing := func(gpus ...GPU) []GPU {
		gpus[0].DriverIndex, gpus[0].Health = NotListed, Faulty("lost")
		return gpus
	}
	gone := func(gpu GPU) string {
		return describe(&gpu) + ": not offered: the driver does not list it any more"
	}
	shared := func(s Selection) Profile {
		return defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Rename: "nvidia.com/shared", Replicas: 2, Select: s})
	}
	single := defaults()
	single.MIGStrategy = MIGSingle
	for _, test := range []planCase{
		{"selected by index", missing(whole(0, t4), whole(1, t4), whole(2, t4)), shared(list(t, "0", "1")),
			[]string{"nvidia.com/gpu: 2×1", "nvidia.com/shared: 1×2"}, []string{gone(whole(0, t4))}},
		{"selected by count", missing(whole(0, t4), whole(1, t4), whole(2, t4)), shared(Selection{Count: 2}),
			[]string{"nvidia.com/gpu: 2×1", "nvidia.com/shared: 1×2"}, []string{gone(whole(0, t4))}},
		{"the only one of its name", missing(whole(0, t4), whole(1, t4)), shared(list(t, "0")),
			[]string{"nvidia.com/gpu: 1×1"}, []string{gone(whole(0, t4))}},
		{"the only one with MIG", missing(cut(0, oneG()), whole(1, a100)), single, nil, []string{gone(cut(0)),
			"GPU 1 (" + whole(1, a100).UUID + `): not offered: MIG is off, while MIG strategy "single" offers partitions only on this node`}},
		{"all", missing(whole(0, t4)), shared(Selection{}), nil, []string{gone(whole(0, t4))}},
	} {
		test.run(t)
	}
}

// TestPlanNamesUnitsByUUIDWhileIndexesMove checks that a grant has no index that a container runtime may take for
// another GPU's.
func TestPlanNamesUnitsByUUIDWhileIndexesMove(t *testing.T) {
	const granted = "deviceIDStrategy index: units are granted by UUID while the driver does not list all GPUs under their first indexes; " +
		"a container that was granted an index before may get another GPU when it restarts"
	const moved = "the driver has renumbered the GPUs, Virgate has not: GPU 1 is its 0, GPU 2 is its 1"
	for _, test := range []struct {
		name     string
		indexes  []string
		strategy DeviceIDStrategy
		want     DeviceIDStrategy
		warnings []string
	}{
		{"as they were", []string{"", "", ""}, ByIndex, ByIndex, nil},
		{"one is lost", []string{"", "", Lost}, ByIndex, ByUUID, []string{granted}},
		{"renumbered", []string{"2", "0", "1"}, ByIndex, ByUUID, []string{granted,
			"the driver has renumbered the GPUs, Virgate has not: GPU 0 is its 2, GPU 1 is its 0, GPU 2 is its 1"}},
		{"one is gone", []string{NotListed, "0", "1"}, ByIndex, ByUUID, []string{
			"GPU 0 (" + whole(0, t4).UUID + "): not offered: the driver does not list it any more", granted, moved}},
		{"by UUID anyway", []string{Lost, "0", "1"}, ByUUID, ByUUID, []string{moved}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var gpus []GPU
			for i, index := range test.indexes {
				gpus = append(gpus, whole(i, t4))
				gpus[i].DriverIndex = index
			}
			profile := defaults()
			profile.DeviceIDs = test.strategy
			plan := NewPlan(gpus, profile)
			if got := plan.Resources[0].DeviceIDs; got != test.want {
				t.Errorf("granted by %s, want %s", got, test.want)
			}
			if diff := cmp.Diff(test.warnings, plan.Warnings); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnmatched checks which warnings are normal if one profile serves different nodes.
func TestUnmatched(t *testing.T) {
	gpus := node(3)
	gpus[2].MIG = true
	selector := func(text string) Selector {
		s, err := ParseSelector(text)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	profile := defaults(
		ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: 2},
		ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2, Select: Selection{List: []Selector{selector("0"), selector("7")}}},
		ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 3, Select: Selection{List: []Selector{selector("0"), selector("1")}}},
		ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 4, Select: Selection{Count: 1}},
	)
	profile.Exclude = []Selector{selector("9")}
	plan := NewPlan(gpus, profile)
	want := []string{
		`exclude[0]: "9" names nothing on this node`,
		`resources[0]: no unit of nvidia.com/mig-1g.5gb on this node`,
		`resources[1].devices[1]: "7" selects no unit of nvidia.com/gpu on this node`,
		`resources[2].devices[0]: earlier entries take what "0" selects of nvidia.com/gpu`,
		`resources[3]: earlier entries take every unit of nvidia.com/gpu`,
	}
	if diff := cmp.Diff(want, plan.Unmatched); diff != "" {
		t.Errorf("unmatched (-want +got):\n%s", diff)
	}
	var others []string
	for _, warning := range plan.Warnings {
		if !slices.Contains(plan.Unmatched, warning) {
			others = append(others, warning)
		}
	}
	if len(others) != 1 || !strings.Contains(others[0], "not offered: MIG is enabled") || len(plan.Warnings) != len(want)+1 {
		t.Errorf("the other warnings are %q", others)
	}
}

// TestPatternsWithoutGPU has patterns that match no GPU of the node. The warning names the node's models.
func TestPatternsWithoutGPU(t *testing.T) {
	profile := defaults()
	profile.GPUNames = []NamingRule{{"tesla t4", "nvidia.com/t4"}, {"A100", "nvidia.com/a100"}, {"NVIDIA A100*", "nvidia.com/late"}, {"*", "nvidia.com/gpu"}}
	profile.MIGNames = []NamingRule{{"2g.*", "nvidia.com/two"}, {"1g.5gb", "nvidia.com/one"}}
	profile.Exclude = []Selector{ModelSelector("t4"), ModelSelector("T4")}
	const models = `"NVIDIA A100-SXM4-40GB", "Tesla T4"`
	excluded := `exclude[0]: pattern "t4" matches no GPU, case matters: there is ` + models + ` on this node`
	unnamed := `resources.gpus[0].pattern: "tesla t4" matches no GPU of this node, which has ` + models + `; case matters`
	for _, test := range []struct {
		name      string
		gpus      []GPU
		strategy  MIGStrategy
		want      []string
		unmatched []string
	}{
		{"two models", []GPU{whole(0, t4), whole(1, a100), whole(2, t4)}, MIGMixed, []string{"nvidia.com/a100: 1×1"}, []string{excluded, unnamed}},
		{
			"partitions", []GPU{whole(0, t4), cut(1, oneG())}, MIGMixed, []string{"nvidia.com/one: 1:0×1"},
			[]string{excluded, unnamed, `resources.mig[0].pattern: "2g.*" matches no partition of this node, which has "1g.5gb"; case matters`},
		},
		{"partitions under the GPUs' names", []GPU{whole(0, t4), cut(1, oneG())}, MIGSingle, []string{"nvidia.com/a100: 1:0×1"}, []string{excluded, unnamed}},
		{"no GPU", nil, MIGMixed, nil, []string{`exclude[0]: pattern "t4" matches no GPU on this node`, `exclude[1]: pattern "T4" matches no GPU on this node`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			profile.MIGStrategy = test.strategy
			plan := NewPlan(test.gpus, profile)
			if diff := cmp.Diff(test.want, show(plan)); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.unmatched, plan.Unmatched); diff != "" {
				t.Errorf("unmatched (-want +got):\n%s", diff)
			}
		})
	}
}

// TestManyUnmatchedNames has thousands of entries that match nothing. Only a few are listed, and every other
// warning.
func TestManyUnmatchedNames(t *testing.T) {
	p := Profile{MIGStrategy: MIGNone}
	for i := range 5000 {
		selector, err := ParseSelector(strconv.Itoa(i + 1))
		if err != nil {
			t.Fatal(err)
		}
		p.Exclude = append(p.Exclude, selector)
	}
	plan := NewPlan([]GPU{{UUID: "GPU-1", Model: "A", MIG: true}}, p)
	if len(plan.Unmatched) != warningsShown+1 || len(plan.Warnings) <= len(plan.Unmatched) {
		t.Errorf("%d of %d warnings are of what matches nothing", len(plan.Unmatched), len(plan.Warnings))
	}
}
