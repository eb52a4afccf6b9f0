package e2e

import (
	"testing"

	v1 "k8s.io/api/core/v1"
)

// testRename gives the shares another name while pods hold some under the first.
func testRename(t *testing.T, c *cluster) {
	const renamed = shared + ".shared"
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "time-slicing-4")
	c.install(t, "node=sim:t4x4", quickly)
	c.offers(t, map[string]int64{shared: 16})
	holders := c.hold(t, "holder", 3) // One on each of three GPUs.
	before := c.vitals(t, holders)

	c.label(t, "time-slicing-renamed")
	c.offers(t, map[string]int64{shared: 3, renamed: 4})
	newcomers := numbered("newcomer", 5, renamed)
	c.runAll(t, newcomers[:4])
	for name, each := range c.vitals(t, names(newcomers[:4])) {
		for _, holder := range before {
			if each.GPU == holder.GPU {
				t.Errorf("pod %s has a share of %s, which is held under the old name", name, each.GPU)
			}
		}
	}
	c.create(t, newcomers[4])
	c.awaitUnscheduled(t, newcomers[4].Name, "Insufficient "+renamed)
	c.create(t, pod("late", shared, 1))
	c.awaitUnscheduled(t, "late", "Insufficient "+shared)
	// It would get what a pod leaves before Virgate sees that it is free.
	c.remove(t, "late")
	c.undisturbed(t, before)

	c.remove(t, holders[0])
	freed := before[holders[0]].GPU
	delete(before, holders[0])
	c.offers(t, map[string]int64{shared: 2, renamed: 8})
	c.awaitPhase(t, newcomers[4].Name, v1.PodRunning)
	if got := c.printedVariable(t, newcomers[4].Name, "NVIDIA_VISIBLE_DEVICES"); got != freed {
		t.Errorf("the next pod sees %s, want %s, which became free", got, freed)
	}
	c.undisturbed(t, before)
	for _, name := range holders[1:] {
		c.remove(t, name)
	}
	c.offers(t, map[string]int64{renamed: 16})
}

// names are the pods'.
func names(pods []*v1.Pod) []string {
	found := make([]string, len(pods))
	for i, pod := range pods {
		found[i] = pod.Name
	}
	return found
}
