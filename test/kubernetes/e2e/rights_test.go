package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// otherHost is a Node without a kubelet.
const otherHost = "node-2"

// testRights tries what the tokens of Virgate's pod, of its service account alone and of a stranger allow.
func testRights(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares)
	other := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: otherHost}}
	nodes := c.client.CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := nodes.Delete(context.Background(), otherHost, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	c.checkRights(t, c.as(t, c.token(t, c.plugin(t))))
	for _, user := range []struct {
		name, token string
		attempts    []attempt
	}{
		{"plugin", c.token(t, c.plugin(t)), pluginAttempts()},
		{"service account without a pod", c.token(t, nil), []attempt{
			{"own state", patchNode(hostName, `{"metadata": {"labels": {"nvidia.com/device-plugin.config.state": "applied"}}}`), "the token does not say on which node"},
			{"event", tell(hostName), "the token does not say on which node"},
		}},
		{"stranger", strangerToken, strangerAttempts()},
	} {
		client := c.as(t, user.token)
		for _, attempt := range user.attempts {
			t.Run(user.name+" "+attempt.name, func(t *testing.T) { c.allowed(t, client, attempt) })
		}
	}
}

// checkRights compares every right of the client, in each namespace, with a list.
func (c *cluster) checkRights(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	namespaces, err := c.client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, in := range namespaces.Items {
		want := []string{
			"authentication.k8s.io/selfsubjectreviews create", // Everyone may ask about themselves.
			"authorization.k8s.io/selfsubjectaccessreviews create",
			"authorization.k8s.io/selfsubjectrulesreviews create",
			"events create",
			"events patch",
			"nodes get",
			"nodes list",
			"nodes patch",
			"nodes watch",
			"nodes/status patch",
		}
		if in.Name == namespace {
			const profiles = "configmaps %s [virgate-profiles]"
			want = append(want, fmt.Sprintf(profiles, "get"), fmt.Sprintf(profiles, "list"), fmt.Sprintf(profiles, "watch"))
			slices.Sort(want)
		}
		review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorization.SelfSubjectRulesReview{
			Spec: authorization.SelfSubjectRulesReviewSpec{Namespace: in.Name},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if review.Status.Incomplete {
			t.Fatalf("namespace %s: the API server does not know all rights: %s", in.Name, review.Status.EvaluationError)
		}
		var got []string
		for _, rule := range review.Status.ResourceRules {
			got = append(got, rights(rule)...)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, slices.Compact(got)); diff != "" {
			t.Errorf("rights in namespace %s (-want +got):\n%s", in.Name, diff)
		}
		for _, rule := range review.Status.NonResourceRules {
			if !slices.Equal(rule.Verbs, []string{"get"}) {
				t.Errorf("%s on the paths %q", rule.Verbs, rule.NonResourceURLs)
			}
		}
	}
}

// rights lists a rule's rights, each as "group/resource verb [names]", without the group for the core group.
func rights(rule authorization.ResourceRule) (list []string) {
	for _, group := range rule.APIGroups {
		for _, what := range rule.Resources {
			for _, verb := range rule.Verbs {
				right := strings.TrimPrefix(group+"/"+what, "/") + " " + verb
				if len(rule.ResourceNames) > 0 {
					right += fmt.Sprint(" ", rule.ResourceNames)
				}
				list = append(list, right)
			}
		}
	}
	return list
}

// pluginAttempts are what Virgate does, and what an attacker would try after taking it over.
func pluginAttempts() []attempt {
	const changes = "virgate changes "
	return []attempt{
		{"state of its node", patchNode(hostName, `{"metadata": {"labels": {"nvidia.com/device-plugin.config.state": "applied"}}}`), ""},
		{"annotation of its node", patchNode(hostName, `{"metadata": {"annotations": {"virgate.github.io/profile": "other"}}}`), ""},
		{"condition of its node", patchNode(hostName, `{"status": {"conditions": [{"type": "GPUSharingReady", "status": "Unknown"}]}}`, "status"), ""},
		{"event about its node", tell(hostName), ""},
		{"profiles", readConfigMap("virgate-profiles"), ""},

		{"state of another node", patchNode(otherHost, `{"metadata": {"labels": {"nvidia.com/device-plugin.config.state": "applied"}}}`), "virgate of node node-1 may not write to node node-2"},
		{"condition of another node", patchNode(otherHost, `{"status": {"conditions": [{"type": "GPUSharingReady", "status": "True"}]}}`, "status"), "may not write to node node-2"},
		{"event about another node", tell(otherHost), "virgate writes events about its own node only"},
		{"profile of its node", patchNode(hostName, `{"metadata": {"labels": {"nvidia.com/device-plugin.config": "other"}}}`), "of a node's labels, " + changes},
		{"annotation of others", patchNode(hostName, `{"metadata": {"annotations": {"example.com/a": "b"}}}`), "of a node's annotations, " + changes},
		{"taint", patchNode(hostName, `{"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}`), "virgate changes no node's spec"},
		{"condition of others", patchNode(hostName, `{"status": {"conditions": [{"type": "Ready", "status": "False"}]}}`, "status"), "of a node's conditions, " + changes},
		{"address", patchNode(hostName, `{"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}`, "status"), "virgate changes no node's addresses"},
		{"deleting its node", func(ctx context.Context, client *kubernetes.Clientset) error {
			return client.CoreV1().Nodes().Delete(ctx, hostName, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		}, `cannot delete resource "nodes"`},
		{"other ConfigMaps", readConfigMap("kube-root-ca.crt"), `cannot get resource "configmaps"`},
		{"Secrets", func(ctx context.Context, client *kubernetes.Clientset) error {
			_, err := client.CoreV1().Secrets(namespace).List(ctx, metav1.ListOptions{})
			return err
		}, `cannot list resource "secrets"`},
		{"reading pods", readPods, `cannot list resource "pods"`},
		{"making pods", func(ctx context.Context, client *kubernetes.Clientset) error {
			_, err := client.CoreV1().Pods(workspace).Create(ctx, pod("own", "cpu", 1), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		}, `cannot create resource "pods"`},
		{"its own policy", func(ctx context.Context, client *kubernetes.Clientset) error {
			return client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(ctx, "virgate-own-node", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		}, `cannot delete resource "validatingadmissionpolicybindings"`},
	}
}

// strangerAttempts are the same for an account without any rights.
func strangerAttempts() []attempt {
	return []attempt{
		{"node", func(ctx context.Context, client *kubernetes.Clientset) error {
			_, err := client.CoreV1().Nodes().Get(ctx, hostName, metav1.GetOptions{})
			return err
		}, `cannot get resource "nodes"`},
		{"label", patchNode(hostName, `{"metadata": {"labels": {"nvidia.com/device-plugin.config": "other"}}}`), `cannot patch resource "nodes"`},
		{"status", patchNode(hostName, `{"status": {"capacity": {"nvidia.com/gpu": "99"}}}`, "status"), `cannot patch resource "nodes/status"`},
		{"profiles", readConfigMap("virgate-profiles"), `cannot get resource "configmaps"`},
		{"event", tell(hostName), `cannot create resource "events"`},
		{"pods", readPods, `cannot list resource "pods"`},
	}
}

// attempt is something tried with a token, without any effect. refused is part of the API server's refusal,
// empty for what is allowed.
type attempt struct {
	name    string
	try     func(context.Context, *kubernetes.Clientset) error
	refused string
}

// allowed waits until the attempt ends as it should: a policy takes a moment to be in force, and an allowed
// attempt may conflict with another writer.
func (c *cluster) allowed(t *testing.T, client *kubernetes.Clientset, a attempt) {
	t.Helper()
	c.await(t, "the API server's word", func() error {
		err := a.try(t.Context(), client)
		switch {
		case a.refused == "":
			return err
		case err == nil:
			return errors.New("it is allowed")
		case !strings.Contains(err.Error(), a.refused):
			return fmt.Errorf("refused for another reason: %w", err)
		}
		return nil
	})
}

func readPods(ctx context.Context, client *kubernetes.Clientset) error {
	_, err := client.CoreV1().Pods(workspace).List(ctx, metav1.ListOptions{})
	return err
}

func readConfigMap(name string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		_, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	}
}

func patchNode(name, patch string, subresources ...string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		options := metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}
		_, err := client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), options, subresources...)
		return err
	}
}

