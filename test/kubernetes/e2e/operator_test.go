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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/await"
)

// The paths and names that the GPU Operator's programs share on the node.
const (
	operatorNamespace = "gpu-operator"
	deployLabel       = "nvidia.com/gpu.deploy.device-plugin"
	discoveryLabel    = "nvidia.com/gpu.deploy.gpu-feature-discovery"
	pluginApp         = "nvidia-device-plugin-daemonset"
	discoveryApp      = "gpu-feature-discovery"
	mpsApp            = "nvidia-device-plugin-mps-control-daemon"
	validations       = "/run/nvidia/validations"
	operatorDriver    = "/run/nvidia/driver"
	operatorFeatures  = "/run/nvidia/features.d"
)

// testOperator runs the objects that the GPU Operator would create, with this image in place of NVIDIA's.
// The plugin waits for the toolkit and the driver; a label of the node chooses a profile of the operator's
// ConfigMap, and the feature labels follow it. In the end the ClusterPolicy no longer names a ConfigMap.
func testOperator(t *testing.T, c *cluster) {
	c.uninstall(t)
	driver := c.installDriver(t, "operator", "-DWHOLE")
	t.Cleanup(func() { _ = os.RemoveAll(validations) })
	c.setLabels(t, "", map[string]any{deployLabel: "true"})
	t.Cleanup(func() { c.setLabels(t, "", map[string]any{deployLabel: nil}) })
	c.apply(t, "testdata/gpu-operator.yaml")
	plugin := c.operatorPod(t, pluginApp, "the toolkit to be waited for", func(pod *v1.Pod) error {
		if len(pod.Status.InitContainerStatuses) == 0 || pod.Status.InitContainerStatuses[0].State.Running == nil {
			return fmt.Errorf("its containers are %v", pod.Status.InitContainerStatuses)
		}
		return nil
	})
	validated(t, "toolkit-ready", "")
	c.awaitLog(t, plugin, "nvidia-device-plugin", "no driver yet")
	c.awaitAllocatable(t, map[string]int64{})

	// As the driver's container leaves it on the node.
	if err := unix.Mount(driver, operatorDriver, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(operatorDriver, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	validated(t, "driver-ready", "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT="+operatorDriver+"\nDRIVER_ROOT_CTR_PATH=/driver-root\nNVIDIA_DEV_ROOT="+operatorDriver+"\nDEV_ROOT_CTR_PATH=/driver-root\n")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 2})
	c.validates(t)

	replacedShell(t, c.operatorPod(t, pluginApp, "its containers to be ready", ready(2)))

	c.apply(t, "testdata/nodefeature.yaml")
	t.Cleanup(func() { _ = os.RemoveAll(operatorFeatures) })
	c.setLabels(t, "", map[string]any{discoveryLabel: "true"})
	t.Cleanup(func() { c.setLabels(t, "", map[string]any{discoveryLabel: nil}) })
	c.apply(t, "testdata/gpu-feature-discovery.yaml")

	t.Cleanup(func() { c.label(t, "") })
	for _, each := range []struct {
		label   string
		devices int64
		product string
	}{{"shared", 8, "NVIDIA-Fake-A100-SXM4-40GB-SHARED"}, {"whole", 2, "NVIDIA-Fake-A100-SXM4-40GB"}, {"", 2, "NVIDIA-Fake-A100-SXM4-40GB"}, {"shared", 8, "NVIDIA-Fake-A100-SXM4-40GB-SHARED"}} {
		c.label(t, each.label)
		c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": each.devices})
		c.validates(t)
		c.awaitNodeFeature(t, operatorNamespace, "nvidia-features-for-"+hostName, "gpu.product", each.product)
	}
	c.operatorPod(t, discoveryApp, "its containers to be ready", ready(2))
	t.Run("MPS", func(t *testing.T) { c.operatesMPS(t, driver) })
	t.Run("without a config", c.operatesWithoutConfig)
}

