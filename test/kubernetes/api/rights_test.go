package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/test/await"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
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
)

// testRightsTaken checks that a node which loses its rights while it watches keeps its profile, says why,
// and follows again when it has them back.
func testRightsTaken(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")

	bindings := s.admin.RbacV1().RoleBindings(namespace)
	binding, err := bindings.Get(t.Context(), "virgate", metav1.GetOptions{})
	s.must(err)
	s.must(bindings.Delete(t.Context(), "virgate", metav1.DeleteOptions{}))
	s.awaitRights(false)
	f.setCut(true) // The server checks rights when a watch begins.
	f.setCut(false)
	s.await("the refusal", func() bool { return f.answered(403) > 0 })
	s.setProfiles(map[string]string{"a": four})
	s.setNode("n1", "b") // It may still receive changes of the Node.
	f.awaits(t, is(t, "a", two), `names "b", which does not exist: the profiles are a`)
	s.setNode("n1", "a")
	binding.ResourceVersion, binding.UID = "", ""
	_, err = bindings.Create(t.Context(), binding, metav1.CreateOptions{})
	s.must(err)
	f.awaits(t, is(t, "a", four), "")
	if history := f.history(); len(history) != 2 {
		t.Errorf("applied %q", history)
	}
}

// testRefused checks that a user without rights gets no profile, and an error that names the missing right.
func testRefused(t *testing.T, s *server) {
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	f := s.follow(t, "n1", strangerToken, nil)
	f.awaits(t, "", `node n1: not known yet: list node n1: nodes "n1" is forbidden: User "stranger" cannot list resource "nodes"`)
	if _, err := f.policy.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
}

// testAllowed checks that the chart's rights are exactly those that are needed.
func testAllowed(t *testing.T, s *server) {
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	virgate, err := kubernetes.NewForConfig(s.config(virgateToken))
	if err != nil {
		t.Fatal(err)
	}
	core, options := virgate.CoreV1(), metav1.ListOptions{}
	patch := []byte(`{"metadata":{"labels":{"nvidia.com/device-plugin.config.state":"applied"}}}`)
	status := []byte(`{"status":{"conditions":[{"type":"GPUSharingReady","status":"True"}]}}`)
	for _, test := range []struct {
		name    string
		allowed bool
		do      func(context.Context) error
	}{
		{"patch its node", true, func(ctx context.Context) error {
			_, err := core.Nodes().Patch(ctx, "n1", types.MergePatchType, patch, metav1.PatchOptions{})
			return err
		}},
		{"patch its node's status", true, func(ctx context.Context) error {
			_, err := core.Nodes().Patch(ctx, "n1", types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status")
			return err
		}},
		{"create an event", true, func(ctx context.Context) error {
			_, err := core.Events("default").Create(ctx, &corev1.Event{
				ObjectMeta: metav1.ObjectMeta{Name: "n1.1"}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n1"},
			}, metav1.CreateOptions{})
			return err
		}},
		{"update a node", false, func(ctx context.Context) error {
			_, err := core.Nodes().Update(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.UpdateOptions{})
			return err
		}},
		{"delete a node", false, func(ctx context.Context) error { return core.Nodes().Delete(ctx, "n1", metav1.DeleteOptions{}) }},
		{"list the namespace's ConfigMaps", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).List(ctx, options)
			return err
		}},
		{"read another ConfigMap", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps("kube-system").Get(ctx, "x", metav1.GetOptions{})
			return err
		}},
		{"write the ConfigMap", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).Patch(ctx, configMap, types.MergePatchType, []byte(`{"data":{"b":""}}`), metav1.PatchOptions{})
			return err
		}},
		{"make a rollout", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "virgate-rollout-x"}}, metav1.CreateOptions{})
			return err
		}},
		{"change a rollout", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).Patch(ctx, "virgate-rollout-x", types.MergePatchType, []byte(`{"data":{"state":""}}`), metav1.PatchOptions{})
			return err
		}},
		{"forget a rollout", false, func(ctx context.Context) error {
			return core.ConfigMaps(namespace).Delete(ctx, "virgate-rollout-x", metav1.DeleteOptions{})
		}},
		{"read a rollout", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).Get(ctx, "virgate-rollout-x", metav1.GetOptions{})
			return err
		}},
		{"list secrets", false, func(ctx context.Context) error { _, err := core.Secrets(namespace).List(ctx, options); return err }},
		{"list pods", false, func(ctx context.Context) error { _, err := core.Pods("").List(ctx, options); return err }},
	} {
		if err := test.do(t.Context()); (err == nil) != test.allowed || err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: allowed %v, got %v", test.name, test.allowed, err)
		}
	}
}

