package sharing

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// planCase is a row of a table that plans and looks at what came of it.
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
	if diff := cmp.Diff(Plan{Faults: map[string]string{}}, plan); diff != "" {
		t.Errorf("plan of no boards (-want +got):\n%s", diff)
	}
}

// The whole answer once, field by field; the tables look at parts of it.
func TestPlanFields(t *testing.T) {
	board := cut(1, oneG(), twoG())
	board.Partitions[1].CI = 3
	profile := defaults(Share{Resource: "nvidia.com/mig-2g.10gb", Replicas: 2, Policy: Spread, SpreadStrict: true})
	profile.Policy = Packed
	profile.OneShareOnly = true
	profile.DeviceIDs = ByIndex

	const first, second = "MIG-00000000-0000-0000-0000-000001000000", "MIG-00000000-0000-0000-0000-000001000001"
	gpu0, gpu1 := whole(0, t4).UUID, board.UUID
	want := Plan{
		Resources: []Resource{{
			Name: "nvidia.com/gpu",
			Units: []Unit{{
				ID: gpu0, GPU: gpu0, Index: "0", Minor: 10, Model: t4, GI: -1, CI: -1, Replicas: 1,
			}},
			Devices:      []Device{{ID: gpu0, Unit: gpu0, Healthy: true}},
			Policy:       Packed,
			OneShareOnly: true,
			DeviceIDs:    ByIndex,
		}, {
			Name: "nvidia.com/mig-1g.5gb",
			Units: []Unit{{
				ID: first, GPU: gpu1, Index: "1:0", Minor: 11, Model: a100, Profile: oneG(), GI: 7, Replicas: 1,
			}},
			Devices:      []Device{{ID: first, Unit: first, Healthy: true}},
			Policy:       Packed,
			OneShareOnly: true,
			DeviceIDs:    ByIndex,
		}, {
			Name: "nvidia.com/mig-2g.10gb",
			Units: []Unit{{
				ID: second, GPU: gpu1, Index: "1:1", Minor: 11, Model: a100, Profile: twoG(), GI: 8, CI: 3, Replicas: 2,
			}},
			Devices: []Device{
				{ID: second + "::0", Unit: second, Healthy: true},
				{ID: second + "::1", Unit: second, Healthy: true},
			},
			Policy:       Spread,
			SpreadStrict: true,
			OneShareOnly: true,
			DeviceIDs:    ByIndex,
		}},
		Faults: map[string]string{gpu0: "", gpu1: "", first: "", second: ""},
	}
	got := NewPlan([]GPU{board, whole(0, t4)}, profile)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	if whole, part := got.Resources[0].Units[0], got.Resources[1].Units[0]; whole.Partition() || !part.Partition() {
		t.Error("Partition is wrong")
	}
}

// The driver's order counts, not that of the UUIDs or of the texts of indexes.
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

// The NUMA node goes from the board to every device of it.
func TestPlanNUMANode(t *testing.T) {
	board := cut(5, oneG())
	plan := NewPlan([]GPU{whole(4, t4), board}, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2}))
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
	sick.Fault = "xid 79"
	part := cut(1, oneG(), oneG())
	part.Partitions[1].Fault = "xid 43"
	board := cut(2, oneG(), oneG())
	board.Fault = "lost"
	board.Partitions[0].Fault = "xid 43"

	plan := NewPlan([]GPU{sick, part, board, whole(3, a100)},
		defaults(Share{Resource: "nvidia.com/gpu", Replicas: 3}))
	if diff := cmp.Diff([]string{
		"nvidia.com/gpu: 0×3! 3×3",
		"nvidia.com/mig-1g.5gb: 1:0×1 1:1×1! 2:0×1! 2:1×1!",
	}, show(plan)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	var healthy []int
	for _, resource := range plan.Resources {
		healthy = append(healthy, resource.Healthy())
	}
	if !slices.Equal(healthy, []int{3, 1}) {
		t.Errorf("healthy devices %v, want [3 1]", healthy)
	}
	if diff := cmp.Diff(map[string]string{
		sick.UUID:                "xid 79",
		part.UUID:                "",
		part.Partitions[0].UUID:  "",
		part.Partitions[1].UUID:  "xid 43",
		board.UUID:               "lost",
		board.Partitions[0].UUID: "lost",
		board.Partitions[1].UUID: "lost",
		whole(3, a100).UUID:      "",
	}, plan.Faults); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	if plan.Warnings != nil {
		t.Errorf("a fault is not a warning: %q", plan.Warnings)
	}
}

// What is not offered keeps its entry: gone and not offered are different.
func TestPlanFaultsOfUnoffered(t *testing.T) {
	board := cut(0, oneG())
	board.Partitions[0].Fault = "xid 43"
	profile := defaults()
	profile.Exclude = selectors(t, "0", "1")
	plan := NewPlan([]GPU{board, whole(1, a100)}, profile)
	want := map[string]string{board.UUID: "", board.Partitions[0].UUID: "xid 43", whole(1, a100).UUID: ""}
	if diff := cmp.Diff(want, plan.Faults); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
}

func TestPlanNaming(t *testing.T) {
	profile := defaults()
	profile.GPUNames = []Naming{
		{"A100", "nvidia.com/a100"}, {"*SXM4*", "nvidia.com/sxm4"}, {"*", "nvidia.com/gpu"},
	}
	profile.MIGNames = []Naming{{"2g.*", "nvidia.com/medium"}, {"2g.10gb", "nvidia.com/never"}}
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
				"nvidia.com/medium: 0:0×1 0:3×1", "nvidia.com/mig-1g.5gb: 0:1×1", "nvidia.com/mig-1g.5gb.me: 0:2×1",
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
	profile := defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2})
	profile.Exclude = selectors(t, "1:1")
	before := []GPU{gpus[0], gpus[1]}
	before[0].Partitions = slices.Clone(gpus[0].Partitions)

	NewPlan(gpus, profile)
	if diff := cmp.Diff(before, gpus); diff != "" {
		t.Errorf("the boards changed (-before +after):\n%s", diff)
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
		{"boards with MIG off do not count", []GPU{cut(0, oneG()), off}, oneG()},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := prevailing(test.gpus); got != test.want {
				t.Errorf("prevailing = %v, want %v", got, test.want)
			}
		})
	}
}
