package kubelet

import "testing"

// PodResources is not mounted: what is held and applied comes from the kubelet's
// checkpoint alone, over a restart of the kubelet too. Without
// podresources.ParseCheckpoint nothing is known, and no list ever shrinks.
func TestCheckpointAlone(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgateThatReads("", quick())
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			p := b.run(gpu, 6)
			v.Apply(plan(2, profile{replicas: 2}))
			held := b.heldOf(p)
			kept := max(2, held[0]) + max(2, held[1])
			b.shows(gpu, kept, kept)
			b.restart(0)
			b.shows(gpu, kept, kept)
			if err := b.readmit(); err != nil {
				t.Error(err)
			}
			b.starts(p)
			if err := b.resize(p); err != nil {
				t.Error(err)
			}

			b.delete(p)
			b.await(patience, func() bool {
				b.delete(b.run(gpu, 1)) // The kubelet forgets pods when it admits one.
				nap(t.Context(), 2*quick().Quiet)
				capacity, allocatable, _ := b.node(gpu)
				return capacity == 4 && allocatable == 4
			}, "a list of 4")
		})
	}
}
