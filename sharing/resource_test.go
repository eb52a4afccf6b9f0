package sharing

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestResourceStrategy(t *testing.T) {
	gpu := func(replicas int) Unit { return Unit{ID: "GPU-0", GPU: "GPU-0", Replicas: replicas} }
	part := func(replicas int) Unit { return Unit{ID: "MIG-0", GPU: "GPU-0", Replicas: replicas} }
	for _, test := range []struct {
		name        string
		units       []Unit
		want        string
		least, most int
	}{
		{"nothing", nil, "", 0, 0},
		{"exclusive", []Unit{gpu(1), gpu(1)}, "exclusive", 1, 1},
		{"time-slicing", []Unit{gpu(2)}, "time-slicing", 2, 2},
		{"mig", []Unit{part(1)}, "mig", 1, 1},
		{"mig+time-slicing", []Unit{part(3)}, "mig+time-slicing", 3, 3},
		{"mixture", []Unit{gpu(4), gpu(1)}, "exclusive,time-slicing", 1, 4},
		{"everything", []Unit{part(2), part(3), gpu(9), gpu(2)}, "time-slicing,mig+time-slicing", 2, 9},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := Resource{Units: test.units}
			if got := resource.Strategy(); got != test.want {
				t.Errorf("Strategy() = %q, want %q", got, test.want)
			}
			if least, most := resource.Replicas(); least != test.least || most != test.most {
				t.Errorf("Replicas() = %d, %d, want %d, %d", least, most, test.least, test.most)
			}
		})
	}
}

func TestResourceHealthy(t *testing.T) {
	resource := Resource{Devices: units(t, "A×3 B×2 !A::1 !B::0")}
	if got := resource.HealthyDevices(); got != 3 {
		t.Errorf("Healthy() = %d, want 3", got)
	}
}

// testResource has one device a replica for each unit.
func testResource(name string, replicas int, units ...string) Resource {
	r := Resource{Name: name}
	for _, id := range units {
		r.Units = append(r.Units, Unit{ID: id, GPU: id, Replicas: replicas})
		for n := range replicas {
			device := Device{ID: id, Unit: id, Healthy: true}
			if replicas > 1 {
				device.ID = NewDeviceID(id, n)
			}
			r.Devices = append(r.Devices, device)
		}
	}
	return r
}

