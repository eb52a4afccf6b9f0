package plugin

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

// world is what Next sees, moved on by hand.
type world struct {
	t      *testing.T
	now    time.Time
	lists  Lists
	held   idSet
	blind  bool // the kubelet cannot be seen
	unsent bool // the newest list has not been sent
	lost   bool // there is no stream, or a new one
	calls  Calls
	timing Timing
	seen   Sight
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, now: time.Unix(1000, 0), lists: Lists{}, held: idSet{},
		calls:  Calls{Granted: map[string]map[string]time.Time{}, Named: map[string]map[string]time.Time{}, Busy: map[string]bool{}},
		timing: Timing{Quiet: 10 * time.Second, RetireAfter: time.Minute, StopAfter: 20 * time.Second},
	}
}

// look reads the kubelet, which has applied the lists at once.
func (w *world) look() {
	if w.blind {
		w.seen.heldKnown, w.seen.appliedKnown = false, false
		return
	}
	w.seen = Sight{held: idSet{}, applied: idSet{}, heldAt: w.now, appliedAt: w.now, heldKnown: true, appliedKnown: true}
	for resource, ids := range w.held {
		for id := range ids {
			w.seen.held.add(resource, id)
		}
	}
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if e.Healthy {
				w.seen.applied.add(resource, e.ID)
			}
		}
	}
}

func (w *world) step(plan sharing.Plan) {
	w.calls.Sent, w.calls.Lost = map[string]bool{}, map[string]bool{}
	for resource := range w.lists {
		w.calls.Sent[resource], w.calls.Lost[resource] = !w.unsent, w.lost
	}
	w.lists = Next(w.lists, plan, w.seen, w.calls, w.now, w.timing)
}

// pass lets time go by in seconds, with a look and a step in each.
func (w *world) pass(plan sharing.Plan, d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(time.Second)
		w.look()
		w.step(plan)
	}
}

// show prints a list: "A0 A1 a2" with lower-case letters for Unhealthy, "+" for
// Closing and "-" for Retiring.
func (w *world) show(resource string) string {
	list, ok := w.lists[resource]
	if !ok {
		return "none"
	}
	var words []string
	for _, e := range list.Entries {
		unit, n, shared := sharing.ParseDeviceID(e.ID)
		word := unit
		if shared {
			word += fmt.Sprint(n)
		}
		if !e.Healthy {
			word = strings.ToLower(word)
		}
		words = append(words, word+map[Phase]string{Offered: "", Closing: "+", Retiring: "-"}[e.Phase])
	}
	return strings.Join(words, " ")
}

func (w *world) expect(resource, want string) {
	w.t.Helper()
	if diff := cmp.Diff(want, w.show(resource)); diff != "" {
		w.t.Errorf("%s at %ds: %s", resource, w.now.Unix()-1000, diff)
	}
}

// planOf plans resources written as "name=replicas:A,B"; units of faults are
// on the node with that fault, all others are healthy.
func planOf(faults map[string]string, resources ...string) sharing.Plan {
	plan := sharing.Plan{Faults: map[string]string{"A": "", "B": "", "C": ""}}
	for unit, fault := range faults {
		if fault == "gone" {
			delete(plan.Faults, unit)
			continue
		}
		plan.Faults[unit] = fault
	}
	for _, text := range resources {
		var r sharing.Resource
		var units string
		name, rest, _ := strings.Cut(text, "=")
		replicas := 0
		if _, err := fmt.Sscanf(rest, "%d:%s", &replicas, &units); err != nil {
			panic(err)
		}
		r.Name = name
		for unit := range strings.SplitSeq(units, ",") {
			r.Units = append(r.Units, sharing.Unit{ID: unit, GPU: unit, Replicas: replicas, NUMANode: -1})
			for n := range replicas {
				d := sharing.Device{ID: unit, Unit: unit, Healthy: plan.Faults[unit] == "", NUMANode: -1}
				if replicas > 1 {
					d.ID = sharing.NewDeviceID(unit, n)
				}
				r.Devices = append(r.Devices, d)
			}
		}
		plan.Resources = append(plan.Resources, r)
	}
	return plan
}
