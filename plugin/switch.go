package plugin

import (
	"cmp"
	"maps"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// unitState is how far a unit is on its way from one sharing mode to another.
type unitState struct {
	id string
	// planned says that the plan has the unit, in that mode and with that index; order
	// is its place in the plan.
	planned bool
	use     sharing.Use
	index   string
	order   int
	// withheld says that it cannot be granted in that mode now.
	withheld bool

	// leaving counts the listed devices in another mode than the planned one, without
	// those of which it is known that nobody can use them any more.
	leaving int
	// offered counts those of them that are still offered.
	offered int
	// held says that a pod holds one of them, or may.
	held bool
	// closes says that all of them are to be refused, and cleared counts those that
	// were, and that nobody held afterwards.
	closes  bool
	cleared int
	// begins says that the unit leaves its mode now, or has begun to.
	begins bool
	// whole says that it is time-sliced, and one of its devices is Entry.Whole.
	whole bool
}

// blocked says that the unit cannot be offered in its planned mode yet, because somebody
// may use what is left of it in another mode.
func (u *unitState) blocked() bool { return u.leaving > u.cleared }

// findUnits finds out, for each unit that has devices or is to get some, how far its
// change of mode has come.
func (s *inputs) findUnits(have Lists, want sharing.Plan) {
	at := func(id string) *unitState {
		if s.units[id] == nil {
			s.units[id] = &unitState{id: id, closes: true}
		}
		return s.units[id]
	}
	for _, r := range want.Resources {
		for _, unit := range r.Units {
			u := at(unit.ID)
			u.planned = true
			u.index = unit.Index
			u.order = len(s.units)
			u.use.Resource = r.Name
			u.withheld = !unit.Health.Healthy()
		}
		for devices := range sameUnit(r.Devices, func(d sharing.Device) string { return d.Unit }) {
			at(devices[0].Unit).use = sharing.Use{Resource: r.Name, Mode: sharing.ModeOf(devices[0].ID)}
		}
	}
	for resource, list := range have {
		for _, e := range list.Entries {
			u := at(e.Unit)
			e = s.asPlanned(resource, e, u)
			if u.use == e.use(resource) {
				u.whole = u.whole || e.Whole
				continue
			}
			if s.removable(resource, e) {
				continue
			}
			held := s.mayBeHeld(resource, e)
			if e.Vacated && !held {
				continue
			}
			u.leaving++
			u.held = u.held || held
			if e.Phase == Offered {
				u.offered++
			}
			u.closes = u.closes && !held && s.canClose(resource, e)
			if !held && s.isCleared(resource, e) {
				u.cleared++
			}
		}
	}
}

// asPlanned returns the listed device as it is in the unit's planned use, if it can stay for that
// though a pod may hold it: the one of an exclusive unit as a time-slice, and back.
func (s *inputs) asPlanned(resource string, e Entry, u *unitState) Entry {
	switch use := e.use(resource); {
	case use.CanBecome(u.use) && e.Phase != Retiring: // What is on its way out finishes that.
		e.Mode = u.use.Mode
		e.Whole = true
		e.Since = s.now
	case e.Whole && s.isShare(resource, e.ID):
		e.Whole = false
	case e.Whole && u.use == sharing.Use{Resource: resource, Mode: sharing.Exclusive}:
		e.Mode, e.Whole = u.use.Mode, false // No other share has been Healthy.
	}
	return e
}

// isShare says that no pod holds the device that was promised the whole unit: nobody holds it, or
// it was granted after it had become a time-slice, which the kubelet does when nobody holds it, or
// for the next container of a pod that it is just admitting. (Names of pods do not tell: a
// StatefulSet's are used again.)
func (s *inputs) isShare(resource, id string) bool {
	since := s.rpc.Shared[resource][id]
	if since.IsZero() {
		return false
	}
	// A call in progress may have begun before, and its grant may not be noted yet.
	return s.rpc.Granted[resource][id].After(since) ||
		s.kubelet.HeldKnown && s.kubelet.HeldAt.After(since) && !s.held(resource, id) && !s.rpc.Busy[resource]
}

// canClose says that an admission that chose the device while the kubelet took it for
// Healthy has had time to call Allocate, so that refusing the device hurts nobody.
func (s *inputs) canClose(resource string, e Entry) bool {
	return e.Phase == Retiring && !e.Applied.IsZero() && !s.now.Before(e.Applied.Add(s.timing.Settle)) &&
		!s.rpc.Lost[resource] && !s.kubelet.Applied.has(resource, e.ID) && s.kubelet.HeldKnown && s.kubelet.AppliedKnown
}

// isCleared says that the holders were read after Allocate had begun to refuse the
// device. A container that was granted it before that is either among them, or in the
// grants, which Allocate records before it asks whether the device is closed.
func (s *inputs) isCleared(resource string, e Entry) bool {
	closed := s.rpc.Closed[resource][e.ID]
	return e.Closed && !closed.IsZero() && s.kubelet.HeldKnown && s.kubelet.HeldAt.After(closed) &&
		s.canClose(resource, e)
}

// startWaves decides which units leave their mode now. While a resource has no unit that
// keeps its mode, only half of its free units may be changing at a time, because their
// devices are not allocatable meanwhile.
func (s *inputs) startWaves(have Lists, wanted map[string]sharing.Resource) {
	for _, u := range s.units {
		// Devices of held and faulty units are not allocatable anyway, and a device that stayed
		// Healthy would go to the next pod, so that the unit never changes.
		u.begins = (u.held || !s.healthy(u.id)) && s.canSwitch(u)
	}
	for _, resource := range slices.Sorted(maps.Keys(have)) {
		want, stays := wanted[resource]
		var waiting []*unitState
		underWay := 0
		seen := map[*unitState]bool{}
		for _, e := range have[resource].Entries {
			u := s.units[e.Unit]
			if u.leaving == 0 && u.withheld && s.healthy(u.id) && !seen[u] && u.use.Resource == resource {
				seen[u] = true
				underWay++ // It has left its mode, and cannot be granted in the new one yet.
			}
			if u.leaving == 0 || u.begins || u.use == s.asPlanned(resource, e, u).use(resource) || e.Vacated ||
				seen[u] {
				continue
			}
			seen[u] = true
			switch {
			case u.offered == 0:
				u.begins = true
				if u.blocked() || u.withheld {
					underWay++
				}
			case !s.canSwitch(u):
			case !stays:
				u.begins = true
			default:
				waiting = append(waiting, u)
			}
		}
		if len(waiting) == 0 {
			continue
		}
		most := len(waiting)
		if !s.hasLasting(have[resource], want) {
			most = max(1, (len(waiting)+underWay)/2) - underWay
		}
		slices.SortFunc(waiting, func(a, b *unitState) int {
			return cmp.Or(cmp.Compare(a.away(resource), b.away(resource)), cmp.Compare(a.order, b.order),
				cmp.Compare(a.id, b.id))
		})
		for _, u := range waiting[:min(len(waiting), max(0, most))] {
			u.begins = true
		}
	}
}

// canSwitch says that a unit can leave its mode: for another one, which needs the
// kubelet to be read, or because it is no longer planned.
func (s *inputs) canSwitch(u *unitState) bool {
	return !u.planned || s.kubelet.HeldKnown && s.kubelet.AppliedKnown
}

// away is 0 for a unit that comes back to the resource in another mode, and 1 for one
// that leaves the resource. The former change first: once they are allocatable again,
// all others can leave at once.
func (u *unitState) away(resource string) int {
	if u.use.Resource == resource {
		return 0
	}
	return 1
}

// hasLasting says that the next list has a Healthy device in the mode that its unit keeps.
func (s *inputs) hasLasting(list List, want sharing.Resource) bool {
	for _, e := range list.Entries {
		u := s.units[e.Unit]
		if e.Healthy && e.Phase == Offered && u.use == s.asPlanned(want.Name, e, u).use(want.Name) &&
			s.healthy(e.Unit) && !u.withheld {
			return true
		}
	}
	if len(list.Entries)+len(want.Devices) > mostListed {
		return false // There may be no room for new ones.
	}
	return slices.ContainsFunc(want.Units, func(unit sharing.Unit) bool {
		return !s.units[unit.ID].blocked() && s.healthy(unit.ID) && unit.Health.Healthy()
	})
}
