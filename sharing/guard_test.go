package sharing

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestSetLimits checks each container's limit, and that an uncertain limit is not set.
func TestSetLimits(t *testing.T) {
	const gib = 1 << 30
	gpu := GPU{UUID: "GPU-a", Memory: 40 * gib}
	offer := func(name string, replicas int, guard MemoryGuard) []Resource {
		return []Resource{{Name: name, Units: []Unit{{ID: gpu.UUID, GPU: gpu.UUID, Replicas: replicas, Guard: guard}}}}
	}
	holds := func(devices ...string) Allocation {
		return Allocation{Namespace: "ns", Pod: "p", Container: "c", Resource: "r", Devices: devices}
	}
	share := MemoryGuard{Share: true}
	type test struct {
		name            string
		guard           MemoryGuard
		planned, listed []Resource
		gpu             GPU
		held            []Allocation
		// limit is in GiB; 0 without one.
		limit float64
	}
	usual := func(name string, limit float64, change func(*test)) test {
		c := test{name: name, guard: share, gpu: gpu, held: []Allocation{holds("GPU-a::1")}, limit: limit}
		change(&c)
		if c.planned == nil {
			c.planned = offer("r", 4, c.guard)
		}
		if c.listed == nil {
			c.listed = offer("r", 4, MemoryGuard{})
		}
		return c
	}
	other := holds("GPU-a::2")
	other.Resource = "older"
	claimed := holds("GPU-a")
	claimed.Claim = "claim"
	for _, c := range []test{
		usual("a share", 10, func(*test) {}),
		usual("two shares", 20, func(c *test) { c.held = []Allocation{holds("GPU-a::1", "GPU-a::3")} }),
		usual("a part", 16, func(c *test) { c.guard = MemoryGuard{Ratio: .4} }),
		usual("an amount", 8, func(c *test) { c.guard = MemoryGuard{Bytes: 8 * gib} }),
		usual("more than there is", 40, func(c *test) {
			c.guard, c.held = MemoryGuard{Bytes: 30 * gib}, []Allocation{holds("GPU-a::0", "GPU-a::1")}
		}),
		usual("no guard", 0, func(c *test) { c.guard = MemoryGuard{} }),
		usual("held as a whole", 0, func(c *test) { c.held = []Allocation{holds("GPU-a")} }),
		usual("held as a whole and as a share", 0, func(c *test) { c.held = []Allocation{holds("GPU-a", "GPU-a::1")} }),
		usual("held as a whole, which has become the first of the shares", 10, func(c *test) {
			c.listed, c.held = offer("r", 4, MemoryGuard{}), []Allocation{holds("GPU-a")}
			c.listed[0].Devices = []Device{{ID: "GPU-a", Unit: "GPU-a"}, {ID: "GPU-a::1", Unit: "GPU-a"}}
		}),
		usual("held by a claim", 0, func(c *test) { c.held = []Allocation{claimed} }),
		usual("held under another name", 0, func(c *test) { c.held = []Allocation{other} }),
		usual("held under two names", 0, func(c *test) { c.held = []Allocation{holds("GPU-a::1"), other} }),
		usual("listed with other replicas", 0, func(c *test) { c.listed = offer("r", 8, MemoryGuard{}) }),
		usual("listed under another name", 0, func(c *test) { c.listed = offer("older", 4, MemoryGuard{}) }),
		usual("listed under two names", 0, func(c *test) { c.listed = append(offer("r", 4, MemoryGuard{}), offer("older", 4, MemoryGuard{})...) }),
		usual("not listed", 0, func(c *test) { c.listed = []Resource{} }),
		usual("memory unknown", 0, func(c *test) { c.gpu.Memory = 0 }),
	} {
		t.Run(c.name, func(t *testing.T) {
			report := UtilizationReport{Containers: []ContainerUtilization{
				{Container: Container{"ns", "p", "c"}, GPU: "GPU-a", Unit: "GPU-a", Memory: new(12.0 * gib)},
				{Container: Container{"ns", "q", "c"}, GPU: "GPU-a", Unit: "GPU-a", Memory: new(12.0 * gib)},
				{Container: Container{"ns", "p", "c"}, GPU: "GPU-b", Unit: "GPU-b", Memory: new(12.0 * gib)},
			}}
			report.SetLimits([]GPU{c.gpu}, c.planned, c.listed, c.held)
			got := report.Containers[0]
			switch {
			case c.limit == 0 && (got.Limit != nil || got.Excess() != 0):
				t.Errorf("limit %v", *got.Limit)
			case c.limit != 0 && (got.Limit == nil || *got.Limit != c.limit*gib || got.Excess() != max(0, 12-c.limit)*gib || got.Guard != c.guard):
				t.Errorf("got %+v, want a limit of %v GiB", got, c.limit)
			}
			if report.Containers[1].Limit != nil || report.Containers[2].Limit != nil {
				t.Error("one that holds nothing has a limit")
			}
		})
	}
	unknown := UtilizationReport{Containers: []ContainerUtilization{{Container: Container{"ns", "p", "c"}, Unit: "GPU-a"}}}
	unknown.SetLimits([]GPU{gpu}, offer("r", 4, share), offer("r", 4, share), []Allocation{holds("GPU-a::1")})
	if diff := cmp.Diff(UtilizationReport{Containers: []ContainerUtilization{{Container: Container{"ns", "p", "c"}, Unit: "GPU-a"}}}, unknown); diff != "" {
		t.Errorf("where its memory is unknown (-want +got):\n%s", diff)
	}
}

// TestPlanHasTheEntrysGuard checks that only the units of an entry have its guard.
func TestPlanHasTheEntrysGuard(t *testing.T) {
	guard := MemoryGuard{Share: true, Grace: time.Minute, Evict: true}
	settings := DriverSettings{TimeSlice: LongTimeSlice}
	profile := Profile{MIGStrategy: MIGMixed, GPUNames: []NamingRule{{"*", "nvidia.com/gpu"}}, TimeSlicing: []ReplicatedResource{
		{Path: "e", Resource: "nvidia.com/gpu", Replicas: 2, Select: Selection{Count: 1}, Guard: guard, Driver: settings},
	}}
	plan := NewPlan([]GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Index: 1}}, profile)
	got := map[string]Unit{}
	for _, unit := range plan.Resources[0].Units {
		got[unit.ID] = unit
	}
	if got["GPU-a"].Guard != guard || got["GPU-a"].Driver != settings || got["GPU-b"].Guard != (MemoryGuard{}) || got["GPU-b"].Driver != (DriverSettings{}) {
		t.Errorf("units are %+v", got)
	}
}
