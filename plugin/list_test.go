package plugin_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestResizeKeepsTheStream(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 8, 10))
	b.shows(gpu, 80, 80)
	held := b.mustPod("p", gpu, 2)
	for _, replicas := range []int{20, 2, 4, 3, 10} {
		b.manager.Apply(plan(gpu, 8, replicas))
		b.shows(gpu, 8*replicas, 8*replicas)
	}
	r := b.kubelet.Snapshot().Resources[gpu]
	if r.StreamsOpened != 1 || r.Registrations != 1 {
		t.Errorf("%d streams and %d registrations, want 1 and 1", r.StreamsOpened, r.Registrations)
	}
	if len(held) != 2 {
		t.Errorf("held %v", held)
	}
}

func TestPolicyChangeSendsNoList(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	lists := b.kubelet.Snapshot().Resources[gpu].Lists
	packed := plan(gpu, 2, 4)
	packed.Resources[0].Policy = sharing.Packed
	b.manager.Apply(packed)
	awaitServed(t, b)
	var units []string
	for i := range 2 {
		id := b.mustPod(fmt.Sprint("p", i), gpu, 1)[0]
		unit, _, _ := sharing.ParseDeviceID(id)
		units = append(units, unit)
	}
	if units[0] != units[1] {
		t.Errorf("packed put pods on %v", units)
	}
	if n := b.kubelet.Snapshot().Resources[gpu].Lists; n != lists {
		t.Errorf("%d lists, want %d", n, lists)
	}
}

// TestListsAreCoalesced sends many plans while the stream is not read.
func TestListsAreCoalesced(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.kubelet.SlowStream(200 * time.Millisecond)
	before := b.kubelet.Snapshot().Resources[gpu].Lists
	for i := range 100 {
		fault := ""
		if i%2 == 0 {
			fault = "XID 79"
		}
		b.manager.Apply(withFault(plan(gpu, 2, 1), "GPU-0001", fault))
	}
	b.manager.Apply(plan(gpu, 3, 1))
	b.shows(gpu, 3, 3)
	if lists := b.kubelet.Snapshot().Resources[gpu].Lists - before; lists > 10 {
		t.Errorf("%d lists for a burst", lists)
	}
}

func TestListIntervalHolds(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Timing.ListInterval = time.Hour })
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
	for replicas := range 20 {
		b.manager.Apply(plan(gpu, 1, replicas+2))
		awaitServed(t, b)
	}
	if lists := b.manager.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists within the interval", lists)
	}
}
