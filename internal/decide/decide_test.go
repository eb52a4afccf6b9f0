package decide

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// node has a whole GPU, one with two partitions, and another whole one.
func node() []sharing.GPU {
	half := mig.Profile{Compute: 3, Slices: 3, MemoryGB: 40}
	gpu := func(index int) sharing.GPU {
		return sharing.GPU{UUID: fmt.Sprintf("GPU-%c", 'a'+index), Index: index, Model: "H100", NUMANode: -1, MIGCapable: true, Architecture: "hopper"}
	}
	divided := gpu(1)
	divided.MIG = true
	divided.Partitions = []sharing.Partition{
		{UUID: "MIG-0", Index: 0, Profile: half, Placement: mig.Placement{Start: 0, Size: 4}},
		{UUID: "MIG-1", Index: 1, Profile: half, Placement: mig.Placement{Start: 4, Size: 4}},
	}
	return []sharing.GPU{gpu(0), divided, gpu(2)}
}

const whole, half = "nvidia.com/gpu", "nvidia.com/mig-3g.40gb"

func profile() sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.NamingRule{{Pattern: "*", Name: whole}},
		MIGNames: []sharing.NamingRule{{Pattern: "*3g.40gb", Name: half}},
	}
}

// serving is DRA offering these resources, before any unit has left the device plugin.
func serving(f *Facts, resources ...string) {
	f.Profile.DRA.Resources = resources
	f.DRA = &DRA{Node: dra.Node{Name: "node", Driver: "gpu.virgate.test"}, View: claims.View{Paths: map[string]units.Path{}}}
}

// onDemandOf is serving with one GPU whose partitions are made for claims.
func onDemandOf(f *Facts, gpu string) {
	serving(f)
	geometry, _ := mig.GeometryOf(0x2330)
	f.Profile.MIG.Manage, f.Profile.DRA.Resources, f.Profile.DRA.DynamicMIG = true, []string{"nvidia.com/mig-1g.10gb"}, true
	f.DRA.Geometries = map[string]Geometry{}
	for _, g := range f.GPUs {
		f.DRA.Geometries[g.UUID] = Geometry{State: sharing.MIGState{}}
	}
	f.DRA.Geometries[gpu] = Geometry{State: sharing.MIGState{Geometry: geometry}}
	f.DRA.View.Paths[dra.UnitName(gpu, nil)] = units.DRA
}

// say lists the plan's units, faulty ones in lower case, and DRA's offer.
func say(d Decision) string {
	var all []string
	for _, r := range d.Plan.Resources {
		for _, u := range r.Units {
			if !u.Health.Healthy() {
				u.ID = strings.ToLower(u.ID)
			}
			all = append(all, u.ID)
		}
	}
	slices.Sort(all)
	if d.Offer == nil {
		return strings.Join(all, " ")
	}
	return strings.Join(all, " ") + " | " + strings.Join(offered(d), " ")
}

// offered are the names of DRA's devices.
func offered(d Decision) (names []string) {
	if d.Offer == nil {
		return nil
	}
	for _, slice := range d.Offer.Slices {
		for _, device := range slice.Spec.Devices {
			names = append(names, device.Name)
		}
	}
	slices.Sort(names)
	return names
}

