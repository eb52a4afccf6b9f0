package plugin

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestNextSwitchesAFreeUnit follows a unit step by step.
func TestNextSwitchesAFreeUnit(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	shared := planOf(nil, "gpu=2m:A")
	const tick = 10 * time.Millisecond
	next := func(look bool) {
		w.now = w.now.Add(tick)
		if look {
			w.look()
		}
		w.step(shared)
	}
	state := func() string {
		e := w.lists["gpu"].Entries[0]
		return fmt.Sprintf("%s: listed %t, applied %t, closed %t, vacated %t", w.show("gpu"), !e.Since.IsZero(), !e.Applied.IsZero(), e.RefusesAllocate, e.Unused)
	}
	expect := func(want string) {
		t.Helper()
		if got := state(); got != want {
			t.Fatalf("after %s: %s, want %s", w.now.Sub(time.Unix(1000, 0)), got, want)
		}
	}
	next(false)
	expect("A: listed false, applied false, closed false, vacated false") // Not before the kubelet was read.
	next(true)
	expect("a-: listed false, applied false, closed false, vacated false")
	next(false)
	expect("a-: listed true, applied false, closed false, vacated false")
	next(false)
	expect("a-: listed true, applied false, closed false, vacated false")
	next(true)
	expect("a-: listed true, applied true, closed false, vacated false")
	for range 4 {
		next(true)
		expect("a-: listed true, applied true, closed false, vacated false") // For admissions under way.
	}
	next(true)
	expect("a-: listed true, applied true, closed true, vacated false")
	next(false)
	expect("a-: listed true, applied true, closed true, vacated false") // The last look is older than that.
	next(true)
	expect("a- A0 A1: listed true, applied true, closed true, vacated true")
	w.pass(shared, 9*time.Second)
	w.expect("gpu", "a- A0 A1") // Leaving the list takes the removal delay.
	w.pass(shared, 2*time.Second)
	w.expect("gpu", "A0 A1")
}

// TestNextSwitchWaits checks what a free unit waits for, one condition at a time.
func TestNextSwitchWaits(t *testing.T) {
	for _, test := range []struct {
		name string
		// from is when it happens: "offered", "retiring", "closed".
		from     string
		happens  func(*world)
		ends     func(*world)
		switches bool // before it ends
	}{
		{"nothing", "offered", func(*world) {}, func(*world) {}, true},
		{"kubelet not read", "offered", func(w *world) { w.blind = true }, func(w *world) { w.blind = false }, false},
		{"kubelet not read", "retiring", func(w *world) { w.blind = true }, func(w *world) { w.blind = false }, false},
		{"kubelet not read", "closed", func(w *world) { w.blind = true }, func(w *world) { w.blind = false }, false},
		{"list not sent", "offered", func(w *world) { w.unsent = true }, func(w *world) { w.unsent = false }, false},
		{"stream lost", "retiring", func(w *world) { w.lost = true }, func(w *world) { w.lost = false }, false},
		{"stream lost", "closed", func(w *world) { w.lost = true }, func(w *world) { w.lost = false }, false},
		{"held", "offered", func(w *world) { w.held.add("gpu", "A") }, func(w *world) { w.held = DeviceIDs{} }, false},
		{"held", "retiring", func(w *world) { w.held.add("gpu", "A") }, func(w *world) { w.held = DeviceIDs{} }, false},
		{"held", "closed", func(w *world) { w.held.add("gpu", "A") }, func(w *world) { w.held = DeviceIDs{} }, false},
		{"granted, not seen", "closed", func(w *world) { w.grant("gpu", "A") }, func(w *world) { w.now = w.now.Add(11 * time.Second) }, false},
		{"granted, seen and gone", "closed", func(w *world) {
			w.grant("gpu", "A")
			w.held.add("gpu", "A")
			w.pass(planOf(nil, "gpu=2m:A"), time.Second)
			w.held = DeviceIDs{}
		}, func(*world) {}, true},
		{"granted, and held by somebody unnamed who is gone", "closed", func(w *world) {
			w.grant("gpu", "A")
			w.held.add("gpu", "A")
			w.unnamed = true
			w.pass(planOf(nil, "gpu=2m:A"), time.Second)
			w.held = DeviceIDs{}
		}, func(w *world) { w.now = w.now.Add(11 * time.Second) }, false},
	} {
		t.Run(test.name+" "+test.from, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=1:A"))
			shared := planOf(nil, "gpu=2m:A")
			for range 10 {
				e := w.lists["gpu"].Entries[0]
				if test.from == "offered" || test.from == string(e.Phase) && !e.Applied.IsZero() || test.from == "closed" && e.RefusesAllocate {
					break
				}
				w.pass(shared, time.Second)
			}
			test.happens(w)
			switched := func() bool { return strings.Contains(w.show("gpu"), "A0 A1") }
			w.pass(shared, 7*time.Second)
			if switched() != test.switches {
				t.Errorf("list %q, switched %t", w.show("gpu"), switched())
			}
			test.ends(w)
			w.pass(shared, 7*time.Second)
			if !switched() {
				t.Errorf("list %q after it has ended", w.show("gpu"))
			}
		})
	}
}

