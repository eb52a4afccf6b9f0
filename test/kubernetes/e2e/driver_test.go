package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testDriverReplaced upgrades a driver whose container mounts its root below /run/nvidia, as the GPU
// Operator's does. The root is unmounted lazily while the chart's containers have it, another module is
// loaded, and another root is mounted. Then a module without its libraries is loaded.
func testDriverReplaced(t *testing.T, c *cluster) {
	const version = "module-of-the-driver/version" // In the place of /sys/module/nvidia/version.
	library := fmt.Sprintf("-DMODULE=%q", "/module/version")
	first, second := c.installDriver(t, "first", "-DWHOLE", library), c.installVersion(t, "second", "590.1", "-DWHOLE", library)
	const root = operatorDriver
	if err := os.MkdirAll(root, 0o755); err != nil {
		t.Fatal(err)
	}
	mount := func(driver string) {
		t.Helper()
		if err := unix.Mount(driver, root, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			t.Fatal(err)
		}
	}
	unmount := func() {
		t.Helper()
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() { // The containers have the mounts.
		c.uninstall(t)
		unmount()
		removeMPSRoot(t)
	})
	c.expectRestarts(t)
	c.write(t, version, "580.1\n")
	mount(first)
	c.installOn(t, root, "migStrategy=none", "config.map.plain=version: v1", "config.default=plain", "mps.enabled=true", "standby.enabled=true", "failOnInitError=false",
		"extraVolumes[0].name=module", "extraVolumes[0].hostPath.path="+filepath.Dir(c.path(version)), "extraVolumeMounts[0].name=module", "extraVolumeMounts[0].mountPath=/module")
	serves := map[string]served{"nvidia.com/gpu": {2, "nvidia0 nvidia1"}}
	c.serves(t, serves)
	plugin := c.plugin(t)

	unmount()
	for _, container := range []string{"virgate", "standby", "mps"} {
		c.awaitLog(t, plugin, container, "the driver root is no longer mounted on the host")
	}
	c.write(t, version, "590.1\n")
	mount(second)
	for _, container := range []string{"virgate", "standby", "mps"} {
		c.awaitEnd(t, plugin, container, "another driver is mounted at /driver-root-parent/driver")
	}
	c.serves(t, serves)
	c.await(t, "the new library in the container that serves, which may be the standby's", func() error {
		pod := c.plugin(t)
		for _, process := range append(processes(t, pod, "virgate"), processes(t, pod, "standby")...) {
			maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", process))
			if err == nil && strings.Contains(string(maps), "libnvidia-ml.so.590.1") {
				return nil
			}
		}
		return errNotYet
	})

	c.write(t, version, "595.1\n")
	if err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), plugin.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	const mismatch = "the driver's libraries are of version 590.1 and the loaded kernel module is of another: reload the module, or reboot the node"
	c.awaitCondition(t, v1.ConditionFalse, "GPUsNotRead", mismatch)
	c.awaitEnd(t, c.plugin(t), "virgate", mismatch+" (it has been so for 10s")
	c.write(t, version, "590.1\n")
	c.serves(t, serves)
}

// awaitEnd waits until a container of the pod has ended and its previous run has logged these words.
func (c *cluster) awaitEnd(t *testing.T, pod *v1.Pod, container, words string) {
	t.Helper()
	c.await(t, container+" to end and to say why", func() error {
		log, err := c.client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &v1.PodLogOptions{Container: container, Previous: true}).DoRaw(t.Context())
		if err == nil && !strings.Contains(string(log), words) {
			err = fmt.Errorf("it said:\n%s", log)
		}
		return err
	})
}
