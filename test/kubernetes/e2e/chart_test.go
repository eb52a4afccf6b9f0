package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"

	"github.com/virgate/virgate/test/await"
)

// namespace is where Virgate is installed.
const namespace = "virgate"

// chart is the chart's folder.
const chart = "../../../charts/virgate"

// fourShares is the chart value that gives a node without a label four shares of each GPU.
const fourShares = "config.default=time-slicing-4"

// stays keeps a surplus device listed, so that a test of such a device does not depend on the machine's
// speed.
const stays = "--removal-delay=24h"

// quickly removes a surplus device after three seconds instead of 30, and an empty list as soon: the kubelet
// here writes the node's status ten times as often as by default.
var quickly = []string{"--removal-delay=3s", "--stop-after=3s"}

// install installs or changes the chart with Helm's command. It waits until everything is ready and the
// kubelet has lists from the new pod: until then, the numbers of the kubelet and the node's status may come
// from the old pod. Each setting is a --set, or an argument of the program if it begins with --.
func (c *cluster) install(t *testing.T, settings ...string) {
	t.Helper()
	c.upgrade(t, settings...)
	c.awaitLists(t)
}

// awaitLists waits until the kubelet has lists from Virgate's pod.
func (c *cluster) awaitLists(t *testing.T) {
	t.Helper()
	c.await(t, "the kubelet to have the plugin's lists", func() error {
		streams, err := series(c.plugin(t), "virgate_listandwatch_streams")
		if err == nil && !slices.ContainsFunc(streams, func(count string) bool { return count != "0" }) {
			err = fmt.Errorf("streams are %q", streams)
		}
		return err
	})
}

// upgrade is install for pods that serve nothing: it does not wait for lists.
func (c *cluster) upgrade(t *testing.T, settings ...string) {
	t.Helper()
	c.upgradeAsIs(t, append(slices.Clone(quickly), settings...)...)
}

// upgradeAsIs is upgrade with only these settings. If an argument comes twice, the last one counts.
func (c *cluster) upgradeAsIs(t *testing.T, settings ...string) {
	t.Helper()
	arguments := []string{"upgrade", "--install", "virgate", chart, "--namespace", namespace, "--create-namespace"}
	var program []string
	for _, setting := range settings {
		if strings.HasPrefix(setting, "--") {
			program = append(program, setting)
			continue
		}
		arguments = append(arguments, "--set", setting)
	}
	if len(program) > 0 {
		arguments = append(arguments, "--set", "extraArgs={"+strings.Join(program, ",")+"}")
	}
	c.helm(t, arguments...)
	c.await(t, "what helm has installed to be ready", func() error { return c.unready(t.Context()) })
}

// unready names a workload of the chart that is not yet updated and ready. Helm's --wait asks for
// the same, but only every two seconds.
func (c *cluster) unready(ctx context.Context) error {
	installed := metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=Helm"}
	sets, err := c.client.AppsV1().DaemonSets(namespace).List(ctx, installed)
	if err != nil {
		return err
	}
	for _, set := range sets.Items {
		if is := set.Status; is.ObservedGeneration < set.Generation || min(is.UpdatedNumberScheduled, is.NumberReady) < is.DesiredNumberScheduled {
			return fmt.Errorf("DaemonSet %s is %+v", set.Name, is)
		}
	}
	deployments, err := c.client.AppsV1().Deployments(namespace).List(ctx, installed)
	if err != nil {
		return err
	}
	for _, deployment := range deployments.Items {
		if is := deployment.Status; is.ObservedGeneration < deployment.Generation || min(is.UpdatedReplicas, is.ReadyReplicas) < *deployment.Spec.Replicas {
			return fmt.Errorf("Deployment %s is %+v", deployment.Name, is)
		}
	}
	return nil
}

// uninstall removes the chart, if it is installed, and waits until its pods are gone.
func (c *cluster) uninstall(t *testing.T) {
	t.Helper()
	c.helm(t, "uninstall", "virgate", "--namespace", namespace, "--ignore-not-found", "--wait", "--cascade", "foreground", "--timeout", await.Patience.String())
}

func (c *cluster) helm(t *testing.T, arguments ...string) string {
	t.Helper()
	output, err := c.helmCommand(context.WithoutCancel(t.Context()), arguments...).CombinedOutput()
	if err != nil {
		t.Fatalf("helm %q: %v\n%s", arguments, err, output)
	}
	return string(output)
}

func (c *cluster) helmCommand(ctx context.Context, arguments ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, filepath.Join(c.tools, "helm"), arguments...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.path("admin.conf"), "HOME="+c.work)
	return command
}

