package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/repeat"
)

// upgradesDriver does to the node what the GPU Operator's k8s-driver-manager does before it unloads the
// driver, label by label, while one GPU is shared by time-slicing and one by MPS. When the last pod has
// gone, no process has a file of the driver open. Every other time the upgrade fails and puts the labels
// back.
func (c *cluster) upgradesDriver(t *testing.T, driver string) {
	const client, draDriver, paused = "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.dra-driver", "paused-for-driver-upgrade"
	c.installMPSControl(t, driver)
	for _, node := range []string{"nvidiactl", "nvidia0", "nvidia1"} {
		c.write(t, filepath.Join("driver-whole/proc/open", node), "")
	}
	t.Cleanup(func() {
		c.setLabels(t, "", map[string]any{deployLabel: nil, client: nil, draDriver: nil})
		c.label(t, "")
		c.uninstall(t)
		removeMPSRoot(t)
		if err := os.RemoveAll(filepath.Join(driver, "proc/open")); err != nil {
			t.Error(err)
		}
	})
	c.setLabels(t, "gpu-operator", map[string]any{deployLabel: "true", client: "true"})
	c.label(t, "")
	c.createNamespace(t, namespace)
	c.profiles(t, "upgraded", map[string]string{"both": `version: v1
sharing:
  timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: [0]}]}
  mps: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [1], rename: nvidia.com/share}]}
`})
	c.installOn(t, driver, "migStrategy=none", "config.name=upgraded", "config.default=both", "mps.enabled=true", "featureLabels.enabled=true")
	offered := map[string]int64{"nvidia.com/gpu": 2, "nvidia.com/share": 4}
	for i := range repeat.Times(2, 20) {
		c.awaitAllocatable(t, offered)
		if c.unload(t, driver) == nil {
			t.Fatal("nobody has the driver open before the upgrade")
		}
		counted, other := pod("counted", "nvidia.com/gpu", 1), pod("other", "nvidia.com/share", 1)
		c.runAll(t, []*v1.Pod{counted, other})
		c.setLabels(t, "gpu-operator", map[string]any{deployLabel: paused})
		c.setLabels(t, "gpu-operator", map[string]any{client: paused})
		c.awaitCondition(t, v1.ConditionFalse, "PausedForDriverUpgrade", workspace+"/counted", workspace+"/other", "does not evict the pods with nvidia.com/share")
		c.awaitAllocatable(t, map[string]int64{})
		c.setLabels(t, "gpu-operator", map[string]any{draDriver: paused})
		c.remove(t, counted.Name) // As an eviction does.
		c.remove(t, other.Name)
		began := time.Now()
		c.await(t, "nobody to have the driver open", func() error { return c.unload(t, driver) })
		closed := since(began)
		c.report.note("driver upgrade: end of the last pod to a driver that no process has open", closed.Round(10*time.Millisecond).String())
		if repeat.All() && closed > 2*time.Second { // make nightly has the machine to itself.
			t.Errorf("the driver was closed %s after the last pod's end, want at most 2 s", closed)
		}
		c.awaitCondition(t, v1.ConditionFalse, "PausedForDriverUpgrade", deployLabel)
		if i%2 == 1 { // A restart in the pause opens nothing.
			c.restartPlugin(t)
		}
		if err := c.unload(t, driver); err != nil {
			t.Error(err)
		}
		c.setLabels(t, "gpu-operator", map[string]any{deployLabel: "true", client: "true", draDriver: nil})
	}
	c.awaitAllocatable(t, offered)
	c.awaitCondition(t, v1.ConditionTrue, "Serving")
}

// restartPlugin deletes the plugin's pod, and waits until another one is ready.
func (c *cluster) restartPlugin(t *testing.T) {
	t.Helper()
	before := c.plugin(t)
	if err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), before.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.await(t, "another pod of the plugin", func() error {
		now := c.plugin(t)
		if now.UID == before.UID {
			return errors.New("it is the same")
		}
		for _, status := range now.Status.ContainerStatuses {
			if !status.Ready {
				return fmt.Errorf("container %s is not ready", status.Name)
			}
		}
		return nil
	})
}

// unload returns an error that names what keeps the driver's module loaded, as the kernel would: processes
// that have one of its nodes open (here, files take the place of the nodes), and the programs that open the
// nodes on a real node.
func (c *cluster) unload(t *testing.T, driver string) error {
	t.Helper()
	nodes, err := filepath.Glob(filepath.Join(driver, "proc/open/*"))
	if err != nil || len(nodes) == 0 {
		t.Fatalf("there are %q, %v", nodes, err)
	}
	var files []os.FileInfo
	for _, node := range nodes {
		file, err := os.Stat(node)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	descriptors, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, descriptor := range descriptors {
		opened, err := os.Stat(descriptor)
		if err != nil {
			continue // Closed meanwhile, or of a process that has ended.
		}
		for i, file := range files {
			if os.SameFile(opened, file) {
				return fmt.Errorf("%s is open as %s", nodes[i], descriptor)
			}
		}
	}
	if running := daemons(t, ""); len(running) > 0 {
		return fmt.Errorf("MPS daemons %v run", running)
	}
	return nil
}
