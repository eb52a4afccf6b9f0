package plugin

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// TestNextGrowth follows an exclusive unit that becomes time-sliced under the same name.
func TestNextGrowth(t *testing.T) {
	alone, shared, more := planOf(nil, "gpu=1:A"), planOf(nil, "gpu=3:A"), planOf(nil, "gpu=4:A")
	type step struct {
		does func(*world)
		plan sharing.Plan
		want string // "A*" is promised to a pod as a whole, "A'" is a share.
	}
	holds := func(id string) func(*world) {
		return func(w *world) { w.grant("gpu", id); w.held.add("gpu", id) }
	}
	ends := func(id string) func(*world) { return func(w *world) { delete(w.held["gpu"], id) } }
	nothing := func(*world) {}
	for _, test := range []struct {
		name  string
		steps []step
	}{
		{"free", []step{
			{nothing, shared, "A*"}, // A grant that is under way would not be known yet.
			{nothing, shared, "A' A1 A2"},
			{nothing, more, "A' A1 A2 A3"},
			{nothing, shared, "A' A1 A2 a3-"},
		}},
		{"held", []step{
			{holds("A"), alone, "A"},
			{nothing, shared, "A*"},
			{nothing, shared, "A*"},
			{nothing, more, "A*"},
			{ends("A"), more, "A' A1 A2 A3"},
			{holds("A"), more, "A' A1 A2 A3"},
		}},
		{"the next pod takes the device at once", []step{
			{holds("A"), alone, "A"},
			{nothing, shared, "A*"},
			{holds("A"), shared, "A' A1 A2"},
		}},
		{"back while it is held", []step{
			{holds("A"), alone, "A"},
			{nothing, shared, "A*"},
			{nothing, alone, "A"},
			{ends("A"), alone, "A"},
		}},
		{"back after it was shared", []step{
			{nothing, shared, "A*"},
			{holds("A"), shared, "A' A1 A2"},
			{nothing, alone, "a'+ a1- a2-"},
			{nothing, shared, "A' A1 A2"}, // Again, with the same IDs.
			{nothing, alone, "a'+ a1- a2-"},
			{ends("A"), alone, "a'- a1- a2-"},
			{nothing, alone, "a'- a1- a2-"},
			{nothing, alone, "a'- a1- a2-"},
			{nothing, alone, "A a1- a2-"},
		}},
		{"another sister is held", []step{
			{nothing, shared, "A*"},
			{nothing, shared, "A' A1 A2"},
			{holds("A::2"), alone, "a'- a1- a2+"},
			{nothing, alone, "a'- a1- a2+"},
		}},
		{"faulty", []step{
			{holds("A"), alone, "A"},
			{nothing, planOf(map[string]string{"A": "XID 79"}, "gpu=3:A"), "a*"},
			{nothing, shared, "A*"},
		}},
		{"another name, and back", []step{
			{holds("A"), alone, "A"},
			{nothing, shared, "A*"},
			{nothing, planOf(nil, "x=2:A"), "a*+"},
			{nothing, shared, "A*"},
			{ends("A"), shared, "A' A1 A2"},
		}},
		{"a kubelet that cannot be read", []step{
			{holds("A"), alone, "A"},
			{func(w *world) { w.blind = true }, shared, "A*"},
			{ends("A"), shared, "A*"},
			{holds("A"), shared, "A' A1 A2"}, // The kubelet gives nothing twice.
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(alone)
			for i, s := range test.steps {
				w.now = w.now.Add(time.Second)
				s.does(w)
				w.now = w.now.Add(time.Second)
				w.look()
				w.step(s.plan)
				if got := w.show("gpu"); got != s.want {
					t.Fatalf("step %d: %q, want %q", i, got, s.want)
				}
			}
		})
	}
}

// TestNextGrowthLooksAfterwards checks that the other shares are offered only after a reading that began after
// Allocate served the device as a share, and while no call is in progress whose grant may be missing.
func TestNextGrowthLooksAfterwards(t *testing.T) {
	w := newWorld(t)
	shared := planOf(nil, "gpu=2:A")
	w.step(planOf(nil, "gpu=1:A"))
	w.now = w.now.Add(time.Second)
	w.look()
	w.step(shared)
	w.now = w.now.Add(time.Second)
	w.step(shared)
	w.expect("gpu", "A*") // The reading is older.
	w.calls.Busy["gpu"] = true
	w.pass(shared, 2*time.Second)
	w.expect("gpu", "A*")
	w.calls.Busy["gpu"] = false
	w.step(shared)
	w.expect("gpu", "A' A1")
}

