package sharing

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

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
			`{"resources":[{"name":"nvidia.com/gpu","strategy":"time-slicing","replicas":2,"units":2,"devices":4,"healthy":3}],"warnings":["w"]}`},
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
	gpu := testResource("nvidia.com/gpu", 1, "GPU-a", "GPU-b")
	for _, test := range []struct {
		name     string
		from, to Plan
		want     []Change
	}{
		{"same", plan(gpu), plan(gpu), nil},
		{"grows", plan(gpu), plan(testResource("nvidia.com/gpu", 4, "GPU-a", "GPU-b")), []Change{{Kind: Grows, Name: "nvidia.com/gpu", Before: 2, After: 8}}},
		{"shrinks", plan(gpu), plan(testResource("nvidia.com/gpu", 1, "GPU-b")), []Change{{Kind: Shrinks, Name: "nvidia.com/gpu", Before: 2, After: 1}}},
		{"appears and vanishes", plan(gpu), plan(testResource("nvidia.com/x", 1, "GPU-a")), []Change{
			{Kind: Vanishes, Name: "nvidia.com/gpu", Before: 2},
			{Kind: Appears, Name: "nvidia.com/x", After: 1},
		}},
		{"renamed", plan(gpu), plan(testResource("nvidia.com/gpu.shared", 4, "GPU-b", "GPU-a")), []Change{{Kind: Renamed, Name: "nvidia.com/gpu.shared", OldName: "nvidia.com/gpu", Before: 2, After: 8}}},
		{"regrouped", plan(gpu), plan(testResource("nvidia.com/gpu", 1, "GPU-a", "GPU-c")), []Change{{Kind: Regrouped, Name: "nvidia.com/gpu", Before: 2, After: 2}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Diff(test.from, test.to)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
