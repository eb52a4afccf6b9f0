package kubelet

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

func TestResizeOnTheOpenStream(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 4}))
			b.shows(gpu, 16, 16)
			p := b.run(gpu, 2)
			for _, replicas := range []int{8, 2, 4} {
				v.Apply(plan(4, profile{replicas: replicas}))
				b.shows(gpu, 4*replicas, 4*replicas)
			}
			v.Apply(plan(4, profile{replicas: 4, policy: sharing.Packed}))
			v.Apply(plan(4, profile{replicas: 4, policy: sharing.Packed, faulty: []int{2}}))
			b.shows(gpu, 16, 12)
			b.starts(p)
			if got := b.ledger.tally(gpu); got.connections != 1 || got.losses != 0 {
				t.Errorf("invariant 1: registered %d times, lost %d times", got.connections, got.losses)
			}
		})
	}
}
