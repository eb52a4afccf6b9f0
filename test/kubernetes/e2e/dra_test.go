package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/virgate/virgate/test/await"
)

const (
	draDriver = "gpu.virgate.github.io"
	// draClass is the chart's DeviceClass of shares.
	draClass = "virgate-gpu.nvidia.com"
)

// testDRA moves two shared GPUs from the device plugin to DRA and back while pods run, and starts pods that
// get shares by claims and by the old name.
func testDRA(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	byDRA := replicas("4") + "dra: {resources: all}\n"
	c.profiles(t, "dra", map[string]string{"plugin": replicas("4"), "dra": byDRA, "whole": "version: v1\ndra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:h100x2", "config.name=dra", "dra.enabled=true", "dra.resources={"+shared+"}", "--cdi-dir=/var/run/cdi")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.run(t, pod("by-plugin", shared, 1))
	c.awaitSlices(t, "")

	began := time.Now()
	c.label(t, "dra")
	devices := c.awaitSlices(t, "one") // The other GPU has a pod of the plugin.
	c.report.note("DRA: from the device plugin, label to ResourceSlice", took(began))
	c.awaitAllocatable(t, map[string]int64{})

	began = time.Now()
	c.runClaim(t, "by-claim", "")
	c.report.note("DRA: claim made to pod running", took(began))
	if got := c.gpuNodes(t, "by-claim"); len(got) != 1 || !slices.Contains(c.printed(t, "by-claim"), "env NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("by claim a container has %q: %q", got, c.printed(t, "by-claim"))
	}
	began = time.Now()
	c.run(t, pod("by-name", shared, 1))
	c.report.note("DRA: the same by the old name", took(began))
	if a, b := c.gpuNodes(t, "by-name"), c.gpuNodes(t, "by-claim"); !slices.Equal(a, b) {
		t.Errorf("by name a container has %q, by claim %q: shares of one GPU", a, b)
	}
	c.runClaim(t, "third", "")
	c.runClaim(t, "fourth", "")
	c.createClaim(t, "fifth", "", 1)
	c.awaitUnschedulable(t, "fifth")
	c.create(t, pod("one-more", shared, 1))
	c.awaitWhy(t, "one-more", ": given out by DRA alone; had by default/", "on the way to DRA, until the pods end that hold them", "To help: what DRA has on "+hostName+" comes free when the claims end")
	c.remove(t, "one-more")

	c.remove(t, "by-plugin")
	if devices = c.awaitSlices(t, "one one"); len(devices) != 2 {
		t.Fatalf("devices %q", devices)
	}
	c.awaitPhase(t, "fifth", v1.PodRunning)
	if a, b := c.gpuNodes(t, "fifth"), c.gpuNodes(t, "third"); slices.Equal(a, b) {
		t.Errorf("a fifth share of %q", a)
	}

	// Virgate is away for a while: running pods stay, and the next pod waits for it.
	c.expectRestarts(t)
	before := c.plugin(t)
	if err := syscall.Kill(processes(t, before)[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.runClaim(t, "after", "")

	// A kubelet that starts deletes the slices.
	c.kubelet.stop(syscall.SIGTERM)
	c.kubelet.start(t)
	c.awaitSlices(t, "one one")
	c.runClaim(t, "after-kubelet", "")
	for _, name := range []string{"by-claim", "by-name", "third", "fourth", "fifth", "after", "after-kubelet"} {
		if got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{}); err != nil || got.Status.Phase != v1.PodRunning {
			t.Errorf("%s: %v, %v", name, got.Status, err)
		}
	}

	// The mode changes: held devices keep the old mode, free ones get the new one.
	c.label(t, "whole")
	c.awaitSlices(t, "leaving leaving one one")
	c.createClaim(t, "whole", sharedBy("exclusive"), 1) // The scheduler may still have the old slices.
	c.awaitUnschedulable(t, "whole")
	c.remove(t, "fifth", "after", "after-kubelet")
	c.awaitPhase(t, "whole", v1.PodRunning)
	c.remove(t, "whole")

	c.remove(t, "by-claim", "by-name", "fourth")
	c.label(t, "dra")
	c.awaitSlices(t, "one one")
	c.runClaim(t, "shares-again", sharedBy("time-slicing")) // The scheduler has the new slices, so it gives no whole GPU away.
	c.remove(t, "shares-again")
	c.runClaimExamples(t)

	began = time.Now()
	c.label(t, "plugin")
	c.awaitAllocatable(t, map[string]int64{shared: 4})
	c.report.note("DRA: back to the device plugin", took(began))
	c.remove(t, "third")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.awaitSlices(t, "")
	c.run(t, pod("by-plugin-again", shared, 1))
}

// sharedBy selects devices that are shared in this way.
func sharedBy(mode string) string {
	return fmt.Sprintf("device.attributes[%q].sharing == %q", draDriver, mode)
}

// awaitSlices waits for the node's devices, one word each: "one" for an offered device, "leaving" for one
// that is held and no longer offered. It returns their names.
func (c *cluster) awaitSlices(t *testing.T, want string) (names []string) {
	t.Helper()
	c.await(t, "ResourceSlices with "+want, func() error {
		list, err := c.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + draDriver})
		if err != nil {
			return err
		}
		names = nil
		var words []string
		for _, slice := range list.Items {
			for _, device := range slice.Spec.Devices {
				word := "one"
				for _, taint := range device.Taints {
					_, word, _ = strings.Cut(taint.Key, "/")
				}
				words, names = append(words, word), append(names, device.Name)
			}
		}
		slices.Sort(words)
		if len(list.Items) == 0 || strings.Join(words, " ") != want {
			return fmt.Errorf("%d slices with %q: %q", len(list.Items), words, names)
		}
		return nil
	})
	return names
}

