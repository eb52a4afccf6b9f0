package plugin

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
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
	w.expect("gpu", "A0 a1- a2- A3") // Not before the removal delay is over,
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
	w.expect("gpu", "a+ b-") // A waiting pod must not take A when its pod ends.
	w.expect("gpu.shared", "none")
	w.pass(renamed, 4*time.Second)
	w.expect("gpu", "a+ b-")
	w.expect("gpu.shared", "B0 B1")
	w.pass(renamed, 9*time.Second)
	w.expect("gpu", "a+")
	w.expect("gpu.shared", "B0 B1") // A is offered there when its pod is gone.
	delete(w.held["gpu"], "A")
	w.pass(renamed, 13*time.Second)
	w.expect("gpu", "") // An empty list, for StopAfter,
	w.expect("gpu.shared", "A0 A1 B0 B1")
	w.pass(renamed, 21*time.Second)
	w.expect("gpu", "none") // then the server stops.
}

// A server that stopped before its empty list was sent would leave the kubelet with devices.
func TestNextKeepsADroppedResourceUntilItsEmptyListIsSent(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	w.look()
	none := planOf(nil)
	w.pass(none, 14*time.Second)
	w.expect("gpu", "")
	w.unsent = true
	w.pass(none, time.Minute)
	w.expect("gpu", "")
	w.unsent = false
	w.pass(none, 20*time.Second)
	w.expect("gpu", "")
	w.pass(none, time.Second)
	w.expect("gpu", "none")
}

// Without a stream the empty list cannot be sent, and the server stops.
func TestNextStopsADroppedResourceWithoutAStream(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	w.look()
	none := planOf(nil)
	w.pass(none, 14*time.Second)
	w.expect("gpu", "")
	w.unsent, w.lost = true, true
	w.pass(none, 21*time.Second)
	w.expect("gpu", "none")
}