// profiles makes a ConfigMap of profiles beside the release, for config.name, and
// removes it at the end of the test.
func (c *cluster) profiles(t *testing.T, name string, texts map[string]string) {
	t.Helper()
	maps := c.client.CoreV1().ConfigMaps(namespace)
	if _, err := maps.Create(t.Context(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: texts}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := maps.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// createNamespace makes the namespace unless it exists.
func (c *cluster) createNamespace(t *testing.T, name string) {
	t.Helper()
	_, err := c.client.CoreV1().Namespaces().Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// editProfile gives one profile of the ConfigMap another text.
func (c *cluster) editProfile(t *testing.T, name, profile, text string) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"data": map[string]string{profile: text}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().ConfigMaps(namespace).Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// apply creates the manifest's objects, as kubectl does, and removes them at the
// end of the test.
func (c *cluster) apply(t *testing.T, path string) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	for decoder := yaml.NewYAMLOrJSONDecoder(file, 4096); ; {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(&object.Object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if len(object.Object) == 0 {
			continue // Only a comment.
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			t.Fatal(err)
		}
		var objects dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if object.GetNamespace() != "" {
			objects = client.Resource(mapping.Resource).Namespace(object.GetNamespace())
		}
		options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
		if _, err := objects.Create(t.Context(), object, options); err != nil {
			t.Fatalf("%s: create %s %s: %v", path, kind.Kind, object.GetName(), err)
		}
		t.Cleanup(func() { removeObject(t, objects, object.GetName()) })
	}
}

// removeObject deletes the object and waits until what it owns is gone too.
func removeObject(t *testing.T, objects dynamic.ResourceInterface, name string) {
	t.Helper()
	ctx, foreground := context.WithoutCancel(t.Context()), metav1.DeletePropagationForeground
	err := objects.Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: &foreground})
	if apierrors.IsNotFound(err) {
		return
	}
	if err == nil {
		err = gone(func() error {
			_, err := objects.Get(ctx, name, metav1.GetOptions{})
			return err
		})
	}
	if err != nil {
		t.Errorf("%s does not go: %v", name, err)
	}
}

// testManifest checks that the API server accepts the static manifest and the node starts its pod. Without
// a driver the pod has nothing to offer.
func testManifest(t *testing.T, c *cluster) {
	c.uninstall(t)
	// Helm leaves the namespace; it does not exist if nothing was installed before.
	_ = c.client.CoreV1().Namespaces().Delete(t.Context(), namespace, metav1.DeleteOptions{})
	c.await(t, "the namespace to go", func() error {
		if _, err := c.client.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{}); err == nil {
			return errNotYet
		}
		return nil
	})
	c.apply(t, "../../../deployments/virgate.yaml")
	c.await(t, "the pod to run", func() error {
		pods, err := c.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(pods.Items) != 1 {
			return fmt.Errorf("%d pods, %w", len(pods.Items), err)
		}
		if err := stuck(&pods.Items[0]); err != nil {
			return await.Never("%w", err)
		}
		if status := pods.Items[0].Status; status.Phase != v1.PodRunning {
			return fmt.Errorf("it is %s: %s", status.Phase, status.Message)
		}
		return nil
	})
}

// testImageSwap runs NVIDIA's own manifests with only the image replaced: their init container, sidecar,
// command and variables stay.
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

// testCDI has containerd put the device nodes into containers, by the specs that
// Virgate writes. A simulated GPU's spec has its node's numbers, so containerd
// makes the node where the machine has none.
func testCDI(t *testing.T, c *cluster) {
	for _, strategy := range []string{"cdi-cri", "cdi-annotations"} {
		c.install(t, "node=sim:dgx-a100", fourShares, "deviceListStrategy="+strategy, "--cdi-dir=/var/run/cdi")
		c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 32})
		c.run(t, pod(strategy, "nvidia.com/gpu", 1))
		lines := c.printed(t, strategy)
		for _, want := range []string{"device /dev/nvidiactl", "env NVIDIA_VISIBLE_DEVICES=void"} {
			if !slices.Contains(lines, want) {
				t.Errorf("%s: the container printed %q, not %q", strategy, lines, want)
			}
		}
		gpus := slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
			number, ok := strings.CutPrefix(line, "device /dev/nvidia")
			return !ok || strings.Trim(number, "0123456789") != ""
		})
		if len(gpus) != 1 {
			t.Errorf("%s: the container has %q, want one GPU's node", strategy, gpus)
		}
	}
}

