package e2e

import (
	"slices"
	"strings"
	"testing"
)

// testCDI has containerd put the device nodes into containers, by the specs that
// Virgate writes. A simulated GPU's spec has its node's numbers, so containerd
// makes the node where the machine has none.
func testCDI(t *testing.T, c *cluster) {
	for _, strategy := range []string{"cdi-cri", "cdi-annotations"} {
		c.install(t, "node=sim:dgx-a100", "deviceListStrategy="+strategy, "extraArgs={--cdi-dir=/var/run/cdi}")
		c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 32})
		c.run(t, pod(strategy, "nvidia.com/gpu", 1))
		lines := c.printed(t, strategy)
		for _, want := range []string{"device /dev/nvidiactl", "env NVIDIA_VISIBLE_DEVICES=void"} {
			if !slices.Contains(lines, want) {
				t.Errorf("%s: the container printed %q, not %q", strategy, lines, want)
			}
		}
		boards := slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
			number, ok := strings.CutPrefix(line, "device /dev/nvidia")
			return !ok || strings.Trim(number, "0123456789") != ""
		})
		if len(boards) != 1 {
			t.Errorf("%s: the container has %q, want one GPU's node", strategy, boards)
		}
	}
}