// operatesMPS uses a profile that shares by MPS. The daemons are in the operator's DaemonSet, which runs
// where feature discovery finds such a profile.
func (c *cluster) operatesMPS(t *testing.T, driver string) {
	c.installMPSControl(t, driver)
	t.Cleanup(func() { removeMPSRoot(t) })
	c.apply(t, "testdata/mps-control-daemon.yaml")
	c.label(t, "mps")
	c.awaitNodeFeature(t, operatorNamespace, "nvidia-features-for-"+hostName, "mps.capable", "true")
	c.setLabels(t, "", map[string]any{"nvidia.com/mps.capable": "true"}) // As NFD does.
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 20})
	c.validates(t)
	c.run(t, pod("operated-mps", "nvidia.com/gpu", 1))
	gpu := c.printedVariable(t, "operated-mps", "NVIDIA_VISIBLE_DEVICES")
	for variable, want := range map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/mps/" + gpu + "/pipe", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"} {
		if got := c.printedVariable(t, "operated-mps", variable); got != want {
			t.Errorf("%s is %q, want %q", variable, got, want)
		}
	}
	if lines := c.printed(t, "operated-mps"); !slices.Contains(lines, "mps: at most 10 4096M") {
		t.Errorf("the daemon's limits are others: %q", lines)
	}
	c.remove(t, "operated-mps")
	c.label(t, "shared")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 8})
	c.validates(t)
	if left := daemons(t, ""); len(left) > 0 {
		t.Errorf("daemons %v run on", left)
	}
	c.setLabels(t, "", map[string]any{"nvidia.com/mps.capable": nil})
	c.await(t, "the DaemonSet's pod to go", func() error {
		pods, err := c.client.CoreV1().Pods(operatorNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + mpsApp})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("there is %s", pods.Items[0].Name)
		}
		return err
	})
}

// operatesWithoutConfig removes the ConfigMap from the ClusterPolicy, and has the labels written to a file.
// The node's label, by which GPUs were shared, then has no effect.
func (c *cluster) operatesWithoutConfig(t *testing.T) {
	for _, app := range []string{pluginApp, discoveryApp} {
		c.await(t, app+" to be changed", func() error {
			sets := c.client.AppsV1().DaemonSets(operatorNamespace)
			set, err := sets.Get(t.Context(), app, metav1.GetOptions{})
			if err != nil {
				return err
			}
			withoutConfig(&set.Spec.Template.Spec)
			if app == discoveryApp { // gfd.env
				env := &set.Spec.Template.Spec.Containers[0].Env
				*env = append(*env, v1.EnvVar{Name: "USE_NODE_FEATURE_API", Value: "false"})
			}
			_, err = sets.Update(t.Context(), set, metav1.UpdateOptions{})
			return err
		})
	}
	c.operatorPod(t, pluginApp, "a container without config-manager", ready(1))
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 2})
	c.validates(t)
	pods := numbered("operated", 2, "nvidia.com/gpu")
	c.runAll(t, pods)
	if gpus := c.gpus(t, pods); gpus[0] == gpus[1] {
		t.Errorf("two pods have the GPU %s alone", gpus[0])
	}

	c.await(t, "the file of the labels", func() error {
		data, err := os.ReadFile(operatorFeatures + "/gfd")
		for _, want := range []string{"gpu.product=NVIDIA-Fake-A100-SXM4-40GB", "gpu.count=2", "gpu.replicas=1", "gpu.sharing-strategy=none", "cuda.driver-version.full=580.1"} {
			if err == nil && !strings.Contains("\n"+string(data), "\nnvidia.com/"+want+"\n") {
				err = fmt.Errorf("it has no %s: %q", want, data)
			}
		}
		return err
	})
	c.setLabels(t, "", map[string]any{discoveryLabel: nil})
	c.await(t, "the file to go with its program", func() error {
		if _, err := os.Stat(operatorFeatures + "/gfd"); !os.IsNotExist(err) {
			return fmt.Errorf("it is there, %w", err)
		}
		return nil
	})
}

// withoutConfig turns a pod with profiles into one without, as the operator does.
func withoutConfig(spec *v1.PodSpec) {
	spec.ShareProcessNamespace = nil
	spec.InitContainers = slices.DeleteFunc(spec.InitContainers, func(c v1.Container) bool { return c.Name == "config-manager-init" })
	spec.Containers = slices.DeleteFunc(spec.Containers, func(c v1.Container) bool { return c.Name == "config-manager" })
	main := &spec.Containers[0]
	main.Env = slices.DeleteFunc(main.Env, func(e v1.EnvVar) bool { return e.Name == "CONFIG_FILE" })
	profiles := func(name string) bool { return name == "time-slicing-config" || name == "config" }
	main.VolumeMounts = slices.DeleteFunc(main.VolumeMounts, func(m v1.VolumeMount) bool { return profiles(m.Name) })
	spec.Volumes = slices.DeleteFunc(spec.Volumes, func(v v1.Volume) bool { return profiles(v.Name) })
}

