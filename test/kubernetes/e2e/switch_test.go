package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testBadProfile chooses impossible profiles, then corrects one.
func testBadProfile(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "faulty", map[string]string{"four": replicas("4"), "edited": replicas("many")})
	c.install(t, "node=sim:t4x2", "config.name=faulty", "config.default=four")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	c.awaitProfile(t, "four", "applied")
	holders := c.hold(t, "holder", 2)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	t.Cleanup(func() { c.label(t, "") })
	for _, bad := range []struct {
		label, text string
		words       []string // What the event and the condition say about it.
	}{
		{"nowhere", replicas("many"), []string{"nowhere"}},
		{"edited", replicas("many"), []string{"faulty", "edited", "sharing.timeSlicing.resources[0].replicas", `"many"`}},
		{"edited", replicas("-3"), []string{"faulty", "edited", "sharing.timeSlicing.resources[0].replicas", "-3"}},
	} {
		began := time.Now()
		c.editProfile(t, "faulty", "edited", bad.text)
		c.label(t, bad.label)
		c.awaitEvent(t, began, "ProfileRejected", append(bad.words, "stays in force")...)
		c.awaitCondition(t, v1.ConditionTrue, "ProfileRejected", bad.words...)
		c.awaitProfile(t, "four", "rejected")
		c.awaitSeries(t, plugin, "virgate_config_state", "1", `state="rejected"`)
		c.awaitSeries(t, plugin, "virgate_config_info", "1", `profile="four"`)
		c.awaitServed(t, all)
		c.awaitAllocatable(t, all)
	}
	began := time.Now()
	c.editProfile(t, "faulty", "edited", replicas("5"))
	c.awaitAllocatable(t, map[string]int64{shared: 10})
	c.report.note("bad profile mended to allocatable", took(began))
	c.awaitEvent(t, began, "ProfileApplied", "edited")
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "10 devices, 10 healthy")
	c.awaitProfile(t, "edited", "applied")
	c.awaitSeries(t, plugin, "virgate_config_state", "1", `state="applied"`)
	c.awaitSeries(t, plugin, "virgate_config_info", "1", `profile="edited"`)
	c.undisturbed(t, before)
}

// replicas is a profile that offers each GPU this many times.
func replicas(number string) string {
	return "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: " + number + "\n"
}

// testRename gives the shares another name while pods hold some under the first.
func testRename(t *testing.T, c *cluster) {
	const renamed = shared + ".shared"
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "time-slicing-4")
	c.install(t, "node=sim:t4x4", fourShares)
	c.offers(t, map[string]int64{shared: 16})
	holders := c.hold(t, "holder", 3) // One on each of three GPUs.
	before := c.podStates(t, holders)

	c.label(t, "time-slicing-4-renamed")
	// A share held under the old name is Unhealthy, so that no pod takes it over from its holder.
	c.awaitAllocatable(t, map[string]int64{renamed: 4})
	newcomers := numbered("newcomer", 5, renamed)
	c.runAll(t, newcomers[:4])
	for name, each := range c.podStates(t, names(newcomers[:4])) {
		for _, holder := range before {
			if each.GPU == holder.GPU {
				t.Errorf("pod %s has a share of %s, which is held under the old name", name, each.GPU)
			}
		}
	}
	c.awaitInsufficient(t, newcomers[4].Name, renamed)
	c.awaitInsufficient(t, "late", shared)
	c.undisturbed(t, before)

	c.remove(t, holders[0])
	freed := before[holders[0]].GPU
	delete(before, holders[0])
	c.awaitAllocatable(t, map[string]int64{renamed: 8})
	c.awaitPhase(t, newcomers[4].Name, v1.PodRunning)
	if got := c.printedVariable(t, newcomers[4].Name, "NVIDIA_VISIBLE_DEVICES"); got != freed {
		t.Errorf("the next pod sees %s, want %s, which became free", got, freed)
	}
	c.undisturbed(t, before)
	if late, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), "late", metav1.GetOptions{}); err != nil || late.Spec.NodeName != "" {
		t.Errorf("pod late got what the holder left (%v)", err)
	}
	c.remove(t, "late")
	c.remove(t, holders[1:]...)
	c.offers(t, map[string]int64{renamed: 16})
}