// testAdmission installs the shipped policy and writes with a pod's token.
func testAdmission(t *testing.T, s *server) {
	s.setNode("n1", "")
	s.setNode("n2", "")
	config := s.podToken("n1")
	testPausedLabels(t, s, config)
	s.applyFile("../../../charts/virgate/files/admission-own-node.yaml")
	client, err := kubernetes.NewForConfig(config)
	s.must(err)
	patch := func(node, body string, part ...string) error {
		_, err := client.CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{}, part...)
		return err
	}
	const ours = `{"metadata":{"annotations":{"virgate.github.io/generation":"x"}}}`
	s.await("the policy to hold", func() bool { return apierrors.IsInvalid(patch("n2", ours)) })

	r := startReporter(t, config, "n1", nil)
	stale := serving("g1")
	_, err = s.admin.CoreV1().Nodes().Patch(t.Context(), "n1", types.StrategicMergePatchType, []byte(`{"status":{"capacity":{"nvidia.com/old":"0","nvidia.com/gpu":"8","pods":"0"},"addresses":[{"type":"InternalIP","address":"10.0.0.1"}],"conditions":[{"type":"Ready","status":"True"}]}}`), metav1.PatchOptions{}, "status")
	s.must(err)
	stale.Gone = []nodereport.GoneResource{{Name: "nvidia.com/old", Since: time.Now().Add(-time.Hour)}}
	r.Report(stale)
	s.await("its own node to be told", func() bool {
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
		{"the annotation of a rollout", "n1", "", `{"metadata":{"annotations":{"virgate.github.io/rollout":"{}"}}}`, "annotations"},
		{"a foreign condition", "n1", "status", `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, "conditions"},
		{"addresses", "n1", "status", `{"status":{"addresses":[{"type":"InternalIP","address":"10.0.0.66"}]}}`, "addresses"},
		{"an owner", "n1", "", `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"u"}]}}`, "owners"},
		{"an owner, by way of the status", "n1", "status", `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"u"}]}}`, "owners"},
		{"a finalizer", "n1", "", `{"metadata":{"finalizers":["example.com/stay"]}}`, "finalizers"},
		{"the kubelet's port", "n1", "status", `{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":6666}}}}`, "daemonEndpoints"},
		{"the kubelet's version", "n1", "status", `{"status":{"nodeInfo":{"kubeletVersion":"v0.0.1"}}}`, "nodeInfo"},
		{"more capacity of Kubernetes' own", "n1", "status", `{"status":{"capacity":{"pods":"200"}}}`, "capacity"},
		{"more capacity than a list can have", "n1", "status", `{"status":{"capacity":{"nvidia.com/gpu":"39322"}}}`, "capacity"},
		{"half a GPU", "n1", "status", `{"status":{"allocatable":{"nvidia.com/gpu":"1500m"}}}`, "allocatable"},
		{"a capacity of its own", "n1", "status", `{"status":{"capacity":{"example.com/new":"1"}}}`, "capacity"},
		{"a capacity that is not 0 away", "n1", "status", `{"status":{"capacity":{"nvidia.com/gpu":null}}}`, "capacity"},
		{"a capacity of Kubernetes' own away", "n1", "status", `{"status":{"capacity":{"pods":null}}}`, "capacity"},
		{"what is allocatable of Kubernetes' own", "n1", "status", `{"status":{"allocatable":{"pods":"80"}}}`, "allocatable"},
		{"what is allocatable of a look-alike", "n1", "status", `{"status":{"allocatable":{"nvidia.community/gpu":"80"}}}`, "allocatable"},
		{"attached volumes", "n1", "status", `{"status":{"volumesAttached":[{"name":"v","devicePath":"/dev/v"}]}}`, "volumes"},
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
	written := r.Announce(t.Context(), map[string]int{"nvidia.com/gpu": 10000, "example.com/gpu": 8}, map[string]int{"nvidia.com/gpu": 4, "example.com/gpu": 8})
	n1 := s.node("n1").Status
	if got := fmt.Sprint(n1.Capacity["nvidia.com/gpu"], n1.Allocatable["nvidia.com/gpu"], n1.Capacity["example.com/gpu"]); !written["nvidia.com/gpu"] || written["example.com/gpu"] || got != "{{10 3} {<nil>} 10k DecimalSI} {{4 0} {<nil>} 4 DecimalSI} {{0 0} {<nil>}  }" {
		t.Errorf("announced: %s, %v", got, written)
	}
	if got := r.Announcements(); got["written"] != 1 || got["refused"] != 1 {
		t.Errorf("announcements %v", got)
	}
	if err := patch("n1", `{"metadata":{"labels":{"nvidia.com/mig.config.state":"success"}}}`); err != nil {
		t.Errorf("its own other label: %v", err)
	}

	r.Leave(t.Context(), nil)
	if c := s.node("n1").Status.Conditions; !slices.ContainsFunc(c, func(c corev1.NodeCondition) bool {
		return c.Type == nodestatus.ConditionType && c.Status == corev1.ConditionUnknown && c.Reason == "Stopped"
	}) {
		t.Errorf("at the end the conditions are %+v", c)
	}
	_, err = s.admin.CoreV1().Nodes().Patch(t.Context(), "n2", types.StrategicMergePatchType, []byte(ours), metav1.PatchOptions{})
	s.must(err)
	if _, err := nodestatus.Uninstall(t.Context(), config, "n2", "nvidia.com"); err == nil || !strings.Contains(err.Error(), "may not write to node n2") {
		t.Errorf("take away what another node's left: %v", err)
	}
	if _, err := nodestatus.Uninstall(t.Context(), config, "n1", "nvidia.com"); err != nil {
		t.Errorf("take away what it left: %v", err)
	}
	n := s.node("n1")
	for key := range n.Annotations {
		if strings.HasPrefix(key, "virgate.github.io/") {
			t.Errorf("the annotation %s is left", key)
		}
	}
	if _, left := n.Labels[nodestatus.StateLabel]; left || len(n.Status.Conditions) != 1 || n.Status.Conditions[0].Type != corev1.NodeReady {
		t.Errorf("labels %v and conditions %+v are left", n.Labels, n.Status.Conditions)
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

// podToken returns a client configuration for Virgate's service account in a pod on the node.
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

// testPausedLabels checks the API server's decisions by the shipped policy, as the chart renders it with
// and without mig.pauseClients.
func testPausedLabels(t *testing.T, s *server, config *rest.Config) {
	const dcgm, exporter, plugin = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter", "nvidia.com/gpu.deploy.device-plugin"
	policy, err := os.ReadFile("../../../charts/virgate/files/admission-own-node.yaml")
	s.must(err)
	opted := strings.Replace(string(policy), "name: pausedLabels\n    expression: '[]'", `name: pausedLabels
    expression: '["`+dcgm+`", "`+exporter+`"]'`, 1)
	if opted == string(policy) {
		t.Fatal("the policy has no list of labels that are paused")
	}
	labels, err := nodestatus.NewClientLabels(config, "n1")
	s.must(err)
	set := func(values map[string]any) {
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": values}})
		s.must(err)
		_, err = s.admin.CoreV1().Nodes().Patch(t.Context(), "n1", types.StrategicMergePatchType, body, metav1.PatchOptions{})
		s.must(err)
	}
	client, err := kubernetes.NewForConfig(config)
	s.must(err)
	try := func(label string, value any) error {
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{label: value}}})
		s.must(err)
		_, err = client.CoreV1().Nodes().Patch(t.Context(), "n1", types.StrategicMergePatchType, body, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	both := []string{dcgm, exporter}
	part := func(name string, play func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			whole := s.t
			s.t = t
			t.Cleanup(func() { s.t = whole })
			play(t)
		})
	}
	part("without mig.pauseClients", func(t *testing.T) {
		s.applyPolicies(1, strings.Split(string(policy), "\n---\n"))
		set(map[string]any{dcgm: "true", exporter: "false"})
		s.await("the policy to hold", func() bool { return try("x", "y") != nil })
		if err := labels.Pause(t.Context(), both); err == nil || !strings.Contains(err.Error(), dcgm+": ") || strings.Contains(err.Error(), "label "+exporter) {
			t.Errorf("pause: %v", err)
		}
		// It was on when this pause was made.
		set(map[string]any{dcgm: "paused-for-mig-change", plugin: "paused-for-mig-change"})
		if err := try(plugin, "true"); err == nil {
			t.Errorf("%s becomes true", plugin)
		}
		if err := try(dcgm, "false"); err == nil {
			t.Errorf("%s becomes false", dcgm)
		}
		set(map[string]any{plugin: nil})
		err := labels.Resume(t.Context(), both)
		if got := s.node("n1").Labels; err != nil || got[dcgm] != "true" {
			t.Errorf("resume: %v, labels %q", err, got)
		}
	})
	part("with mig.pauseClients", func(t *testing.T) {
		s.applyPolicies(1, strings.Split(opted, "\n---\n"))
		set(map[string]any{dcgm: "true", exporter: "false", plugin: "true"})
		s.await("the policy to hold, and not the one before", func() bool { return try(dcgm, "paused-for-mig-change") == nil && try("x", "y") != nil })
		for _, test := range []struct {
			label string
			value any
		}{
			{dcgm, "false"}, {dcgm, nil}, {dcgm, "paused-for-driver-upgrade"}, {exporter, "paused-for-mig-change"}, {exporter, "true"}, {plugin, "paused-for-mig-change"},
		} {
			if err := try(test.label, test.value); err == nil || !strings.Contains(err.Error(), "labels") {
				t.Errorf("%s becomes %v: %v", test.label, test.value, err)
			}
		}
		for _, step := range []struct {
			name string
			do   func(context.Context, []string) error
			want string
		}{{"pause", labels.Pause, "paused-for-mig-change"}, {"pause again", labels.Pause, "paused-for-mig-change"}, {"resume", labels.Resume, "true"}} {
			err := step.do(t.Context(), both)
			if got := s.node("n1").Labels; err != nil || got[dcgm] != step.want || got[exporter] != "false" {
				t.Errorf("%s: %v, labels %q", step.name, err, got)
			}
		}
	})
}

