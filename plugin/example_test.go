package plugin_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// A GPU shared by four pods is to be shared by two. One pod holds a device, so that device stays listed, and the
// two surplus devices become Unhealthy before they are removed.
func ExampleNext() {
	const resource = "nvidia.com/gpu"
	shares := func(n int) sharing.Plan {
		planned := sharing.Resource{Name: resource, Units: []sharing.Unit{{ID: "GPU-1", Index: "0"}}}
		for i := range n {
			planned.Devices = append(planned.Devices, sharing.Device{ID: fmt.Sprintf("GPU-1::%d", i), Unit: "GPU-1", Healthy: true, NUMANode: -1})
		}
		return sharing.Plan{Resources: []sharing.Resource{planned}, Health: map[string]sharing.Health{"GPU-1": {}}}
	}
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	kubelet := plugin.KubeletSnapshot{
		Held:   plugin.DeviceIDs{resource: {"GPU-1::3": {}}},
		HeldAt: now, HeldKnown: true, AppliedAt: now, AppliedKnown: true,
	}

	lists := plugin.Next(nil, shares(4), kubelet, plugin.RPCState{}, now, plugin.Timing{})
	lists = plugin.Next(lists, shares(2), kubelet, plugin.RPCState{}, now, plugin.Timing{})
	for _, e := range lists[resource].Entries {
		fmt.Println(e.ID, e.Phase, e.Healthy)
	}
	// Output:
	// GPU-1::0 offered true
	// GPU-1::1 retiring false
	// GPU-1::2 retiring false
	// GPU-1::3 offered true
}

// A manager registers each resource of the plan with the kubelet in whose
// directory it serves; here that is a simulated one.
func ExampleManager() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir})
	go func() { _ = kubelet.Run(ctx) }()

	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	changed := manager.Subscribe()
	stopped := make(chan error)
	go func() { stopped <- manager.Run(ctx) }()
	manager.Apply(sharing.Plan{
		Resources: []sharing.Resource{{
			Name:    "nvidia.com/gpu",
			Units:   []sharing.Unit{{ID: "GPU-1", Index: "0"}},
			Devices: []sharing.Device{{ID: "GPU-1", Unit: "GPU-1", Healthy: true, NUMANode: -1}},
		}},
		Health: map[string]sharing.Health{"GPU-1": {}},
	})
	for len(manager.Status().Resources) == 0 || manager.Status().Resources[0].Streams == 0 {
		<-changed
	}
	fmt.Println(manager.Status().Resources[0].Name, "is registered with", manager.Status().Resources[0].Devices, "device")
	cancel()
	fmt.Println(<-stopped)
	// Output:
	// nvidia.com/gpu is registered with 1 device
	// <nil>
}