// Each row changes one fact, and the others stay.
func TestDecide(t *testing.T) {
	onlyFirst := func(u units.Unit) bool { return u.UUID == "MIG-0" }
	ready := nodereport.MPSState{Phase: nodereport.MPSReady}
	shared := func(f *Facts) {
		f.Profile.TimeSlicing = []sharing.ReplicatedResource{{Path: "mps", Resource: whole, Replicas: 4, Policy: sharing.Distributed, MPS: true}}
	}
	for _, test := range []struct {
		name   string
		change func(*Facts)
		want   string
		// warning is in a plan's warning, reason in the health of the faulty units.
		warning, reason string
	}{
		{name: "nothing", change: func(*Facts) {}, want: "GPU-a GPU-c MIG-0 MIG-1"},
		{name: "a release", want: "GPU-c MIG-0 MIG-1", warning: "GPU 0 is released", change: func(f *Facts) {
			f.Reservations = []units.Reservation{{Purpose: units.Release, GPU: "GPU-a", Text: "GPU 0 is released"}}
		}},
		{name: "a pause", want: "", warning: "mig-manager", change: func(f *Facts) {
			f.Reservations = []units.Reservation{{Purpose: units.Pause, Text: "mig-manager"}}
		}},
		{name: "a MIG change", want: "GPU-a GPU-c MIG-1", change: func(f *Facts) {
			f.Reservations = []units.Reservation{{Purpose: units.MIGChange, GPU: "GPU-b", Only: onlyFirst}}
		}},
		{name: "no device node", want: "GPU-a GPU-c MIG-1 mig-0", reason: "no device node", change: func(f *Facts) {
			f.Host.Obstacles = map[string]string{"MIG-0": "no device node"}
		}},
		{name: "MPS without daemons", want: "MIG-0 MIG-1 gpu-a gpu-c", warning: MPSUnanswered, reason: MPSUnanswered, change: func(f *Facts) {
			shared(f)
			f.MPS = &MPS{}
		}},
		{name: "MPS, one daemon is ready", want: "GPU-a MIG-0 MIG-1 gpu-c", reason: "it is not started yet", change: func(f *Facts) {
			shared(f)
			f.MPS = &MPS{Connected: true, States: map[string]nodereport.MPSState{"GPU-a": ready}, Busy: map[string]bool{"GPU-a": true}, Shares: map[string]int{"GPU-a": 4}}
			f.Reservations = f.MPS.Reservations()
		}},
		{name: "MPS, a program waits for another user's", want: "GPU-a MIG-0 MIG-1 gpu-c", reason: "it is not started yet", warning: "GPU 0 (GPU-a): MPS daemon: python3 waits", change: func(f *Facts) {
			shared(f)
			waits := nodereport.MPSState{Phase: nodereport.MPSReady, Reason: "python3 waits"}
			f.MPS = &MPS{Connected: true, States: map[string]nodereport.MPSState{"GPU-a": waits}, Busy: map[string]bool{"GPU-a": true}, Shares: map[string]int{"GPU-a": 4}}
			f.Reservations = f.MPS.Reservations()
		}},
		{name: "a daemon of an earlier profile", want: "GPU-a GPU-c mig-0 mig-1", reason: daemonRuns, change: func(f *Facts) {
			f.MPS = &MPS{Connected: true, States: map[string]nodereport.MPSState{"GPU-b": ready}, Busy: map[string]bool{"GPU-b": true}}
			f.Reservations = f.MPS.Reservations()
		}},
		{name: "daemons that do not matter", want: "GPU-a GPU-c MIG-0 MIG-1", change: shared},
		{name: "DRA that nobody serves", want: "GPU-a GPU-c MIG-0 MIG-1", warning: NoDRA, change: func(f *Facts) { f.Profile.DRA.Resources = []string{whole} }},
		{name: "leaves the device plugin", want: "MIG-0 MIG-1 | ", change: func(f *Facts) { serving(f, whole) }},
		{name: "half of it is DRA's", want: "MIG-0 MIG-1 | gpu-a", change: func(f *Facts) {
			serving(f, whole)
			f.DRA.View.Paths["gpu-a"], f.DRA.View.Paths["gpu-c"] = units.DRA, units.LeavingPlugin
		}},
		{name: "leaves DRA", want: "GPU-c MIG-0 MIG-1 | ", change: func(f *Facts) {
			serving(f)
			f.DRA.View.Paths["gpu-a"] = units.LeavingDRA
		}},
		{name: "not wanted by DRA any more", want: "GPU-c MIG-0 MIG-1 | ", change: func(f *Facts) {
			serving(f)
			f.DRA.View.Paths["gpu-a"] = units.DRA
		}},
		{name: "released and DRA's", want: "GPU-c MIG-0 MIG-1 | ", change: func(f *Facts) {
			serving(f)
			f.DRA.View.Paths["gpu-a"] = units.DRA
			f.Reservations = []units.Reservation{{Purpose: units.Release, GPU: "GPU-a"}}
		}},
		{name: "released while its partitions are changed", want: "GPU-c MIG-0 MIG-1 | ", warning: "released", change: func(f *Facts) {
			onDemandOf(f, "GPU-a")
			f.Reservations = []units.Reservation{
				{Purpose: units.Release, GPU: "GPU-a", Text: "released"},
				{Purpose: units.MIGChange, GPU: "GPU-a", Begun: true, Only: func(units.Unit) bool { return false }},
			}
		}},
		{name: "no right to reset", want: "GPU-a GPU-c MIG-0 MIG-1", warning: MayNotReset, change: func(f *Facts) { f.Profile.MIG.Reset, f.MayReset = true, false }},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := Facts{GPUs: node(), Profile: profile(), MayReset: true, MayEvict: true}
			test.change(&f)
			d := Decide(f)
			if got := say(d); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
			if warnings := strings.Join(d.Plan.Warnings, "\n"); !strings.Contains(warnings, test.warning) || test.warning == "" && warnings != "" {
				t.Errorf("warnings %q, want %q", warnings, test.warning)
			}
			for _, r := range d.Plan.Resources {
				for _, u := range r.Units {
					if !u.Health.Healthy() && (test.reason == "" || !strings.Contains(u.Health.Reason, test.reason)) {
						t.Errorf("%s: %q, want %q", u.ID, u.Health.Reason, test.reason)
					}
				}
			}
		})
	}
}