func TestNextChangesExclusivityInOneResource(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A,B"))
	w.held.add("gpu", "A")
	w.look()
	shared := planOf(nil, "gpu=2m:A,B")
	w.pass(shared, 15*time.Second)
	w.expect("gpu", "a+ B0 B1")
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
	w.expect("gpu", "A0 A1 a2- a3-") // The removal delay starts anew.
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

func TestNextAdoptsWhatPodsHold(t *testing.T) {
	w := newWorld(t)
	w.held.add("gpu", "A::9")                // Planned: from a state that was lost.
	w.held.add("nvidia.com/gpu", "B::1")     // Not planned, but NVIDIA's name.
	w.held.add("nvidia.com/gpu", "GPU-x::0") // Of a GPU that is gone.
	w.held.add("nvidia.com/gpu", "other")    // No unit.
	w.held.add("example.com/gpu", "A::0")    // Another plugin's resource.
	w.look()
	plan := planOf(nil, "gpu=2:A,B")
	w.step(plan)
	w.expect("gpu", "A0 A9")
	w.expect("nvidia.com/gpu", "b1+ gpu-x0+")
	w.expect("example.com/gpu", "none")
	w.held = DeviceIDs{}
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

func TestNextKeepsWhatItCannotSee(t *testing.T) {
	w := newWorld(t)
	w.blind = true
	w.step(planOf(nil, "gpu=3:A"))
	w.calls.Granted["gpu"] = map[string]time.Time{"A::2": w.now}
	small := planOf(nil, "gpu=2:A")
	w.pass(small, time.Hour)
	w.expect("gpu", "A0 a1- A2") // Granted is held, and nothing is removed.
	w.pass(planOf(nil, "other=1:A"), time.Hour)
	w.expect("other", "none")
}

func TestNextCallsPostponeRemoval(t *testing.T) {
	for _, test := range []struct {
		name string
		call func(*world)
		want string
	}{
		{"none", func(*world) {}, "A0 A1"},
		{"named lately", func(w *world) { w.calls.Preferred["gpu"] = map[string]time.Time{"A::2": w.now.Add(5 * time.Second)} }, "A0 A1 a2-"},
		{"in progress", func(w *world) { w.calls.Busy["gpu"] = true }, "A0 A1 a2-"},
		{"granted meanwhile", func(w *world) { w.calls.Granted["gpu"] = map[string]time.Time{"A::2": w.now.Add(5 * time.Second)} }, "A0 A2"},
		{"held meanwhile", func(w *world) { w.held.add("gpu", "A::2") }, "A0 A2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			w.pass(small, time.Second)
			w.expect("gpu", "A0 A1 a2-")
			test.call(w)
			w.pass(small, 13*time.Second)
			got := strings.Fields(w.show("gpu"))
			want := strings.Fields(test.want)
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestNextBlindRestart starts with a list in whose state file a pod held a surplus device.
func TestNextBlindRestart(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=3:A"))
	entries := w.lists["gpu"].Entries
	entries[2].Phase, entries[2].Since = HeldSurplus, w.now
	w.blind = true
	small := planOf(nil, "gpu=2:A")
	w.pass(small, 30*time.Second)
	w.expect("gpu", "A0 A1 A2+")
	w.blind = false
	w.pass(small, 13*time.Second)
	w.expect("gpu", "A0 A1")
}

// TestNextRemovalNeedsEveryReading breaks one condition at a time just when a device could be removed.
func TestNextRemovalNeedsEveryReading(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*world)
		gone   bool
	}{
		{"all is well", func(*world) {}, true},
		{"healthy again for the kubelet", func(w *world) { w.seen.Applied.add("gpu", "A::2") }, false},
		{"held read too early", func(w *world) { w.seen.HeldAt = w.lists["gpu"].Entries[2].Applied }, false},
		{"held unknown", func(w *world) { w.seen.HeldKnown = false }, false},
		{"applied unknown", func(w *world) { w.seen.AppliedKnown = false }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			w.pass(small, 12*time.Second)
			w.expect("gpu", "A0 A1 a2-")
			w.now = w.now.Add(time.Second)
			w.look()
			test.change(w)
			w.step(small)
			if gone := w.show("gpu") == "A0 A1"; gone != test.gone {
				t.Errorf("list %q", w.show("gpu"))
			}
		})
	}
}

// TestNextTellsBeforeItRemoves always shows no Healthy device, like a kubelet that has lost its stream or lags
// behind. An event after eleven seconds, shortly before the removal, restarts the wait.
func TestNextTellsBeforeItRemoves(t *testing.T) {
	for _, test := range []struct {
		name   string
		before func(*world)
		after  func(*world)
		gone   time.Duration
	}{
		{"told at once", func(*world) {}, func(*world) {}, 13 * time.Second},
		{"never told", func(w *world) { w.unsent = true }, func(*world) {}, 0},
		{"no stream", func(w *world) { w.lost, w.unsent = true, true }, func(*world) {}, 0},
		{"told late", func(w *world) { w.unsent = true }, func(w *world) { w.unsent = false }, 23 * time.Second},
		{"stream lost", func(*world) {}, func(w *world) { w.lost, w.unsent = true, true }, 0},
		{"stream lost when it could leave", func(*world) {}, func(w *world) {
			w.pass(planOf(nil, "gpu=2:A"), time.Second)
			w.lost, w.unsent = true, true
		}, 0},
		{"stream replaced", func(*world) {}, func(w *world) {
			w.lost = true
			w.pass(planOf(nil, "gpu=2:A"), time.Second)
			w.lost = false
		}, 23 * time.Second},
		{"healthy for the kubelet", func(*world) {}, func(w *world) {
			w.now = w.now.Add(time.Second)
			w.look()
			w.seen.Applied.add("gpu", "A::2")
			w.step(planOf(nil, "gpu=2:A"))
		}, 23 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			test.before(w)
			began := w.now
			w.pass(small, 11*time.Second)
			w.expect("gpu", "A0 A1 a2-")
			test.after(w)
			for w.show("gpu") != "A0 A1" && w.now.Before(began.Add(time.Minute)) {
				w.pass(small, time.Second)
			}
			took := w.now.Sub(began)
			if gone := w.show("gpu") == "A0 A1"; gone != (test.gone > 0) || gone && took != test.gone {
				t.Errorf("list %q after %s", w.show("gpu"), took)
			}
		})
	}
}

func TestNextWantsAReadingAfterTheList(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=3:A"))
	small := planOf(nil, "gpu=2:A")
	w.seen = KubeletSnapshot{Held: DeviceIDs{}, Applied: DeviceIDs{}, HeldAt: w.now, AppliedAt: w.now, HeldKnown: true, AppliedKnown: true}
	for range 60 { // Nothing was Healthy in this reading, which is older than the list.
		w.step(small)
		w.now = w.now.Add(time.Second)
		w.seen.HeldAt = w.now
	}
	w.expect("gpu", "A0 A1 a2-")
}

// TestNextHeldAtTheLastMoment has a pod appear in the look that would have let the
// unit change its mode.
func TestNextHeldAtTheLastMoment(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	renamed := planOf(nil, "gpu.shared=2:A")
	for !w.lists["gpu"].Entries[0].RefusesAllocate {
		w.pass(renamed, time.Second)
	}
	w.expect("gpu", "a-")
	w.now = w.now.Add(time.Second)
	w.held.add("gpu", "A")
	w.look()
	w.step(renamed)
	w.expect("gpu", "a+")
	w.expect("gpu.shared", "none")
	if w.lists["gpu"].Entries[0].RefusesAllocate {
		t.Error("a device that a pod holds is still refused")
	}
	w.held = DeviceIDs{}
	w.pass(renamed, 5*time.Second)
	w.expect("gpu.shared", "A0 A1")
}

// TestNextInvariants runs random plans, holders and blind spells and checks the invariants in every step.
func TestNextInvariants(t *testing.T) {
	t.Parallel()
	makePlans := func() []sharing.Plan {
		return []sharing.Plan{
			planOf(nil, "gpu=1:A,B,C"), planOf(nil, "gpu=4:A,B,C"), planOf(nil, "gpu=2:A,B,C"),
			planOf(nil, "gpu.shared=3:A,B,C"), planOf(nil, "gpu=1:A", "gpu.shared=2:B,C"),
			planOf(nil, "gpu=2:A", "gpu.shared=1:B"), planOf(nil), planOf(map[string]string{"B": "XID 79"}, "gpu=4:A,B,C"),
			planOf(map[string]string{"A": "gone"}, "gpu=4:B,C"),
			planOf(nil, "gpu=4m:A,B,C"), planOf(nil, "gpu=4m:A,B,C").MarkModeUnavailable(map[string]string{"A": "no daemon", "C": "no daemon"}),
			planOf(nil, "gpu=2m:A", "gpu.shared=3m:B,C"), planOf(nil, "gpu=4:A,B,C").MarkModeUnavailable(map[string]string{"A": "a daemon", "B": "a daemon", "C": "a daemon"}),
		}
	}
	for seed := range uint64(repeat.Times(20, 80)) {
		random := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		plans := makePlans()
		plan := plans[0]
		for range 80 {
			switch random.IntN(6) {
			case 0:
				plan = plans[random.IntN(len(plans))]
			case 1:
				w.blind = random.IntN(4) == 0
			case 2: // A pod comes and gets a free Healthy device.
				if resource, id, ok := pickFree(w, random); ok {
					w.held.add(resource, id)
					if w.calls.Granted[resource] == nil {
						w.calls.Granted[resource] = map[string]time.Time{}
					}
					w.calls.Granted[resource][id] = w.now
				}
			case 3: // A pod goes.
				for _, ids := range w.held {
					for _, id := range slices.Sorted(maps.Keys(ids)) {
						if random.IntN(3) == 0 {
							delete(ids, id)
							break
						}
					}
				}
			}
			w.pass(plan, time.Duration(1+random.IntN(8))*time.Second)
			checkInvariants(t, seed, w)
			for _, r := range plan.Resources {
				for _, u := range r.Units {
					if slices.ContainsFunc(w.lists[r.Name].Entries, func(e Entry) bool { return e.Unit == u.ID && e.Healthy && !e.Switching && !u.Health.Healthy() }) {
						t.Errorf("seed %d: %s is offered in a mode in which it cannot be granted", seed, u.ID)
					}
				}
			}
			if t.Failed() {
				return
			}
		}
		w.blind = false
		w.held = DeviceIDs{}
		for _, r := range plan.Resources { // Every daemon is as it should be.
			for i := range r.Units {
				r.Units[i].Health = plan.Health[r.Units[i].ID]
			}
			for i := range r.Devices {
				r.Devices[i].Healthy = plan.Health[r.Devices[i].Unit].Healthy()
			}
		}
		w.pass(plan, 3*time.Minute)
		for _, r := range plan.Resources {
			if diff := cmp.Diff(r.Devices, w.converged(r.Name)); diff != "" {
				t.Fatalf("seed %d: did not converge: %s", seed, diff)
			}
		}
	}
}

func pickFree(w *world, random *rand.Rand) (string, string, bool) {
	var free [][2]string
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if e.Healthy && !w.held.has(resource, e.ID) {
				free = append(free, [2]string{resource, e.ID})
			}
		}
	}
	if len(free) == 0 {
		return "", "", false
	}
	slices.SortFunc(free, func(a, b [2]string) int { return strings.Compare(a[0]+a[1], b[0]+b[1]) })
	picked := free[random.IntN(len(free))]
	return picked[0], picked[1], true
}