// tell creates an event about the node.
func tell(node string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		event := &v1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: "attempt-", Namespace: metav1.NamespaceDefault},
			InvolvedObject: v1.ObjectReference{Kind: "Node", Name: node},
			Reason:         "Attempt",
		}
		_, err := client.CoreV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
}

// token returns a token of Virgate's service account, bound to the pod as the kubelet's is, or to no pod
// for nil.
func (c *cluster) token(t *testing.T, pod *v1.Pod) string {
	t.Helper()
	request := &authentication.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authentication.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	answer, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), "virgate", request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

// as returns a client with only that token.
func (c *cluster) as(t *testing.T, token string) *kubernetes.Clientset {
	t.Helper()
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// testAdmission checks the chart's policies for pods, before and after their namespace gets the label.
func testAdmission(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares, "admission.oneSharePerContainer=true", "admission.sharesNeedNamespaceLabel=true")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	preparing := pod("preparing", "cpu", 1)
	preparing.Spec.InitContainers = pod("", shared, 2).Spec.Containers
	preparing.Spec.InitContainers[0].Name = "prepare"
	const one, place = "a container may have at most one share of a GPU", "virgate.github.io/shared-gpus=allowed"
	const either = "ValidatingAdmissionPolicy" // If several refuse, the API server names any one.
	for _, namespaces := range []struct {
		name, label string
		attempts    []attempt
	}{
		{"unlabelled", `null`, []attempt{
			{"one share", create(pod("one", shared, 1)), place},
			{"two shares", create(pod("two", shared, 2)), either},
			{"no share", create(pod("none", "cpu", 1)), ""},
			{"0 shares", create(pod("zero", shared, 0)), ""},
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

	// Without the values, no pod is judged.
	c.labelNamespace(t, "null")
	c.install(t, "node=sim:t4x2", fourShares)
	c.allowed(t, c.client, attempt{"two shares", create(pod("two", shared, 2)), ""})

	// As with spread: strict, a request that no node could ever satisfy is refused, instead of making pods
	// that fail one after another.
	c.install(t, "node=sim:t4x2", fourShares, `admission.mostPerContainer.nvidia\.com/gpu=2`, `admission.mostPerContainer.nvidia\.com/g_pu=9`, `admission.mostPerContainer.nvidia\.com/g-pu=9`)
	c.allowed(t, c.client, attempt{"more than there are GPUs", create(pod("three", shared, 3)), "a container may have at most 2 of nvidia.com/gpu"})
	c.allowed(t, c.client, attempt{"as many as there are GPUs", create(pod("two", shared, 2)), ""})
}

// create is the attempt to create the pod.
func create(pod *v1.Pod) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		_, err := client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
}

// labelNamespace sets the label that allows shares on the pods' namespace, and removes it at the end of the
// test. The value is JSON.
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
