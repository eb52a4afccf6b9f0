package plugin

import (
	"testing"
	"time"
)

func TestNextAdoptsWhatPodsHold(t *testing.T) {
	w := newWorld(t)
	w.held.add("gpu", "A::9")                // Planned: from a state that was lost.
	w.held.add("nvidia.com/gpu", "B::1")     // Not planned, but NVIDIA's name.
	w.held.add("nvidia.com/gpu", "GPU-x::0") // Of a board that is gone.
	w.held.add("nvidia.com/gpu", "other")    // No unit.
	w.held.add("example.com/gpu", "A::0")    // Another plugin's resource.
	w.look()
	plan := planOf(nil, "gpu=2:A,B")
	w.step(plan)
	w.expect("gpu", "A0 A9")
	w.expect("nvidia.com/gpu", "B1+ gpu-x0+")
	w.expect("example.com/gpu", "none")
	w.held = idSet{}
	w.pass(plan, 40*time.Second)
	w.expect("gpu", "A0 A1 B0 B1")
	w.pass(plan, 40*time.Second)
	w.expect("nvidia.com/gpu", "none")
}

func TestNextAdoptsTheNUMANode(t *testing.T) {
	w := newWorld(t)
	plan := planOf(nil, "gpu=2:A")
	plan.Resources[0].Units[0].NUMANode = 1
	w.held.add("nvidia.com/gpu", "A::1")
	w.look()
	w.step(plan)
	if got := w.lists["nvidia.com/gpu"].Entries[0].NUMANode; got != 1 {
		t.Errorf("NUMA node %d, want 1", got)
	}
}