// createClaim creates a claim for this number of devices, and a pod that uses it.
func (c *cluster) createClaim(t *testing.T, name, expression string, count int64) {
	t.Helper()
	request := resourceapi.ExactDeviceRequest{DeviceClassName: draClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if expression != "" {
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	}
	c.requestClaim(t, name, request)
}

// requestClaim makes a claim with this request, and a pod that uses it.
func (c *cluster) requestClaim(t *testing.T, name string, request resourceapi.ExactDeviceRequest) {
	t.Helper()
	claims := c.client.ResourceV1().ResourceClaims(workspace)
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &request}}}},
	}
	if _, err := claims.Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // Cleanups run in reverse order, so the pod is gone.
		if err := claims.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	with := pod(name, shared, 1)
	with.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
	with.Spec.Containers[0].Resources = v1.ResourceRequirements{
		Claims:   []v1.ResourceClaim{{Name: "gpu"}},
		Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1m")},
	}
	c.create(t, with)
}

// runClaim calls createClaim for one share, and waits until the pod runs.
func (c *cluster) runClaim(t *testing.T, name, expression string) {
	t.Helper()
	c.createClaim(t, name, expression, 1)
	c.awaitPhase(t, name, v1.PodRunning)
}

// runClaimExamples runs the pods of deployments/examples/claims.yaml with the tests' image.
func (c *cluster) runClaimExamples(t *testing.T) {
	t.Helper()
	data, err := os.ReadFile("../../../deployments/examples/claims.yaml")
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	var names []string
	for {
		var raw runtime.RawExtension
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw.Raw, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		switch object := object.(type) {
		case *resourceapi.ResourceClaimTemplate:
			templates := c.client.ResourceV1().ResourceClaimTemplates(workspace)
			if _, err = templates.Create(t.Context(), object, metav1.CreateOptions{}); err == nil {
				t.Cleanup(func() { _ = templates.Delete(context.WithoutCancel(t.Context()), object.Name, metav1.DeleteOptions{}) })
			}
		case *resourceapi.ResourceClaim:
			claims := c.client.ResourceV1().ResourceClaims(workspace)
			if _, err = claims.Create(t.Context(), object, metav1.CreateOptions{}); err == nil {
				t.Cleanup(func() { _ = claims.Delete(context.WithoutCancel(t.Context()), object.Name, metav1.DeleteOptions{}) })
			}
		case *v1.Pod:
			object.Namespace = workspace
			object.Spec.TerminationGracePeriodSeconds = new(int64(1))
			object.Spec.Containers[0].Image, object.Spec.Containers[0].Command = workloadImage, nil
			c.create(t, object)
			names = append(names, object.Name)
		default:
			t.Fatalf("an example is a %T", object)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		c.awaitPhase(t, name, v1.PodRunning)
		want := 1
		if name == "two-gpus" {
			want = 2
		}
		if got := c.gpuNodes(t, name); len(got) != want {
			t.Errorf("%s has %q, want %d GPUs", name, got, want)
		}
	}
	if a, b := c.gpuNodes(t, "together-1"), c.gpuNodes(t, "together-2"); !slices.Equal(a, b) {
		t.Errorf("one claim is %q and %q", a, b)
	}
	c.remove(t, names...)
}

func (c *cluster) awaitUnschedulable(t *testing.T, name string) {
	t.Helper()
	c.await(t, "pod "+name+" to wait for a device", func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if unschedulable(got) {
			return nil
		}
		if got.Status.Phase != v1.PodPending {
			return await.Never("it is %s: %s: %s", got.Status.Phase, got.Status.Reason, got.Status.Message)
		}
		return errors.New("nobody has looked yet")
	})
}

