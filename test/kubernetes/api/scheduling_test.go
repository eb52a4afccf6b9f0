package api

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/await"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	schedulingExamples  = "../../../deployments/examples/scheduling/"
	shares              = "nvidia.com/gpu.shared"
	schedulingNamespace = "scheduling"
)

// machine is a node without a kubelet, with all that the scheduler reads of a node.
type machine struct {
	set, name string
	cpus      int64
	shares    string // 8 for ""
	labels    map[string]string
	taint     string
}

// machines are the nodes of all parts; each part has its own set. The scheduler by default prefers the node
// with the most free CPUs, which here is the wrong one.
var machines = []machine{
	{set: "even", name: "even-1", cpus: 16},
	{set: "even", name: "even-2", cpus: 16},
	{set: "even", name: "even-3", cpus: 16},
	{set: "dense", name: "dense-1", cpus: 16, shares: "80"},
	{set: "dense", name: "dense-2", cpus: 16, shares: "80"},
	{set: "uneven", name: "large", cpus: 256},
	{set: "uneven", name: "small-1", cpus: 4},
	{set: "uneven", name: "small-2", cpus: 4},
	{set: "labels", name: "t4-of-4", cpus: 256, labels: gpuLabels("15360", "4")},
	{set: "labels", name: "a100-of-10", cpus: 32, labels: gpuLabels("40960", "10")},
	{set: "labels", name: "a100-of-4", cpus: 4, labels: gpuLabels("40960", "4")},
	{set: "taints", name: "tainted", cpus: 256, taint: shares},
	{set: "taints", name: "free", cpus: 4},
	{set: "other taint", name: "whole", cpus: 4, taint: "nvidia.com/gpu"},
}

func gpuLabels(memory, replicas string) map[string]string {
	return map[string]string{"nvidia.com/gpu.memory": memory, "nvidia.com/gpu.replicas": replicas, "nvidia.com/gpu.sharing-strategy": "time-slicing"}
}

// serviced is the set whose pods belong to a Service. One of its nodes' many shares makes so small a
// difference that the scheduler's default spreading would win.
const serviced = "dense"

// testScheduling tries the scheduling examples on the real scheduler, each beside the result without it.
func testScheduling(t *testing.T, s *server) {
	_, err := s.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: schedulingNamespace}}, metav1.CreateOptions{})
	s.must(err)
	// By default the scheduler spreads a Service's pods, which packing must overcome.
	_, err = s.admin.CoreV1().Services(schedulingNamespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: serviced},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"set": serviced}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	s.must(err)
	for _, m := range machines {
		s.createMachine(m)
	}
	s.startScheduler(t)

	one := func(set, scheduler string) corev1.PodSpec { return shareOf(set, shares, scheduler) }
	dense := one(serviced, "gpu-packing")
	dense.Containers[0].Resources.Limits[corev1.ResourceCPU] = resource.MustParse("1")
	for _, c := range []struct {
		name  string
		pod   corev1.PodSpec
		count int
		want  []int
	}{
		{"the default spreads pods over equal nodes", one("even", ""), 10, []int{3, 3, 4}},
		{"packing fills a node, then another", one("even", "gpu-packing"), 10, []int{0, 2, 8}},
		{"packing a Service's pods that ask for CPUs", dense, 10, []int{0, 10}},
		{"packing with headroom stops at three quarters", one("even", "gpu-packing-headroom"), 14, []int{2, 6, 6}},
		{"packing with headroom takes the rest last", one("even", "gpu-packing-headroom"), 20, []int{6, 6, 8}},
		{"the default does not weigh shares", one("uneven", ""), 6, []int{0, 0, 6}},
		{"spreading does", one("uneven", "gpu-spreading"), 6, []int{2, 2, 2}},
		{"the constraint spreads with the default scheduler", s.spread(true), 6, []int{2, 2, 2}},
		{"without the constraint", s.spread(false), 6, []int{0, 0, 6}},
	} {
		t.Run(c.name, func(t *testing.T) {
			counts := map[string]int{}
			for _, m := range machines {
				if m.set == c.pod.NodeSelector["set"] {
					counts[m.name] = 0
				}
			}
			for _, node := range s.schedule(t, c.pod, c.count) {
				counts[node]++
			}
			if got := slices.Sorted(maps.Values(counts)); !slices.Equal(got, c.want) {
				t.Errorf("%v: %v, want %v", counts, got, c.want)
			}
		})
	}

	example := func(change func(*corev1.NodeAffinity)) corev1.PodSpec {
		var pod corev1.Pod
		s.readExample("by-labels.yaml", &pod)
		change(pod.Spec.Affinity.NodeAffinity)
		return inSet(pod.Spec, "labels")
	}
	none := corev1.PodSpec{NodeSelector: map[string]string{"set": "taints"}, Containers: []corev1.Container{{Name: "main", Image: "none"}}}
	for _, c := range []struct {
		name string
		pod  corev1.PodSpec
		want string
	}{
		{"labels that are required and preferred", example(func(*corev1.NodeAffinity) {}), "a100-of-4"},
		{"without what is preferred", example(func(a *corev1.NodeAffinity) { a.PreferredDuringSchedulingIgnoredDuringExecution = nil }), "t4-of-4"},
		{"without what is required", example(func(a *corev1.NodeAffinity) { a.RequiredDuringSchedulingIgnoredDuringExecution = nil }), "a100-of-10"},
		{"a share is let onto the tainted node", one("taints", ""), "tainted"},
		{"a pod without GPU is not", none, "free"},
		{"the taint of another name keeps shares away", one("other taint", ""), ""},
		{"and lets whole GPUs in", shareOf("other taint", "nvidia.com/gpu", ""), "whole"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := s.schedule(t, c.pod, 1)[0]; got != c.want {
				t.Errorf("on %q, want %q", got, c.want)
			}
		})
	}
}