// applyFile creates the objects of a manifest.
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

// gpusNeedRequest is part of the name of the policy about GPUs without a request.
const gpusNeedRequest = "-gpus-need-request"

// rendered returns the policies and bindings for which keep is true, as the chart's tests render them with
// the values of that name.
func (s *server) rendered(values string, keep func(policy string) bool) (policies []string) {
	s.t.Helper()
	text, err := os.ReadFile("../../chart/testdata/" + values + ".golden.yaml")
	s.must(err)
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		if strings.Contains(document, "kind: ValidatingAdmissionPolicy") && keep(document) {
			policies = append(policies, document)
		}
	}
	return policies
}

// applyPolicies applies this many policies and their bindings, until the test ends.
func (s *server) applyPolicies(want int, policies []string) {
	s.t.Helper()
	if len(policies) != 2*want {
		s.t.Fatalf("%d policies and bindings, want %d of each", len(policies), want)
	}
	file := filepath.Join(s.t.TempDir(), "policies.yaml")
	write(s.t, file, strings.Join(policies, "\n---\n"))
	s.applyFile(file)
	s.t.Cleanup(func() {
		all := metav1.ListOptions{}
		s.must(s.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().DeleteCollection(context.Background(), metav1.DeleteOptions{}, all))
		s.must(s.admin.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().DeleteCollection(context.Background(), metav1.DeleteOptions{}, all))
	})
}

