package sharing

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestUsage(t *testing.T) {
	const gpu, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
	gpus := node(3)
	plan := NewPlan(gpus, defaults(ReplicatedResource{Resource: gpu, Replicas: 4, Rename: shared, Select: list(t, "0", "2")}))
	var (
		unit0, unit1, unit2 = plan.Resources[1].Units[0], plan.Resources[0].Units[0], plan.Resources[1].Units[1]
		id0, id1, id2       = unit0.ID, unit1.ID, unit2.ID
		gone                = "MIG-00000000-0000-0000-0000-000000000009"
		holder              = func(pod, resource string, devices ...string) Allocation {
			return Allocation{Namespace: "team", Pod: pod, Container: "main", Resource: resource, Devices: devices}
		}
	)
	for _, test := range []struct {
		name        string
		allocations []Allocation
		want        []UnitUsage
	}{
		{
			name: "nothing held",
			want: []UnitUsage{{unit1, gpu, nil}, {unit0, shared, nil}, {unit2, shared, nil}},
		}, {
			name: "several pods on one unit, sorted",
			allocations: []Allocation{
				holder("b", shared, id0+"::3"), holder("c", gpu, id1), holder("a", shared, id0+"::2", id0+"::0"),
			},
			want: []UnitUsage{
				{unit1, gpu, []Allocation{holder("c", gpu, id1)}},
				{unit0, shared, []Allocation{holder("a", shared, id0+"::0", id0+"::2"), holder("b", shared, id0+"::3")}},
				{unit2, shared, nil},
			},
		}, {
			name:        "one pod on several units",
			allocations: []Allocation{holder("a", shared, id0+"::1", id2+"::0", id0+"::0")},
			want: []UnitUsage{
				{unit1, gpu, nil},
				{unit0, shared, []Allocation{holder("a", shared, id0+"::0", id0+"::1")}},
				{unit2, shared, []Allocation{holder("a", shared, id2+"::0")}},
			},
		}, {
			name: "one container told in parts",
			allocations: []Allocation{
				holder("a", shared, id0+"::1"), holder("a", shared, id0+"::0", id0+"::1"), holder("a", gpu, id0),
			},
			want: []UnitUsage{
				{unit1, gpu, nil},
				{unit0, shared, []Allocation{holder("a", gpu, id0), holder("a", shared, id0+"::0", id0+"::1")}},
				{unit2, shared, nil},
			},
		}, {
			name:        "held under an earlier name",
			allocations: []Allocation{holder("a", gpu, id0), holder("b", "nvidia.com/old", id1+"::9")},
			want: []UnitUsage{
				{unit1, gpu, []Allocation{holder("b", "nvidia.com/old", id1+"::9")}},
				{unit0, shared, []Allocation{holder("a", gpu, id0)}},
				{unit2, shared, nil},
			},
		}, {
			name:        "held and not offered",
			allocations: []Allocation{holder("a", "nvidia.com/mig-1g.5gb", gone+"::1"), holder("b", gpu, "GPU-x")},
			want: []UnitUsage{
				{unit1, gpu, nil},
				{unit0, shared, nil},
				{unit2, shared, nil},
				{Unit{ID: "GPU-x"}, "", []Allocation{holder("b", gpu, "GPU-x")}},
				{Unit{ID: gone}, "", []Allocation{holder("a", "nvidia.com/mig-1g.5gb", gone+"::1")}},
			},
		}, {
			name:        "another plugin's devices",
			allocations: []Allocation{holder("a", "example.com/nic", "eth0", "eth1::2"), holder("b", gpu)},
			want:        []UnitUsage{{unit1, gpu, nil}, {unit0, shared, nil}, {unit2, shared, nil}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Usage(plan.Resources, test.allocations)); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}
			slices.Reverse(test.allocations)
			if diff := cmp.Diff(test.want, Usage(plan.Resources, test.allocations)); diff != "" {
				t.Errorf("usage of the reverse (-want +got):\n%s", diff)
			}
		})
	}
}

// Containers and namespaces are kept apart, like pods.
func TestUsageHolders(t *testing.T) {
	holders := []Allocation{
		{Namespace: "a", Pod: "p", Container: "one", Resource: "r", Devices: []string{"GPU-0::3"}},
		{Namespace: "a", Pod: "p", Container: "two", Resource: "r", Devices: []string{"GPU-0::2"}},
		{Namespace: "b", Pod: "p", Container: "one", Resource: "r", Devices: []string{"GPU-0::1"}},
		{Namespace: "b", Pod: "q", Container: "one", Resource: "r", Devices: []string{"GPU-0::0"}},
	}
	shuffled := []Allocation{holders[2], holders[0], holders[3], holders[1]}
	want := []UnitUsage{{Unit: Unit{ID: "GPU-0"}, Holders: holders}}
	if diff := cmp.Diff(want, Usage(nil, shuffled)); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}
}

