package e2e

import (
	"strings"
	"testing"
)

// testImageSwap runs under NVIDIA's own manifests, of which only the image is
// replaced: its init container and its sidecar, its command, its variables.
func testImageSwap(t *testing.T, c *cluster) {
	c.uninstall(t)
	c.apply(t, "testdata/nvidia.yaml")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 32})
	c.run(t, pod("swapped", "nvidia.com/gpu", 1))
	if got := c.printedVariable(t, "swapped", "NVIDIA_VISIBLE_DEVICES"); !strings.HasPrefix(got, "GPU-") {
		t.Errorf("the pod sees %q, want a GPU", got)
	}
	c.label(t, "ten")
	defer c.label(t, "")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 80})
}
