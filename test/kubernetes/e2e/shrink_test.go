package e2e

import (
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testShrink takes shares away from a GPU on which more are held than it is to
// have. The quiet time is the usual one: allocatable does not wait for it.
func testShrink(t *testing.T, c *cluster) {
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "time-slicing-10")
	c.install(t, "node=sim:t4x2")
	c.offers(t, map[string]int64{shared: 20})
	holders := c.hold(t, "holder", 8) // The profile packs them on one GPU.
	before := c.vitals(t, holders)
	gpu := before[holders[0]].GPU

	began := time.Now()
	c.label(t, "time-slicing-4")
	c.awaitAllocatable(t, map[string]int64{shared: 8 + 4})
	took := time.Since(began)
	c.report.note("shrink with held replicas, label to allocatable", took.Round(10*time.Millisecond).String())
	if took > 20*time.Second {
		t.Errorf("allocatable took %s to fall", took)
	}
	for name, each := range c.vitals(t, c.hold(t, "beside", 4)) {
		if each.GPU == gpu {
			t.Errorf("pod %s got a share of %s, of which twice as many are held as there are to be", name, gpu)
		}
	}
	last := pod("last", shared, 1)
	c.create(t, last)
	c.awaitUnscheduled(t, last.Name, "Insufficient "+shared)
	c.undisturbed(t, before)
	// One that waits would get what a pod leaves before Virgate sees that it is free.
	c.remove(t, last.Name)

	// Four shares leave with the first four pods; the fifth makes room for another.
	for _, name := range holders[:4] {
		c.remove(t, name)
		delete(before, name)
	}
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	next := pod("next", shared, 1)
	c.create(t, next)
	c.awaitUnscheduled(t, next.Name, "Insufficient "+shared)
	c.remove(t, holders[4])
	delete(before, holders[4])
	c.awaitPhase(t, next.Name, v1.PodRunning)
	if got := c.gpus(t, []*v1.Pod{next}); !slices.Equal(got, []string{gpu}) {
		t.Errorf("the share that became free is of %s, the next pod's of %s", gpu, got)
	}
	c.undisturbed(t, before)
	c.offers(t, map[string]int64{shared: 8})
}