// TestNextWaves checks which units switch first, and when the others follow.
func TestNextWaves(t *testing.T) {
	for _, test := range []struct {
		name, before, after string
		held                []string
		faults              map[string]string
		// lists are all lists of the resource gpu, without devices that are being removed.
		lists []string
	}{
		{name: "one", before: "gpu=1:A", after: "gpu=2m:A", lists: []string{"A", "", "A0 A1"}},
		{name: "two", before: "gpu=1:A,B", after: "gpu=2m:A,B", lists: []string{"A B", "B", "A0 A1", "A0 A1 B0 B1"}},
		{name: "four", before: "gpu=1:A,B,C,D", after: "gpu=2m:A,B,C,D", lists: []string{
			"A B C D", "C D", "A0 A1 B0 B1", "A0 A1 B0 B1 C0 C1 D0 D1"}},
		{name: "back", before: "gpu=2:A,B", after: "gpu=1:A,B", lists: []string{"A0 A1 B0 B1", "B0 B1", "A", "A B"}},
		{name: "some stay", before: "gpu=1:A,B,C", after: "gpu=1:A gpu.shared=2:B,C", lists: []string{"A B C", "A"}},
		{name: "one comes back", before: "gpu=1:A,B,C", after: "gpu.shared=2:A,B gpu=2m:C", lists: []string{"A B C", "A B", "C0 C1"}},
		{name: "all get another name", before: "gpu=1:A,B", after: "x=1:A,B", lists: []string{"A B", ""}},
		{name: "one is held", before: "gpu=1:A,B", after: "gpu=2m:A,B", held: []string{"A"}, lists: []string{"A B", "", "B0 B1"}},
		{name: "one is faulty", before: "gpu=1:A,B", after: "gpu=2m:A,B", faults: map[string]string{"A": "XID 79"}, lists: []string{"A B", "", "B0 B1"}},
		{name: "one is excluded", before: "gpu=1:A,B", after: "gpu=1:B", lists: []string{"A B", "B"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, strings.Fields(test.before)...))
			w.look()
			for _, id := range test.held {
				w.held.add("gpu", id)
			}
			var lists []string
			for range 30 {
				var healthy []string
				for word := range strings.FieldsSeq(w.show("gpu")) {
					if strings.ToUpper(word) == word {
						healthy = append(healthy, word)
					}
				}
				if list := strings.Join(healthy, " "); len(lists) == 0 || lists[len(lists)-1] != list {
					lists = append(lists, list)
				}
				w.now = w.now.Add(100 * time.Millisecond)
				w.look()
				w.step(planOf(test.faults, strings.Fields(test.after)...))
			}
			if !slices.Equal(lists, test.lists) {
				t.Errorf("lists %q, want %q", lists, test.lists)
			}
		})
	}
}

