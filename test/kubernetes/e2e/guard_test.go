package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/virgate/virgate/test/repeat"
)

// testGuard runs one pod within its share of the memory, one beyond it, and one further beyond it that a
// PodDisruptionBudget protects.
func testGuard(t *testing.T, c *cluster) {
	const profile = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, memory: {limit: share, grace: 2s, action: evict}}]}}\n"
	c.createNamespace(t, namespace)
	c.profiles(t, "guard", map[string]string{"guarded": profile})
	guarded := []string{"config.name=guard", "config.default=guarded", "metrics.perContainer=true", "memoryGuard.evict=true", "--sample=500ms"}
	c.install(t, append(guarded, "node=sim:t4")...)
	c.awaitAllocatable(t, map[string]int64{shared: 4})
	kept := pod("guard-kept", shared, 1)
	kept.Labels = map[string]string{"guard": "kept"}
	budgets := c.client.PolicyV1().PodDisruptionBudgets(workspace)
	if _, err := budgets.Create(t.Context(), &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "guard"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: kept.Labels},
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	dropBudget := func() {
		if err := budgets.Delete(context.WithoutCancel(t.Context()), "guard", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	}
	t.Cleanup(dropBudget) // In case the test fails before it does so.
	began, plugin := time.Now(), c.plugin(t)
	for i, p := range []struct {
		pod   *v1.Pod
		bytes int
	}{{kept, 7 << 30}, {pod("guard-over", shared, 1), 5 << 30}, {pod("guard-within", shared, 1), 2 << 30}} {
		c.run(t, p.pod)
		c.simulate(t, plugin, "process-add", "--gpu", "0", "--bytes", fmt.Sprint(p.bytes), "--container", workspace+"/"+p.pod.Name+"/work", fmt.Sprint(900000+i))
	}
	within := c.podStates(t, []string{"guard-within"})
	c.awaitEvicted(t, "guard-over")
	c.awaitEvent(t, began, "MemoryOverLimit", "guard-over")
	c.awaitEvent(t, began, "MemoryOverLimitEvicted", "guard-over")
	c.awaitEvent(t, began, "EvictionRefused", "guard-kept", "PodDisruptionBudget")
	c.awaitPhase(t, "guard-kept", v1.PodRunning)
	c.simulate(t, plugin, "process-remove", "--gpu", "0", "900001")
	c.awaitSeries(t, plugin, "virgate_memory_guard_evictions_total", "1", `result="evicted"`)
	dropBudget()
	c.awaitEvicted(t, "guard-kept")
	c.undisturbed(t, within)
	c.clear(t)
	c.install(t, append(guarded, "node=sim:dgx-a100")...)
	c.guardsInStorm(t)
}

// guardsInStorm starts and ends pods on all GPUs beside pods that stay. A third of those that stay use more
// than their share: only these are evicted.
func (c *cluster) guardsInStorm(t *testing.T) {
	c.awaitAllocatable(t, map[string]int64{shared: 32})
	names := c.hold(t, "guard-holder", 9)
	within, plugin := c.podStates(t, names), c.plugin(t)
	over := map[string]string{} // With the ID of the process.
	d := c.watchCluster(t)
	t.Cleanup(func() { c.clear(t) })
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	busy.Go(func() { c.startPods(ctx, d) })
	defer busy.Wait()
	defer cancel()
	for i, name := range names {
		bytes, process := 6<<30, fmt.Sprint(900000+i)
		if i%3 == 0 {
			bytes, over[name] = 12<<30, process
		}
		c.simulate(t, plugin, "process-add", "--gpu", indexOf(t, plugin, within[name].GPU), "--bytes", fmt.Sprint(bytes), "--container", workspace+"/"+name+"/work", process)
	}
	for name, process := range over {
		c.awaitEvicted(t, name)
		c.simulate(t, plugin, "process-remove", "--gpu", indexOf(t, plugin, within[name].GPU), process)
		delete(within, name)
	}
	c.await(t, "more pods to have come", func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.pods) < repeat.Times(20, 60) {
			return fmt.Errorf("there were %d", len(d.pods))
		}
		return nil
	})
	cancel()
	busy.Wait()
	c.undisturbed(t, within)
	c.awaitSeries(t, plugin, "virgate_memory_guard_evictions_total", fmt.Sprint(len(over)), `result="evicted"`)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, wrong := range d.wrong {
		t.Error(wrong)
	}
}

// indexOf is the driver's index of the GPU.
func indexOf(t *testing.T, plugin *v1.Pod, uuid string) string {
	t.Helper()
	for index := range 8 {
		if found, err := series(plugin, "virgate_gpu_info", fmt.Sprintf("index=%q", fmt.Sprint(index)), uuid); err != nil {
			t.Fatal(err)
		} else if len(found) > 0 {
			return fmt.Sprint(index)
		}
	}
	t.Fatalf("no index of %s is known", uuid)
	return ""
}

// awaitEvicted waits until the evicted pod is gone.
func (c *cluster) awaitEvicted(t *testing.T, name string) {
	t.Helper()
	c.await(t, name+" to be evicted", func() error {
		found, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err == nil:
			err = fmt.Errorf("it is %s", found.Status.Phase)
		}
		return err
	})
}
