package kubelet

import (
	"testing"
	"time"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// graceOver is longer than a kubelet remembers a stopped plugin.
const graceOver = 5*time.Minute + time.Second

// Invariant 5 over a rename, with a restart of Virgate half-way and container
// restarts after the kubelet's five minutes. Without the drain in Next (a
// dropped resource keeps its list), or without the lists of the last run, the
// old name's endpoint stops, and five minutes later containers do not start.
func TestRenameWithPodsHolding(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 1}))
			b.shows(gpu, 4, 4)
			p := b.run(gpu, 2)

			renamed := plan(4, profile{resource: shared, replicas: 3})
			v.Apply(renamed)
			b.shows(gpu, 2, 2)
			b.shows(shared, 6, 6)
			q := b.run(shared, 1)

			b.halt(v, gpu, shared)
			v = b.startVirgate(quick())
			v.Apply(renamed)
			b.shows(gpu, 2, 2)
			b.shows(shared, 6, 6)
			for _, resource := range []string{gpu, shared} {
				if setBack(b.manager, resource, graceOver) {
					t.Errorf("the kubelet counts the minutes until it forgets %s", resource)
				}
			}
			b.node(gpu) // The kubelet forgets resources when it counts them.
			b.starts(p)
			b.starts(q)
			if err := b.resize(p); err != nil {
				t.Error(err)
			}

			b.delete(p)
			b.shows(shared, 12, 12)
			b.await(patience, func() bool { return b.ledger.tally(gpu).losses == 2 }, "the old name's end")
			if list := b.ledger.list(gpu); len(list) != 0 {
				t.Errorf("the old name ends with %v in its list", list)
			}
			b.shows(gpu, 0, 0)
			b.starts(q)
		})
	}
}

// The opposite of the test above, so that it means something: a plugin that
// ends for good takes the container starts with it.
func TestGraceEnds(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	v := b.startVirgate(quick())
	v.Apply(plan(1, profile{replicas: 2}))
	b.shows(gpu, 2, 2)
	p := b.run(gpu, 1)
	b.halt(v, gpu)
	b.shows(gpu, 2, 0)
	b.starts(p)
	if !setBack(b.manager, gpu, graceOver) {
		t.Fatal("the plugin has not stopped")
	}
	b.shows(gpu, 0, 0)
	if visible, err := b.startContainer(p); err == nil {
		t.Errorf("a container started with %v", visible)
	}
}
