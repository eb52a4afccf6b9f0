package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlanShares(t *testing.T) {
	const gpu, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
	for _, test := range []planCase{
		{
			name:    "all",
			gpus:    node(3),
			profile: defaults(Share{Resource: gpu, Replicas: 4}),
			want:    []string{"nvidia.com/gpu: 0×4 1×4 2×4"},
		}, {
			name:    "renamed",
			gpus:    node(2),
			profile: defaults(Share{Resource: gpu, Replicas: 4, Rename: shared}),
			want:    []string{"nvidia.com/gpu.shared: 0×4 1×4"},
		}, {
			name:    "first N, the rest exclusive",
			gpus:    []GPU{whole(2, a100), whole(0, a100), whole(10, a100), whole(1, a100)},
			profile: defaults(Share{Resource: gpu, Replicas: 4, Rename: shared, Select: Selection{Count: 2}}),
			want:    []string{"nvidia.com/gpu: 2×1 10×1", "nvidia.com/gpu.shared: 0×4 1×4"},
		}, {
			name:    "listed",
			gpus:    node(4),
			profile: defaults(Share{Resource: gpu, Replicas: 4, Select: list(t, "3", node(4)[1].UUID)}),
			want:    []string{"nvidia.com/gpu: 0×1 1×4 2×1 3×4"},
		}, {
			name: "the first entry that selects a unit has it",
			gpus: node(4),
			profile: defaults(
				Share{Resource: gpu, Replicas: 2, Select: list(t, "1")},
				Share{Resource: gpu, Replicas: 3, Select: Selection{Count: 2}},
				Share{Resource: gpu, Replicas: 5},
			),
			want: []string{"nvidia.com/gpu: 0×3 1×2 2×3 3×5"},
		}, {
			name: "whole, shared and partitioned side by side",
			gpus: []GPU{whole(0, a100), whole(1, a100), cut(2, oneG(), oneG(), twoG())},
			profile: defaults(
				Share{Resource: gpu, Replicas: 8, Rename: shared, Select: list(t, "0")},
				Share{Resource: "nvidia.com/mig-1g.5gb", Replicas: 2},
			),
			want: []string{
				"nvidia.com/gpu: 1×1", "nvidia.com/gpu.shared: 0×8",
				"nvidia.com/mig-1g.5gb: 2:0×2 2:1×2", "nvidia.com/mig-2g.10gb: 2:2×1",
			},
		}, {
			name:    "a board selects its partitions",
			gpus:    []GPU{cut(0, oneG(), oneG()), cut(1, oneG(), oneG())},
			profile: defaults(Share{Resource: "nvidia.com/mig-1g.5gb", Replicas: 3, Select: list(t, "0", "1:1")}),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:0×3 0:1×3 1:0×1 1:1×3"},
		}, {
			name: "one replica is exclusive, by the name the entry gives",
			gpus: node(2),
			profile: defaults(
				Share{Resource: gpu, Replicas: 1, Rename: "nvidia.com/alone", Select: list(t, "1")},
				Share{Resource: gpu, Replicas: 0},
			),
			want: []string{"nvidia.com/alone: 1×1", "nvidia.com/gpu: 0×1"},
		}, {
			name: "names before renaming",
			gpus: node(2),
			profile: defaults(
				Share{Resource: gpu, Replicas: 2, Rename: shared},
				Share{Resource: shared, Replicas: 7},
			),
			want:     []string{"nvidia.com/gpu.shared: 0×2 1×2"},
			warnings: []string{"resources[1]: no unit of nvidia.com/gpu.shared on this node"},
		}, {
			name: "renamed to a name that others have",
			gpus: []GPU{whole(1, a100), cut(0, oneG()), whole(2, a100)},
			profile: defaults(
				Share{Resource: gpu, Replicas: 2, Rename: "nvidia.com/any", Select: list(t, "2")},
				Share{Resource: "nvidia.com/mig-1g.5gb", Replicas: 3, Rename: "nvidia.com/any"},
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
				Share{Resource: gpu, Replicas: 2},
				Share{Resource: "nvidia.com/mig-1g.5gb", Replicas: 2, Select: list(t, "0:0")},
			),
			want:     []string{"nvidia.com/gpu: 0×2"},
			warnings: []string{"resources[1]: no unit of nvidia.com/mig-1g.5gb on this node"},
		}, {
			name:     "everything taken",
			gpus:     node(1),
			profile:  defaults(Share{Resource: gpu, Replicas: 2}, Share{Resource: gpu, Replicas: 3}),
			want:     []string{"nvidia.com/gpu: 0×2"},
			warnings: []string{"resources[1]: earlier entries take every unit of nvidia.com/gpu"},
		}, {
			name:     "more than there are",
			gpus:     node(2),
			profile:  defaults(Share{Resource: gpu, Replicas: 2, Select: Selection{Count: 3}}),
			want:     []string{"nvidia.com/gpu: 0×2 1×2"},
			warnings: []string{"resources[0].devices: 3 units of nvidia.com/gpu wanted, 2 free on this node"},
		}, {
			name:    "as many as there are",
			gpus:    node(2),
			profile: defaults(Share{Resource: gpu, Replicas: 2, Select: Selection{Count: 2}}),
			want:    []string{"nvidia.com/gpu: 0×2 1×2"},
		}, {
			name: "selectors",
			gpus: []GPU{whole(0, a100), whole(1, a100), cut(2, oneG())},
			profile: defaults(
				Share{Resource: gpu, Replicas: 2, Select: list(t, "0")},
				Share{Resource: gpu, Replicas: 3, Select: list(t, "0", "1", "2", "9")},
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
			profile: defaults(Share{Resource: gpu, Replicas: 2, Select: list(t, "0", node(1)[0].UUID)}),
			want:    []string{"nvidia.com/gpu: 0×2 1×1"},
		}, {
			name:    "empty list",
			gpus:    node(1),
			profile: defaults(Share{Resource: gpu, Replicas: 2, Select: Selection{List: []Selector{}}}),
			want:    []string{"nvidia.com/gpu: 0×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanPolicy(t *testing.T) {
	const gpu, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
	type answer struct {
		Policy Policy
		Strict bool
	}
	for _, test := range []struct {
		name     string
		shares   []Share
		want     map[string]answer
		warnings []string
	}{
		{
			name: "the profile's where nothing is shared",
			want: map[string]answer{gpu: {Policy: Distributed}},
		}, {
			name:   "the share's",
			shares: []Share{{Resource: gpu, Replicas: 2, Policy: Packed}},
			want:   map[string]answer{gpu: {Policy: Packed}},
		}, {
			name:   "the share's for exclusive units beside shared ones",
			shares: []Share{{Resource: gpu, Replicas: 2, Policy: Spread, SpreadStrict: true, Select: list(t, "1")}},
			want:   map[string]answer{gpu: {Spread, true}},
		}, {
			name:   "each name its own",
			shares: []Share{{Resource: gpu, Replicas: 2, Rename: shared, Policy: Packed, Select: list(t, "0")}},
			want:   map[string]answer{gpu: {Policy: Distributed}, shared: {Policy: Packed}},
		}, {
			name: "the first share's in the document, whatever the order of the units",
			shares: []Share{
				{Resource: gpu, Replicas: 2, Policy: Packed, Select: list(t, "2")},
				{Resource: gpu, Replicas: 3, Policy: Packed, Select: list(t, "1")},
				{Resource: gpu, Replicas: 4, Policy: Spread, Select: list(t, "0")},
			},
			want:     map[string]answer{gpu: {Policy: Packed}},
			warnings: []string{"resources[2]: the policy of nvidia.com/gpu is that of resources[0]"},
		}, {
			name: "strictness is part of it",
			shares: []Share{
				{Resource: gpu, Replicas: 2, Policy: Spread, Select: list(t, "2")},
				{Resource: gpu, Replicas: 2, Policy: Spread, SpreadStrict: true},
			},
			want:     map[string]answer{gpu: {Policy: Spread}},
			warnings: []string{"resources[1]: the policy of nvidia.com/gpu is that of resources[0]"},
		}, {
			name: "a share without units has no say",
			shares: []Share{
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
