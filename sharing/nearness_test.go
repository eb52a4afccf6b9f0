package sharing

import (
	"fmt"
	"slices"
	"testing"
)

func TestPairScore(t *testing.T) {
	for _, test := range []struct {
		name        string
		there, back Link
		a, b        int // NUMA nodes
		want        int
	}{
		{"nothing known", Link{}, Link{}, -1, -1, 0},
		{"one NUMA node", Link{}, Link{}, 3, 3, 20},
		{"two NUMA nodes", Link{}, Link{}, 0, 1, 10},
		{"NUMA node of one", Link{}, Link{}, 0, -1, 0},
		{"NUMA node of the other", Link{}, Link{}, -1, 0, 0},
		{"one board", Link{Level: "internal"}, Link{Level: "internal"}, 0, 0, 60},
		{"one switch", Link{Level: "single"}, Link{Level: "single"}, 0, 0, 50},
		{"several switches", Link{Level: "multiple"}, Link{Level: "multiple"}, 0, 0, 40},
		{"one host bridge", Link{Level: "hostbridge"}, Link{Level: "hostbridge"}, 0, 0, 30},
		{"one processor", Link{Level: "node"}, Link{Level: "node"}, 0, 0, 20},
		{"two processors", Link{Level: "system"}, Link{Level: "system"}, 0, 0, 10},
		{"an unknown level", Link{Level: "galaxy"}, Link{}, 0, 0, 20},
		{"a level that is known one way", Link{}, Link{Level: "single"}, 0, 1, 50},
		{"a level that is known the other way", Link{Level: "single"}, Link{}, 0, 1, 50},
		{"NVLinks with a level", Link{NVLinks: 4, Level: "system"}, Link{NVLinks: 4, Level: "system"}, 0, 0, 410},
		{"NVLinks with NUMA nodes", Link{NVLinks: 18}, Link{NVLinks: 18}, 0, 0, 1820},
		{"NVLinks that are known one way", Link{}, Link{NVLinks: 2, Level: "node"}, 0, 0, 220},
		{"NVLinks that are known the other way", Link{NVLinks: 2, Level: "node"}, Link{}, 0, 0, 220},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b, c := whole(0, a100), whole(1, a100), whole(2, a100)
			test.there.Peer, test.back.Peer = b.UUID, a.UUID
			units := []*Unit{
				{ID: a.UUID, GPU: a.UUID, NUMANode: test.a, Links: []Link{test.there}},
				{ID: b.UUID, GPU: b.UUID, NUMANode: test.b, Links: []Link{test.back}},
				{ID: c.UUID, GPU: c.UUID, NUMANode: -1, Links: []Link{{Peer: a.UUID, NVLinks: 99}, {Peer: "GPU-of-another-resource", NVLinks: 7}}},
			}
			n := newNearness(units)
			if got := n.score(0, 1); got != test.want || n.score(1, 0) != got {
				t.Errorf("score = %d and %d, want %d", got, n.score(1, 0), test.want)
			}
			if n.score(1, 2) != 0 || n.score(2, 0) != 9900 || n.score(1, 1) != 0 {
				t.Errorf("other scores are %d, %d and %d", n.score(1, 2), n.score(2, 0), n.score(1, 1))
			}
		})
	}
}

// Where links make no difference none are kept.
func TestNewNearnessOfEquals(t *testing.T) {
	for _, test := range []struct {
		name  string
		nodes []int
		known bool
	}{
		{"no board", nil, false},
		{"one board", []int{0}, false},
		{"two boards", []int{0, 1}, false},
		{"one NUMA node", []int{1, 1, 1, 1}, false},
		{"no NUMA node", []int{-1, -1, -1}, false},
		{"each its own", []int{0, 1, 2}, false},
		{"one apart", []int{0, 0, 1}, true},
		{"the last apart", []int{0, 0, 0, 0, 0, 1}, true},
		{"as many as there may be", append(slices.Repeat([]int{0}, mostSeats-1), 1), true},
		{"too many", append(slices.Repeat([]int{0}, mostSeats), 1), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			var boards []*Unit
			for i, node := range test.nodes {
				id := fmt.Sprint("GPU-", i)
				boards = append(boards, &Unit{ID: id, GPU: id, NUMANode: node})
			}
			if got := newNearness(boards) != nil; got != test.known {
				t.Errorf("nearness is known: %v, want %v", got, test.known)
			}
		})
	}
}

