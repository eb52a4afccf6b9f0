package api

import (
	"errors"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
)

// TestEvictions tries what the holder of a node's token can do with the chart's rights and policy for
// evictions: it can end pods of its own node that requested a GPU, within PodDisruptionBudgets and grace
// periods, and no others.
func TestEvictions(t *testing.T) {
	s := startServer(t)
	s.allow()
	s.setNode("n1", "")
	s.setNode("n2", "")
	config := s.podToken("n1")
	s.createRole("virgate-evict", "clusterrole-evict.yaml")
	account := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "virgate", Name: "virgate"}
	s.bind("virgate-evict", "virgate-evict", account)
	var policies []string
	for _, policy := range s.rendered("limits", func(policy string) bool { return strings.Contains(policy, "admission-evict.yaml") }) {
		policies = append(policies, strings.ReplaceAll(policy, "system:serviceaccount:gpu:virgate", "system:serviceaccount:virgate:virgate"))
	}
	s.applyPolicies(1, policies)
	client, err := kubernetes.NewForConfig(config)
	s.must(err)
	evictor, err := nodestatus.NewEvictor(config, "n1")
	s.must(err)

	ctx, pods := t.Context(), s.admin.CoreV1().Pods("default")
	create := func(name, node, device string) *corev1.Pod {
		t.Helper()
		pod, err := pods.Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}},
			Spec: corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(77)), Containers: []corev1.Container{{
				Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(device): resource.MustParse("1")}},
			}}},
		}, metav1.CreateOptions{})
		s.must(err)
		pod.Status.Phase = corev1.PodRunning // A Pending pod has no budget.
		pod, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
		s.must(err)
		return pod
	}
	ends := func(name string) *int64 {
		t.Helper()
		pod, err := pods.Get(ctx, name, metav1.GetOptions{})
		s.must(err)
		return pod.DeletionGracePeriodSeconds
	}
	own, other, plain, kept := create("own", "n1", "nvidia.com/gpu"), create("other", "n2", "nvidia.com/gpu"), create("plain", "n1", "memory"), create("kept", "n1", "nvidia.com/gpu.shared")
	_, err = s.admin.PolicyV1().PodDisruptionBudgets("default").Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "kept"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: kept.Labels}},
	}, metav1.CreateOptions{})
	s.must(err)
	with := func(pod *corev1.Pod, change func(*metav1.DeleteOptions)) metav1.DeleteOptions {
		options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}
		if change != nil {
			change(&options)
		}
		return options
	}
	remove := func(pod *corev1.Pod, change func(*metav1.DeleteOptions)) error {
		return client.CoreV1().Pods("default").Delete(ctx, pod.Name, with(pod, change))
	}
	evict := func(options metav1.DeleteOptions) error {
		return client.CoreV1().Pods("default").EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: own.Name, Namespace: "default"}, DeleteOptions: &options})
	}
	dry := func(o *metav1.DeleteOptions) { o.DryRun = []string{metav1.DryRunAll} }
	s.await("the policy to hold", func() bool { return apierrors.IsInvalid(remove(other, dry)) })

	unbound, err := s.admin.CoreV1().ServiceAccounts("virgate").CreateToken(ctx, "virgate", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	s.must(err)
	nowhere, err := kubernetes.NewForConfig(s.config(unbound.Status.Token))
	s.must(err)
	for _, test := range []struct {
		name string
		do   func() error
		why  string
	}{
		{"a GPU pod of another node", func() error { return evictor.Evict(ctx, "default", "other", string(other.UID)) }, "virgate of node n1 may not delete pod default/other"},
		{"a pod without a GPU", func() error { return evictor.Evict(ctx, "default", "plain", string(plain.UID)) }, "only pods that requested a GPU"},
		{"a real eviction", func() error { return evict(metav1.DeleteOptions{}) }, "evicts none so"},
		{"an eviction that is a dry run in its body only", func() error { return evict(with(own, dry)) }, "evicts none so"},
		{"without a UID", func() error { return remove(own, func(o *metav1.DeleteOptions) { o.Preconditions = nil }) }, "names a pod's UID"},
		{"at once", func() error {
			return remove(own, func(o *metav1.DeleteOptions) { o.GracePeriodSeconds = new(int64(0)) })
		}, "leaves its grace period"},
		{"in a year", func() error {
			return remove(own, func(o *metav1.DeleteOptions) { o.GracePeriodSeconds = new(int64(365 * 24 * 3600)) })
		}, "leaves its grace period"},
		{"a token of no node", func() error {
			return nowhere.CoreV1().Pods("default").Delete(ctx, "own", with(own, nil))
		}, "does not say on which node"},
		{"all pods", func() error {
			return client.CoreV1().Pods("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}, "cannot deletecollection"},
	} {
		if err := test.do(); err == nil || !strings.Contains(err.Error(), test.why) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.why)
		}
	}
	if err := evictor.Evict(ctx, "default", "plain", string(plain.UID)); !errors.Is(err, nodereport.ErrMayNotEvict) {
		t.Errorf("what the policy refuses: %v", err)
	}
	if err := evictor.Evict(ctx, "default", "kept", string(kept.UID)); !errors.Is(err, nodereport.ErrDisruptionBudget) {
		t.Errorf("against a PodDisruptionBudget: %v", err)
	}
	if err := evictor.Evict(ctx, "default", "own", string(types.UID("another"))); !errors.Is(err, nodereport.ErrPodGone) {
		t.Errorf("another pod of that name: %v", err)
	}
	for _, pod := range []*corev1.Pod{own, other, plain, kept} {
		if ends(pod.Name) != nil {
			t.Errorf("pod %s ends", pod.Name)
		}
	}
	s.must(evictor.Evict(ctx, "default", "own", string(own.UID)))
	if grace := ends("own"); grace == nil || *grace != 77 {
		t.Errorf("the evicted pod ends after %v, want its own 77 s", grace)
	}
	for _, phase := range []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed} {
		pod := create("ended", "n1", "nvidia.com/gpu")
		pod.Status.Phase = phase
		_, err := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
		s.must(err)
		if err := evictor.Evict(ctx, "default", "ended", string(pod.UID)); err != nil {
			t.Errorf("a pod that has %s: %v", phase, err)
		}
		if _, err := pods.Get(ctx, "ended", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("a pod that has %s is still there: %v", phase, err)
		}
	}
}
