package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// quickly makes a surplus device leave after three seconds instead of 30: the
// kubelet here writes the node's status ten times as often as one does by default.
const quickly = "extraArgs[0]=--quiet-time=3s"

// testShares plays the chart's profiles for whole GPUs, by the node's label.
func testShares(t *testing.T, c *cluster) {
	c.install(t, "node=sim:dgx-a100", quickly)
	c.offers(t, map[string]int64{"nvidia.com/gpu": 32})
	t.Cleanup(func() { c.label(t, "") })

	t.Run("capacity", func(t *testing.T) {
		for _, profile := range []struct {
			name string
			want map[string]int64
		}{
			{"time-slicing-10", map[string]int64{"nvidia.com/gpu": 80}},
			{"time-slicing-renamed", map[string]int64{"nvidia.com/gpu.shared": 32}},
			{"side-by-side", map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16}},
			{"excluded-gpu", map[string]int64{"nvidia.com/gpu": 28}},
			{"time-slicing-4", map[string]int64{"nvidia.com/gpu": 32}},
		} {
			began := time.Now()
			c.label(t, profile.name)
			c.offers(t, profile.want)
			c.report.note("label "+profile.name+" to capacity and allocatable", time.Since(began).Round(10*time.Millisecond).String())
		}
	})
	t.Run("distributed", func(t *testing.T) {
		c.label(t, "time-slicing-4")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 32})
		pods := numbered("distributed", 9, "nvidia.com/gpu")
		c.runAll(t, pods)
		gpus := c.gpus(t, pods)
		if got := len(slices.Compact(slices.Sorted(slices.Values(gpus)))); got != 8 {
			t.Errorf("nine pods see %d GPUs, want all 8: %q", got, gpus)
		}
	})
	t.Run("one share only", func(t *testing.T) {
		c.label(t, "time-slicing-10")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 80})
		greedy := pod("greedy", "nvidia.com/gpu", 2)
		c.create(t, greedy)
		refused := c.awaitPhase(t, greedy.Name, v1.PodFailed)
		const want = "nvidia.com/gpu is shared: a container may request 1, not 2"
		if refused.Status.Reason != unexpectedAdmission || !strings.Contains(refused.Status.Message, want) {
			t.Errorf("refused with %s: %q, want %s and %q", refused.Status.Reason, refused.Status.Message, unexpectedAdmission, want)
		}
		pods := numbered("packed", 3, "nvidia.com/gpu")
		c.runAll(t, pods)
		if gpus := c.gpus(t, pods); gpus[0] != gpus[1] || gpus[0] != gpus[2] {
			t.Errorf("pods see %q, want one GPU that is filled first", gpus)
		}
	})
	t.Run("whole", func(t *testing.T) {
		c.label(t, "side-by-side")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16})
		whole, shared := numbered("whole", 6, "nvidia.com/gpu"), numbered("shared", 4, "nvidia.com/gpu.shared")
		c.runAll(t, slices.Concat(whole, shared))
		all := c.gpus(t, slices.Concat(whole, shared))
		if got := len(slices.Compact(slices.Sorted(slices.Values(all)))); got != 8 {
			t.Errorf("6 whole GPUs and 4 shares of 2 more are %d, want 8: %q", got, all)
		}
		next := pod("next", "nvidia.com/gpu", 1)
		c.create(t, next)
		c.awaitUnscheduled(t, next.Name, "Insufficient nvidia.com/gpu")
		c.remove(t, whole[2].Name)
		c.awaitPhase(t, next.Name, v1.PodRunning)
		if diff := cmp.Diff(all[2:3], c.gpus(t, []*v1.Pod{next})); diff != "" {
			t.Errorf("the GPU that became free is not the next pod's (-want +got):\n%s", diff)
		}
	})
}

// numbered are so many pods for one of the resource each.
func numbered(name string, count int, resourceName string) []*v1.Pod {
	pods := make([]*v1.Pod, count)
	for i := range pods {
		pods[i] = pod(fmt.Sprintf("%s-%d", name, i), resourceName, 1)
	}
	return pods
}