// shareOf is the spec of a pod with one of the resource.
func shareOf(set, name, scheduler string) corev1.PodSpec {
	return inSet(corev1.PodSpec{SchedulerName: scheduler, Containers: []corev1.Container{{
		Name: "main", Image: "none", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}},
	}}}, set)
}

func inSet(pod corev1.PodSpec, set string) corev1.PodSpec {
	pod.NodeSelector = map[string]string{"set": strings.ReplaceAll(set, " ", "-")}
	return pod
}

func (s *server) readExample(name string, into any) {
	s.t.Helper()
	text, err := os.ReadFile(schedulingExamples + name)
	s.must(err)
	s.must(yaml.UnmarshalStrict(text, into))
}

// spread is the spec of a pod of the example, with or without its constraint.
func (s *server) spread(constraint bool) corev1.PodSpec {
	s.t.Helper()
	var example appsv1.Deployment
	s.readExample("spread.yaml", &example)
	pod := inSet(example.Spec.Template.Spec, "uneven")
	if !constraint {
		pod.TopologySpreadConstraints = nil
	}
	return pod
}

func (s *server) createMachine(m machine) {
	s.t.Helper()
	nodes := s.admin.CoreV1().Nodes()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name, Labels: map[string]string{
		"set": strings.ReplaceAll(m.set, " ", "-"), corev1.LabelHostname: m.name,
	}}}
	maps.Copy(node.Labels, m.labels)
	node, err := nodes.Create(s.t.Context(), node, metav1.CreateOptions{})
	s.must(err)
	offered := cmp.Or(m.shares, "8")
	node.Status.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewQuantity(m.cpus, resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(m.cpus<<32, resource.BinarySI),
		corev1.ResourcePods: resource.MustParse("110"), shares: resource.MustParse(offered), "nvidia.com/gpu": resource.MustParse("2"),
	}
	node.Status.Capacity = node.Status.Allocatable
	node, err = nodes.UpdateStatus(s.t.Context(), node, metav1.UpdateOptions{})
	s.must(err)
	node.Spec.Taints = nil // The API server taints each new node as not ready.
	if m.taint != "" {
		node.Spec.Taints = []corev1.Taint{{Key: m.taint, Effect: corev1.TaintEffectNoSchedule}}
	}
	_, err = nodes.Update(s.t.Context(), node, metav1.UpdateOptions{})
	s.must(err)
}

// startScheduler starts kube-scheduler with the example's profiles.
func (s *server) startScheduler(t *testing.T) {
	t.Helper()
	const kubeconfig = "/etc/kubernetes/scheduler.conf"
	example, err := os.ReadFile(schedulingExamples + "scheduler.yaml")
	s.must(err)
	if !strings.Contains(string(example), kubeconfig) {
		t.Fatalf("the example does not name %s", kubeconfig)
	}
	write(t, s.path("scheduler.yaml"), strings.Replace(string(example), kubeconfig, s.path("scheduler.conf"), 1))
	write(t, s.path("scheduler.conf"), fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- {name: test, cluster: {server: %q, insecure-skip-tls-verify: true}}
users:
- {name: admin, user: {token: %s}}
contexts:
- {name: test, context: {cluster: test, user: admin}}
current-context: test
`, s.config("").Host, adminToken))
	log, err := os.Create(s.path("scheduler.log"))
	s.must(err)
	self, err := os.Executable()
	s.must(err)
	process := exec.Command(self, "--config="+s.path("scheduler.yaml"), "--leader-elect=false", "--secure-port=0", "--cert-dir="+s.path("scheduler"))
	process.Env = append(os.Environ(), asServer+"=scheduler")
	process.Stdout, process.Stderr = log, log
	_, err = process.StdinPipe()
	s.must(err)
	s.must(process.Start())
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		_ = log.Close()
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("the scheduler's log ends:\n%s", text[max(0, len(text)-3000):])
		}
	})
}

// schedule creates pods, deletes them again, and returns the node of each, "" if the scheduler finds none.
func (s *server) schedule(t *testing.T, spec corev1.PodSpec, count int) []string {
	t.Helper()
	pods := s.admin.CoreV1().Pods(schedulingNamespace)
	for i := range count {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d", i), Labels: map[string]string{"set": spec.NodeSelector["set"], "app": "inference"}}, Spec: spec}
		_, err := pods.Create(t.Context(), pod, metav1.CreateOptions{})
		s.must(err)
	}
	var nodes []string
	await.True(t, "the scheduler to decide", func() bool {
		list, err := pods.List(t.Context(), metav1.ListOptions{})
		s.must(err)
		nodes = nil
		for _, pod := range list.Items {
			refused := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable
			})
			if pod.Spec.NodeName == "" && !refused {
				return false
			}
			nodes = append(nodes, pod.Spec.NodeName)
		}
		return true
	})
	// No kubelet would end them.
	s.must(pods.DeleteCollection(t.Context(), *metav1.NewDeleteOptions(0), metav1.ListOptions{}))
	return nodes
}