// The fault of a released GPU's unit tells its claim why it cannot be used.
func TestReleasedUnits(t *testing.T) {
	f := Facts{GPUs: node(), Profile: profile(), Reservations: []units.Reservation{{Purpose: units.Release, GPU: "GPU-a"}}}
	serving(&f, whole)
	for unitName, want := range map[string]string{"gpu-a": releasedFault, "gpu-c": ""} {
		if unit := Decide(f).Units[unitName]; unit.Fault != want || unit.ID == "" {
			t.Errorf("%s: %+v, want fault %q", unitName, unit, want)
		}
	}
}

// The same for each existing or possible partition, if they are made for claims.
func TestReleasedOnDemand(t *testing.T) {
	f := Facts{GPUs: node(), Profile: profile(), Reservations: []units.Reservation{{Purpose: units.Release, GPU: "GPU-b"}}}
	onDemandOf(&f, "GPU-b")
	all := Decide(f).Units
	for unitName, unit := range all {
		if want := map[bool]string{true: releasedFault}[unit.GPU == "GPU-b"]; unit.Fault != want {
			t.Errorf("%s: fault %q, want %q", unitName, unit.Fault, want)
		}
	}
	if len(all) < 10 {
		t.Errorf("%d units", len(all))
	}
}

// A unit that is both released and repartitioned is no unit of the node, whichever has priority.
func TestReleasedAndRepartitioned(t *testing.T) {
	f := Facts{GPUs: node(), Profile: profile(), Reservations: []units.Reservation{{Purpose: units.Release, GPU: "GPU-a"}, {Purpose: units.MIGChange, GPU: "GPU-a"}}}
	serving(&f, whole)
	if unit, there := Decide(f).Units["gpu-a"]; there {
		t.Errorf("%+v", unit)
	}
}

// random are facts of all kinds.
func random(r *rand.Rand) Facts {
	f := Facts{GPUs: node(), Profile: profile(), MayReset: true, MayEvict: true}
	ids := []string{"GPU-a", "GPU-b", "GPU-c", "MIG-0", "MIG-1"}
	some := func() string { return ids[r.IntN(len(ids))] }
	if r.IntN(2) == 0 {
		f.Profile.TimeSlicing = []sharing.ReplicatedResource{{Path: "s", Resource: whole, Replicas: 2 + r.IntN(3), Policy: sharing.Distributed, MPS: r.IntN(2) == 0}}
	}
	for range r.IntN(4) {
		reservation := units.Reservation{Purpose: units.Purpose(r.IntN(3)), GPU: []string{"GPU-a", "GPU-b", ""}[r.IntN(3)], Text: "reserved"}
		reservation.Begun = reservation.Purpose == units.MIGChange && r.IntN(2) == 0
		if only := some(); r.IntN(2) == 0 {
			reservation.Only = func(u units.Unit) bool { return u.UUID == only }
		}
		f.Reservations = append(f.Reservations, reservation)
	}
	f.Host = grant.Host{Obstacles: map[string]string{some(): "obstacle"}, NoCDIEntry: map[string]string{some(): "no entry"}}
	if r.IntN(2) == 0 {
		f.MPS = &MPS{Connected: r.IntN(2) == 0, States: map[string]nodereport.MPSState{some(): {Phase: nodereport.MPSReady}}, Busy: map[string]bool{some(): true}, Shares: map[string]int{some(): 2}}
		f.Reservations = append(f.Reservations, f.MPS.Reservations()...)
	}
	if r.IntN(4) > 0 {
		serving(&f, []string{whole, half}[:r.IntN(3)]...)
		for _, named := range dra.UnitNames(f.GPUs) {
			f.DRA.View.Paths[named.Name] = []units.Path{units.Plugin, units.LeavingPlugin, units.DRA, units.LeavingDRA}[r.IntN(4)]
		}
		f.DRA.View.Paths["gpu-b"] = []units.Path{units.Plugin, units.LeavingPlugin, units.DRA, units.LeavingDRA}[r.IntN(4)]
		if geometry, _ := mig.GeometryOf(0x2330); r.IntN(2) == 0 { // Partitions are made for claims.
			f.Profile.MIG.Manage, f.Profile.DRA.All, f.Profile.DRA.DynamicMIG = true, true, true
			f.DRA.Geometries = map[string]Geometry{}
			for _, gpu := range f.GPUs[:1+r.IntN(3)] {
				f.DRA.Geometries[gpu.UUID] = Geometry{State: sharing.MIGState{Geometry: geometry}}
			}
		}
		f.DRA.State.Without.Taints, f.DRA.State.Without.Shares = r.IntN(2) == 0, r.IntN(2) == 0
	}
	return f
}