// names returns the pods' names.
func names(pods []*v1.Pod) []string {
	found := make([]string, len(pods))
	for i, pod := range pods {
		found[i] = pod.Name
	}
	return found
}

// testShrink reduces the shares of a GPU to fewer than pods hold.
func testShrink(t *testing.T, c *cluster) {
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "time-slicing-10-packed")
	c.install(t, "node=sim:t4x2", fourShares, "config.examples=true", stays)
	c.awaitAllocatable(t, map[string]int64{shared: 20})
	holders := c.hold(t, "holder", 8) // The profile packs them on one GPU.
	before := c.podStates(t, holders)
	gpu := before[holders[0]].GPU

	began := time.Now()
	c.label(t, "time-slicing-4")
	c.awaitAllocatable(t, map[string]int64{shared: 8 + 4})
	c.report.note("shrink with held replicas, label to allocatable", took(began))
	for name, each := range c.podStates(t, c.hold(t, "beside", 4)) {
		if each.GPU == gpu {
			t.Errorf("pod %s got a share of %s, of which twice as many are held as there are to be", name, gpu)
		}
	}
	c.awaitInsufficient(t, "last", shared)
	c.undisturbed(t, before)
	// A waiting pod would get what a pod leaves before Virgate sees that it is free.
	c.remove(t, "last")

	// Four shares leave with the first four pods; the fifth makes room for another.
	for _, name := range holders[:4] {
		c.remove(t, name)
		delete(before, name)
	}
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.awaitInsufficient(t, "next", shared)
	c.remove(t, holders[4])
	delete(before, holders[4])
	c.awaitPhase(t, "next", v1.PodRunning)
	if got := c.gpus(t, []*v1.Pod{pod("next", shared, 1)}); !slices.Equal(got, []string{gpu}) {
		t.Errorf("the share that became free is of %s, the next pod's of %s", gpu, got)
	}
	c.undisturbed(t, before)
}

// testShares switches through the chart's profiles for whole GPUs by the node's label.
func testShares(t *testing.T, c *cluster) {
	c.install(t, "node=sim:dgx-a100", fourShares, "config.examples=true")
	c.offers(t, map[string]int64{"nvidia.com/gpu": 32})
	t.Cleanup(func() { c.label(t, "") })

	t.Run("capacity", func(t *testing.T) {
		for _, profile := range []struct {
			name string
			want map[string]int64
		}{
			{"time-slicing-10", map[string]int64{"nvidia.com/gpu": 80}},
			{"time-slicing-4-renamed", map[string]int64{"nvidia.com/gpu.shared": 32}},
			{"side-by-side", map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16}},
			{"exclusive", map[string]int64{"nvidia.com/gpu": 8}},
			{"time-slicing-4", map[string]int64{"nvidia.com/gpu": 32}},
		} {
			began := time.Now()
			c.label(t, profile.name)
			c.offers(t, profile.want)
			c.report.note("label "+profile.name+" to capacity and allocatable", took(began))
		}
	})
	t.Run("distributed", func(t *testing.T) {
		c.label(t, "time-slicing-4")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 32})
		pods := numbered("distributed", 9, "nvidia.com/gpu")
		c.runAll(t, pods)
		gpus := c.gpus(t, pods)
		if got := len(slices.Compact(slices.Sorted(slices.Values(gpus)))); got != 8 {
			t.Errorf("nine pods see %d GPUs, want all 8: %q", got, gpus)
		}
	})
	t.Run("one share only", func(t *testing.T) {
		c.label(t, "time-slicing-10-packed")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 80})
		greedy := pod("greedy", "nvidia.com/gpu", 2)
		c.create(t, greedy)
		refused := c.awaitPhase(t, greedy.Name, v1.PodFailed)
		const want = "nvidia.com/gpu is shared: a container may request 1, not 2"
		if refused.Status.Reason != unexpectedAdmission || !strings.Contains(refused.Status.Message, want) {
			t.Errorf("refused with %s: %q, want %s and %q", refused.Status.Reason, refused.Status.Message, unexpectedAdmission, want)
		}
		pods := numbered("packed", 3, "nvidia.com/gpu")
		c.runAll(t, pods)
		if gpus := c.gpus(t, pods); gpus[0] != gpus[1] || gpus[0] != gpus[2] {
			t.Errorf("pods see %q, want one GPU that is filled first", gpus)
		}
	})
	t.Run("whole", func(t *testing.T) {
		c.label(t, "side-by-side")
		c.offers(t, map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16})
		whole, shared := numbered("whole", 6, "nvidia.com/gpu"), numbered("shared", 4, "nvidia.com/gpu.shared")
		c.runAll(t, slices.Concat(whole, shared))
		all := c.gpus(t, slices.Concat(whole, shared))
		if got := len(slices.Compact(slices.Sorted(slices.Values(all)))); got != 8 {
			t.Errorf("6 whole GPUs and 4 shares of 2 more are %d, want 8: %q", got, all)
		}
		next := pod("next", "nvidia.com/gpu", 1)
		c.awaitInsufficient(t, next.Name, "nvidia.com/gpu")
		c.remove(t, whole[2].Name)
		c.awaitPhase(t, next.Name, v1.PodRunning)
		if diff := cmp.Diff(all[2:3], c.gpus(t, []*v1.Pod{next})); diff != "" {
			t.Errorf("the GPU that became free is not the next pod's (-want +got):\n%s", diff)
		}
	})
}