// Links reach the units that are whole boards, and no other.
func TestPlanLinks(t *testing.T) {
	boards := fabricOf("DGX-1 V100").node()
	cut := cut(8, oneG())
	cut.Links = []Link{{Peer: boards[0].UUID, NVLinks: 12}}
	plan := NewPlan(append(boards, cut), defaults())
	for _, resource := range plan.Resources {
		for _, unit := range resource.Units {
			if want := map[bool]int{true: 0, false: 7}[unit.Partition()]; len(unit.Links) != want {
				t.Errorf("%s has %d links, want %d", unit.Index, len(unit.Links), want)
			}
		}
	}
	if len(plan.Resources) != 2 {
		t.Errorf("%d resources, want whole boards and partitions", len(plan.Resources))
	}
}

// A choice by links is for boards that the container has whole and alone.
func TestPreferByLinksOnlyWholeBoards(t *testing.T) {
	boards := fabricOf("8 × H100 NVL").node()[:4]
	id := func(board int) string { return boards[board].UUID }
	sick := boards[0]
	sick.Fault = "XID 79"
	one := boards[3]
	one.MIG = true
	one.Partitions = []Partition{{UUID: "MIG-1", Profile: threeG()}, {UUID: "MIG-2", Index: 1, Profile: threeG()}}
	single := defaults()
	single.MIGNames = []Naming{{"*", "nvidia.com/gpu"}}
	for _, test := range []struct {
		name            string
		boards          []GPU
		profile         Profile
		available, must []string
		want            []string
	}{
		{"whole boards", boards, defaults(), []string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"policy makes no difference", boards, Profile{GPUNames: defaults().GPUNames, Policy: Packed},
			[]string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"one is shared and free", boards, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(0) + "::0", id(1), id(2), id(3)}, nil, []string{id(1), id(2)}},
		{"one is shared and not free", boards, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"the container has a shared one", boards, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(1), id(2), id(3)}, []string{id(0) + "::1"}, []string{id(0) + "::1", id(1)}},
		{"one is in partitions and free", []GPU{boards[0], boards[1], boards[2], one}, single,
			[]string{id(1), id(2), "MIG-2"}, nil, []string{id(1), id(2)}},
		{"too few that are healthy", []GPU{sick, boards[1], boards[2], boards[3]}, defaults(),
			[]string{id(0), id(3)}, nil, []string{id(3), id(0)}},
		{"no need for more", boards, defaults(), []string{id(1), id(2), id(3)}, []string{id(3), id(1)}, []string{id(1), id(3)}},
		{"an unknown one", boards, defaults(), []string{id(1), id(2), id(3), "X"}, nil, []string{id(2), id(3)}},
		{"the container has an unknown one", boards, defaults(), []string{id(1), id(2), id(3)}, []string{"X"}, []string{"X", id(1)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := NewPlan(test.boards, test.profile).Resources[0]
			got := NewIndex(resource.Devices, resource.Units, resource.Policy).Prefer(test.available, test.must, 2)
			if !slices.Equal(got, test.want) {
				t.Errorf("Prefer = %q, want %q", got, test.want)
			}
		})
	}
}

// A unit with a replica in the list is not a board alone, even if it is the
// only device left of it.
func TestIndexSeatsOnlyExclusiveUnits(t *testing.T) {
	var hardware []Unit
	for _, id := range []string{"A", "B", "C", "D"} {
		hardware = append(hardware, Unit{ID: id, GPU: id, NUMANode: -1})
	}
	hardware[1].Links = []Link{{Peer: "D", NVLinks: 2}}
	for _, test := range []struct {
		name string
		// ofA are the devices of unit A, the first of them available.
		ofA, want []string
	}{
		{"alone", []string{"A"}, []string{"B", "D"}},
		{"a replica", []string{"A::0"}, []string{"A::0", "B"}},
		{"a replica beside it", []string{"A", "A::0"}, []string{"B", "C"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var devices []Device
			for _, id := range test.ofA {
				devices = append(devices, Device{ID: id, Unit: "A", Healthy: true})
			}
			devices = append(devices, units(t, "B×1 C×1 D×1")...)
			got := NewIndex(devices, hardware, Distributed).Prefer([]string{test.ofA[0], "B", "C", "D"}, nil, 2)
			if !slices.Equal(got, test.want) {
				t.Errorf("Prefer = %q, want %q", got, test.want)
			}
		})
	}
}
