package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"
)

// testFeatureLabels follows the labels through profiles, checks that pods can choose the node by them, and
// tries what else Virgate's rights allow. Then it sends them through node feature discovery.
func testFeatureLabels(t *testing.T, c *cluster) {
	const byNode = "nvidia.com/gpu.present" // Set by the test's node, not by Virgate. It must stay: the chart looks for it.
	t.Cleanup(func() { c.withoutFeatures(t) })
	c.install(t, "node=sim:dgx-a100", "featureLabels.enabled=true")
	c.awaitFeatures(t, map[string]string{
		"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "8", "gpu.memory": "40960", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "gpu.family": "ampere",
		"gpu.compute.major": "8", "cuda.driver-version.major": "580", "gpu.shared.count": "",
	})

	t.Run("profile", func(t *testing.T) {
		c.label(t, "time-slicing-4-renamed")
		defer c.label(t, "")
		c.awaitProfile(t, "time-slicing-4-renamed", "applied")
		node := c.node(t) // A client that sees the profile also sees its labels.
		for name, want := range map[string]string{"gpu.replicas": "4", "gpu.shared.count": "8", byNode[len("nvidia.com/"):]: "true"} {
			if got := node.Labels["nvidia.com/"+name]; got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		c.label(t, "")
		c.awaitFeatures(t, map[string]string{"gpu.replicas": "1", "gpu.sharing-strategy": "none", "gpu.shared.count": "", "gpu.shared.replicas": "", "gpu.present": "true"})
	})
	t.Run("affinity", c.choosesNode)
	t.Run("rights", func(t *testing.T) {
		client := c.as(t, c.token(t, c.plugin(t)))
		label := func(node, name string) func(context.Context, *kubernetes.Clientset) error {
			return patchNode(node, `{"metadata": {"labels": {"nvidia.com/`+name+`": "any"}}}`)
		}
		for _, a := range []attempt{
			{"a feature label", label(hostName, "gpu.memory"), ""},
			{"a vGPU's", label(hostName, "vgpu.host-driver-branch"), ""},
			{"a partition's", label(hostName, "mig-1g.5gb.engines.copy"), ""},
			{"the operator's", label(hostName, "gpu.deploy.device-plugin"), "of a node's labels, virgate changes"},
			{"the profile's", label(hostName, "device-plugin.config"), "of a node's labels, virgate changes"},
		} {
			t.Run(a.name, func(t *testing.T) { c.allowed(t, client, a) })
		}
	})
	c.withoutFeatures(t)
	t.Run("file", c.writesFeatureFile)
	t.Run("object", c.writesNodeFeature)
}

// withoutFeatures installs Virgate without the labels, and removes those it has written.
func (c *cluster) withoutFeatures(t *testing.T) {
	t.Helper()
	if t.Context().Err() == nil {
		c.install(t, "node=sim:dgx-a100")
	}
	node, err := c.client.CoreV1().Nodes().Get(context.WithoutCancel(t.Context()), hostName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]any{}
	for _, name := range strings.Split(node.Annotations["virgate.github.io/feature-labels"], ",") {
		if _, there := node.Labels[name]; there {
			left[name] = nil
		}
	}
	c.setLabels(t, "", left)
}

// awaitFeatures waits until the Node has these labels of nvidia.com; "" means none.
func (c *cluster) awaitFeatures(t *testing.T, want map[string]string) {
	t.Helper()
	c.await(t, fmt.Sprintf("labels %v", want), func() error {
		node := c.node(t)
		for name, value := range want {
			if got := node.Labels["nvidia.com/"+name]; got != value {
				return fmt.Errorf("%s is %q", name, got)
			}
		}
		return nil
	})
}

// choosesNode runs the example of a pod that chooses a node by its GPUs, and one that requires more memory
// than any GPU has.
func (c *cluster) choosesNode(t *testing.T) {
	text, err := os.ReadFile("../../../deployments/examples/gpu-by-memory.yaml")
	if err != nil {
		t.Fatal(err)
	}
	read := func(name, memory string) *v1.Pod {
		var pod v1.Pod
		if err := yaml.UnmarshalStrict([]byte(strings.Replace(string(text), `"30000"`, `"`+memory+`"`, 1)), &pod); err != nil {
			t.Fatal(err)
		}
		pod.Name, pod.Namespace = name, workspace
		grace := int64(1)
		pod.Spec.TerminationGracePeriodSeconds = &grace
		pod.Spec.Containers[0].Image, pod.Spec.Containers[0].Command = workloadImage, nil // There is no registry.
		return &pod
	}
	c.create(t, read("too-large", "50000"))
	c.run(t, read("fits", "30000"))
	c.await(t, "the scheduler to refuse the other", func() error {
		pod, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), "too-large", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == v1.PodScheduled && strings.Contains(condition.Message, "affinity") {
				return nil
			}
		}
		return fmt.Errorf("it is %s: %v", pod.Status.Phase, pod.Status.Conditions)
	})
}

