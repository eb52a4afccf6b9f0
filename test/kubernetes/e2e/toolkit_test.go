package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/repeat"
)

// The files of NVIDIA's runtime, which containerd runs for pods of the runtime class.
const (
	runtimeClass   = "nvidia"
	runtimeProgram = "nvidia-container-runtime" // in the work folder, with the settings of this node
	runtimeConfig  = "toolkit/nvidia-container-runtime/config.toml"
)

// nvidiaRuntime is containerd's configuration of it, beside the default, runc. It costs nothing if it is
// not used.
func (c *cluster) nvidiaRuntime(t *testing.T) string {
	t.Helper()
	c.useToolkit(t, "")
	return `[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = 'runc'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.` + runtimeClass + `]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.` + runtimeClass + `.options]
BinaryName = '` + c.path(runtimeProgram) + `'
`
}

// useToolkit sets the version of NVIDIA's runtime for the next containers, one of olderToolkits or "" for the newest.
func (c *cluster) useToolkit(t *testing.T, version string) {
	t.Helper()
	// Before 1.18 the runtime reads no other variable than XDG_CONFIG_HOME.
	c.write(t, runtimeProgram, "#!/bin/sh\nXDG_CONFIG_HOME="+c.path("toolkit")+" exec "+filepath.Join(c.tools, version, runtimeProgram)+" \"$@\"\n")
	if err := os.Chmod(c.path(runtimeProgram), 0o755); err != nil {
		t.Fatal(err)
	}
}

// toolkitMode is a mode of NVIDIA's runtime.
type toolkitMode struct {
	name string
	// want is what a pod sees by envvar, cdi-cri and DRA: without a runtime class, and with it.
	want [3][2]string
}