func unschedulable(pod *v1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(condition v1.PodCondition) bool {
		return condition.Type == v1.PodScheduled && condition.Reason == v1.PodReasonUnschedulable
	})
}

// gpuNodes are the GPU device nodes in the pod's container.
func (c *cluster) gpuNodes(t *testing.T, name string) []string {
	t.Helper()
	return gpuNodesIn(c.printed(t, name))
}

// gpuNodesIn returns the GPU device nodes among the lines that a container has printed.
func gpuNodesIn(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
		number, ok := strings.CutPrefix(line, "device /dev/nvidia")
		return !ok || strings.Trim(number, "0123456789") != ""
	})
}

// testDRAMPS gives pods shares of GPUs by MPS, each with its limits: one by the old name, two of one GPU by
// a claim. A pod of the device plugin keeps its share meanwhile.
func testDRAMPS(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	const byPlugin = "version: v1\nsharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	c.profiles(t, "dra-mps", map[string]string{"plugin": byPlugin, "dra": byPlugin + "dra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { // After the chart and its daemons are gone.
		c.uninstall(t)
		removeMPSRoot(t)
	})
	c.install(t, "node=sim:t4x2", "config.name=dra-mps", "mps.enabled=true", "nvidiaDriverRoot="+c.mpsDriver(t), "dra.enabled=true", "dra.resources={"+shared+"}", "--cdi-dir=/var/run/cdi")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.awaitProfile(t, "plugin", "applied") // The previous part may have offered as many devices.
	c.run(t, pod("by-plugin", shared, 1))
	before := c.podStates(t, []string{"by-plugin"})
	units := c.mpsUnits(t)
	other := units[slices.IndexFunc(units, func(unit string) bool { return unit != before["by-plugin"].GPU })]
	c.label(t, "dra")
	c.awaitSlices(t, "one") // The other GPU has a pod of the plugin.
	// While the node offers a device by the plugin, the scheduler may give a pod one of these.
	c.awaitAllocatable(t, map[string]int64{})
	c.requestClaim(t, "two", resourceapi.ExactDeviceRequest{
		DeviceClassName: draClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("2")}},
	})
	c.awaitPhase(t, "two", v1.PodRunning)
	c.claimsShares(t, "two", other, 2)
	c.run(t, pod("by-name", shared, 1))
	c.claimsShares(t, "by-name", other, 1)
	c.run(t, pod("last", shared, 1))
	c.create(t, pod("waits", shared, 1))
	c.awaitUnschedulable(t, "waits")
	c.undisturbed(t, before)
	c.remove(t, "two")
	c.awaitPhase(t, "waits", v1.PodRunning)
	c.claimsShares(t, "waits", other, 1)
}