// TestNextUnderRandomLag runs random plans, pods and faults against a kubelet that applies lists and shows
// holders late. Each step checks the kubelet's invariants.
func TestNextUnderRandomLag(t *testing.T) {
	t.Parallel()
	plans := []string{
		"gpu=1:A,B,C,D", "gpu=4:A,B,C,D", "gpu=2:A,B,C,D", "gpu.shared=3:A,B,C,D", "gpu=1:A,B gpu.shared=2:C,D",
		"gpu=2:A gpu.shared=1:B", "gpu=1:A,B,C", "gpu=2:B,C,D",
	}
	switched := 0
	seeds := repeat.Times(15, 60)
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 3))
		w := newLagging(t, random)
		plan := planOf(nil, strings.Fields(plans[0])...)
		w.run(plan, 5)
		for range 25 {
			if random.IntN(3) == 0 {
				plan = planOf(nil, strings.Fields(plans[random.IntN(len(plans))])...)
			}
			w.run(plan, 1+random.IntN(60))
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		for len(w.pods) > 0 {
			w.end(0)
		}
		w.calm = true
		w.run(plan, 600)
		for _, r := range plan.Resources {
			if got := w.converged(r.Name); !slices.Equal(got, r.Devices) {
				t.Fatalf("seed %d: did not converge: %v, want %v", seed, got, r.Devices)
			}
		}
		switched += w.switched
	}
	if switched < 6*seeds {
		t.Errorf("%d switches", switched)
	}
}

// lagging is a world whose kubelet applies lists with a delay. Its pods are admitted in three steps, with time
// between: a device is chosen, Allocate is called, and the pod holds it.
type lagging struct {
	*world
	random *rand.Rand
	calm   bool
	// queue are the lists on their way, applied the ones that the kubelet has.
	queue   []Lists
	applied Lists
	pods    []*lagPod
	// switched counts the units that were offered in another mode.
	switched, refused int
	uses              map[string]sharing.Use
}

type lagPod struct {
	resource, id string
	// granted: Allocate has answered; holds: the kubelet shows the pod.
	granted, holds bool
	// mode is the device's mode when it was granted.
	mode sharing.Mode
}

func newLagging(t *testing.T, random *rand.Rand) *lagging {
	return &lagging{world: newWorld(t), random: random, applied: Lists{}, uses: map[string]sharing.Use{}}
}

// run goes through so many steps of ten milliseconds.
func (w *lagging) run(plan sharing.Plan, moments int) {
	for range moments {
		w.now = w.now.Add(10 * time.Millisecond)
		if w.calm {
			w.now = w.now.Add(100 * time.Millisecond)
		}
		switch n := len(w.queue); { // Lists are coalesced.
		case n > 0 && w.calm:
			w.applied, w.queue = w.queue[n-1], nil
		case n > 0 && w.random.IntN(3) == 0:
			n = w.random.IntN(n)
			w.applied, w.queue = w.queue[n], w.queue[n+1:]
		}
		if !w.calm {
			w.movePods()
		}
		if w.calm || w.random.IntN(2) == 0 {
			w.look()
			w.seen.Applied = DeviceIDs{}
			for resource, list := range w.applied {
				for _, e := range list.Entries {
					if e.Healthy {
						w.seen.Applied.add(resource, e.ID)
					}
				}
			}
			w.now = w.now.Add(time.Millisecond)
		}
		if !w.calm {
			w.movePods()
		}
		before := w.lists
		w.step(plan)
		w.queue = append(w.queue, w.lists)
		w.check(before, plan)
		if w.t.Failed() {
			return
		}
	}
}