// testToolkit has NVIDIA's own runtime beside runc, in two modes: cdi as the GPU Operator sets it, where
// the runtime knows only all GPUs together, by the operator's spec for its own programs; and jit-cdi, which
// the mode auto means from 1.18 on. Virgate is installed with the chart's preset, and its own container
// gets the driver by that runtime. What pods see must match the table of docs/reference/grants.md.
func testToolkit(t *testing.T, c *cluster) {
	c.uninstall(t)
	driver := c.installDriver(t, "toolkit", "-DWHOLE")
	if err := os.MkdirAll(operatorDriver, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(driver, operatorDriver, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	classes := c.client.NodeV1().RuntimeClasses()
	if _, err := classes.Create(t.Context(), &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: runtimeClass}, Handler: runtimeClass}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const management = "/var/run/cdi/management.nvidia.com-gpu.yaml"
	t.Cleanup(func() { // The containers have the driver.
		c.uninstall(t)
		if err := unix.Unmount(operatorDriver, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		_ = os.Remove(management)
	})
	if err := os.MkdirAll(filepath.Dir(management), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(management, []byte(`cdiVersion: 0.5.0
kind: management.nvidia.com/gpu
devices:
- name: all
  containerEdits:
    deviceNodes:
    - {path: /dev/nvidia0, hostPath: `+operatorDriver+`/dev/nvidia0}
    - {path: /dev/nvidia1, hostPath: `+operatorDriver+`/dev/nvidia1}
    - {path: /dev/nvidiactl, hostPath: `+operatorDriver+`/dev/nvidiactl}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	c.createNamespace(t, namespace)
	c.profiles(t, "toolkit", map[string]string{"plugin": "version: v1", "claims": "version: v1\ndra:\n  resources: all"})
	const resource = "nvidia.com/gpu"
	ways := []struct {
		name     string
		settings []string
		offered  map[string]int64 // by the device plugin
	}{
		{"envvar", []string{"config.default=plugin", "deviceListStrategy=envvar"}, map[string]int64{resource: 2}},
		{"cdi-cri", []string{"config.default=plugin"}, map[string]int64{resource: 2}},
		{"DRA", []string{"config.default=claims", "dra.enabled=true", "dra.resources={" + resource + "}"}, map[string]int64{}},
	}
	cdi := toolkitMode{"cdi", [3][2]string{{"no GPU", "does not start"}, {"its GPU", "its GPU"}, {"its GPU", "its GPU"}}}
	jit := toolkitMode{"jit-cdi", [3][2]string{{"no GPU", "its GPU"}, {"its GPU", "its GPU"}, {"its GPU", "its GPU"}}}
	type run struct {
		toolkit string
		toolkitMode
	}
	runs := []run{{"", cdi}, {"", jit}}
	if repeat.All() {
		runs = append(runs, run{"v1.17.8", cdi}, run{"v1.18.0", cdi}, run{"v1.18.0", jit})
	}
	for _, mode := range runs {
		c.useToolkit(t, mode.toolkit)
		title := strings.TrimSpace(mode.name + " " + mode.toolkit)
		c.write(t, runtimeConfig, `disable-require = true
accept-nvidia-visible-devices-envvar-when-unprivileged = true
[nvidia-container-cli]
root = "`+operatorDriver+`"
[nvidia-container-runtime]
mode = "`+mode.name+`"
runtimes = ["runc"]
[nvidia-container-runtime.modes.cdi]
default-kind = "management.nvidia.com/gpu"
spec-dirs = ["/var/run/cdi"]
[nvidia-container-runtime.modes.jit-cdi]
nvcdi-disable-hooks = ["all"]
[nvidia-ctk]
path = "/bin/true" # 1.18 knows no nvcdi-disable-hooks
`)
		for i, way := range ways {
			t.Run(way.name+", "+title, func(t *testing.T) {
				// The images have no loader's cache for a hook to update.
				c.install(t, append(slices.Clone(way.settings), "preset=gpu-operator", "node=nvml", "migStrategy=none", "config.name=toolkit", "--cdi-disable-hooks=all")...)
				c.awaitAllocatable(t, way.offered)
				for j, class := range []string{"", runtimeClass} {
					one := pod(strings.ToLower(fmt.Sprintf("sees-%s-%s-%d", way.name, strings.NewReplacer(" ", "-", ".", "-").Replace(title), j)), resource, 1)
					if class != "" {
						one.Spec.RuntimeClassName = &class
					}
					got := c.sees(t, one)
					if got != mode.want[i][j] {
						t.Errorf("with runtime class %q a pod sees %s, want %s", class, got, mode.want[i][j])
					}
					c.report.note(fmt.Sprintf("%s, mode %s, runtime class %q", way.name, title, class), got)
					c.remove(t, one.Name)
				}
			})
		}
		// The container requests the rights of MIG, which the versions treat in three different ways.
		t.Run("mig.manage, "+title, func(t *testing.T) {
			c.install(t, "config.default=plugin", "preset=gpu-operator", "node=nvml", "mig.manage=true", "config.name=toolkit", "--cdi-disable-hooks=all")
			c.awaitAllocatable(t, ways[0].offered)
		})
	}
}

// sees returns what the pod has of the node's GPUs: "its GPU", "no GPU", "does not start".
func (c *cluster) sees(t *testing.T, pod *v1.Pod) string {
	t.Helper()
	c.create(t, pod)
	runs := false
	c.await(t, "pod "+pod.Name+" to run, or not to start", func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if runs = got.Status.Phase == v1.PodRunning; runs {
			return nil
		}
		for _, status := range containers(got) {
			if ended := status.State.Terminated; ended != nil && ended.Reason == "StartError" {
				t.Logf("%s: %s", pod.Name, ended.Message)
				return nil
			}
			if waiting := status.State.Waiting; waiting != nil && strings.HasSuffix(waiting.Reason, "ContainerError") {
				t.Logf("%s: %s", pod.Name, waiting.Message)
				return nil
			}
		}
		return fmt.Errorf("it is %s: %s: %s", got.Status.Phase, got.Status.Reason, got.Status.Message)
	})
	if !runs {
		return "does not start"
	}
	lines := c.printed(t, pod.Name)
	gpus := 0
	for _, line := range lines {
		if number, ok := strings.CutPrefix(line, "device /dev/nvidia"); ok && strings.Trim(number, "0123456789") == "" {
			gpus++
		}
	}
	switch gpus {
	case 0:
		return "no GPU"
	case 1:
		return "its GPU"
	}
	return fmt.Sprintf("%d GPUs: %q", gpus, lines)
}