// claimsShares checks the output of a pod that has this number of a GPU's four shares by a claim.
func (c *cluster) claimsShares(t *testing.T, name, gpu string, shares int) {
	t.Helper()
	lines := c.printed(t, name)
	for _, want := range []string{
		"env CUDA_MPS_PIPE_DIRECTORY=/mps/" + gpu + "/pipe",
		fmt.Sprintf("env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", 25*shares),
		fmt.Sprintf("env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", shares*15360/4),
		"mps: at most",
	} {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("pod %s printed %q, nothing with %q", name, lines, want)
		}
	}
	if got := c.gpuNodes(t, name); len(got) != 1 {
		t.Errorf("pod %s has %q", name, got)
	}
}

// testNVIDIANames checks that a claim made for NVIDIA's DRA driver and a pod that asks by the old name get
// shares from Virgate under that driver's name.
func testNVIDIANames(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "nvidia-names", map[string]string{"plugin": replicas("4"), "dra": replicas("4") + "dra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:h100x2", "config.name=nvidia-names", "dra.enabled=true", "dra.nvidiaNames=true", "dra.resources={"+shared+"}", "--cdi-dir=/var/run/cdi")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.label(t, "dra")
	c.awaitAllocatable(t, map[string]int64{})
	c.requestClaim(t, "nvidia-claim", resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*h100.*$') && device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('40Gi')) >= 0",
		}}},
	})
	c.awaitPhase(t, "nvidia-claim", v1.PodRunning)
	c.run(t, pod("nvidia-name", shared, 1))
	for _, name := range []string{"nvidia-claim", "nvidia-name"} {
		if got := c.gpuNodes(t, name); len(got) != 1 {
			t.Errorf("%s has %q", name, got)
		}
	}
}

// testDRAPartitions has pods partition a GPU. Claims and old names create partitions that did not exist,
// idle partitions make room for others, and a pod gets the whole GPU when no pod has a part of it.
func testDRAPartitions(t *testing.T, c *cluster) {
	const small, large, whole = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", "nvidia.com/gpu"
	c.createNamespace(t, namespace)
	const byPlugin = "version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true}\n"
	c.profiles(t, "ondemand", map[string]string{"plugin": byPlugin, "ondemand": byPlugin + "dra: {resources: all, dynamicMIG: true}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:h100", "config.name=ondemand", "mig.manage=true", "dra.enabled=true", "dra.resources={"+strings.Join([]string{small, large, whole}, ",")+"}", "--cdi-dir=/var/run/cdi")
	c.awaitAllocatable(t, map[string]int64{whole: 1})
	c.label(t, "ondemand")
	var offered []string
	c.await(t, "places of partitions", func() error {
		list, err := c.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + draDriver})
		offered = nil
		if err == nil {
			for _, slice := range list.Items {
				for _, device := range slice.Spec.Devices {
					offered = append(offered, device.Name)
				}
			}
			if len(offered) < 20 {
				err = fmt.Errorf("offered: %q", offered)
			}
		}
		return err
	})
	began := time.Now()
	c.run(t, pod("first", small, 1))
	c.report.note("DRA: pod by name to running, with MIG mode and a partition made for it", took(began))
	began = time.Now()
	c.run(t, pod("large", large, 1))
	c.report.note("DRA: the same with a partition made for it", took(began))
	for _, name := range []string{"second", "third"} { // With the large one, there is no room for more.
		c.run(t, pod(name, small, 1))
	}
	c.create(t, pod("whole", whole, 1))
	c.awaitUnschedulable(t, "whole")
	c.create(t, pod("larger", large, 1))
	c.awaitUnschedulable(t, "larger")
	c.remove(t, "first", "second", "third")
	c.awaitPhase(t, "larger", v1.PodRunning) // Where idle partitions were.
	c.remove(t, "large")
	c.remove(t, "larger")
	c.awaitPhase(t, "whole", v1.PodRunning)
	if got := c.gpuNodes(t, "whole"); len(got) != 1 {
		t.Errorf("a whole GPU is %q", got)
	}
	c.remove(t, "whole")
	c.run(t, pod("again", small, 1))
	c.label(t, "plugin")
	c.remove(t, "again")
	c.awaitAllocatable(t, map[string]int64{small: 1}) // The one that exists is the device plugin's.
}