// testLeaving removes Virgate and everything it has left: once as the chart does it on each node, and once
// with the command after only the chart is gone.
func testLeaving(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "layout", map[string]string{"chosen": "version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true, config: all-balanced}\n"})
	partitioned := []string{"node=sim:dgx-a100", "config.name=layout", "config.default=chosen", "mig.manage=true", "deviceListStrategy=cdi-cri", "--cdi-dir=/var/run/cdi"}
	state := func(want string) {
		t.Helper()
		c.await(t, "the state of the layout to be "+want, func() error {
			if got := c.node(t).Labels["nvidia.com/mig.config.state"]; got != want {
				return fmt.Errorf("it is %q", got)
			}
			return nil
		})
	}
	c.install(t, partitioned...)
	state("success")
	c.install(t, "node=sim:t4x2", fourShares) // Without the right to change layouts.
	state("")
	c.awaitAllocatable(t, map[string]int64{shared: 8})

	c.install(t, partitioned...)
	state("success")
	lies := func() (found []string) {
		for _, pattern := range []string{"/var/lib/kubelet/device-plugins/virgate*", "/var/run/cdi/k8s.device-plugin.nvidia.com*"} {
			matches, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, matches...)
		}
		return found
	}
	if len(lies()) < 4 {
		t.Fatalf("on the node lie %q, not state, lock, sockets and specs", lies())
	}
	c.upgrade(t, append(partitioned, "uninstall=true")...)
	c.await(t, "the rollout", func() error { // As kubectl rollout status does: Helm accepts that a DaemonSet lacks its maxUnavailable.
		set, err := c.client.AppsV1().DaemonSets(namespace).Get(t.Context(), "virgate", metav1.GetOptions{})
		if s := set.Status; err == nil && (s.ObservedGeneration < set.Generation || s.UpdatedNumberScheduled < 1 || s.NumberAvailable < 1) {
			err = fmt.Errorf("its status is %+v", s)
		}
		return err
	})
	if left := lies(); len(left) > 0 {
		t.Errorf("on the node are left %q", left)
	}
	c.nodeIsClean(t)
	c.uninstall(t)
	c.nodeIsClean(t)

	c.install(t, "node=sim:t4x2", fourShares)
	c.awaitCondition(t, v1.ConditionTrue, "Serving")
	// With the DaemonSet gone already, the chart's hook has nothing to delete.
	if err := c.client.AppsV1().DaemonSets(namespace).Delete(t.Context(), "virgate", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.awaitCondition(t, v1.ConditionUnknown, "Stopped", "its GPUs are not served")
	c.uninstall(t)
	output, err := exec.Command(c.path("virgate"), "uninstall", "--all", "--kubeconfig", c.path("admin.conf")).CombinedOutput()
	if err != nil || !strings.Contains(string(output), "condition GPUSharingReady") {
		t.Errorf("uninstall: %v\n%s", err, output)
	}
	c.nodeIsClean(t)
}

// nodeIsClean fails if the Node has a condition, a label or an annotation of Virgate's.
func (c *cluster) nodeIsClean(t *testing.T) {
	t.Helper()
	node := c.node(t)
	for _, condition := range node.Status.Conditions {
		if condition.Type == "GPUSharingReady" {
			t.Errorf("the node has the condition %+v", condition)
		}
	}
	for key := range node.Labels {
		if strings.HasSuffix(key, "config.state") {
			t.Errorf("the node has the label %s", key)
		}
	}
	for key := range node.Annotations {
		if strings.HasPrefix(key, "virgate.github.io/") {
			t.Errorf("the node has the annotation %s", key)
		}
	}
}

// testUninstall removes the chart while pods hold shares, and installs it again.
func testUninstall(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares)
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	if running := processes(t, plugin); len(running) != 1 {
		t.Fatalf("Virgate's container has processes %v, want one", running)
	}

	began := time.Now()
	c.uninstall(t)
	c.report.note("helm uninstall", took(began))
	// The pod itself wrote it: the chart's hook ends the pod before its right to write goes.
	c.awaitCondition(t, v1.ConditionUnknown, "Stopped", "its GPUs are not served")
	c.awaitAllocatable(t, map[string]int64{})
	c.awaitServed(t, map[string]int64{})
	c.nothingLeft(t, plugin)
	c.awaitInsufficient(t, "nowhere", shared)
	c.undisturbed(t, before)

	c.install(t, "node=sim:t4x2", fourShares)
	c.awaitAllocatable(t, all)
	c.undisturbed(t, before)
	c.fill(t, append(holders, "nowhere"), 2, 4)
}

// nothingLeft fails if a process, a socket or an object in the cluster is left of Virgate, which ran in
// that pod.
func (c *cluster) nothingLeft(t *testing.T, plugin *v1.Pod) {
	t.Helper()
	if left := processes(t, plugin); len(left) > 0 {
		t.Errorf("Virgate's processes %v run on", left)
	}
	err := filepath.WalkDir("/var/lib/kubelet/device-plugins", func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && entry.Type() == fs.ModeSocket && entry.Name() != "kubelet.sock" {
			t.Errorf("the socket %s is left", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.await(t, "the chart's objects to be gone", func() error {
		if left := c.named(t, "virgate"); len(left) > 0 {
			return fmt.Errorf("there are %q", left)
		}
		return nil
	})
}

// named returns the objects of all kinds whose names have the prefix, as "RESOURCE/NAME". It leaves out
// namespaces, which Helm keeps, and events, which stay for an hour.
func (c *cluster) named(t *testing.T, prefix string) []string {
	t.Helper()
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	groups, err := c.client.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, group := range groups {
		version, err := schema.ParseGroupVersion(group.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range group.APIResources {
			if !slices.Contains(kind.Verbs, "list") || kind.Name == "namespaces" || kind.Name == "events" {
				continue
			}
			list, err := client.Resource(version.WithResource(kind.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatalf("list %s: %v", kind.Name, err)
			}
			for _, object := range list.Items {
				if strings.HasPrefix(object.GetName(), prefix) {
					found = append(found, kind.Name+"/"+object.GetName())
				}
			}
		}
	}
	return found
}