// writesFeatureFile has Virgate write the labels where NFD's worker would read them.
func (c *cluster) writesFeatureFile(t *testing.T) {
	const folder = "/etc/kubernetes/node-feature-discovery"
	if _, err := os.Stat(folder); err == nil {
		t.Skip("this machine has a folder of node feature discovery, which is not this test's")
	}
	t.Cleanup(func() {
		c.uninstall(t)
		// If this test made the folder above, it is empty now.
		_ = os.RemoveAll(folder)
		_ = os.Remove(filepath.Dir(folder))
	})
	c.install(t, "node=sim:dgx-a100", "featureLabels.enabled=true", "featureLabels.output=nfd-file", fourShares)
	c.await(t, "the file", func() error {
		data, err := os.ReadFile(folder + "/features.d/virgate")
		if err == nil && !strings.Contains(string(data), "\nnvidia.com/gpu.product=NVIDIA-A100-SXM4-40GB-SHARED\n") {
			err = fmt.Errorf("it has %q", data)
		}
		return err
	})
	if got := c.node(t).Labels["nvidia.com/gpu.product"]; got != "" {
		t.Errorf("the Node has the label too: %q", got)
	}
}

// writesNodeFeature has Virgate write the labels to NFD's object, which belongs to Virgate's pod and
// DaemonSet, and tries to write another node's.
func (c *cluster) writesNodeFeature(t *testing.T) {
	c.uninstall(t)
	c.apply(t, "testdata/nodefeature.yaml")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:dgx-a100", "featureLabels.enabled=true", "featureLabels.output=nfd-api", fourShares)
	const path = nodeFeatures + namespace + "/nodefeatures"
	c.awaitNodeFeature(t, namespace, "virgate-features-for-"+hostName, "gpu.replicas", "4")
	c.label(t, "exclusive")
	defer c.label(t, "")
	c.awaitNodeFeature(t, namespace, "virgate-features-for-"+hostName, "gpu.replicas", "1")

	client := c.as(t, c.token(t, c.plugin(t)))
	write := func(name, node, label string) func(context.Context, *kubernetes.Clientset) error {
		body := `{"apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature", "metadata": {"name": "` + name + `", "namespace": "` + namespace + `", "labels": {"nfd.node.kubernetes.io/node-name": "` + node + `"}},
			"spec": {"labels": {"` + label + `": "1"}, "features": {"flags": {}, "attributes": {}, "instances": {}}}}`
		return func(ctx context.Context, client *kubernetes.Clientset) error {
			return client.RESTClient().Post().AbsPath(path).Param("dryRun", "All").SetHeader("Content-Type", "application/json").Body([]byte(body)).Do(ctx).Error()
		}
	}
	const refused = "virgate writes the NodeFeature of its own node only"
	for _, a := range []attempt{
		{"another node's", write("virgate-features-for-"+otherHost, otherHost, "nvidia.com/gpu.count"), refused},
		{"under its name about another node", write("virgate-features-for-"+hostName, otherHost, "nvidia.com/gpu.count"), refused},
		{"another label", write("virgate-features-for-"+hostName, hostName, "nvidia.com/gpu.deploy.device-plugin"), refused},
		{"its own", write("virgate-features-for-"+hostName, hostName, "nvidia.com/gpu.count"), "already exists"},
	} {
		t.Run(a.name, func(t *testing.T) { c.allowed(t, client, a) })
	}
}

// nodeFeatures begins the paths of NFD's objects, before the namespace.
const nodeFeatures = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/"

// awaitNodeFeature waits until NFD's object has the label, and checks the object's owners.
func (c *cluster) awaitNodeFeature(t *testing.T, namespace, name, label, want string) {
	t.Helper()
	var found struct {
		Metadata metav1.ObjectMeta
		Spec     struct{ Labels map[string]string }
	}
	c.await(t, fmt.Sprintf("%s of NodeFeature %s to be %q", label, name, want), func() error {
		data, err := c.client.RESTClient().Get().AbsPath(nodeFeatures+namespace+"/nodefeatures", name).DoRaw(t.Context())
		if err != nil {
			return err
		}
		found.Spec.Labels = nil
		if err := json.Unmarshal(data, &found); err != nil {
			return err
		}
		if got := found.Spec.Labels["nvidia.com/"+label]; got != want {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
	var owners []string
	for _, owner := range found.Metadata.OwnerReferences {
		owners = append(owners, owner.Kind)
	}
	if got := strings.Join(owners, ","); got != "DaemonSet,Pod" || found.Metadata.Labels["nfd.node.kubernetes.io/node-name"] != hostName {
		t.Errorf("the object belongs to %s and is about %v", got, found.Metadata.Labels)
	}
}
