package e2e

import (
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testKubeletRestarts ends the kubelet, in order and by force, while pods hold
// shares.
func testKubeletRestarts(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
	all := map[string]int64{shared: 8}
	c.awaitServed(t, all)
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.vitals(t, holders), c.plugin(t)
	lasting := pod("lasting", shared, 1)
	lasting.Spec.RestartPolicy = v1.RestartPolicyAlways
	c.run(t, lasting)
	gpu := c.printedVariable(t, lasting.Name, "NVIDIA_VISIBLE_DEVICES")
	for _, way := range []struct {
		name   string
		signal syscall.Signal
	}{{"stopped", syscall.SIGTERM}, {"killed", syscall.SIGKILL}} {
		c.kubelet.stop(way.signal)
		began := time.Now()
		c.kubelet.start(t)
		c.awaitServed(t, all)
		c.report.note("kubelet "+way.name+", start to shares", time.Since(began).Round(10*time.Millisecond).String())
		c.awaitAllocatable(t, all)
		c.hold(t, way.name, 1)
		c.undisturbed(t, before)
	}
	if c.plugin(t).Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Error("the kubelet's end has ended Virgate too")
	}
	c.restart(t, lasting.Name)
	if after := c.printedVariable(t, lasting.Name, "NVIDIA_VISIBLE_DEVICES"); after != gpu {
		t.Errorf("a container that started again has %s, its pod was given %s", after, gpu)
	}
	c.fill(t, append(holders, lasting.Name, "stopped-0", "killed-0"), 2, 4)
}

// testContainerdRestarts does the same to the container runtime, which neither
// Virgate nor a running pod needs.
func testContainerdRestarts(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.vitals(t, holders), c.plugin(t)
	registered := registrations(t, plugin)
	for _, way := range []struct {
		name   string
		signal syscall.Signal
	}{{"stopped", syscall.SIGTERM}, {"killed", syscall.SIGKILL}} {
		c.containerd.stop(way.signal)
		c.awaitServed(t, all)
		if _, err := fetch(plugin, "/readyz"); err != nil {
			t.Errorf("while containerd is %s: %v", way.name, err)
		}
		began := time.Now()
		c.containerd.start(t)
		c.hold(t, way.name, 1)
		c.report.note("containerd "+way.name+", start to a new pod", time.Since(began).Round(10*time.Millisecond).String())
		c.undisturbed(t, before)
		c.awaitAllocatable(t, all)
	}
	if after := c.plugin(t); after.UID != plugin.UID || after.Status.ContainerStatuses[0].ContainerID != plugin.Status.ContainerStatuses[0].ContainerID {
		t.Error("containerd's end has ended Virgate too")
	}
	if after := registrations(t, plugin); after != registered {
		t.Errorf("Virgate has registered %s times, before containerd's end %s", after, registered)
	}
	c.fill(t, append(holders, "stopped-0", "killed-0"), 2, 4)
}

// registrations is how often the kubelet had to be told of Virgate.
func registrations(t *testing.T, plugin *v1.Pod) string {
	t.Helper()
	values, err := series(plugin, "virgate_kubelet_registrations_total", `resource="nvidia.com/gpu"`)
	if err != nil || len(values) != 1 {
		t.Fatalf("registrations are %q: %v", values, err)
	}
	return values[0]
}
