package e2e

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kubeletReports makes the kubelet report its node at this interval until the end of the test.
func (c *cluster) kubeletReports(t *testing.T, every string) {
	t.Helper()
	path := c.path("kubelet.yaml")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	restart := func(config string) {
		c.write(t, "kubelet.yaml", config)
		c.kubelet.stop(syscall.SIGTERM)
		c.kubelet.start(t)
	}
	restart(strings.Replace(string(before), "nodeStatusUpdateFrequency: 1s", "nodeStatusUpdateFrequency: "+every, 1))
	t.Cleanup(func() { restart(string(before)) })
}

// testAnnounced runs a kubelet that reports once an hour, and a full node with waiting pods. After a switch
// to another name, the kubelet must refuse none of the pods, and the scheduler must use the freed devices:
// it learns of each change from Virgate.
func testAnnounced(t *testing.T, c *cluster) {
	const gpus, waiting, renamed = 4, 12, shared + ".shared"
	c.kubeletReports(t, "1h")
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "exclusive")
	c.install(t, "node=sim:t4x4", fourShares, "config.examples=true", stays)
	c.awaitAllocatable(t, map[string]int64{shared: gpus})
	c.hold(t, "holder", gpus)
	for _, one := range numbered("waiting", waiting, shared) {
		c.create(t, one)
	}
	c.awaitInsufficient(t, "last", shared)

	began := time.Now()
	c.label(t, "time-slicing-4-renamed")
	c.awaitAllocatable(t, map[string]int64{})
	c.report.note("label to fewer schedulable, by Virgate alone", took(began))
	// This does not wait for the four holders.
	c.awaitSeries(t, c.plugin(t), "virgate_switch_schedulable_seconds_bucket", "1", `le="60"`)
	metrics, err := fetch(c.plugin(t), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if seconds, is := strings.CutPrefix(strings.TrimSpace(line), "virgate_switch_schedulable_seconds_sum "); is {
			c.report.note("the same as virgate_switch_schedulable_seconds", seconds)
		}
	}
	began = time.Now()
	c.remove(t, "holder-0")
	c.awaitAllocatable(t, map[string]int64{renamed: 4})
	newcomer := pod("newcomer", renamed, 1)
	c.create(t, newcomer)
	c.await(t, "the share to be bound", func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), newcomer.Name, metav1.GetOptions{})
		if err == nil && got.Spec.NodeName == "" {
			err = errNotYet
		}
		return err
	})
	c.report.note("end of the holder to a bound share, by Virgate alone", took(began))
	c.awaitPhase(t, newcomer.Name, v1.PodRunning)
	list, err := c.client.CoreV1().Pods(workspace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range list.Items {
		if one.Status.Phase == v1.PodFailed {
			t.Errorf("pod %s was refused: %s: %s", one.Name, one.Status.Reason, one.Status.Message)
		}
	}
	c.awaitSeries(t, c.plugin(t), "virgate_announcements_total", "0", `result="refused"`)
}