// TestNextGrowthOfWhatLeaves has a device come back as a time-slice that is on its way out: that ends first.
func TestNextGrowthOfWhatLeaves(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	w.look()
	w.unsent = true
	w.now = w.now.Add(time.Second)
	w.look()
	w.step(planOf(nil, "x=2:A"))
	w.now = w.now.Add(time.Millisecond)
	w.step(planOf(nil, "gpu=2:A"))
	if e := w.lists["gpu"].Entries[0]; e.RefusesAllocate || e.Unused || !e.Since.IsZero() {
		t.Errorf("%+v, and the kubelet was not given the list", e)
	}
	w.unsent = false
	w.pass(planOf(nil, "gpu=2:A"), 5*time.Second)
	w.expect("gpu", "A' A1")
}

// TestNextGrowthAfterAnOlderVersion has the lists of a version without growth, within the removal delay of a
// switch.
func TestNextGrowthAfterAnOlderVersion(t *testing.T) {
	w := newWorld(t)
	listed := func(id string, phase Phase) Entry {
		return Entry{Device: sharing.Device{ID: id, Unit: "A", NUMANode: -1, Healthy: phase != Removing}, Mode: sharing.ModeOf(id), Phase: phase}
	}
	w.lists = Lists{"gpu": {Entries: []Entry{listed("A", Removing), listed("A::0", Offered), listed("A::1", Offered)}}}
	w.held.add("gpu", "A::1")
	w.lost = true
	w.look()
	w.step(planOf(nil, "gpu=2:A"))
	w.expect("gpu", "a- A0 A1")
}

// TestGrantedBeforeGrowth has Allocate begin with an exclusive GPU and end when it is time-sliced: the pod has it
// exclusively.
func TestGrantedBeforeGrowth(t *testing.T) {
	alone, shared := planOf(nil, "gpu=1:A"), planOf(nil, "gpu=3:A")
	clock := time.Unix(2000, 0)
	made := func(p sharing.Plan, lists Lists, previous *generation) (*generation, Lists) {
		lists = Next(lists, p, KubeletSnapshot{}, RPCState{}, clock, Timing{})
		return newGeneration(p.Resources[0], lists["gpu"], grantTerms{host: &grant.Host{}}, p.Health, nil, previous), lists
	}
	before, lists := made(alone, nil, nil)
	after, _ := made(shared, lists, before)
	s := &server{Options: Options{Now: func() time.Time { return clock }}, name: "gpu", refusedUnits: newRefusedUnits()}
	s.publish(before)
	now, grown := s.Now, false
	s.Now = func() time.Time {
		at := now()
		if !grown { // The first thing that Allocate does.
			grown, clock = true, clock.Add(time.Second)
			s.publish(after)
			clock = clock.Add(time.Second)
		}
		return at
	}
	request := &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"A"}}}}
	for _, want := range []bool{false, true} {
		if _, err := (service{server: s}).Allocate(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		calls := RPCState{Granted: DeviceTimes{}, Preferred: DeviceTimes{}, Refused: DeviceTimes{}, Shared: DeviceTimes{}}
		s.current.Load().rpcState(calls)
		if in := (inputs{rpc: calls}); in.isShare("gpu", "A") != want {
			t.Errorf("is it a share: %t; granted at %v, shared since %v", !want, calls.Granted["gpu"]["A"], calls.Shared["gpu"]["A"])
		}
	}
}

// TestNextOfBothKinds has pods of another plugin hold a unit exclusively and as a share. When one of them ends,
// no third pod gets the unit.
func TestNextOfBothKinds(t *testing.T) {
	for _, plan := range []sharing.Plan{planOf(nil, "gpu=1:A"), planOf(nil, "gpu=2:A")} {
		w := newWorld(t)
		w.held.add("gpu", "A")
		w.held.add("gpu", "A::1")
		w.look()
		w.step(plan)
		for _, ended := range []string{"A", "A::1"} {
			w.held = DeviceIDs{}
			w.held.add("gpu", map[string]string{"A": "A::1", "A::1": "A"}[ended])
			lists := w.lists
			w.pass(plan, time.Minute)
			promised := w.held.has("gpu", "A") || plan.Resources[0].Units[0].Replicas == 1
			for _, e := range w.lists["gpu"].Entries {
				if e.Healthy && !w.held.has("gpu", e.ID) && promised {
					t.Errorf("%s is offered after %s has ended: %s", e.ID, ended, w.show("gpu"))
				}
			}
			w.lists = lists
		}
	}
}