// Invariants of every decision: no unit is offered on two paths, no reserved unit is offered, another reservation
// adds nothing, and neither the order of the facts nor a repetition changes anything.
func FuzzDecide(f *testing.F) {
	for seed := range uint64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		facts := random(rand.New(rand.NewPCG(seed, 1)))
		d := Decide(facts)
		byDRA := map[string]bool{}
		for _, device := range offered(d) {
			byDRA[dra.UnitNameOf(device)] = true
		}
		planned := map[string]bool{}
		for _, r := range d.Plan.Resources {
			for _, u := range r.Units {
				planned[u.ID] = true
				owner := d.Owners[u.ID]
				if byDRA[d.unitNames[u.ID].Name] || owner.Path != units.Plugin {
					t.Errorf("%s is the device plugin's, and %v", u.ID, owner)
				}
				if owner.ReservedFor(units.Pause, units.Release, units.MIGChange) {
					t.Errorf("%s is offered, and reserved", u.ID)
				}
			}
		}
		for id, at := range d.unitNames {
			if owner := d.Owners[id]; byDRA[at.Name] && (owner.Path != units.DRA || !owner.Offered || owner.ReservedFor(units.Pause, units.Release, units.MIGChange)) {
				t.Errorf("%s is offered by DRA: %v", id, owner)
			}
		}
		for _, gpu := range facts.GPUs {
			if d.Owners[gpu.UUID].ReservedFor(units.Pause, units.Release) && slices.ContainsFunc(offered(d), func(device string) bool { return strings.HasPrefix(device, dra.UnitName(gpu.UUID, nil)) }) {
				t.Errorf("%s is released, and DRA offers something of it", gpu.UUID)
			}
		}
		again := facts
		again.GPUs, again.Reservations = slices.Clone(facts.GPUs), slices.Clone(facts.Reservations)
		slices.Reverse(again.GPUs)
		slices.Reverse(again.Reservations)
		other := Decide(again)
		slices.Sort(d.Plan.Warnings)
		slices.Sort(other.Plan.Warnings)
		if !reflect.DeepEqual(d.Plan, other.Plan) || !reflect.DeepEqual(d.Offer, other.Offer) || !maps.EqualFunc(d.Owners, other.Owners, sameOwner) {
			t.Errorf("%s\nin another order %s", say(d), say(other))
		}
		again.Reservations = append(again.Reservations, units.Reservation{Purpose: units.Release, GPU: "GPU-b", Text: "reserved"})
		for _, r := range Decide(again).Plan.Resources {
			for _, u := range r.Units {
				if !planned[u.ID] || u.GPU == "GPU-b" {
					t.Errorf("a release of GPU-b adds or leaves %s", u.ID)
				}
			}
		}
	})
}

func sameOwner(a, b units.Owner) bool {
	return a.Path == b.Path && a.Offered == b.Offered && slices.EqualFunc(a.Reserved, b.Reserved, func(a, b units.Reservation) bool { return a.Purpose == b.Purpose && a.Text == b.Text })
}
