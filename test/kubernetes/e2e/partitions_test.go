package e2e

import (
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// testPartitions plays nodes whose boards are cut.
func testPartitions(t *testing.T, c *cluster) {
	t.Cleanup(func() { c.label(t, "") })
	t.Run("all boards", func(t *testing.T) {
		c.label(t, "mig-mixed")
		c.install(t, "node=sim:dgx-a100+all-balanced", quickly)
		c.offers(t, map[string]int64{"nvidia.com/mig-1g.5gb": 16, "nvidia.com/mig-2g.10gb": 8, "nvidia.com/mig-3g.20gb": 8})
		pods := slices.Concat(numbered("small", 3, "nvidia.com/mig-1g.5gb"), numbered("medium", 2, "nvidia.com/mig-2g.10gb"),
			numbered("large", 2, "nvidia.com/mig-3g.20gb"))
		c.runAll(t, pods)
		c.apart(t, pods, "MIG-")
	})
	t.Run("beside shares and whole GPUs", func(t *testing.T) {
		c.label(t, "side-by-side")
		c.install(t, "node=sim:mixed", quickly)
		c.offers(t, map[string]int64{
			"nvidia.com/gpu": 2, "nvidia.com/gpu.shared": 16,
			"nvidia.com/mig-1g.5gb": 18, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1,
		})
		whole, shares := numbered("whole", 2, "nvidia.com/gpu"), numbered("share", 4, "nvidia.com/gpu.shared")
		alone := []*v1.Pod{pod("medium", "nvidia.com/mig-2g.10gb", 1), pod("large", "nvidia.com/mig-3g.20gb", 1)}
		halves := numbered("half", 10, "nvidia.com/mig-1g.5gb")
		c.runAll(t, slices.Concat(whole, shares, alone, halves))
		c.apart(t, whole, "GPU-")
		c.apart(t, alone, "MIG-")
		c.togetherOn(t, shares, "GPU-", 2)
		// Ten pods on nine partitions: one partition has two of them.
		c.togetherOn(t, halves, "MIG-", 9)
	})
}

// apart says that each pod sees a unit of its own.
func (c *cluster) apart(t *testing.T, pods []*v1.Pod, prefix string) {
	t.Helper()
	c.togetherOn(t, pods, prefix, len(pods))
}

// togetherOn says that each pod sees one unit of that kind, and all of them so many.
func (c *cluster) togetherOn(t *testing.T, pods []*v1.Pod, prefix string, count int) {
	t.Helper()
	units := c.gpus(t, pods)
	for i, unit := range units {
		if !strings.HasPrefix(unit, prefix) || strings.Contains(unit, ",") {
			t.Errorf("pod %s sees %q, want one %s", pods[i].Name, unit, prefix)
		}
	}
	if got := len(slices.Compact(slices.Sorted(slices.Values(units)))); got != count {
		t.Errorf("%d pods see %d units, want %d: %q", len(pods), got, count, units)
	}
}