// testSharePolicies checks the API server's decisions about pods by the chart's policies for shares, as the
// chart's tests render them: one share of nvidia.com/gpu, in labelled namespaces only, and at most 8 of
// nvidia.com/gpu.shared.
func testSharePolicies(t *testing.T, s *server) {
	var policies []string
	for name, part := range map[string]string{"everything": "", "overrides": "-most-", "dra": "-claims\n"} {
		policies = append(policies, s.rendered(name, func(policy string) bool {
			return strings.Contains(policy, part) && !strings.Contains(policy, gpusNeedRequest)
		})...)
	}
	s.applyPolicies(6, policies)
	_, err := s.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "sharing", Labels: map[string]string{"virgate.github.io/shared-gpus": "allowed"},
	}}, metav1.CreateOptions{})
	s.must(err)
	try := func(space, name, count string, initially bool) error {
		asks := corev1.Container{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(count)}}}
		spec := corev1.PodSpec{Containers: []corev1.Container{asks}}
		if initially {
			spec = corev1.PodSpec{InitContainers: []corev1.Container{asks}, Containers: []corev1.Container{{Name: "main", Image: "i"}}}
		}
		_, err := s.admin.CoreV1().Pods(space).Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "p-"}, Spec: spec}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	s.await("the policies to hold", func() bool {
		return try("sharing", "nvidia.com/gpu", "2", false) != nil && try("default", "nvidia.com/gpu", "1", false) != nil && try("default", "nvidia.com/gpu.shared", "9", false) != nil
	})
	const one, place, most = "at most one share of a GPU", "virgate.github.io/shared-gpus=allowed", "at most 8 of nvidia.com/gpu.shared"
	for _, test := range []struct {
		space, name, count string
		initially          bool
		refused            string
	}{
		{"default", "nvidia.com/gpu", "1", false, place},
		{"default", "nvidia.com/gpu", "0", false, ""},
		{"default", "nvidia.com/mig-1g.5gb", "2", false, ""},
		{"sharing", "nvidia.com/gpu", "1", false, ""},
		{"sharing", "nvidia.com/gpu", "2", false, one},
		{"sharing", "nvidia.com/gpu", "2", true, one},
		{"default", "nvidia.com/gpu.shared", "8", false, ""},
		{"default", "nvidia.com/gpu.shared", "9", false, most},
		{"default", "nvidia.com/gpu.shared", "9", true, most},
		{"default", "cpu", "9", false, ""},
		{"kube-system", "nvidia.com/gpu", "2", false, ""},
	} {
		if err := try(test.space, test.name, test.count, test.initially); (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s asks for %s of %s (at first: %t): got %v, want %q", test.space, test.count, test.name, test.initially, err, test.refused)
		}
	}
	testClaimPolicies(t, s)
}

