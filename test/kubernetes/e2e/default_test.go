package e2e

import (
	"strings"
	"testing"
	"time"
)

// testDefaultValues installs the chart as a new user does.
func testDefaultValues(t *testing.T, c *cluster) {
	began := time.Now()
	c.install(t, "node=sim:dgx-a100")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 32})
	took := time.Since(began)
	c.report.note("helm install to allocatable", took.Round(10*time.Millisecond).String())
	if took > time.Minute {
		t.Errorf("shared GPUs took %s, longer than a minute", took)
	}
	c.run(t, pod("first", "nvidia.com/gpu", 1))
	if got := c.printedVariable(t, "first", "NVIDIA_VISIBLE_DEVICES"); !strings.HasPrefix(got, "GPU-") || strings.Contains(got, ",") {
		t.Errorf("the pod sees %q, want one GPU", got)
	}
}