// movePods may move each pod a step further, and may add one.
func (w *lagging) movePods() {
	for i := len(w.pods) - 1; i >= 0; i-- {
		switch p := w.pods[i]; {
		case w.random.IntN(3) > 0:
		case p.holds:
			if w.random.IntN(10) == 0 {
				w.end(i)
			}
		case p.granted:
			p.holds = true
			w.held.add(p.resource, p.id)
		case w.isClosed(p.resource, p.id):
			w.refused++
			w.end(i)
		default:
			p.granted, p.mode = true, w.modeNow(p.resource, p.id)
			w.grant(p.resource, p.id)
		}
	}
	if w.random.IntN(4) > 0 {
		return
	}
	var free []*lagPod
	for resource, list := range w.applied {
		for _, e := range list.Entries {
			taken := slices.ContainsFunc(w.pods, func(p *lagPod) bool { return p.resource == resource && p.id == e.ID })
			if e.Healthy && !taken {
				free = append(free, &lagPod{resource: resource, id: e.ID})
			}
		}
	}
	slices.SortFunc(free, func(a, b *lagPod) int { return strings.Compare(a.resource+a.id, b.resource+b.id) })
	if len(free) > 0 {
		w.pods = append(w.pods, free[w.random.IntN(len(free))])
	}
}

func (w *lagging) end(i int) {
	delete(w.held[w.pods[i].resource], w.pods[i].id)
	w.pods = slices.Delete(w.pods, i, i+1)
}

// isClosed reports whether Allocate would refuse now.
func (w *lagging) isClosed(resource, id string) bool {
	return slices.ContainsFunc(w.lists[resource].Entries, func(e Entry) bool { return e.ID == id && e.RefusesAllocate })
}

func (w *lagging) modeNow(resource, id string) sharing.Mode {
	entries := w.lists[resource].Entries
	return entries[slices.IndexFunc(entries, func(e Entry) bool { return e.ID == id })].Mode
}

func (w *lagging) check(before Lists, plan sharing.Plan) {
	t := w.t
	t.Helper()
	held := map[string]map[sharing.Use]bool{}
	for _, p := range w.pods {
		listed := slices.ContainsFunc(w.lists[p.resource].Entries, func(e Entry) bool { return e.ID == p.id })
		if !listed {
			t.Errorf("%s of %s, which a pod has or is about to have, has left the list", p.id, p.resource)
		}
		if p.granted {
			unit, _, _ := sharing.ParseDeviceID(p.id)
			if held[unit] == nil {
				held[unit] = map[sharing.Use]bool{}
			}
			held[unit][sharing.Use{Resource: p.resource, Mode: p.mode}] = true
		}
	}
	offered := map[string]map[sharing.Use]bool{}
	for resource, list := range w.lists {
		for _, e := range list.Entries {
			if !e.Healthy {
				continue
			}
			mode := e.use(resource)
			if offered[e.Unit] == nil {
				offered[e.Unit] = map[sharing.Use]bool{}
			}
			offered[e.Unit][mode] = true
			if w.uses[e.Unit] != mode {
				w.uses[e.Unit] = mode
				w.switched++
			}
			for other := range held[e.Unit] {
				if keeps := e.Whole && other.CanBecome(mode); other != mode && !keeps {
					t.Errorf("%s of %s is offered, and the unit is held as %v", e.ID, resource, other)
				}
			}
		}
	}
	for unit, modes := range held {
		if len(modes) > 1 {
			t.Errorf("%s is held as %v", unit, modes)
		}
	}
	for unit, modes := range offered {
		if len(modes) > 1 {
			t.Errorf("%s is offered as %v", unit, modes)
		}
	}
	for resource, list := range before {
		for _, e := range list.Entries {
			if e.Healthy && !slices.ContainsFunc(w.lists[resource].Entries, func(n Entry) bool { return n.ID == e.ID }) {
				t.Errorf("%s left %s while Healthy", e.ID, resource)
			}
		}
	}
	w.checkAllocatable(before, plan)
}

