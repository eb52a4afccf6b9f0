package kubelet

import (
	"errors"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// Every way in which pods can hold more than is wanted. Their devices stay in
// the list, so the kubelet may look at its pods again (kubelet.md F3, which
// needs NUMA nodes and a policy that asks for hints). Without the case for held
// devices in step.appendSurplus, it dies.
func TestShrinkBelowWhatIsHeld(t *testing.T) {
	lost := plan(2, profile{replicas: 8})
	lost.Resources[0].Units = lost.Resources[0].Units[:1]
	lost.Resources[0].Devices = lost.Resources[0].Devices[:8]
	delete(lost.Faults, boards("", 1, 1)[0].UUID)

	for _, test := range []struct {
		name string
		plan sharing.Plan
		// want is the capacity and how many are allocatable under the old name,
		// while pods hold so many devices of the two GPUs.
		want        func(first, second int) (capacity, allocatable int)
		retireAfter time.Duration
		// ill says that a pod holds devices that are Unhealthy now.
		ill bool
	}{
		{name: "fewer replicas", plan: plan(2, profile{replicas: 2}),
			want: func(a, b int) (int, int) { return max(2, a) + max(2, b), max(2, a) + max(2, b) }},
		{name: "fewer replicas, retired", plan: plan(2, profile{replicas: 2}), retireAfter: time.Millisecond, ill: true,
			want: func(a, b int) (int, int) { return max(2, a) + max(2, b), 4 }},
		{name: "GPU excluded", plan: plan(2, profile{replicas: 8, excluded: []int{1}}),
			want: func(_, b int) (int, int) { return 8 + b, 8 + b }},
		{name: "GPU faulty", plan: plan(2, profile{replicas: 8, faulty: []int{1}}), ill: true,
			want: func(_, _ int) (int, int) { return 16, 8 }},
		{name: "GPU lost", plan: lost, ill: true,
			want: func(_, b int) (int, int) { return 8 + b, 8 }},
		{name: "exclusive", plan: plan(2, profile{replicas: 1}),
			want: func(a, b int) (int, int) { return a + b, a + b }},
		{name: "nothing wanted", plan: sharing.Plan{Faults: plan(2, profile{replicas: 1}).Faults},
			want: func(a, b int) (int, int) { return a + b, a + b }},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, topologymanager.PolicyBestEffort)
			timing := quick()
			timing.RetireAfter = test.retireAfter
			v := b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			for range 5 {
				b.run(gpu, 2)
			}
			held := b.heldOf(b.pods.running()...)
			capacity, allocatable := test.want(held[0], held[1])
			v.Apply(test.plan)
			b.shows(gpu, capacity, allocatable)
			b.lookAgain(test.ill)
			b.restart(0)
			b.shows(gpu, capacity, allocatable)
			if err := b.readmit(); err != nil {
				t.Error(err)
			}
			b.lookAgain(test.ill)

			for _, p := range b.pods.running() {
				b.delete(p)
			}
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			b.run(gpu, 16)
		})
	}
}

// heldOf counts the pods' devices by the index of their GPU.
func (b *bench) heldOf(pods ...*pod) [2]int {
	var held [2]int
	for i, board := range boards("", 0, len(held)) {
		for _, p := range pods {
			for _, id := range p.devices {
				if unit, _, _ := sharing.ParseDeviceID(id); unit == board.UUID {
					held[i]++
				}
			}
		}
	}
	return held
}

// lookAgain resizes every pod and starts its container. Where devices are ill a
// resize has to wait; nothing else may be wrong.
func (b *bench) lookAgain(ill bool) {
	b.t.Helper()
	refused := 0
	for _, p := range b.pods.running() {
		b.starts(p)
		if err := b.resize(p); errors.As(err, new(rejection)) {
			refused++
		} else if err != nil {
			b.t.Error(err)
		}
	}
	if (refused > 0) != ill {
		b.t.Errorf("%d resizes refused", refused)
	}
}