// TestNextGrowthKeepsWhatIsHeld plays growth and its reverse with a kubelet that lags: a device granted as a
// whole never leaves the list, and is Unhealthy only while its unit is faulty.
func TestNextGrowthKeepsWhatIsHeld(t *testing.T) {
	t.Parallel()
	plans := []string{"gpu=1:A,B", "gpu=2:A,B", "gpu=4:A,B"}
	kept, grown := 0, 0
	for seed := range uint64(repeat.Times(15, 100)) {
		random := rand.New(rand.NewPCG(seed, 7))
		w := newLagging(t, random)
		plan, faulty := planOf(nil, plans[0]), false
		for range 60 {
			switch random.IntN(4) {
			case 0:
				faulty = random.IntN(4) == 0
				fallthrough
			case 1:
				var faults map[string]string
				if faulty {
					faults = map[string]string{"A": "XID 79"}
				}
				plan = planOf(faults, plans[random.IntN(len(plans))])
			}
			for range 1 + random.IntN(30) {
				w.run(plan, 1)
				for _, p := range w.pods {
					if !p.granted || p.mode != sharing.Exclusive {
						continue
					}
					kept++
					at := slices.IndexFunc(w.lists["gpu"].Entries, func(e Entry) bool { return e.ID == p.id })
					if at < 0 {
						t.Fatalf("seed %d: %s has left", seed, p.id)
					}
					if e := w.lists["gpu"].Entries[at]; e.Healthy != (p.id != "A" || !faulty) {
						t.Fatalf("seed %d: %s is held, and Healthy is %t: %s", seed, p.id, e.Healthy, w.show("gpu"))
					} else if e.Whole {
						grown++
					}
				}
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		}
	}
	if kept < 1000 || grown < 300 {
		t.Errorf("%d devices were held, %d of them through growth", kept, grown)
	}
}

// TestGrowthIsSaved checks that a change of any field about how pods may hold a device is saved.
func TestGrowthIsSaved(t *testing.T) {
	saved := Entry{Device: sharing.Device{ID: "A", Unit: "A"}, Phase: Offered, Mode: sharing.Exclusive}
	list := func(e Entry) Lists { return Lists{"gpu": {Entries: []Entry{e}}} }
	for name, change := range map[string]func(*Entry){
		"phase": func(e *Entry) { e.Phase = HeldSurplus },
		"mode":  func(e *Entry) { e.Mode = sharing.TimeSliced },
		"whole": func(e *Entry) { e.Whole = true },
	} {
		now := saved
		change(&now)
		if list(now).savedAs(list(saved)) {
			t.Errorf("%s alone is not saved", name)
		}
	}
	healthy := saved
	healthy.Healthy = true
	if !list(healthy).savedAs(list(saved)) {
		t.Error("health is saved")
	}
}

// TestGrownDeviceIsOneShare checks that a device with the GPU's own ID counts as a share if its unit is shared.
func TestGrownDeviceIsOneShare(t *testing.T) {
	for mode, want := range map[sharing.Mode]codes.Code{sharing.Exclusive: codes.OK, sharing.TimeSliced: codes.InvalidArgument} {
		list, health, units := List{}, map[string]sharing.Health{}, map[string]sharing.Unit{}
		for _, id := range []string{"A", "B"} {
			list.Entries = append(list.Entries, Entry{Device: sharing.Device{ID: id, Unit: id, Healthy: true}, Phase: Offered, Mode: mode})
			health[id], units[id] = sharing.Health{}, sharing.Unit{ID: id, GPU: id}
		}
		g := newGeneration(sharing.Resource{Name: "gpu", FailRequestsGreaterThanOne: true}, list, grantTerms{host: &grant.Host{}}, health, units, nil)
		if _, _, err := g.grant([]string{"A", "B"}, time.Now()); status.Code(err) != want {
			t.Errorf("%v: %v, want %v", mode, err, want)
		}
	}
}
