package e2e

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// testAdmission has the chart's policies judge pods, before and after their
// namespace is given the label.
func testAdmission(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", "admission.oneSharePerContainer=true", "admission.sharesNeedNamespaceLabel=true", "admission.sharedResources={nvidia.com/gpu}")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	preparing := pod("preparing", "cpu", 1)
	preparing.Spec.InitContainers = pod("", shared, 2).Spec.Containers
	preparing.Spec.InitContainers[0].Name = "prepare"
	const one, place = "a container may have at most one share of a GPU", "virgate.github.io/shared-gpus=allowed"
	const either = "ValidatingAdmissionPolicy" // Of several that refuse, the API server names any one.
	for _, namespaces := range []struct {
		name, label string
		attempts    []attempt
	}{
		{"unlabelled", `null`, []attempt{
			{"one share", create(pod("one", shared, 1)), place},
			{"two shares", create(pod("two", shared, 2)), either},
			{"no share", create(pod("none", "cpu", 1)), ""},
		}},
		{"wrong", `"forbidden"`, []attempt{{"one share", create(pod("one", shared, 1)), place}}},
		{"allowed", `"allowed"`, []attempt{
			{"one share", create(pod("one", shared, 1)), ""},
			{"two shares", create(pod("two", shared, 2)), one},
			{"two shares at first", create(preparing), one},
			{"no share", create(pod("none", "cpu", 1)), ""},
		}},
	} {
		c.labelNamespace(t, namespaces.label)
		for _, attempt := range namespaces.attempts {
			t.Run(namespaces.name+" "+attempt.name, func(t *testing.T) { c.allowed(t, c.client, attempt) })
		}
	}
	c.run(t, pod("one", shared, 1))

	// Without the values, nobody is judged any more.
	c.labelNamespace(t, "null")
	c.install(t, "node=sim:t4x2")
	c.allowed(t, c.client, attempt{"two shares", create(pod("two", shared, 2)), ""})
}

// create is the attempt to make the pod.
func create(pod *v1.Pod) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		_, err := client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
}

// labelNamespace gives the pods' namespace the label that lets shares be used in
// it, which is taken away at the end of the test. The value is JSON.
func (c *cluster) labelNamespace(t *testing.T, value string) {
	t.Helper()
	write := func(ctx context.Context, value string) error {
		patch := `{"metadata": {"labels": {"virgate.github.io/shared-gpus": ` + value + `}}}`
		_, err := c.client.CoreV1().Namespaces().Patch(ctx, workspace, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	if err := write(t.Context(), value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := write(context.Background(), "null"); err != nil {
			t.Error(err)
		}
	})
}