// numbered returns this many pods that request one of the resource each.
func numbered(name string, count int, resourceName string) []*v1.Pod {
	pods := make([]*v1.Pod, count)
	for i := range pods {
		pods[i] = pod(fmt.Sprintf("%s-%d", name, i), resourceName, 1)
	}
	return pods
}

// testPartitions runs on nodes with partitioned GPUs.
func testPartitions(t *testing.T, c *cluster) {
	t.Cleanup(func() { c.label(t, "") })
	t.Run("all GPUs", func(t *testing.T) {
		c.label(t, "mig-mixed")
		c.install(t, "node=sim:dgx-a100+all-balanced", fourShares, "config.examples=true")
		c.offers(t, map[string]int64{"nvidia.com/mig-1g.5gb": 16, "nvidia.com/mig-2g.10gb": 8, "nvidia.com/mig-3g.20gb": 8})
		pods := slices.Concat(numbered("small", 3, "nvidia.com/mig-1g.5gb"), numbered("medium", 2, "nvidia.com/mig-2g.10gb"),
			numbered("large", 2, "nvidia.com/mig-3g.20gb"))
		c.runAll(t, pods)
		c.apart(t, pods, "MIG-")
	})
	t.Run("beside shares and whole GPUs", func(t *testing.T) {
		c.label(t, "side-by-side")
		c.install(t, "node=sim:mixed", fourShares, "config.examples=true")
		c.offers(t, map[string]int64{
			"nvidia.com/gpu": 2, "nvidia.com/gpu.shared": 16,
			"nvidia.com/mig-1g.5gb": 18, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1,
		})
		whole, shares := numbered("whole", 2, "nvidia.com/gpu"), numbered("share", 4, "nvidia.com/gpu.shared")
		alone := []*v1.Pod{pod("medium", "nvidia.com/mig-2g.10gb", 1), pod("large", "nvidia.com/mig-3g.20gb", 1)}
		halves := numbered("half", 10, "nvidia.com/mig-1g.5gb")
		c.runAll(t, slices.Concat(whole, shares, alone, halves))
		c.apart(t, whole, "GPU-")
		c.apart(t, alone, "MIG-")
		c.togetherOn(t, shares, "GPU-", 2)
		// Ten pods on nine partitions: one partition has two of them.
		c.togetherOn(t, halves, "MIG-", 9)
	})
}

// apart checks that each pod sees a different unit.
func (c *cluster) apart(t *testing.T, pods []*v1.Pod, prefix string) {
	t.Helper()
	c.togetherOn(t, pods, prefix, len(pods))
}

// togetherOn checks that each pod sees one unit of that kind, and all pods together this many.
func (c *cluster) togetherOn(t *testing.T, pods []*v1.Pod, prefix string, count int) {
	t.Helper()
	units := c.gpus(t, pods)
	for i, unit := range units {
		if !strings.HasPrefix(unit, prefix) || strings.Contains(unit, ",") {
			t.Errorf("pod %s sees %q, want one %s", pods[i].Name, unit, prefix)
		}
	}
	if got := len(slices.Compact(slices.Sorted(slices.Values(units)))); got != count {
		t.Errorf("%d pods see %d units, want %d: %q", len(pods), got, count, units)
	}
}
