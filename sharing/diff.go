package sharing

import (
	"cmp"
	"slices"
)

// Change says how one resource differs from one plan to another.
type Change struct {
	// Kind says what happens to the resource.
	Kind ChangeKind `json:"kind"`
	// Name is the resource's name, in the later plan where it is in both.
	Name string `json:"name"`
	// OldName is the name in the earlier plan of a Renamed resource.
	OldName string `json:"oldName,omitempty"`
	// Before and After are numbers of devices.
	Before int `json:"before"`
	After  int `json:"after"`
	// Switches are the units that leave the resource, or come to it, or change between exclusive, shared
	// and shared by MPS, or their number of shares by MPS. Each does so when no pod holds it; see
	// plugin.Next. Without any, the change is made with the next list.
	Switches []Switch `json:"switches,omitempty"`
	// Takes says for people how long it takes and for whom it waits; Diff leaves it empty.
	Takes string `json:"takes,omitempty"`
}

// Switch is a unit that one plan offers otherwise than another.
type Switch struct {
	// Unit is its ID, Index as in Unit.
	Unit  string `json:"unit"`
	Index string `json:"index"`
	// IdleShares says that the unit is shared in the earlier plan: while a pod holds one
	// of its shares, the others are offered to nobody.
	IdleShares bool `json:"idleShares,omitempty"`
	// Pods hold it now, as "namespace/name"; nil where that is not known, as by Diff.
	Pods []string `json:"pods,omitempty"`
}

func (p Plan) uses() map[string]Use {
	byUnit := map[string]Use{}
	for _, r := range p.Resources {
		for _, u := range r.Units {
			byUnit[u.ID] = Use{r.Name, u.Mode()}
		}
	}
	return byUnit
}

// HeldOtherwise are the units of which devices are held in another way than the plan offers
// them, or that it does not offer, with those holders: it can offer them, or the other shares (see
// Use.CanBecome), when the holders have ended. Of a claim of unknown GPUs nobody can tell. Mode is
// ModeOf or knows better.
func (p Plan) HeldOtherwise(allocations []Allocation, mode func(resource, device string) Mode) (units []UnitUsage) {
	want := p.uses()
	for _, u := range Usage(p.Resources, allocations) {
		u.Holders = slices.DeleteFunc(slices.Clone(u.Holders), func(a Allocation) bool {
			held := Use{} // By a claim: the plan has no such unit.
			if a.Claim == "" {
				held = Use{a.Resource, mode(a.Resource, a.Devices[0])}
			}
			return a.AnyGPU || held == want[u.Unit.ID]
		})
		if len(u.Holders) > 0 {
			units = append(units, u)
		}
	}
	return units
}

// ChangeKind is one of the constants below.
type ChangeKind string

// What can happen to a resource.
const (
	Appears  ChangeKind = "appears"
	Vanishes ChangeKind = "vanishes"
	Grows    ChangeKind = "grows"
	Shrinks  ChangeKind = "shrinks"
	// Renamed says that a new resource has exactly the units of one that vanishes.
	Renamed ChangeKind = "renamed"
	// Regrouped says that the number of devices is the same, but the devices are not.
	Regrouped ChangeKind = "regrouped"
)

// Diff says what changes for the kubelet from one plan to another of the same GPUs, by
// name. Resources whose devices stay the same are left out; health is not compared.
func Diff(from, to Plan) []Change {
	was, is := from.uses(), to.uses()
	// A unit that is new waits for nobody.
	switches := func(old, next Resource) (list []Switch) {
		for _, u := range slices.Concat(old.Units, next.Units) {
			use, existed := was[u.ID]
			if existed && use != is[u.ID] && !slices.ContainsFunc(list, func(s Switch) bool { return s.Unit == u.ID }) {
				list = append(list, Switch{
					Unit:       u.ID,
					Index:      u.Index,
					IdleShares: use.Mode != Exclusive,
				})
			}
		}
		return list
	}
	vanished := slices.DeleteFunc(slices.Clone(from.Resources), func(r Resource) bool {
		return slices.ContainsFunc(to.Resources, named(r.Name))
	})
	var changes []Change
	for _, r := range to.Resources {
		var old Resource
		kind := Appears
		if i := slices.IndexFunc(from.Resources, named(r.Name)); i >= 0 {
			old = from.Resources[i]
			kind = compareDevices(old.Devices, r.Devices)
		} else if i := slices.IndexFunc(
			vanished, func(old Resource) bool { return slices.EqualFunc(old.Units, r.Units, sameUnit) }); i >= 0 {
			old, kind = vanished[i], Renamed
			vanished = slices.Delete(vanished, i, i+1)
		}
		if kind == "" {
			continue
		}
		change := Change{
			Kind:     kind,
			Name:     r.Name,
			Before:   len(old.Devices),
			After:    len(r.Devices),
			Switches: switches(old, r),
		}
		if kind == Renamed {
			change.OldName = old.Name
		}
		changes = append(changes, change)
	}
	for _, r := range vanished {
		changes = append(changes, Change{
			Kind:     Vanishes,
			Name:     r.Name,
			Before:   len(r.Devices),
			Switches: switches(r, Resource{}),
		})
	}
	slices.SortFunc(changes, func(a, b Change) int { return cmp.Compare(a.Name, b.Name) })
	return changes
}

func named(name string) func(Resource) bool {
	return func(r Resource) bool { return r.Name == name }
}

func sameUnit(a, b Unit) bool { return a.ID == b.ID }

// compareDevices is what happens to a resource that both plans have; empty for nothing.
func compareDevices(before, after []Device) ChangeKind {
	switch {
	case len(after) > len(before):
		return Grows
	case len(after) < len(before):
		return Shrinks
	case !slices.EqualFunc(before, after, func(a, b Device) bool { return a.ID == b.ID }):
		return Regrouped
	}
	return ""
}
