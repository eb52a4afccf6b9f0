package e2e

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// otherHost is a Node that no kubelet stands behind.
const otherHost = "node-2"

// testRights tries with the tokens of Virgate's pod, of its service account alone
// and of a stranger what each may do.
func testRights(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
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

// pluginAttempts are what Virgate does, and what else somebody would do who had
// taken it over.
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

// strangerAttempts are the same for somebody to whom nothing was given.
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