func checkInvariants(t *testing.T, seed uint64, w *world) {
	t.Helper()
	listed := DeviceIDs{}
	ways := map[string]map[sharing.Use]bool{}
	holders := map[string]map[sharing.Use]int{}
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if listed.has(resource, e.ID) {
				t.Errorf("seed %d: %s is listed twice in %s", seed, e.ID, resource)
			}
			listed.add(resource, e.ID)
			key := e.use(resource)
			if e.Healthy && !w.held.has(resource, e.ID) {
				if ways[e.Unit] == nil {
					ways[e.Unit] = map[sharing.Use]bool{}
				}
				ways[e.Unit][key] = true
			}
			if w.held.has(resource, e.ID) {
				if holders[e.Unit] == nil {
					holders[e.Unit] = map[sharing.Use]int{}
				}
				holders[e.Unit][key]++
			}
		}
	}
	for unit, in := range ways {
		if len(in) > 1 {
			t.Errorf("seed %d: invariant 7: %s is free in %v", seed, unit, in)
		}
	}
	for unit, in := range holders {
		if len(in) > 1 {
			t.Errorf("seed %d: invariant 7: %s is held in %v", seed, unit, in)
		}
	}
	for resource, ids := range w.held {
		for id := range ids {
			if !listed.has(resource, id) {
				t.Errorf("seed %d: invariant 5: held %s left %s", seed, id, resource)
			}
		}
	}
}