// testGPUsNeedRequest checks the API server's decisions about pods that name GPUs without a request.
func testGPUsNeedRequest(t *testing.T, s *server) {
	s.applyPolicies(1, s.rendered("everything", func(policy string) bool { return strings.Contains(policy, gpusNeedRequest) }))
	_, err := s.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "driver", Labels: map[string]string{"virgate.github.io/gpus-without-request": "allowed"},
	}}, metav1.CreateOptions{})
	s.must(err)
	container := func(change func(c *corev1.Container)) corev1.Container {
		c := corev1.Container{Name: "c", Image: "i", TerminationMessagePolicy: corev1.TerminationMessageReadFile, ImagePullPolicy: corev1.PullNever}
		change(&c)
		return c
	}
	variable := func(value string) func(c *corev1.Container) {
		return func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", Value: "all"}, {Name: "NVIDIA_VISIBLE_DEVICES", Value: value}}
		}
	}
	mount := func(path string) func(c *corev1.Container) {
		return func(c *corev1.Container) { c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: path}} }
	}
	asks := func(resourceName, count string) func(c *corev1.Container) {
		return func(c *corev1.Container) {
			variable("all")(c)
			c.Resources.Limits = corev1.ResourceList{corev1.ResourceName(resourceName): resource.MustParse(count)}
		}
	}
	plain := func(*corev1.Container) {}
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	try := func(space string, init, main func(c *corev1.Container)) error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "p-"}, Spec: corev1.PodSpec{
			Volumes:        []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "claim", ResourceClaimName: new("claim")}},
			Containers:     []corev1.Container{container(main)},
		}}
		if init != nil {
			first := container(init)
			first.Name = "first"
			pod.Spec.InitContainers = []corev1.Container{first}
		}
		_, err := s.admin.CoreV1().Pods(space).Create(t.Context(), pod, dry)
		return err
	}
	s.await("the policy to hold", func() bool { return try("default", nil, variable("all")) != nil })
	const named, mounted = "a container that requests no GPU may not set NVIDIA_VISIBLE_DEVICES", "a container that requests no GPU may not mount anything below /var/run/nvidia-container-devices"
	for _, test := range []struct {
		name, space string
		init, main  func(c *corev1.Container)
		refused     string
	}{
		{"nothing", "default", nil, plain, ""},
		{"all", "default", nil, variable("all"), named},
		{"one", "default", nil, variable("GPU-1"), named},
		{"void", "default", nil, variable("void"), ""},
		{"none", "default", nil, variable("none"), ""},
		{"empty", "default", nil, variable(""), ""},
		{"from elsewhere", "default", nil, func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}
		}, named},
		{"an init container", "default", variable("all"), plain, named},
		{"beside one with a GPU", "default", asks("nvidia.com/gpu", "1"), variable("all"), named},
		{"a mount", "default", nil, mount("/var/run/nvidia-container-devices/all"), mounted},
		{"a mount in other words", "default", nil, mount("/var/run/x/../nvidia-container-devices/all"), mounted},
		{"another mount", "default", nil, mount("/var/run/all"), ""},
		{"with a GPU", "default", nil, asks("nvidia.com/gpu.shared", "1"), ""},
		{"with a partition", "default", nil, asks("nvidia.com/mig-1g.5gb", "1"), ""},
		{"with a name of its own", "default", nil, asks("example.com/gpu", "1"), ""},
		{"by a DeviceClass", "default", nil, asks("deviceclass.resource.kubernetes.io/virgate-gpu.nvidia.com", "1"), ""},
		{"with none of it", "default", nil, asks("nvidia.com/gpu", "0"), named},
		{"with something else", "default", nil, asks("example.com/other", "1"), named},
		{"by a claim", "default", nil, func(c *corev1.Container) {
			variable("all")(c)
			c.Resources.Claims = []corev1.ResourceClaim{{Name: "claim"}}
		}, ""},
		{"the cluster's own", "kube-system", nil, variable("all"), ""},
		{"where it is allowed", "driver", nil, variable("all"), ""},
	} {
		if err := try(test.space, test.init, test.main); (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.refused)
		}
	}

	pods := s.admin.CoreV1().Pods("default")
	pod, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "debugged"}, Spec: corev1.PodSpec{Containers: []corev1.Container{container(plain)}}}, metav1.CreateOptions{})
	s.must(err)
	for value, refused := range map[string]string{"void": "", "all": "a debugging container may not set NVIDIA_VISIBLE_DEVICES"} {
		debugged := pod.DeepCopy()
		debugged.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
			Name: "debugger", Image: "i", Env: []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: value}},
			TerminationMessagePolicy: corev1.TerminationMessageReadFile, ImagePullPolicy: corev1.PullNever,
		}}}
		_, err := pods.UpdateEphemeralContainers(t.Context(), pod.Name, debugged, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if (err == nil) != (refused == "") || err != nil && !strings.Contains(err.Error(), refused) {
			t.Errorf("debugging with %q: got %v, want %q", value, err, refused)
		}
	}
}