// checkAllocatable checks that a resource that stays has a Healthy device if two of its units were Healthy before
// and free, as far as was known.
func (w *lagging) checkAllocatable(before Lists, plan sharing.Plan) {
	w.t.Helper()
	for _, r := range plan.Resources {
		free := map[string]bool{}
		for _, e := range before[r.Name].Entries {
			free[e.Unit] = free[e.Unit] || e.Healthy
		}
		for _, e := range before[r.Name].Entries {
			if w.seen.Held.has(r.Name, e.ID) || w.seen.pendingGrant(r.Name, e.ID, w.calls.Granted[r.Name][e.ID], w.timing.RemovalDelay) {
				delete(free, e.Unit)
			}
		}
		maps.DeleteFunc(free, func(_ string, is bool) bool { return !is })
		if len(free) >= 2 && !slices.ContainsFunc(w.lists[r.Name].Entries, func(e Entry) bool { return e.Healthy }) {
			w.t.Errorf("%s has no Healthy device left, and %d units were free", r.Name, len(free))
		}
	}
}

// TestNextRetireAfter checks how long a held device stays Healthy, by the profile's settings for a shrink and for
// a switch.
func TestNextRetireAfter(t *testing.T) {
	const minute = time.Minute
	for _, test := range []struct {
		name  string
		after string
		says  sharing.RetireAfter
		want  time.Duration // 0 for at once
	}{
		{"shrink, as the flag says", "gpu=2:A", sharing.RetireAfter{}, minute},
		{"shrink, as the profile says", "gpu=2:A", sharing.RetireAfter{Shrink: 2 * minute, ShrinkSet: true}, 2 * minute},
		{"shrink, at once", "gpu=2:A", sharing.RetireAfter{ShrinkSet: true, Switch: minute}, 0},
		{"exclusive", "gpu=1:A", sharing.RetireAfter{Shrink: minute, ShrinkSet: true}, 0},
		{"another name", "x=4:A", sharing.RetireAfter{}, 0},
		{"another name, later", "x=4:A", sharing.RetireAfter{Switch: 2 * minute}, 2 * minute},
		{"excluded", "gpu=4:B", sharing.RetireAfter{}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=4:A"))
			for n := range 4 {
				w.held.add("gpu", sharing.NewDeviceID("A", n))
			}
			w.look()
			plan := planOf(nil, test.after)
			plan.RetireAfter = test.says
			w.pass(plan, time.Second)
			began := w.now
			for w.now.Before(began.Add(time.Hour)) && strings.Contains(w.show("gpu"), "A3") {
				w.pass(plan, time.Second)
			}
			if took := w.now.Sub(began); took != test.want {
				t.Errorf("Healthy for %s, want %s", took, test.want)
			}
		})
	}
}

// TestClosedWhileAllocateIsUnderWay closes a device after Allocate has taken the generation and before it grants.
// The call is refused and leaves no grant. A call answered before is visible after the closing.
func TestClosedWhileAllocateIsUnderWay(t *testing.T) {
	plan := planOf(nil, "gpu=1:A,B")
	list := Next(nil, plan, KubeletSnapshot{}, RPCState{}, time.Unix(1000, 0), Timing{})["gpu"]
	made := func(list List, previous *generation) *generation {
		return newGeneration(plan.Resources[0], list, grantTerms{host: &grant.Host{}}, plan.Health, nil, previous)
	}
	open := made(list, nil)
	closing := List{Entries: slices.Clone(list.Entries)}
	closing.Entries[0].Phase, closing.Entries[0].RefusesAllocate = Removing, true
	clock := time.Unix(2000, 0)
	s := &server{Options: Options{Now: func() time.Time { return clock }}, name: "gpu", refusedUnits: newRefusedUnits()}
	s.publish(open)
	allocate := func(id string) error {
		_, err := service{server: s}.Allocate(t.Context(), &api.AllocateRequest{
			ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{id}}},
		})
		return err
	}
	state := func() RPCState {
		calls := RPCState{Granted: map[string]map[string]time.Time{}, Preferred: map[string]map[string]time.Time{}, Refused: map[string]map[string]time.Time{}}
		s.current.Load().rpcState(calls)
		return calls
	}

	if err := allocate("B"); err != nil {
		t.Fatal(err)
	}
	next := made(closing, open)
	if closed := state().Refused["gpu"]; len(closed) > 0 {
		t.Errorf("closed before it is published: %v", closed)
	}
	now := s.Now
	s.Now = func() time.Time { // Allocate has taken the generation when it asks for the time.
		s.Now = now
		clock = clock.Add(time.Second)
		s.publish(next)
		return clock
	}
	err := allocate("A")
	if status.Code(err) != codes.FailedPrecondition || reasonOf(err) != Switching {
		t.Errorf("granted while it was closed: %v", err)
	}
	calls := state()
	if _, granted := calls.Granted["gpu"]["A"]; granted || len(calls.Granted["gpu"]) != 1 {
		t.Errorf("grants %v, want that of B", calls.Granted["gpu"])
	}
	if got := calls.Refused["gpu"]["A"]; !got.Equal(clock) {
		t.Errorf("closed at %s, want when it was published", got)
	}
	if err := allocate("A"); reasonOf(err) != Switching {
		t.Errorf("granted after it was closed: %v", err)
	}
	s.publish(made(list, next))
	if err := allocate("A"); err != nil || len(state().Refused["gpu"]) > 0 {
		t.Errorf("open again: %v, closed %v", err, state().Refused["gpu"])
	}
}

