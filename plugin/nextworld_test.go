package plugin

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

// world is the input of Next, moved on by hand.
type world struct {
	t      *testing.T
	now    time.Time
	lists  Lists
	held   DeviceIDs
	blind  bool // the kubelet cannot be seen
	unsent bool // the newest list has not been sent
	lost   bool // there is no stream, or a new one
	// unnamed: the kubelet does not name the pods that hold devices.
	unnamed bool
	calls   RPCState
	timing  Timing
	seen    KubeletSnapshot
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, now: time.Unix(1000, 0), lists: Lists{}, held: DeviceIDs{},
		calls:  RPCState{Granted: map[string]map[string]time.Time{}, Preferred: map[string]map[string]time.Time{}, Busy: map[string]bool{}},
		timing: Timing{RemovalDelay: 10 * time.Second, RetireAfter: time.Minute, StopAfter: 20 * time.Second},
	}
}

// look reads the kubelet, which has applied the lists at once.
func (w *world) look() {
	if w.blind {
		w.seen.HeldKnown, w.seen.AppliedKnown = false, false
		return
	}
	before := w.seen.SeenHeld
	w.seen = KubeletSnapshot{Held: DeviceIDs{}, Applied: DeviceIDs{}, Uncertain: DeviceIDs{}, HeldAt: w.now, AppliedAt: w.now, HeldKnown: true, AppliedKnown: true}
	for resource, ids := range w.held {
		for id := range ids {
			w.seen.Held.add(resource, id)
			if w.unnamed {
				w.seen.Uncertain.add(resource, id)
			}
		}
	}
	w.seen.observeHeld(before, w.timing.RemovalDelay)
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if e.Healthy {
				w.seen.Applied.add(resource, e.ID)
			}
		}
	}
}

// grant has Allocate serve the device.
func (w *world) grant(resource, id string) {
	if w.calls.Granted[resource] == nil {
		w.calls.Granted[resource] = map[string]time.Time{}
	}
	w.calls.Granted[resource][id] = w.now
}

func (w *world) step(plan sharing.Plan) {
	w.calls.Sent, w.calls.Lost = map[string]bool{}, map[string]bool{}
	for resource := range w.lists {
		w.calls.Sent[resource], w.calls.Lost[resource] = !w.unsent, w.lost
	}
	w.lists = Next(w.lists, plan, w.seen, w.calls, w.now, w.timing)
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if e.Mode != sharing.ModeOf(e.ID) && (e.Mode != sharing.TimeSliced || e.ID != e.Unit) || e.Whole && e.Mode != sharing.TimeSliced {
				w.t.Fatalf("%s of %s is said to be %+v", e.ID, resource, e.Mode)
			}
		}
	}
	w.close()
}

// close updates Allocate for the new list, as a server does: it refuses devices with RefusesAllocate, and grants
// devices with Whole as shares.
func (w *world) close() {
	w.calls.Refused = w.since(w.calls.Refused, func(e Entry) bool { return e.RefusesAllocate })
	w.calls.Shared = w.since(w.calls.Shared, func(e Entry) bool { return e.Whole })
}

func (w *world) since(before DeviceTimes, so func(Entry) bool) DeviceTimes {
	times := DeviceTimes{}
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if since, was := before[resource][e.ID]; so(e) && was {
				times.set(resource, e.ID, since)
			} else if so(e) {
				times.set(resource, e.ID, w.now)
			}
		}
	}
	return times
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
// HeldSurplus and "-" for Removing, "'" for a time-slice with the unit's ID and "*" for one that is Whole.
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
		if e.Whole {
			word += "*"
		} else if !shared && e.Mode == sharing.TimeSliced {
			word += "'"
		}
		words = append(words, word+map[Phase]string{Offered: "", HeldSurplus: "+", Removing: "-"}[e.Phase])
	}
	return strings.Join(words, " ")
}

// converged are the list's devices as a plan names them.
func (w *world) converged(resource string) (devices []sharing.Device) {
	for _, e := range w.lists[resource].Entries {
		if e.ID == e.Unit && e.Mode == sharing.TimeSliced {
			e.ID = sharing.NewDeviceID(e.Unit, 0)
		}
		devices = append(devices, e.Device)
	}
	return devices
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
	plan := sharing.Plan{Health: map[string]sharing.Health{"A": {}, "B": {}, "C": {}, "D": {}}}
	for unit, fault := range faults {
		if fault == "gone" {
			delete(plan.Health, unit)
			continue
		}
		plan.Health[unit] = sharing.Faulty(fault)
	}
	for _, text := range resources {
		var r sharing.Resource
		var units string
		name, rest, _ := strings.Cut(text, "=")
		replicas, mps := 0, strings.Contains(rest, "m:") // "gpu=4m:A" is by MPS.
		if _, err := fmt.Sscanf(strings.Replace(rest, "m:", ":", 1), "%d:%s", &replicas, &units); err != nil {
			panic(err)
		}
		r.Name = name
		for unit := range strings.SplitSeq(units, ",") {
			u := sharing.Unit{ID: unit, GPU: unit, Replicas: replicas, NUMANode: -1, Health: plan.Health[unit]}
			if mps {
				u.MPS.Shares = replicas
			}
			r.Units = append(r.Units, u)
			for n := range replicas {
				d := sharing.Device{ID: unit, Unit: unit, Healthy: plan.Health[unit].Healthy(), NUMANode: -1}
				if replicas > 1 {
					d.ID = sharing.NewDeviceID(unit, n)
				}
				if mps {
					d.ID = sharing.NewMPSDeviceID(unit, n, replicas)
				}
				r.Devices = append(r.Devices, d)
			}
		}
		plan.Resources = append(plan.Resources, r)
	}
	return plan
}