// testClaimPolicies checks the API server's decisions about claims and templates by those policies.
func testClaimPolicies(t *testing.T, s *server) {
	const gpu, renamed, one, place = "virgate-gpu.nvidia.com", "virgate-gpu.shared.nvidia.com", "a claim may have at most one share", "virgate.github.io/shared-gpus=allowed"
	request := func(class string, count int64, capacity ...string) resourceapi.DeviceRequest {
		exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
		if count == 0 {
			exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
		}
		if len(capacity) > 0 {
			exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{resourceapi.QualifiedName(capacity[0]): resource.MustParse(capacity[1])}}
		}
		return resourceapi.DeviceRequest{Exactly: exactly}
	}
	either := func(class string, count int64) resourceapi.DeviceRequest {
		return resourceapi.DeviceRequest{FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "other", DeviceClassName: "other", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 3},
			{Name: "share", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count},
		}}
	}
	type requests = []resourceapi.DeviceRequest
	try := func(space string, asks requests) (claim, template error) {
		spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: asks}}
		dry, name := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}, metav1.ObjectMeta{GenerateName: "c-"}
		_, claim = s.admin.ResourceV1().ResourceClaims(space).Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: name, Spec: spec}, dry)
		_, template = s.admin.ResourceV1().ResourceClaimTemplates(space).Create(t.Context(), &resourceapi.ResourceClaimTemplate{ObjectMeta: name, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}, dry)
		return claim, template
	}
	s.await("the policies about claims to hold", func() bool {
		share, two := request(gpu, 1), request(gpu, 2)
		share.Name, two.Name = "r", "r"
		_, unlabelled := try("default", requests{share})
		_, several := try("sharing", requests{two})
		return unlabelled != nil && several != nil
	})
	for _, test := range []struct {
		name, space string
		requests    requests
		refused     string
	}{
		{"a share", "default", requests{request(gpu, 1)}, place},
		{"a share as the second choice", "default", requests{either(gpu, 1)}, place},
		{"all of them", "default", requests{request(gpu, 0)}, "ValidatingAdmissionPolicy"},
		{"another class", "default", requests{request("other", 9)}, ""},
		{"the cluster's own", "kube-system", requests{request(gpu, 9)}, ""},
		{"a share where it may be", "sharing", requests{request(gpu, 1)}, ""},
		{"with memory", "sharing", requests{request(gpu, 1, "memory", "16Gi")}, ""},
		{"a share as the second choice, where it may be", "sharing", requests{either(gpu, 1)}, ""},
		{"of two devices", "sharing", requests{request(gpu, 2)}, one},
		{"by two requests", "sharing", requests{request(gpu, 1), request(renamed, 1)}, one},
		{"two of one device", "sharing", requests{request(gpu, 1, "shares", "2")}, one},
		{"two by the whole name", "sharing", requests{request(gpu, 1, "gpu.virgate.github.io/shares", "2")}, one},
		{"two as the second choice", "sharing", requests{either(gpu, 2)}, one},
		{"more than there are", "sharing", requests{request(renamed, 3, "shares", "3")}, "ValidatingAdmissionPolicy"},
	} {
		for i := range test.requests {
			test.requests[i].Name = fmt.Sprintf("r%d", i)
		}
		claim, template := try(test.space, test.requests)
		for what, err := range map[string]error{"claim": claim, "template": template} {
			if (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
				t.Errorf("%s, in a %s: got %v, want %q", test.name, what, err, test.refused)
			}
		}
	}
	// The scheduler's claim for the extended resources of a pod has a request for each container.
	config := s.config(adminToken)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:kube-scheduler", Groups: []string{"system:masters"}}
	scheduler, err := kubernetes.NewForConfig(config)
	s.must(err)
	first, second := request(gpu, 1), request(gpu, 1)
	first.Name, second.Name = "container-0-request-0", "container-1-request-0"
	for space, ok := range map[string]bool{"sharing": true, "default": false} {
		_, err := scheduler.ResourceV1().ResourceClaims(space).Create(t.Context(), &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "c-"}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests{first, second}}},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if (err == nil) != ok {
			t.Errorf("the scheduler's claim in %s: %v", space, err)
		}
	}
}

