package kubelet

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// A kubelet that has lists to read shows what was before them. Without the wait
// in step.appendSurplus until the stream was given the list that has a device
// Unhealthy, Virgate takes it for that list's effect, and the next list that it
// sends lacks a device that was Healthy in the one before.
func TestToldBeforeItIsRemoved(t *testing.T) {
	t.Parallel() // It waits for seconds.
	b := newBench(t, topologymanager.PolicyBestEffort)
	stall, goOn := b.stallLists()
	timing := quick()
	timing.ListInterval = 3 * time.Second // Much may change between two lists.
	v := b.startVirgate(timing)
	v.Apply(plan(2, profile{replicas: 2}))
	b.shows(gpu, 4, 4)
	sent := func(lists uint64) func() bool { return func() bool { return v.Status().Resources[0].Lists >= lists } }
	stall()
	v.Apply(plan(2, profile{replicas: 8}))
	b.await(patience, sent(2), "the longer list sent")
	v.Apply(plan(2, profile{replicas: 2}))
	b.await(patience, sent(3), "another one")
	goOn()
	b.await(patience, func() bool { return b.ledger.tally(gpu).lists >= 3 }, "the kubelet to read on")
	b.shows(gpu, 4, 4)
}

// A kubelet that has not read the list yet goes on to hand out what it believes
// to be Healthy. Without the wait in step.appendSurplus until it has applied the
// list, Virgate no longer knows those devices and refuses them.
func TestServesAKubeletThatIsBehind(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	stall, goOn := b.stallLists()
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	stall()
	v.Apply(plan(2, profile{replicas: 2}))
	b.await(patience, func() bool { return v.Status().Resources[0].Lists == 2 }, "the list sent")
	nap(t.Context(), time.Second) // Twenty times the quiet time.
	p := b.run(gpu, 16)
	goOn()
	b.starts(p)
	b.delete(p)
	b.shows(gpu, 4, 4)
}

// A kubelet that has lost the stream shows no device as Healthy, whatever it was
// told. Without the reset in step.appendSurplus after a lost stream, the quiet
// time that began on the old one goes on.
func TestQuietTimeBeginsAnewOnANewStream(t *testing.T) {
	t.Parallel() // It waits for seconds.
	const quiet = 6 * time.Second
	b := newBench(t, topologymanager.PolicyBestEffort)
	timing := quick()
	timing.Quiet = quiet
	v := b.startVirgate(timing)
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	v.Apply(plan(2, profile{replicas: 2}))
	b.shows(gpu, 16, 4)
	nap(t.Context(), quiet/2)
	lost := time.Now()
	b.drop(gpu)
	b.shows(gpu, 16, 4)
	b.shows(gpu, 4, 4)
	for _, r := range b.ledger.removed(gpu) {
		if waited := r.at.Sub(lost); waited < quiet {
			t.Errorf("%s left the list %s after the stream was lost", r.id, waited)
		}
	}
}

// stallLists makes the kubelet read no list between the two calls that it
// returns.
func (b *bench) stallLists() (stall, goOn func()) {
	var stalled atomic.Bool
	released := make(chan struct{})
	b.witness.reading = func() {
		if stalled.Load() {
			<-released
		}
	}
	goOn = sync.OnceFunc(func() {
		stalled.Store(false)
		close(released)
	})
	b.t.Cleanup(goOn)
	return func() { stalled.Store(true) }, goOn
}