// TestNextHolderThatComesLate is invariant 7: a surplus device that could leave the list is held after all, by a pod
// that the kubelet shows late. Its GPU is not offered under another name while the pod runs.
func TestNextHolderThatComesLate(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=4:A"))
	w.look()
	for range 2 {
		w.now = w.now.Add(time.Second)
		w.step(planOf(nil))
		w.now = w.now.Add(time.Second)
		w.look()
	}
	w.step(planOf(nil))
	w.expect("gpu", "a0- a1- a2- a3-")
	w.held.add("gpu", "A::3")
	w.now = w.now.Add(time.Hour)
	w.look()
	w.step(planOf(nil, "gpu.shared=2:A"))
	w.expect("gpu.shared", "none")
}

// TestNextNeverDropsAHealthyDevice is invariant 6, step by step.
func TestNextNeverDropsAHealthyDevice(t *testing.T) {
	t.Parallel()
	plans := []sharing.Plan{planOf(nil, "gpu=1:A,B"), planOf(nil, "gpu=4:A"), planOf(nil, "x=2:A,B"), planOf(nil)}
	for seed := range uint64(repeat.Times(15, 60)) {
		random := rand.New(rand.NewPCG(seed, 2))
		w := newWorld(t)
		for range 200 {
			plan := plans[random.IntN(len(plans))]
			for range 1 + random.IntN(30) {
				before := w.lists
				w.now = w.now.Add(time.Second)
				if random.IntN(2) == 0 {
					w.look()
				}
				w.step(plan)
				for resource, list := range before {
					for _, e := range list.Entries {
						stays := slices.ContainsFunc(w.lists[resource].Entries, func(n Entry) bool { return n.ID == e.ID })
						if e.Healthy && !stays {
							t.Fatalf("seed %d: %s left %s while Healthy", seed, e.ID, resource)
						}
					}
				}
			}
		}
	}
}