// testPods checks that Virgate sees the pods of its node, with the separate right for that, and no others.
func testPods(t *testing.T, s *server) {
	s.createRole("virgate-pods", "clusterrole-pods.yaml")
	s.bind("virgate-pods", "virgate-pods", user("virgate"))
	t.Cleanup(func() {
		_ = s.admin.RbacV1().ClusterRoleBindings().Delete(context.Background(), "virgate-pods", metav1.DeleteOptions{})
	})

	count := &counter{}
	api, err := kube.NewClient(count.into(s.config(virgateToken)))
	s.must(err)
	pods := configsource.NewPods(api, "n1", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- pods.Watch(ctx, func() {}) }()
	defer func() {
		cancel()
		s.must(<-ended)
	}()
	for _, node := range []string{"n1", "n2"} {
		pod, err := s.admin.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "on-" + node},
			Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{})
		s.must(err)
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", ContainerID: "containerd://" + node}}
		_, err = s.admin.CoreV1().Pods("default").UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		s.must(err)
	}
	await.True(t, "the pod's container", func() bool {
		containers, err := pods.Containers()
		return err == nil && len(containers) == 1 && containers["n1"].Pod == "on-n1"
	})
	for _, request := range count.seen() {
		if !strings.Contains(request, "fieldSelector=spec.nodeName%3Dn1") {
			t.Errorf("%s is for pods of other nodes", request)
		}
	}
}
