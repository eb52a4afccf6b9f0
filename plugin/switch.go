package plugin

import (
	"cmp"
	"maps"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// unitState is how far a unit has come on its way from one sharing mode to another.
type unitState struct {
	id string
	// planned is true if the plan has the unit, in the mode of use and with that index. order is
	// the unit's place in the plan.
	planned bool
	use     sharing.Use
	index   string
	order   int
	// withheld is true if the unit cannot be granted in that mode now.
	withheld bool

	// leaving counts the listed devices in a mode other than the planned one, except the ones that
	// are known to be out of use.
	leaving int
	// offered counts the leaving devices that are still offered.
	offered int
	// held is true if a pod holds one of the leaving devices, or may hold one.
	held bool
	// closes is true if Allocate is to refuse all leaving devices. cleared counts the leaving
	// devices that Allocate already refused and that no pod held afterwards.
	closes  bool
	cleared int
	// begins is true if the unit leaves its mode now, or has begun to.
	begins bool
	// whole is true if the unit is time-sliced and one of its devices is Entry.Whole.
	whole bool
}

// blocked reports whether the unit cannot be offered in its planned mode yet, because a pod may use
// one of its devices in another mode.
func (u *unitState) blocked() bool { return u.leaving > u.cleared }

// findUnits determines, for each unit that has devices or is to get some, how far its change of
// mode has come.
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
			if e.Unused && !held {
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

// asPlanned returns the listed device in the unit's planned use, if the device can stay for that use
// even though a pod may hold it: an exclusive unit's device becomes a time-slice, or the reverse.
func (s *inputs) asPlanned(resource string, e Entry, u *unitState) Entry {
	switch use := e.use(resource); {
	case use.CanBecome(u.use) && e.Phase != Removing: // A device on its way out finishes leaving.
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

// isShare reports whether the device that was promised to a pod as the whole unit is now an
// ordinary share. Either no pod holds it, or it was granted after it had become a time-slice: the
// kubelet grants it again when no pod holds it, or to the next container of a pod that it is
// admitting. (Pod names do not tell: a StatefulSet reuses them.)
func (s *inputs) isShare(resource, id string) bool {
	since := s.rpc.Shared[resource][id]
	if since.IsZero() {
		return false
	}
	// A call in progress may have begun before that, and its grant may not be recorded yet.
	return s.rpc.Granted[resource][id].After(since) ||
		s.kubelet.HeldKnown && s.kubelet.HeldAt.After(since) && !s.held(resource, id) && !s.rpc.Busy[resource]
}

// canClose reports whether refusing the device harms no pod: an admission that chose it while the
// kubelet considered it Healthy has had time to call Allocate.
func (s *inputs) canClose(resource string, e Entry) bool {
	return e.Phase == Removing && s.isUnhealthy(resource, e) && !s.now.Before(e.Applied.Add(s.timing.Settle))
}

// isCleared reports whether the holders were read after Allocate began to refuse the device. A
// container that was granted the device earlier is then either among the holders or in the grants,
// which Allocate records before it checks whether it refuses the device.
func (s *inputs) isCleared(resource string, e Entry) bool {
	refused := s.rpc.Refused[resource][e.ID]
	return e.RefusesAllocate && !refused.IsZero() && s.kubelet.HeldKnown && s.kubelet.HeldAt.After(refused) &&
		s.canClose(resource, e)
}

// startWaves decides which units leave their mode now. While a resource has no unit that keeps its
// mode, only half of its free units may be changing at a time, because their devices are not
// allocatable meanwhile.
func (s *inputs) startWaves(have Lists, wanted map[string]sharing.Resource) {
	for _, u := range s.units {
		// Devices of held and faulty units are not allocatable anyway. A device that stayed Healthy
		// would go to the next pod, and its unit would never change.
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
				underWay++ // It has left its old mode, and cannot be granted in the new one yet.
			}
			if u.leaving == 0 || u.begins || u.use == s.asPlanned(resource, e, u).use(resource) || e.Unused ||
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

// canSwitch reports whether a unit can leave its mode: for another mode, which requires that the
// kubelet can be read, or because it is no longer planned.
func (s *inputs) canSwitch(u *unitState) bool {
	return !u.planned || s.kubelet.HeldKnown && s.kubelet.AppliedKnown
}

// away returns 0 for a unit that comes back to the resource in another mode, and 1 for one that
// leaves the resource. Units that come back change first: once they are allocatable again, all
// others can leave at once.
func (u *unitState) away(resource string) int {
	if u.use.Resource == resource {
		return 0
	}
	return 1
}

// hasLasting reports whether the next list has a Healthy device in a mode that its unit keeps.
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
