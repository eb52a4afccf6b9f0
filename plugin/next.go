package plugin

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Timing are the waits of the protocol. The zero value of a field means its
// default.
type Timing struct {
	// Quiet is how long an Unhealthy surplus device stays in the list after the
	// kubelet has applied that; default 30 s. It outlasts any admission that
	// chose the device before.
	Quiet time.Duration
	// RetireAfter is how long a surplus device that a pod holds stays Healthy;
	// default 10 min.
	RetireAfter time.Duration
	// StopAfter is how long a dropped resource is served with an empty list
	// before its server stops; default 30 s, so that the kubelet publishes the
	// zero at least twice.
	StopAfter time.Duration
	// VerifyAfter is how long after a stream has opened the kubelet must show
	// the resource; default 5 s.
	VerifyAfter time.Duration
	// ListInterval is the least time between two lists of a resource; default
	// 100 ms. Each list costs the kubelet an fsync.
	ListInterval time.Duration
}

func (t Timing) withDefaults() Timing {
	t.Quiet = cmp.Or(t.Quiet, 30*time.Second)
	t.RetireAfter = cmp.Or(t.RetireAfter, 10*time.Minute)
	t.StopAfter = cmp.Or(t.StopAfter, 30*time.Second)
	t.VerifyAfter = cmp.Or(t.VerifyAfter, 5*time.Second)
	t.ListInterval = cmp.Or(t.ListInterval, 100*time.Millisecond)
	return t
}

// Calls are the kubelet's calls that named devices.
type Calls struct {
	// Granted is when Allocate last served a device, Named when any call last
	// named it; by resource and device ID.
	Granted, Named map[string]map[string]time.Time
	// Busy are the resources with a call in progress.
	Busy map[string]bool
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
		list := List{Entries: s.entries(name, old.Entries, resource.Devices)}
		switch {
		case isWanted && !had && len(list.Entries) == 0:
			continue // All of its units are still offered in another way.
		case isWanted:
		default:
			list.Dropped = firstTime(old.Dropped, now)
			if len(list.Entries) == 0 {
				list.Emptied = firstTime(old.Emptied, now)
				if !now.Before(list.Emptied.Add(s.timing.StopAfter)) {
					continue
				}
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

// removable says that a surplus device can leave the list without harm: the
// kubelet has long applied that it is Unhealthy, and nobody has it or is about
// to.
func (s *step) removable(resource string, e Entry) bool {
	return e.Phase == Retiring && !e.Applied.IsZero() &&
		s.seen.heldKnown && s.seen.appliedKnown && s.seen.heldAt.After(e.Applied) &&
		!s.seen.applied.has(resource, e.ID) && !s.held(resource, e.ID) && !s.calls.Busy[resource] &&
		!s.now.Before(e.Applied.Add(s.timing.Quiet)) &&
		!s.now.Before(s.calls.Named[resource][e.ID].Add(s.timing.Quiet))
}

// entries merges what the resource lists with what the plan wants it to list.
func (s *step) entries(resource string, old []Entry, want []sharing.Device) []Entry {
	type unit struct {
		old  []Entry
		want []sharing.Device
	}
	units := map[string]*unit{}
	at := func(id string) *unit {
		if units[id] == nil {
			units[id] = &unit{}
		}
		return units[id]
	}
	for _, e := range old {
		u := at(e.Unit)
		u.old = append(u.old, e)
	}
	place := map[string]int{}
	for i, d := range want {
		u := at(d.Unit)
		u.want = append(u.want, d)
		if _, ok := place[d.Unit]; !ok {
			place[d.Unit] = i
		}
	}

	entries := make([]Entry, 0, max(len(old), len(want)))
	for id, u := range units {
		entries = append(entries, s.unit(resource, id, u.old, u.want)...)
	}
	sortEntries(entries, place)
	return entries
}

// unit decides for the devices of one unit. As many are offered as the plan
// wants; device IDs mean nothing, so those that pods hold come first, then
// those that the plan names.
func (s *step) unit(resource, id string, old []Entry, want []sharing.Device) []Entry {
	const (
		isHeld = iota
		isWanted
		isExtra
	)
	type candidate struct {
		Entry
		rank  int
		fresh bool // not in the list yet
	}
	var candidates []candidate
	var entries []Entry

	wantShared := len(want) > 0 && Entry{Device: want[0]}.shared()
	missing := map[string]sharing.Device{}
	for _, d := range want {
		missing[d.ID] = d
	}
	for _, e := range old {
		device, wanted := missing[e.ID]
		delete(missing, e.ID)
		switch {
		case len(want) == 0 || e.shared() != wantShared:
			entries = s.appendSurplus(entries, resource, e)
			continue
		case wanted:
			e.Device = device
		}
		e.NUMANode = want[0].NUMANode
		rank := isExtra
		if wanted {
			rank = isWanted
		}
		if s.held(resource, e.ID) {
			rank = isHeld
		}
		candidates = append(candidates, candidate{e, rank, false})
	}
	if len(missing) > 0 && !s.blocked(id, way{resource, wantShared}) {
		for _, d := range missing {
			candidates = append(candidates, candidate{Entry{Device: d}, isWanted, true})
		}
	}

	slices.SortFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(replica(a.ID), replica(b.ID)))
	})
	for i, c := range candidates {
		switch {
		case i < len(want):
			c.Phase, c.Since, c.Applied = Offered, time.Time{}, time.Time{}
			c.Healthy = s.healthy(id)
			entries = append(entries, c.Entry)
		case !c.fresh:
			entries = s.appendSurplus(entries, resource, c.Entry)
		}
	}
	return entries
}

// healthy is the unit's health now. A unit that is not on the node any more is
// not healthy.
func (s *step) healthy(unit string) bool {
	fault, present := s.faults[unit]
	return present && fault == ""
}

// appendSurplus moves a device that the plan does not want one step on its way
// out.
func (s *step) appendSurplus(entries []Entry, resource string, e Entry) []Entry {
	if s.held(resource, e.ID) {
		if e.Phase != Closing {
			e.Phase, e.Since, e.Applied = Closing, s.now, time.Time{}
		}
		e.Healthy = s.healthy(e.Unit) && s.now.Before(e.Since.Add(s.timing.RetireAfter))
		return append(entries, e)
	}
	if s.removable(resource, e) {
		return entries
	}
	if e.Phase != Retiring {
		e.Phase, e.Since, e.Applied = Retiring, s.now, time.Time{}
	}
	e.Healthy = false
	if e.Applied.IsZero() && s.seen.appliedKnown && s.seen.appliedAt.After(e.Since) && !s.seen.applied.has(resource, e.ID) {
		e.Applied = s.now
	}
	return append(entries, e)
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