// TestNextOpensAgain checks that all devices of a unit are served again when a pod is found to hold one.
func TestNextOpensAgain(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=2:A"))
	alone := planOf(nil, "gpu=1:A")
	closed := func() (n int) {
		for _, e := range w.lists["gpu"].Entries {
			if e.RefusesAllocate {
				n++
			}
		}
		return n
	}
	for closed() == 0 {
		w.pass(alone, time.Second)
	}
	if n := closed(); n != 2 {
		t.Errorf("%d devices are closed, want both", n)
	}
	w.held.add("gpu", "A::0")
	w.pass(alone, time.Second)
	w.expect("gpu", "a0+ a1-")
	if n := closed(); n > 0 {
		t.Errorf("%d devices are closed while a pod has the unit", n)
	}
}

// TestNextClosesNothingBlindly checks that nothing is refused while holders cannot be read, as the unit could not
// switch anyway.
func TestNextClosesNothingBlindly(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	shared := planOf(nil, "gpu=2m:A")
	for w.lists["gpu"].Entries[0].Applied.IsZero() {
		w.pass(shared, 10*time.Millisecond)
		w.now = w.now.Add(-time.Second + 10*time.Millisecond)
	}
	w.blind = true
	w.pass(shared, time.Minute)
	if w.lists["gpu"].Entries[0].RefusesAllocate {
		t.Error("closed")
	}
}

// TestNextWavesWithoutRoom switches GPUs whose new devices do not fit into the list beside the old ones: the rest
// stays offered.
func TestNextWavesWithoutRoom(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, fmt.Sprintf("gpu=%d:A,B,D", sharing.MaxDevices/3)))
	alone := planOf(nil, fmt.Sprintf("gpu=%d:C", sharing.MaxDevices/3), "y=1:A,B,D")
	for range 10 {
		w.now = w.now.Add(100 * time.Millisecond)
		w.look()
		w.step(alone)
		if !slices.ContainsFunc(w.lists["gpu"].Entries, func(e Entry) bool { return e.Healthy }) {
			t.Fatalf("nothing is Healthy after %s", w.now.Sub(time.Unix(1000, 0)))
		}
		if w.lists["y"].Entries != nil {
			return // The first of them has its new name.
		}
	}
	t.Error("nothing has switched")
}

