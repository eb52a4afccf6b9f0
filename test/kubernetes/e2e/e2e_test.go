package e2e

import (
	"os"
	"testing"
)

// TestKubernetes plays everything on one cluster, as starting it takes longest.
// Each part says what it needs installed.
func TestKubernetes(t *testing.T) {
	if os.Getenv(role) != asTest {
		t.Skip(unable())
	}
	c := startCluster(t)
	t.Cleanup(func() { c.removePods(t) })
	defer c.report.write(t)
	for _, part := range []struct {
		name string
		play func(*testing.T, *cluster)
	}{
		{"default values", testDefaultValues},
		{"shares", testShares},
		{"partitions", testPartitions},
		{"storm", testStorm},
		{"shrink with held replicas", testShrink},
		{"rename under load", testRename},
		{"rollout", testRollout},
		{"kubelet restarts", testKubeletRestarts},
		{"containerd restarts", testContainerdRestarts},
		{"plugin killed", testPluginKilled},
		{"bad profile", testBadProfile},
		{"fault", testFault},
		{"outage", testOutage},
		{"rights", testRights},
		{"admission", testAdmission},
		{"uninstall", testUninstall},
		{"CDI", testCDI},
		{"Prometheus", testPrometheus},
		{"image swap", testImageSwap},
		{"manifest", testManifest},
	} {
		t.Run(part.name, func(t *testing.T) { c.report.step(part.name, func() { part.play(t, c) }) })
	}
}
