package chart

import (
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// TestNodesOfTheDaemonSet checks on which nodes the chart runs, by labels that other programs write, and
// that its notes name those labels in the form of kubectl -l.
func TestNodesOfTheDaemonSet(t *testing.T) {
	const noGPU, value = "kubernetes.io/hostname=a,feature.node.kubernetes.io/pci-0200_15b3.present=true", "feature.node.kubernetes.io/"
	for _, test := range []struct {
		name, values, node string
		want               bool
	}{
		{"another device", "{}", noGPU, false},
		{"node feature discovery by itself, a data centre's GPU", "{}", value + "pci-0302_10de.present=true", true},
		{"the same, a GPU that has a display", "{}", value + "pci-0300_10de.present=true", true},
		{"node feature discovery as NVIDIA's charts set it", "{}", value + "pci-10de.present=true", true},
		{"a GPU of another vendor", "{}", value + "pci-0302_1002.present=true", false},
		{"NVIDIA's bridge", "{}", value + "pci-0680_10de.present=true", false},
		{"Tegra", "{}", value + "cpu-model.vendor_id=NVIDIA", true},
		{"GPU feature discovery or the GPU Operator", "{}", "nvidia.com/gpu.present=true", true},
		{"said to have none", "{}", "nvidia.com/gpu.present=false", false},
		{"a label besides", "nodeSelector: {pool: a}", "nvidia.com/gpu.present=true", false},
		{"all nodes", "affinity: {nodeAffinity: null}", noGPU, true},
		{"own labels", "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [a, b]}, {key: old, operator: DoesNotExist}]}]}}}",
			"gpu=b", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			values, err := chartutil.ReadValues([]byte(test.values))
			if err != nil {
				t.Fatal(err)
			}
			manifest, notes, err := render(t, values)
			if err != nil {
				t.Fatal(err)
			}
			node, err := labels.ConvertSelectorToLabelsMap(test.node)
			if err != nil {
				t.Fatal(err)
			}
			if got := runsOn(t, daemonSet(t, decode(t, manifest)).Spec.Template.Spec, node); got != test.want {
				t.Errorf("the pod runs there: %t", got)
			}
			_, list, found := strings.Cut(notes, "kubectl -n gpu get daemonset virgate\n")
			if !found {
				t.Fatalf("the notes have no command that counts the nodes:\n%s", notes)
			}
			list, _, _ = strings.Cut(strings.TrimSpace(list), "\n\n")
			named := strings.HasPrefix(strings.TrimSpace(notes), "Virgate runs on all nodes.")
			for line := range strings.SplitSeq(list, "\n") {
				selector, err := labels.Parse(strings.TrimSpace(line))
				if named || err != nil {
					continue
				}
				named = selector.Matches(node)
			}
			if named != test.want {
				t.Errorf("the notes name the node's labels: %t, want %t:\n%s", named, test.want, notes)
			}
		})
	}
}

// runsOn reports whether the scheduler may put the pod on a node with the labels.
func runsOn(t *testing.T, pod corev1.PodSpec, node labels.Set) bool {
	t.Helper()
	if !labels.SelectorFromSet(pod.NodeSelector).Matches(node) {
		return false
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil {
		return true
	}
	return slices.ContainsFunc(pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			operator := map[corev1.NodeSelectorOperator]selection.Operator{
				corev1.NodeSelectorOpIn:           selection.In,
				corev1.NodeSelectorOpExists:       selection.Exists,
				corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
			}[e.Operator]
			requirement, err := labels.NewRequirement(e.Key, operator, e.Values)
			if err != nil {
				t.Fatal(err)
			}
			return !requirement.Matches(node)
		})
	})
}
