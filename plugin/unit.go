package plugin

import (
	"cmp"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

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
			device.Healthy = e.Healthy // As the kubelet was told, until it is decided.
			e.Device = device
		}
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
	if s.isHeld(resource, e) {
		if e.Phase != Closing {
			e.Phase, e.Since, e.Applied = Closing, s.now, time.Time{}
		}
		e.Healthy = s.healthy(e.Unit) && s.now.Before(e.Since.Add(s.timing.RetireAfter))
		return append(entries, e)
	}
	if s.removable(resource, e) {
		return entries
	}
	// A kubelet that shows the device no more may have lost its stream, or may
	// have an older list yet to read in which the device is Healthy. So the clock
	// starts only when the stream that is open was given the list.
	if e.Phase != Retiring || s.calls.Lost[resource] {
		e.Phase, e.Since, e.Applied = Retiring, time.Time{}, time.Time{}
	}
	if e.Since.IsZero() && s.calls.Sent[resource] && !e.Healthy {
		e.Since = s.now
	}
	e.Healthy = false
	switch {
	case s.seen.applied.has(resource, e.ID):
		e.Applied = time.Time{}
	case e.Applied.IsZero() && !e.Since.IsZero() && s.seen.appliedKnown && s.seen.appliedAt.After(e.Since):
		e.Applied = s.now
	}
	return append(entries, e)
}
