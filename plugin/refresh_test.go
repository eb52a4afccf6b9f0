package plugin_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// TestAllocateDuringRefresh allocates while what the node has and how it is
// granted changes without pause. Each answer is of one state of the node, never
// of two, and none is an error.
func TestAllocateDuringRefresh(t *testing.T) {
	hosts := make([]plugin.Host, 8)
	for i := range hosts {
		hosts[i] = plugin.Host{
			DevRoot: fmt.Sprintf("/driver-%d", i),
			Nodes:   map[string][]string{"GPU-0000": {fmt.Sprintf("/dev/nvidia%d", i)}, "GPU-0001": {fmt.Sprintf("/dev/nvidia%d", i)}},
			Extras:  []string{plugin.CDIName("gds", fmt.Sprint(i))},
		}
	}
	plans := []sharing.Plan{by(plan(gpu, 2, 2), sharing.CDICRI, sharing.DriverMounts), by(plan(gpu, 2, 2), sharing.DriverMounts)}
	client, manager := dialManager(t, plans[0])
	manager.SetHost(hosts[0])
	awaitGrant(t, client, "GPU-0000::0", func(r *api.ContainerAllocateResponse) bool { return len(r.Devices) == 1 })

	// seen are the states that some caller was answered from.
	var seen sync.Map
	var ended atomic.Bool
	var refresher, callers sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	refresher.Go(func() {
		for i := 0; !ended.Load(); i++ {
			manager.SetHost(hosts[i%len(hosts)])
			manager.Apply(plans[i%len(plans)])
		}
	})
	for n := range 4 {
		callers.Go(func() {
			for states := 0; states < len(hosts); {
				response, err := client.Allocate(ctx, allocate(fmt.Sprintf("GPU-%04d::%d", n%2, n/2)))
				if err != nil {
					t.Error(err)
					return
				}
				got := response.ContainerResponses[0]
				if !ofOneState(got) {
					t.Errorf("of several states: %v", got)
					return
				}
				seen.Store(got.Devices[0].HostPath, true)
				states = 0
				seen.Range(func(any, any) bool { states++; return true })
			}
		})
	}
	callers.Wait()
	ended.Store(true)
	refresher.Wait()
}

// ofOneState says that the node, the folder that it lies in and the CDI entry
// have one number.
func ofOneState(r *api.ContainerAllocateResponse) bool {
	if len(r.Devices) != 1 {
		return false
	}
	var folder, node int
	if _, err := fmt.Sscanf(r.Devices[0].HostPath, "/driver-%d/dev/nvidia%d", &folder, &node); err != nil || folder != node {
		return false
	}
	for _, entry := range r.CdiDevices[min(1, len(r.CdiDevices)):] {
		if entry.Name != plugin.CDIName("gds", fmt.Sprint(node)) {
			return false
		}
	}
	return len(r.CdiDevices) != 1
}
