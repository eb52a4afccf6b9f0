package plugin

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestNextGrowsAtOnce(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=2:A,B"))
	w.expect("gpu", "A0 A1 B0 B1")
	w.step(planOf(nil, "gpu=3:A,B"))
	w.expect("gpu", "A0 A1 A2 B0 B1 B2")
}

func TestNextShrinksInTwoPhases(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=4:A"))
	w.look()
	w.held.add("gpu", "A::3")
	w.look()
	small := planOf(nil, "gpu=2:A")
	w.now = w.now.Add(time.Second)
	w.step(small)
	w.expect("gpu", "A0 a1- a2- A3") // The held one is kept, free ones go.
	w.pass(small, 11*time.Second)
	w.expect("gpu", "A0 a1- a2- A3") // Not before the quiet time is over,
	w.pass(small, 2*time.Second)
	w.expect("gpu", "A0 A3") // which starts when the kubelet has applied it.
	delete(w.held["gpu"], "A::3")
	w.pass(small, 15*time.Second)
	w.expect("gpu", "A0 A1") // When the pod is gone, the plan's own IDs return.
}

func TestNextShrinksBelowHeld(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=3:A"))
	for _, id := range []string{"A::0", "A::1", "A::2"} {
		w.held.add("gpu", id)
	}
	small := planOf(nil, "gpu=2:A")
	w.look()
	w.step(small)
	w.expect("gpu", "A0 A1 A2+")
	w.pass(small, 59*time.Second)
	w.expect("gpu", "A0 A1 A2+")
	w.pass(small, 2*time.Second)
	w.expect("gpu", "A0 A1 a2+")
	w.pass(small, time.Hour)
	w.expect("gpu", "A0 A1 a2+") // Held: never removed.
	delete(w.held["gpu"], "A::0")
	w.pass(small, time.Second)
	w.expect("gpu", "a0- A1 A2") // Two are held now, and two are wanted.
	w.pass(small, 20*time.Second)
	w.expect("gpu", "A1 A2")
}

func TestNextDrainsARename(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A,B"))
	w.held.add("gpu", "A")
	w.look()
	renamed := planOf(nil, "gpu.shared=2:A,B")
	w.now = w.now.Add(time.Second)
	w.step(renamed)
	w.expect("gpu", "A+ b-")
	w.expect("gpu.shared", "none")
	w.pass(renamed, 13*time.Second)
	w.expect("gpu", "A+")
	w.expect("gpu.shared", "B0 B1") // A is offered there when its pod is gone.
	delete(w.held["gpu"], "A")
	w.pass(renamed, 13*time.Second)
	w.expect("gpu", "") // An empty list, for StopAfter,
	w.expect("gpu.shared", "A0 A1 B0 B1")
	w.pass(renamed, 21*time.Second)
	w.expect("gpu", "none") // then the server stops.
}

func TestNextChangesExclusivityInOneResource(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A,B"))
	w.held.add("gpu", "A")
	w.look()
	shared := planOf(nil, "gpu=2:A,B")
	w.pass(shared, 15*time.Second)
	w.expect("gpu", "A+ B0 B1")
	w.pass(planOf(nil, "gpu=1:A,B"), time.Second)
	w.expect("gpu", "A b0- b1-")
	w.pass(planOf(nil, "gpu=1:A,B"), 15*time.Second)
	w.expect("gpu", "A B")
}

func TestNextChangesItsMind(t *testing.T) {
	w := newWorld(t)
	large, small := planOf(nil, "gpu=4:A"), planOf(nil, "gpu=2:A")
	w.step(large)
	w.pass(small, 3*time.Second)
	w.expect("gpu", "A0 A1 a2- a3-")
	w.step(large)
	w.expect("gpu", "A0 A1 A2 A3")
	w.pass(small, 3*time.Second)
	w.pass(small, 8*time.Second)
	w.expect("gpu", "A0 A1 a2- a3-") // The quiet time starts anew.
}

func TestNextHealth(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=2:A,B"))
	w.step(planOf(map[string]string{"A": "XID 79"}, "gpu=2:A,B"))
	w.expect("gpu", "a0 a1 B0 B1")
	w.step(planOf(nil, "gpu=2:A,B"))
	w.expect("gpu", "A0 A1 B0 B1")
	w.held.add("gpu", "A::0")
	gone := planOf(map[string]string{"A": "gone"}, "gpu=2:B")
	w.pass(gone, time.Hour)
	w.expect("gpu", "B0 B1 a0+") // A lost unit's held device stays, Unhealthy.
}

func TestNextKeepsTheNUMANodeOfALostUnit(t *testing.T) {
	w := newWorld(t)
	plan := planOf(nil, "gpu=1:A")
	plan.Resources[0].Devices[0].NUMANode = 1
	w.step(plan)
	w.held.add("gpu", "A")
	w.pass(planOf(map[string]string{"A": "gone"}, "gpu=1:B"), time.Minute)
	for _, e := range w.lists["gpu"].Entries {
		if e.ID == "A" && e.NUMANode != 1 {
			t.Errorf("NUMA node %d, want 1", e.NUMANode)
		}
	}
}

func TestNextIsDeterministic(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=4:A,B,C", "x=1:A"))
	w.held.add("gpu", "A::3")
	w.look()
	plan := planOf(nil, "gpu=2:B,A", "y=3:C")
	first := Next(w.lists, plan, w.seen, w.calls, w.now, w.timing)
	for range 50 {
		if diff := cmp.Diff(first, Next(w.lists, plan, w.seen, w.calls, w.now, w.timing)); diff != "" {
			t.Fatal(diff)
		}
	}
}