// ready checks that a pod has this many containers, all ready and never restarted.
func ready(containers int) func(*v1.Pod) error {
	return func(pod *v1.Pod) error {
		if got := len(pod.Status.ContainerStatuses); got != containers || len(pod.Spec.Containers) != containers {
			return fmt.Errorf("it has %d containers", got)
		}
		for _, status := range pod.Status.ContainerStatuses {
			if status.RestartCount > 0 {
				return await.Never("container %s has restarted %d times: %+v", status.Name, status.RestartCount, status.LastTerminationState.Terminated)
			}
			if !status.Ready {
				return fmt.Errorf("container %s is not ready: %+v", status.Name, status.State)
			}
		}
		return nil
	}
}

// validated writes the result of one of the operator's validations.
func validated(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join(validations, name)
	if err := os.WriteFile(path+".next", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".next", path); err != nil {
		t.Fatal(err)
	}
}

// validates does what the operator's validator does: it looks for GPUs in the node's capacity, by the
// beginning of their names, and runs a pod with one, without the scheduler. It ignores names that an
// earlier part has left, which would make it fail.
func (c *cluster) validates(t *testing.T) {
	t.Helper()
	found, node := "", c.node(t)
	allocatable := offered(node.Status.Allocatable)
	for name, count := range offered(node.Status.Capacity) {
		if count >= 1 && allocatable[name] >= 1 && (strings.HasPrefix(name, "nvidia.com/gpu") || strings.HasPrefix(name, "nvidia.com/mig-")) {
			found = name
		}
	}
	if found == "" {
		t.Fatalf("the node's capacity is %v", node.Status.Capacity)
	}
	one := pod("nvidia-device-plugin-validator", found, 1)
	one.Spec.NodeName = hostName
	c.run(t, one)
	lines := c.printed(t, one.Name)
	for _, want := range []string{"env NVIDIA_VISIBLE_DEVICES=GPU-", "device /dev/nvidia"} {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("the validator's pod printed %q, nothing with %q", lines, want)
		}
	}
	c.remove(t, one.Name)
}

// operatorPod waits until the DaemonSet's pod meets the condition, and returns it.
func (c *cluster) operatorPod(t *testing.T, app, what string, is func(*v1.Pod) error) *v1.Pod {
	t.Helper()
	var found *v1.Pod
	c.await(t, what, func() error {
		pods, err := c.client.CoreV1().Pods(operatorNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil || len(pods.Items) != 1 {
			return fmt.Errorf("%d pods, %w", len(pods.Items), err)
		}
		found = &pods.Items[0]
		if err := stuck(found); err != nil {
			return await.Never("%w", err)
		}
		return is(found)
	})
	return found
}

// awaitLog waits until the container has logged the text.
func (c *cluster) awaitLog(t *testing.T, pod *v1.Pod, container, text string) {
	t.Helper()
	c.await(t, fmt.Sprintf("%q in the log of %s", text, container), func() error {
		log, err := c.client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &v1.PodLogOptions{Container: container}).DoRaw(t.Context())
		if err != nil {
			return err
		}
		if !strings.Contains(string(log), text) {
			return fmt.Errorf("it is %q", log)
		}
		return nil
	})
}

// replacedShell checks that the plugin is the only process in its container, so that the kubelet's signal
// to end reaches it, and that it has the variables which the script derived.
func replacedShell(t *testing.T, pod *v1.Pod) {
	t.Helper()
	running := processes(t, pod, "nvidia-device-plugin")
	if len(running) != 1 {
		t.Fatalf("in the plugin's container run %v", running)
	}
	for file, want := range map[string]string{
		"cmdline":                "nvidia-device-plugin\x00",
		"root/feature-flags.env": "GDRCOPY_ENABLED=false\n",
		"environ":                "\x00NVIDIA_DRIVER_ROOT=" + operatorDriver + "\x00",
	} {
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", running[0], file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains("\x00"+string(got), want) {
			t.Errorf("%s of the plugin's process is %q, want %q", file, got, want)
		}
	}
}
