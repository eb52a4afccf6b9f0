package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/repeat"
)

// testDRALatency measures how long a user waits, from the creation of the claim or the pod until the API
// shows that the pod runs: by the device plugin, by a claim, and by the old name. Pods come one after the
// other, to an otherwise idle node. The figures go into the report and docs/internals/scale.md; the test
// does not judge them.
func testDRALatency(t *testing.T, c *cluster) {
	if !repeat.All() {
		t.Skip("it only measures, so it is for LONG=1")
	}
	const pods = 10
	c.createNamespace(t, namespace)
	c.profiles(t, "dra-latency", map[string]string{"plugin": replicas("4"), "dra": replicas("4") + "dra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:h100x2", "config.name=dra-latency", "dra.enabled=true", "dra.resources={"+shared+"}", "--cdi-dir=/var/run/cdi")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	measure := func(way string, create func(name string)) {
		var took []time.Duration
		for i := range pods {
			name := fmt.Sprintf("latency-%d", i)
			watch, err := c.client.CoreV1().Pods(workspace).Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			create(name)
			for running := false; !running; {
				event, open := <-watch.ResultChan()
				pod, is := event.Object.(*v1.Pod)
				if !open || !is || pod.Status.Phase == v1.PodFailed {
					t.Fatalf("%s: %s: %v", way, name, event)
				}
				running = pod.Status.Phase == v1.PodRunning
			}
			took = append(took, since(began))
			watch.Stop()
			c.remove(t, name)
		}
		slices.Sort(took)
		c.report.note("dra latency: "+way+", median, longest of 10", fmt.Sprintf("%.2f s, %.2f s", took[pods/2].Seconds(), took[pods-1].Seconds()))
	}
	byName := func(name string) { c.create(t, pod(name, shared, 1)) }
	measure("device plugin", byName)
	c.label(t, "dra")
	c.awaitSlices(t, "one one")
	c.awaitAllocatable(t, map[string]int64{})
	c.claimTemplate(t, "latency", "true")
	measure("claim of a template", func(name string) { c.create(t, claimPod(name, "latency")) })
	measure("claim", func(name string) { c.createClaim(t, name, "", 1) })
	measure("old name", byName)
}