// TestScheduleLooksSoon checks which of the kubelet's records Virgate reads next for a device in each state (the
// devices that the kubelet has applied, those that pods hold), and how soon.
func TestScheduleLooksSoon(t *testing.T) {
	now := time.Now()
	const never = time.Duration(-1)
	retiring := Entry{Phase: Removing, Switching: true, Since: now}
	applied := retiring
	applied.Applied = now
	closed := applied
	closed.RefusesAllocate = true
	vacated := closed
	vacated.Unused = true
	for _, test := range []struct {
		name   string
		entry  Entry
		unseen bool
		most   time.Duration
		due    reading
		isHeld bool
	}{
		{"nothing", Entry{Phase: Offered}, false, never, reading{}, false},
		{"a grant", Entry{Phase: Offered}, true, firstGrantPause, reading{held: true}, false},
		{"not its turn", Entry{Phase: Offered, Switching: true}, false, 500 * time.Millisecond, reading{applied: true, held: true}, false},
		{"held", Entry{Phase: HeldSurplus, Switching: true}, false, 500 * time.Millisecond, reading{applied: true, held: true}, false},
		{"not listed", Entry{Phase: Removing}, false, 500 * time.Millisecond, reading{applied: true, held: true}, false},
		{"listed", retiring, false, firstPause, reading{applied: true}, false},
		{"applied", applied, false, 50 * time.Millisecond, reading{}, false},
		{"closed", closed, false, 0, reading{held: true}, false},
		{"vacated", vacated, false, 500 * time.Millisecond, reading{applied: true, held: true}, false},
		{"may become a share", Entry{Device: sharing.Device{ID: "A"}, Phase: Offered, Whole: true}, false, 0, reading{held: true}, false},
		{"is held whole", Entry{Device: sharing.Device{ID: "A"}, Phase: Offered, Whole: true}, false, 500 * time.Millisecond, reading{held: true}, true},
	} {
		m := NewManager(Options{})
		r := &reconciler{Manager: m, lists: Lists{"gpu": {Entries: []Entry{test.entry}}}, pendingGrants: test.unseen}
		r.kubelet.Held = DeviceIDs{}
		if test.isHeld {
			r.kubelet.Held.add("gpu", test.entry.ID)
		}
		r.schedule.change()
		wait, any := r.schedule.next(r)
		if any != (test.most != never) || wait > max(test.most, 0) || r.schedule.due != test.due {
			t.Errorf("%s: %+v after %s (%t), want %+v within %s", test.name, r.schedule.due, wait, any, test.due, test.most)
		}
	}
}

// TestHoldersWithoutANameAreLookedForSoon checks how often a list is sent again while the kubelet names no pod
// for a held device: in the end every two seconds if a unit waits to change its mode, and less and less often if
// only a device of this unit waits to be removed.
func TestHoldersWithoutANameAreLookedForSoon(t *testing.T) {
	entry := func(id string, phase Phase, switching bool) Entry {
		return Entry{Device: sharing.Device{ID: id, Unit: id[:1]}, Phase: phase, Switching: switching}
	}
	for _, test := range []struct {
		name    string
		entries []Entry
		least   int
	}{
		{"changes its mode", []Entry{entry("A::0", HeldSurplus, true)}, 300},
		{"its other shares wait", []Entry{{Device: sharing.Device{ID: "A::0", Unit: "A"}, Phase: Offered, Whole: true}}, 300},
		{"surplus", []Entry{entry("A::0", HeldSurplus, false)}, 20},
		{"another one is surplus", []Entry{entry("A::0", Offered, false), entry("A::1", HeldSurplus, false)}, 20},
		{"another unit's is surplus", []Entry{entry("A::0", Offered, false), entry("B::0", HeldSurplus, false)}, 0},
		{"offered", []Entry{entry("A::0", Offered, false)}, 0},
	} {
		now := time.Unix(1000, 0)
		r := reconciler{Manager: NewManager(Options{Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})}
		r.kubelet.Uncertain = DeviceIDs{}
		r.kubelet.Uncertain.add("gpu", "A::0")
		list := List{Entries: test.entries}
		s := &running{server: r.newServer("gpu")}
		s.publish(newGeneration(sharing.Resource{Name: "gpu"}, list, grantTerms{}, nil, nil, nil))
		lists := 0
		for range 6000 { // ten minutes
			before := s.current.Load()
			r.resendIfUncertain(s, list)
			if s.current.Load() != before {
				lists++
			}
			now = now.Add(100 * time.Millisecond)
		}
		if lists < test.least || lists > test.least+5 || test.least == 0 && lists > 0 {
			t.Errorf("%s: sent %d times in ten minutes, want about %d", test.name, lists, test.least)
		}
	}
}
