package api

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/sharing"
)

// testAdmission installs the shipped policy and writes with the
// token of a pod.
func testAdmission(t *testing.T, s *server) {
	s.setNode("n1", "")
	s.setNode("n2", "")
	config := s.podToken("n1")
	s.applyFile("../../../charts/virgate/files/admission-own-node.yaml")
	client, err := kubernetes.NewForConfig(config)
	s.must(err)
	patch := func(node, body string, part ...string) error {
		_, err := client.CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{}, part...)
		return err
	}
	const ours = `{"metadata":{"annotations":{"virgate.github.io/generation":"x"}}}`
	s.await(startTimeout, "the policy to hold", func() bool { return apierrors.IsInvalid(patch("n2", ours)) })

	r := startReporter(t, config, "n1", nil)
	stale := serving("g1")
	_, err = s.admin.CoreV1().Nodes().Patch(t.Context(), "n1", types.StrategicMergePatchType, []byte(`{"status":{"capacity":{"nvidia.com/old":"0"},"addresses":[{"type":"InternalIP","address":"10.0.0.1"}],"conditions":[{"type":"Ready","status":"True"}]}}`), metav1.PatchOptions{}, "status")
	s.must(err)
	stale.Gone = []sharing.GoneResource{{Name: "nvidia.com/old", Since: time.Now().Add(-time.Hour)}}
	r.Report(stale)
	s.await(startTimeout, "its own node to be told", func() bool {
		_, there := s.node("n1").Status.Capacity["nvidia.com/old"]
		return s.says("n1", "g1", "applied", "Serving") && len(s.told("n1", "ProfileApplied")) == 1 && !there
	})

	for _, test := range []struct {
		name, node, part, body, why string
	}{
		{"another node's annotations", "n2", "", ours, "may not write to node n2"},
		{"another node's condition", "n2", "status", `{"status":{"conditions":[{"type":"GPUSharingReady","status":"True"}]}}`, "may not write to node n2"},
		{"a taint", "n1", "", `{"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]}}`, "spec"},
		{"a foreign label", "n1", "", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`, "labels"},
		{"the label that chooses a layout", "n1", "", `{"metadata":{"labels":{"nvidia.com/mig.config":"all-disabled"}}}`, "labels"},
		{"a foreign annotation", "n1", "", `{"metadata":{"annotations":{"x":"y"}}}`, "annotations"},
		{"a foreign condition", "n1", "status", `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, "conditions"},
		{"addresses", "n1", "status", `{"status":{"addresses":[{"type":"InternalIP","address":"10.0.0.66"}]}}`, "addresses"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var parts []string
			if test.part != "" {
				parts = []string{test.part}
			}
			if err := patch(test.node, test.body, parts...); err == nil || !strings.Contains(err.Error(), test.why) {
				t.Errorf("got %v, want %q", err, test.why)
			}
		})
	}
	if err := patch("n1", `{"metadata":{"labels":{"nvidia.com/mig.config.state":"success"}}}`); err != nil {
		t.Errorf("its own other label: %v", err)
	}
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "default"}, Reason: "R", InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n2"},
	}
	if _, err := client.CoreV1().Events("default").Create(t.Context(), event, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(), "own node only") {
		t.Errorf("an event about another node: %v", err)
	}
	_, err = s.admin.CoreV1().Events("default").Create(t.Context(), event, metav1.CreateOptions{})
	s.must(err)
	taken := []byte(`{"involvedObject":{"name":"n1"}}`)
	if _, err := client.CoreV1().Events("default").Patch(t.Context(), "e", types.StrategicMergePatchType, taken, metav1.PatchOptions{}); err == nil || !strings.Contains(err.Error(), "own node only") {
		t.Errorf("an event taken from another node: %v", err)
	}
}

// podToken logs in as Virgate's service account from a pod on the node.
func (s *server) podToken(node string) *rest.Config {
	s.t.Helper()
	const name = "virgate"
	ctx, core := s.t.Context(), s.admin.CoreV1()
	_, err := core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	s.must(err)
	_, err = core.ServiceAccounts(name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	s.must(err)
	s.bind("virgate-account", "virgate", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: name, Name: name})
	zero := resource.MustParse("0")
	pod, err := core.Pods(name).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: name,
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": zero}}}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
	token, err := core.ServiceAccounts(name).CreateToken(ctx, name, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: name, UID: pod.UID},
	}}, metav1.CreateOptions{})
	s.must(err)
	return s.config(token.Status.Token)
}

// applyFile creates what a manifest has.
func (s *server) applyFile(path string) {
	s.t.Helper()
	data, err := os.ReadFile(path)
	s.must(err)
	client, err := dynamic.NewForConfig(s.config(adminToken))
	s.must(err)
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		object := &unstructured.Unstructured{}
		converted, err := utilyaml.ToJSON([]byte(document))
		s.must(err)
		s.must(json.Unmarshal(converted, object))
		plural := map[string]string{
			"ValidatingAdmissionPolicy": "validatingadmissionpolicies", "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
		}[object.GetKind()]
		kind := schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: plural}
		_, err = client.Resource(kind).Create(s.t.Context(), object, metav1.CreateOptions{})
		s.must(err)
	}
}
