package sharing_test

import (
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// node is a node with two GPUs that are shared by two containers each.
func node() ([]sharing.GPU, sharing.Profile) {
	gpus := []sharing.GPU{
		{UUID: "GPU-a", Index: 0, Model: "Tesla T4", NUMANode: -1},
		{UUID: "GPU-b", Index: 1, Model: "Tesla T4", NUMANode: -1, Health: sharing.Faulty("XID 79")},
	}
	return gpus, sharing.Profile{
		MIGStrategy: sharing.MIGNone,
		TimeSlicing: []sharing.ReplicatedResource{{Resource: "nvidia.com/gpu", Replicas: 2, Policy: sharing.Packed}},
	}
}

func ExampleNewPlan() {
	plan := sharing.NewPlan(node())
	for _, resource := range plan.Resources {
		fmt.Println(resource.Name, resource.Strategy())
		for _, device := range resource.Devices {
			fmt.Println(device.ID, device.Healthy)
		}
	}
	fmt.Println(plan.Health["GPU-b"].Reason)
	// Output:
	// nvidia.com/gpu time-slicing
	// GPU-a::0 true
	// GPU-a::1 true
	// GPU-b::0 false
	// GPU-b::1 false
	// XID 79
}

func ExampleDeviceSet_Prefer() {
	resource := sharing.NewPlan(node()).Resources[0]
	devices := sharing.NewDeviceSet(resource.Devices, resource.Units, resource.Policy)
	// A pod holds GPU-a::0. Unhealthy devices are chosen last.
	fmt.Println(devices.Prefer([]string{"GPU-a::1", "GPU-b::0", "GPU-b::1"}, nil, 1))
	// Output: [GPU-a::1]
}

func ExampleUsage() {
	plan := sharing.NewPlan(node())
	allocations := []sharing.Allocation{
		{Namespace: "team", Pod: "train", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::0"}},
		{Namespace: "team", Pod: "notebook", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}},
	}
	for _, usage := range sharing.Usage(plan.Resources, allocations) {
		fmt.Printf("%s: %d of %d devices, %d containers\n", usage.Unit.ID, usage.Held(), usage.Unit.Replicas, usage.Sharers())
	}
	// Output:
	// GPU-a: 2 of 2 devices, 2 containers
	// GPU-b: 0 of 2 devices, 0 containers
}
