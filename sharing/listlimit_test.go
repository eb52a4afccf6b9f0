package sharing

import (
	"slices"
	"strings"
	"testing"
)

// TestListLimit: a resource has as many units as a list of the kubelet can hold,
// and those left out are named with their entry.
func TestListLimit(t *testing.T) {
	const gpu = "nvidia.com/gpu"
	tests := []struct {
		name   string
		boards int
		shares []Share
		// devices are those of the resource, warning is in a warning; "" for none.
		devices int
		warning string
	}{
		{"exactly full", 3, []Share{{Resource: gpu, Replicas: MostDevices / 3}}, MostDevices, ""},
		{"one too many", 3, []Share{{Resource: gpu, Replicas: MostDevices/3 + 1}}, 2 * (MostDevices/3 + 1), "resources[0].replicas: 1 of 3 units with 13108 replicas"},
		{"one board alone", 1, []Share{{Resource: gpu, Replicas: MostDevices + 1}}, 0, "resources[0].replicas: 1 of 1 units with 39322 replicas"},
		{"64 boards", 64, []Share{{Resource: gpu, Replicas: 2457}}, 16 * 2457, "resources[0].replicas: 48 of 64 units with 2457 replicas are not offered as nvidia.com/gpu: the kubelet takes no list beyond 4 MiB, which is 39321 devices"},
		{
			"what is smaller still fits", 3, []Share{{Resource: gpu, Select: Selection{Count: 2}, Replicas: 30000}, {Resource: gpu, Replicas: 9000}},
			39000, "resources[0].replicas: 1 of 3 units with 30000 replicas",
		},
		{
			"two names have a list each", 2, []Share{{Resource: gpu, Select: Selection{Count: 1}, Replicas: 30000, Rename: "nvidia.com/many"}, {Resource: gpu, Replicas: 30000}},
			30000, "",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			plan := NewPlan(node(test.boards), defaults(test.shares...))
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
			if warned != (test.warning != "") || len(plan.Warnings) > 1 {
				t.Errorf("warnings %q, want %q", plan.Warnings, test.warning)
			}
		})
	}
}