func TestUsageHeld(t *testing.T) {
	usage := UnitUsage{Holders: []Allocation{{Devices: []string{"a", "b"}}, {Devices: []string{"c"}}}}
	if got := usage.Held(); got != 3 {
		t.Errorf("Held() = %d, want 3", got)
	}
	if got := (UnitUsage{}).Held(); got != 0 {
		t.Errorf("Held() of nothing = %d", got)
	}
}

func TestUsageLeavesInputAlone(t *testing.T) {
	allocations := []Allocation{{Pod: "b", Devices: []string{"GPU-1", "GPU-0"}}, {Pod: "a", Devices: []string{"GPU-2::1", "GPU-2::0"}}}
	before := []Allocation{{Pod: "b", Devices: []string{"GPU-1", "GPU-0"}}, {Pod: "a", Devices: []string{"GPU-2::1", "GPU-2::0"}}}
	Usage(nil, allocations)
	if diff := cmp.Diff(before, allocations); diff != "" {
		t.Errorf("the allocations changed (-before +after):\n%s", diff)
	}
}

func TestOccupancies(t *testing.T) {
	gpus, _ := sharedGPU()
	device := func(id, unit string, healthy bool) Device { return Device{ID: id, Unit: unit, Healthy: healthy} }
	listings := []Resource{
		{Name: "r", Devices: []Device{
			device("GPU-a::0", "GPU-a", true), device("GPU-a::1", "GPU-a", false), device("GPU-a::2", "GPU-a", false),
			device("GPU-gone::0", "GPU-gone", false), device("GPU-a::3", "GPU-a", true),
		}},
		{Name: "old", Devices: []Device{device("GPU-a::0", "GPU-a", false), device("MIG-b", "MIG-b", true)}},
	}
	held := []Allocation{holder("a", "GPU-a::1"), holder("b", "GPU-a::0"), {Resource: "other", Devices: []string{"MIG-b"}}}
	want := []DeviceCount{
		{Resource: "r", GPU: "GPU-a", Unit: "GPU-a", Free: 1, Allocated: 2, Unhealthy: 1},
		{Resource: "r", Unit: "GPU-gone", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-a", Unit: "GPU-a", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-b", Unit: "MIG-b", Free: 1},
	}
	if diff := cmp.Diff(want, CountDevices(gpus, listings, held)); diff != "" {
		t.Errorf("occupancies (-want +got):\n%s", diff)
	}
}

func TestTenantsAndOversubscription(t *testing.T) {
	_, resources := sharedGPU()
	held := []Allocation{
		holder("a", "GPU-a::0"), holder("b", "GPU-a::1", "GPU-a::2"),
		{Namespace: "other", Pod: "a", Container: "c", Resource: "r", Devices: []string{"GPU-a::3"}},
		{Container: "c", Resource: "r", Devices: []string{"MIG-b"}},
		{Namespace: "ns", Pod: "z", Container: "c", Resource: "old", Devices: []string{"GPU-gone"}},
	}
	usages := Usage(resources, held)
	tenants := map[string]int{}
	for _, usage := range usages {
		tenants[usage.Unit.ID] = usage.Tenants()
	}
	held = append(held, Allocation{Namespace: "other", Pod: "a", Container: "c", Resource: "old", Devices: []string{"GPU-a::4"}})
	if got := Usage(resources, held)[0].Sharers(); got != 3 {
		t.Errorf("%d sharers of which one holds two names, want 3", got)
	}
	if diff := cmp.Diff(map[string]int{"GPU-a": 2, "MIG-b": 0, "GPU-gone": 1}, tenants); diff != "" {
		t.Errorf("tenants (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]float64{"GPU-a": 4, "GPU-b": 1}, Oversubscriptions(usages)); diff != "" {
		t.Errorf("oversubscription (-want +got):\n%s", diff)
	}
}

func TestUnitsOf(t *testing.T) {
	t.Parallel()
	gpus := []GPU{{UUID: "a"}, {UUID: "b", Partitions: []Partition{{UUID: "b1"}, {UUID: "b2"}}}}
	for gpu, want := range map[string][]string{"a": {"a"}, "b": {"b", "b1", "b2"}, "gone": {"gone"}} {
		if got := UnitsOf(gpus, gpu); !slices.Equal(got, want) {
			t.Errorf("units of %s: %q, want %q", gpu, got, want)
		}
	}
}
