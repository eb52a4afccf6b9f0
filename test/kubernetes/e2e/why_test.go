package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// why returns the output of kubectl virgate why for the pod, which need not exist.
func (c *cluster) why(name string) string {
	output, err := exec.Command(c.path("kubectl-virgate"), "--kubeconfig", c.path("admin.conf"), "why", "-o", "wide", "-n", workspace, name).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s(%v)", output, err)
	}
	return string(output)
}

// awaitWhy waits until that output has all of these words: Virgate updates the Node within a second.
func (c *cluster) awaitWhy(t *testing.T, name string, words ...string) {
	t.Helper()
	said := ""
	c.await(t, fmt.Sprintf("why %s to say %q", name, words), func() error {
		said = c.why(name)
		for _, word := range words {
			if !strings.Contains(said, word) {
				return fmt.Errorf("%q is not in it:\n%s", word, said)
			}
		}
		return nil
	})
	t.Logf("why %s:\n%s", name, said)
}

// operate runs virgate gpu on the node, as an operator does, and checks that the output has this text.
func (c *cluster) operate(t *testing.T, plugin *v1.Pod, says string, verb ...string) {
	t.Helper()
	socket := fmt.Sprintf("/proc/%d/root/run/virgate/control.sock", processes(t, plugin)[0])
	output, err := exec.Command(c.path("virgate"), append([]string{"gpu", "--control-socket", socket}, verb...)...).CombinedOutput()
	if !strings.Contains(string(output), says) {
		t.Fatalf("gpu %q: %v\n%s", verb, err, output)
	}
}

// testWhy makes pods wait for each cause that kubectl virgate why knows; testDRA does so for DRA. The
// answer names the cause, what it waits for, and what helps.
func testWhy(t *testing.T, c *cluster) {
	const renamed = shared + ".shared"
	c.install(t, "node=sim:t4x2", fourShares, "--probe=2s")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	plugin, waits := c.plugin(t), "why"

	// Unhealthy: one GPU has a fault, and pods hold all shares of the other.
	c.simulate(t, plugin, "xid", "--gpu", "0", "79")
	c.awaitAllocatable(t, map[string]int64{shared: 4})
	c.hold(t, "holder", 4)
	c.awaitInsufficient(t, waits, shared)
	c.awaitWhy(t, waits, "devices are unhealthy on all nodes that have it: 1", "4 of 8 nvidia.com/gpu unhealthy, 4 held, 0 free", "held by default/holder-0", "GPU 0 is unhealthy: XID 79", "To help: 1 node could run it if all devices were healthy")
	c.remove(t, waits)

	// Full.
	c.simulate(t, plugin, "heal", "--gpu", "0")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	rest := c.hold(t, "rest", 4)
	c.awaitInsufficient(t, waits, shared)
	c.awaitWhy(t, waits, "pods hold too many on all nodes that have it: 1", "8 of 8 nvidia.com/gpu held, 0 free", "held by default/holder-0", "default/rest-3", "1 pod would have to end there")

	// Leaving: an operator has released one of the GPUs.
	c.operate(t, plugin, "waits for: ", "release", "--gpu", "0", "--wait=false")
	c.awaitWhy(t, waits, "GPU 0", "is not offered: it is released until", "or until virgate gpu restore", "To help: virgate gpu restore")
	c.operate(t, plugin, "is taken back", "restore", "--gpu", "0")
	c.awaitAllocatable(t, map[string]int64{shared: 8})

	// Switching, from the name that the pod wants and to it.
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "time-slicing-4-renamed")
	c.awaitWhy(t, waits, "a profile is being switched on all nodes that have it: 1", "withdrawn, because the node is switching to the profile time-slicing-4-renamed", "), held as nvidia.com/gpu by default/rest-0", "To help: the new profile of "+hostName+" does not offer what it wants")
	c.awaitInsufficient(t, "renamed", renamed)
	c.awaitWhy(t, "renamed", "nvidia.com/gpu.shared, which no node has; 1 node is switching", "), held as nvidia.com/gpu by default/rest-0", "To help: what the switch on "+hostName+" waits for")
	c.remove(t, "renamed")
	c.label(t, "")
	c.awaitAllocatable(t, map[string]int64{shared: 8})

	// A taint, with room behind it.
	taint := func(taints string) {
		t.Helper()
		if _, err := c.client.CoreV1().Nodes().Patch(t.Context(), hostName, types.MergePatchType, []byte(`{"spec":{"taints":`+taints+`}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	taint(`[{"key":"example.com/maintenance","effect":"NoSchedule"}]`)
	c.remove(t, rest[0])
	c.awaitWhy(t, waits, "it does not tolerate a taint of all nodes that have it: 1", "the taint example.com/maintenance:NoSchedule is not tolerated", "To help: a toleration of the taint would open 1 node")
	taint("null")
	c.awaitPhase(t, waits, v1.PodRunning)

	// A name that no node has.
	c.awaitInsufficient(t, "misspelt", "nvidia.com/gpus")
	c.awaitWhy(t, "misspelt", "waits for nvidia.com/gpus, which no node has.", "the nearest name that nodes have is nvidia.com/gpu, on 1 node")

	c.whyQuota(t)
}

// whyQuota has a quota prevent a workload's pod.
func (c *cluster) whyQuota(t *testing.T) {
	t.Helper()
	quota := &v1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "few-gpus"}, Spec: v1.ResourceQuotaSpec{Hard: v1.ResourceList{"requests." + shared: resource.MustParse("9")}}}
	if _, err := c.client.CoreV1().ResourceQuotas(workspace).Create(t.Context(), quota, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.client.CoreV1().ResourceQuotas(workspace).Delete(context.WithoutCancel(t.Context()), quota.Name, metav1.DeleteOptions{})
	})
	c.await(t, "the quota to be counted", func() error {
		got, err := c.client.CoreV1().ResourceQuotas(workspace).Get(t.Context(), quota.Name, metav1.GetOptions{})
		if used := got.Status.Used["requests."+shared]; err == nil && used.Value() != 8 {
			err = fmt.Errorf("used: %v", got.Status.Used)
		}
		return err
	})
	labels := map[string]string{"app": "too-many"}
	many := pod("too-many", shared, 2)
	many.Spec.RestartPolicy = v1.RestartPolicyAlways
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "too-many"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: many.Spec},
	}}
	if _, err := c.client.AppsV1().Deployments(workspace).Create(t.Context(), deployment, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.client.AppsV1().Deployments(workspace).Delete(context.WithoutCancel(t.Context()), deployment.Name, metav1.DeleteOptions{})
	})
	c.awaitWhy(t, deployment.Name, "there is no pod default/too-many; the ReplicaSet too-many-", "exceeded quota: few-gpus, requested: requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=9")
}
