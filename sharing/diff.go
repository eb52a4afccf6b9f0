package sharing

import (
	"cmp"
	"slices"
)

// Change describes how one resource differs between two plans.
type Change struct {
	// Kind is what happens to the resource.
	Kind ChangeKind `json:"kind"`
	// Name is the resource's name. A resource that is in both plans has its name in the later plan.
	Name string `json:"name"`
	// OldName is the name in the earlier plan of a Renamed resource.
	OldName string `json:"oldName,omitempty"`
	// Before and After are numbers of devices.
	Before int `json:"before"`
	After  int `json:"after"`
	// Switches are the units that leave or join the resource, change between exclusive, time-sliced
	// and MPS, or get another number of MPS shares. Each switches once no pod holds it; see
	// plugin.Next. A change without switches takes effect with the next list.
	Switches []Switch `json:"switches,omitempty"`
	// Takes describes for people how long the change takes and for which pods it waits. Diff leaves
	// it empty.
	Takes string `json:"takes,omitempty"`
}

// Switch is a unit that the two plans offer differently.
type Switch struct {
	// Unit is the unit's ID, Index is Unit.Index.
	Unit  string `json:"unit"`
	Index string `json:"index"`
	// IdleShares is true if the earlier plan shares the unit: while a pod holds one of its shares,
	// no pod gets the others.
	IdleShares bool `json:"idleShares,omitempty"`
	// Pods hold the unit now, as "namespace/name". It is nil if they are unknown, as in the result
	// of Diff.
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

// HeldOtherwise returns the units with devices that are held in another way than the plan offers
// them, or that the plan does not offer, each with those holders only. Once these holders have
// ended, the plan can offer the unit, or its remaining shares (see Use.CanBecome). Claims of
// unknown GPUs are ignored. mode is ModeOf, or a function that knows the mode better.
func (p Plan) HeldOtherwise(allocations []Allocation, mode func(resource, device string) Mode) (units []UnitUsage) {
	want := p.uses()
	for _, u := range Usage(p.Resources, allocations) {
		u.Holders = slices.DeleteFunc(slices.Clone(u.Holders), func(a Allocation) bool {
			held := Use{} // A claim: the plan has no such unit.
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

// The kinds of changes.
const (
	Appears  ChangeKind = "appears"
	Vanishes ChangeKind = "vanishes"
	Grows    ChangeKind = "grows"
	Shrinks  ChangeKind = "shrinks"
	// Renamed means that a new resource has exactly the units of one that vanishes.
	Renamed ChangeKind = "renamed"
	// Regrouped means that the resource has other devices, but as many as before.
	Regrouped ChangeKind = "regrouped"
)

// Diff returns what changes for the kubelet between two plans of the same GPUs, by name. Resources
// whose devices stay the same are left out. Health is not compared.
func Diff(from, to Plan) []Change {
	was, is := from.uses(), to.uses()
	// A new unit has no holders to wait for.
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

// compareDevices returns what happens to a resource that both plans have; empty if nothing.
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
