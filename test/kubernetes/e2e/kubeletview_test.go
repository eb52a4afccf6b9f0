package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// awaitServed waits until the kubelet itself has so many healthy devices of each
// resource; nothing that a node's status still says from before counts.
func (c *cluster) awaitServed(t *testing.T, want map[string]int64) {
	t.Helper()
	kubelet := c.kubeletSays(t)
	c.await(t, 90*time.Second, fmt.Sprintf("the kubelet to have %v", want), func() error {
		answer, err := kubelet.GetAllocatableResources(t.Context(), &api.AllocatableResourcesRequest{})
		if err != nil {
			return err
		}
		got := map[string]int64{}
		for _, device := range answer.GetDevices() {
			got[device.GetResourceName()] += int64(len(device.GetDeviceIds()))
		}
		if difference := cmp.Diff(want, got); difference != "" {
			return fmt.Errorf("it has (-want +got):\n%s", difference)
		}
		return nil
	})
}
