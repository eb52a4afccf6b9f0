package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOccupancies(t *testing.T) {
	gpus, _ := sharedBoard()
	device := func(id, unit string, healthy bool) Device { return Device{ID: id, Unit: unit, Healthy: healthy} }
	listings := []Listing{
		{"r", []Device{
			device("GPU-a::0", "GPU-a", true), device("GPU-a::1", "GPU-a", false), device("GPU-a::2", "GPU-a", false),
			device("GPU-gone::0", "GPU-gone", false), device("GPU-a::3", "GPU-a", true),
		}},
		{"old", []Device{device("GPU-a::0", "GPU-a", false), device("MIG-b", "MIG-b", true)}},
	}
	held := []Allocation{holder("a", "GPU-a::1"), holder("b", "GPU-a::0"), {Resource: "other", Devices: []string{"MIG-b"}}}
	want := []Occupancy{
		{Resource: "r", GPU: "GPU-a", Unit: "GPU-a", Free: 1, Allocated: 2, Unhealthy: 1},
		{Resource: "r", Unit: "GPU-gone", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-a", Unit: "GPU-a", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-b", Unit: "MIG-b", Free: 1},
	}
	if diff := cmp.Diff(want, Occupancies(gpus, listings, held)); diff != "" {
		t.Errorf("occupancies (-want +got):\n%s", diff)
	}
}

func TestTenantsAndOversubscription(t *testing.T) {
	_, resources := sharedBoard()
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
	if diff := cmp.Diff([]Oversubscription{{"GPU-a", 4}, {"GPU-b", 1}}, Oversubscriptions(usages)); diff != "" {
		t.Errorf("oversubscription (-want +got):\n%s", diff)
	}
}
