package plugin

import (
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Calls are the kubelet's calls: those that named devices, and the streams of
// lists.
type Calls struct {
	// Granted is when Allocate last served a device, Named when
	// GetPreferredAllocation last named it; by resource and device ID.
	Granted, Named map[string]map[string]time.Time
	// Busy are the resources with a call in progress.
	Busy map[string]bool
	// Sent are the resources with an open stream that was given the newest list,
	// Lost those without one and those whose stream has been replaced since the
	// last step.
	Sent, Lost map[string]bool
}

// Next returns what each resource should list now. It is pure: the same
// arguments give the same lists.
//
// It grows a list at once and shrinks it in two phases (see Phase), prefers to
// keep what pods hold, and offers a unit in a new way (under another name, or
// shared instead of exclusive) only when no device of the old way is left.
// Where the kubelet cannot be seen, nothing is removed.
//
// A device that a pod holds and no list has, from NVIDIA's plugin or from a
// state that was lost, is taken over as if it had been listed.
func Next(have Lists, want sharing.Plan, seen Sight, calls Calls, now time.Time, timing Timing) Lists {
	s := step{seen: seen, calls: calls, now: now, timing: timing.withDefaults(), faults: want.Faults}
	have = s.adopt(have, want)
	s.findLingering(have)

	wanted := map[string]sharing.Resource{}
	for _, r := range want.Resources {
		wanted[r.Name] = r
	}
	names := slices.Collect(maps.Keys(have))
	for name := range wanted {
		if _, ok := have[name]; !ok {
			names = append(names, name)
		}
	}

	next := Lists{}
	for _, name := range names {
		resource, isWanted := wanted[name]
		old, had := have[name]
		list := List{Entries: withRoom(s.entries(name, old.Entries, resource.Devices), old.Entries)}
		if isWanted && !had && len(list.Entries) == 0 {
			continue // All of its units are still offered in another way.
		}
		if !isWanted {
			list.Dropped = firstTime(old.Dropped, now)
			if len(list.Entries) == 0 {
				list.Emptied = firstTime(old.Emptied, now)
			}
			if !list.Emptied.IsZero() && !now.Before(list.Emptied.Add(s.timing.StopAfter)) {
				continue
			}
		}
		next[name] = list
	}
	return next
}

func firstTime(t, now time.Time) time.Time {
	if t.IsZero() {
		return now
	}
	return t
}

// way is how a unit is offered: under which name, and shared or alone.
type way struct {
	resource string
	shared   bool
}

type step struct {
	seen   Sight
	calls  Calls
	now    time.Time
	timing Timing
	faults map[string]string
	// lingering are the ways in which each unit has devices that cannot leave
	// in this step.
	lingering map[string]map[way]struct{}
}

func (s *step) findLingering(have Lists) {
	s.lingering = map[string]map[way]struct{}{}
	for name, list := range have {
		for _, e := range list.Entries {
			if s.removable(name, e) {
				continue
			}
			if s.lingering[e.Unit] == nil {
				s.lingering[e.Unit] = map[way]struct{}{}
			}
			s.lingering[e.Unit][way{name, e.shared()}] = struct{}{}
		}
	}
}

// blocked says that the unit still has devices in another way than w.
func (s *step) blocked(unit string, w way) bool {
	for other := range s.lingering[unit] {
		if other != w {
			return true
		}
	}
	return false
}

// held says that a pod holds the device, or may.
func (s *step) held(resource, id string) bool {
	if s.seen.held.has(resource, id) {
		return true
	}
	granted, ok := s.calls.Granted[resource][id]
	// A grant that is not much older than the reading may have missed it.
	return ok && (s.seen.heldAt.IsZero() || granted.After(s.seen.heldAt.Add(-s.timing.Quiet)))
}

// isHeld is held, for a device of a list. One that was held when Virgate last
// ran is, until the kubelet says something else.
func (s *step) isHeld(resource string, e Entry) bool {
	return s.held(resource, e.ID) || (e.Phase == Closing && s.seen.heldAt.IsZero())
}

// removable says that a surplus device can leave the list without harm: the
// kubelet has long applied that it is Unhealthy, and nobody has it or is about
// to.
func (s *step) removable(resource string, e Entry) bool {
	return !e.Applied.IsZero() && !s.calls.Lost[resource] &&
		s.seen.heldKnown && s.seen.appliedKnown && s.seen.heldAt.After(e.Applied) &&
		!s.seen.applied.has(resource, e.ID) && !s.held(resource, e.ID) && !s.calls.Busy[resource] &&
		!s.now.Before(e.Applied.Add(s.timing.Quiet)) &&
		!s.now.Before(s.calls.Named[resource][e.ID].Add(s.timing.Quiet))
}

// settled says that every list is as the plan wants it for good.
func (l Lists) settled() bool {
	for _, list := range l {
		if !list.Dropped.IsZero() {
			return false
		}
		for _, e := range list.Entries {
			if e.Phase != Offered {
				return false
			}
		}
	}
	return true
}
