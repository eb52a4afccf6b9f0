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
)

// TestNextInvariants runs random plans, holders and blind spells and checks
// what must hold in every step.
func TestNextInvariants(t *testing.T) {
	plans := []sharing.Plan{
		planOf(nil, "gpu=1:A,B,C"), planOf(nil, "gpu=4:A,B,C"), planOf(nil, "gpu=2:A,B,C"),
		planOf(nil, "gpu.shared=3:A,B,C"), planOf(nil, "gpu=1:A", "gpu.shared=2:B,C"),
		planOf(nil, "gpu=2:A", "gpu.shared=1:B"), planOf(nil), planOf(map[string]string{"B": "XID 79"}, "gpu=4:A,B,C"),
		planOf(map[string]string{"A": "gone"}, "gpu=4:B,C"),
	}
	for seed := range uint64(80) {
		random := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		plan := plans[0]
		for range 80 {
			switch random.IntN(6) {
			case 0:
				plan = plans[random.IntN(len(plans))]
			case 1:
				w.blind = random.IntN(4) == 0
			case 2: // A pod comes: it gets a Healthy device that nobody holds.
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
			if t.Failed() {
				return
			}
		}
		w.blind = false
		w.held = idSet{}
		w.pass(plan, 3*time.Minute)
		for _, r := range plan.Resources {
			var got []sharing.Device
			for _, e := range w.lists[r.Name].Entries {
				got = append(got, e.Device)
			}
			if diff := cmp.Diff(r.Devices, got); diff != "" {
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
	listed := idSet{}
	ways := map[string]map[way]bool{}
	holders := map[string]map[way]int{}
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if listed.has(resource, e.ID) {
				t.Errorf("seed %d: %s is listed twice in %s", seed, e.ID, resource)
			}
			listed.add(resource, e.ID)
			key := way{resource, e.shared()}
			if e.Healthy && !w.held.has(resource, e.ID) {
				if ways[e.Unit] == nil {
					ways[e.Unit] = map[way]bool{}
				}
				ways[e.Unit][key] = true
			}
			if w.held.has(resource, e.ID) {
				if holders[e.Unit] == nil {
					holders[e.Unit] = map[way]int{}
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

// TestNextNeverDropsAHealthyDevice is invariant 6, step by step.
func TestNextNeverDropsAHealthyDevice(t *testing.T) {
	plans := []sharing.Plan{planOf(nil, "gpu=1:A,B"), planOf(nil, "gpu=4:A"), planOf(nil, "x=2:A,B"), planOf(nil)}
	for seed := range uint64(60) {
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