func TestSummary(t *testing.T) {
	sick := testResource("nvidia.com/gpu", 2, "GPU-a", "GPU-b")
	sick.Devices[0].Healthy = false
	for _, test := range []struct {
		name string
		plan Plan
		want string
	}{
		{"nothing", Plan{}, `{"resources":[],"warnings":[]}`},
		{"one resource", Plan{Resources: []Resource{sick}, Warnings: []string{"w"}},
			`{"resources":[{"name":"nvidia.com/gpu","strategy":"time-slicing","replicas":2,"units":2,"devices":4,"healthy":3,"gpus":[{"uuid":"GPU-a","index":"","devices":2},{"uuid":"GPU-b","index":"","devices":2}]}],"warnings":["w"]}`},
		{"partitions", Plan{Resources: []Resource{{Name: "nvidia.com/small", Units: []Unit{
			{ID: "MIG-a", GPU: "GPU-a", Index: "0:0", Replicas: 1}, {ID: "MIG-b", GPU: "GPU-a", Index: "0:1", Replicas: 3}, {ID: "MIG-c", GPU: "GPU-b", Index: "1:0", Replicas: 1},
		}}}}, `{"resources":[{"name":"nvidia.com/small","strategy":"mig,mig+time-slicing","replicas":1,"maxReplicas":3,"units":3,"devices":0,"healthy":0,` +
			`"gpus":[{"uuid":"GPU-a","index":"0","devices":4},{"uuid":"GPU-b","index":"1","devices":1}]}],"warnings":[]}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := json.Marshal(test.plan.Summary())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDiff(t *testing.T) {
	plan := func(resources ...Resource) Plan { return Plan{Resources: resources} }
	gpu, shared := testResource("nvidia.com/gpu", 1, "GPU-a", "GPU-b"), testResource("nvidia.com/gpu", 4, "GPU-a", "GPU-b")
	leave := func(shared bool, units ...string) (list []Switch) {
		for _, unit := range units {
			list = append(list, Switch{Unit: unit, IdleShares: shared})
		}
		return list
	}
	for _, test := range []struct {
		name     string
		from, to Plan
		want     []Change
	}{
		{"same", plan(gpu), plan(gpu), nil},
		{"grows", plan(shared), plan(testResource("nvidia.com/gpu", 5, "GPU-a", "GPU-b")), []Change{{Kind: Grows, Name: "nvidia.com/gpu", Before: 8, After: 10}}},
		{"is shared", plan(gpu), plan(shared), []Change{{Kind: Grows, Name: "nvidia.com/gpu", Before: 2, After: 8, Switches: leave(false, "GPU-a", "GPU-b")}}},
		{"is exclusive", plan(shared), plan(gpu), []Change{{Kind: Shrinks, Name: "nvidia.com/gpu", Before: 8, After: 2, Switches: leave(true, "GPU-a", "GPU-b")}}},
		{"shrinks", plan(gpu), plan(testResource("nvidia.com/gpu", 1, "GPU-b")), []Change{{Kind: Shrinks, Name: "nvidia.com/gpu", Before: 2, After: 1, Switches: leave(false, "GPU-a")}}},
		{"appears and vanishes", plan(gpu), plan(testResource("nvidia.com/x", 1, "GPU-a")), []Change{
			{Kind: Vanishes, Name: "nvidia.com/gpu", Before: 2, Switches: leave(false, "GPU-a", "GPU-b")},
			{Kind: Appears, Name: "nvidia.com/x", After: 1, Switches: leave(false, "GPU-a")},
		}},
		{"renamed", plan(gpu), plan(testResource("nvidia.com/gpu.shared", 4, "GPU-a", "GPU-b")), []Change{{Kind: Renamed, Name: "nvidia.com/gpu.shared", OldName: "nvidia.com/gpu", Before: 2, After: 8, Switches: leave(false, "GPU-a", "GPU-b")}}},
		{"regrouped", plan(gpu), plan(testResource("nvidia.com/gpu", 1, "GPU-a", "GPU-c")), []Change{{Kind: Regrouped, Name: "nvidia.com/gpu", Before: 2, After: 2, Switches: leave(false, "GPU-b")}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Diff(test.from, test.to)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestMarkUnavailable(t *testing.T) {
	gpus := node(2)
	gpus[1].Health = Faulty("XID 79")
	plan := NewPlan(gpus, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2}))
	before := NewPlan(gpus, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2}))

	got := plan.MarkUnavailable(map[string]string{gpus[0].UUID: "no driver", gpus[1].UUID: "no driver", "GPU-gone": "no driver"})
	if diff := cmp.Diff(map[string]Health{gpus[0].UUID: Faulty("no driver"), gpus[1].UUID: Faulty("XID 79")}, got.Health); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"nvidia.com/gpu: 0×2! 1×2!"}, show(got)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	if healthy := got.Resources[0].HealthyDevices(); healthy != 0 {
		t.Errorf("%d devices are healthy", healthy)
	}
	if diff := cmp.Diff(before, plan); diff != "" {
		t.Errorf("the plan was modified (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(before, plan.MarkUnavailable(nil)); diff != "" {
		t.Errorf("nothing withheld (-plan +got):\n%s", diff)
	}
	if one := plan.MarkUnavailable(map[string]string{gpus[0].UUID: "no driver"}).MarkUnavailable(map[string]string{}); one.Health[gpus[0].UUID].Healthy() {
		t.Error("an earlier reason is lost")
	}
}

// TestHeldOtherwise checks that a device held under the planned name and in the planned mode is no obstacle.
func TestHeldOtherwise(t *testing.T) {
	plan := Plan{Resources: []Resource{
		{Name: "gpu", Units: []Unit{{ID: "GPU-a", Replicas: 1}, {ID: "GPU-b", Replicas: 1}}},
		{Name: "share", Units: []Unit{{ID: "GPU-c", Replicas: 4}, {ID: "GPU-d", Replicas: 4, MPS: MPS{Shares: 4}}}},
	}}
	byID := func(_, device string) Mode { return ModeOf(device) }
	for _, test := range []struct {
		name string
		held Allocation
		want string // The unit; "" without one.
	}{
		{"exclusive", Allocation{Resource: "gpu", Devices: []string{"GPU-a"}}, ""},
		{"exclusive under another name", Allocation{Resource: "other", Devices: []string{"GPU-a"}}, "GPU-a"},
		{"a share of what is exclusive", Allocation{Resource: "gpu", Devices: []string{"GPU-b::0"}}, "GPU-b"},
		{"a share", Allocation{Resource: "share", Devices: []string{"GPU-c::3"}}, ""},
		{"one share more than there will be", Allocation{Resource: "share", Devices: []string{"GPU-c::7"}}, ""},
		{"whole, of what is shared", Allocation{Resource: "share", Devices: []string{"GPU-c"}}, "GPU-c"},
		{"by MPS", Allocation{Resource: "share", Devices: []string{"GPU-d::1of4"}}, ""},
		{"by MPS between another number", Allocation{Resource: "share", Devices: []string{"GPU-d::1of2"}}, "GPU-d"},
		{"not by MPS", Allocation{Resource: "share", Devices: []string{"GPU-d::1"}}, "GPU-d"},
		{"not in the plan", Allocation{Resource: "gpu", Devices: []string{"GPU-z"}}, "GPU-z"},
		{"by a claim, not in the plan", Allocation{Resource: "driver", Devices: []string{"GPU-z"}, Claim: "c"}, ""},
		{"by a claim, in the plan", Allocation{Resource: "driver", Devices: []string{"GPU-a"}, Claim: "c"}, "GPU-a"},
		{"by a claim of any GPU", Allocation{Resource: "driver", Devices: []string{"GPU-a", "GPU-z"}, Claim: "c", AnyGPU: true}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			for _, u := range plan.HeldOtherwise([]Allocation{test.held}, byID) {
				got += u.Unit.ID
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
	mixed := []Allocation{{Pod: "p", Resource: "share", Devices: []string{"GPU-c::0"}}, {Pod: "q", Resource: "gpu", Devices: []string{"GPU-c"}}}
	if got := plan.HeldOtherwise(mixed, byID); len(got) != 1 || len(got[0].Holders) != 1 || got[0].Holders[0].Pod != "q" {
		t.Errorf("of two holders: %+v", got)
	}
	share := []Allocation{{Pod: "p", Resource: "gpu", Devices: []string{"GPU-a"}}}
	if got := plan.HeldOtherwise(share, func(string, string) Mode { return TimeSliced }); len(got) != 1 {
		t.Errorf("a share with the GPU's own ID, of a GPU that is to be exclusive: %+v", got)
	}
}
