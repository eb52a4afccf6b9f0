package plugin

import (
	"cmp"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// entries merges what the resource lists with what the plan wants it to list.
func (s *step) entries(resource string, old []Entry, want []sharing.Device) []Entry {
	entries := make([]Entry, 0, max(len(old), len(want)))
	for _, part := range partsOf(old, want) {
		entries = s.appendUnit(entries, resource, part)
	}
	return entries
}

// part is what concerns one unit.
type part struct {
	unit string
	old  []Entry
	want []sharing.Device
}

// partsOf returns the units' parts in the order in which the plan names the
// units. Units that it does not have come last, by ID.
func partsOf(old []Entry, want []sharing.Device) []*part {
	var parts []*part
	byUnit := map[string]*part{}
	at := func(unit string) *part {
		known := byUnit[unit]
		if known == nil {
			known = &part{unit: unit}
			byUnit[unit] = known
			parts = append(parts, known)
		}
		return known
	}
	for _, d := range want {
		p := at(d.Unit)
		p.want = append(p.want, d)
	}
	planned := len(parts)
	for _, e := range old {
		p := at(e.Unit)
		p.old = append(p.old, e)
	}
	slices.SortFunc(parts[planned:], func(a, b *part) int { return cmp.Compare(a.unit, b.unit) })
	return parts
}

// candidate is a device that may stay in the list, or come into it.
type candidate struct {
	Entry
	rank    int
	replica int
	fresh   bool // not in the list yet
}

// The ranks of candidates: device IDs mean nothing, so those that pods hold come
// first, then those that the plan names.
const (
	isHeld = iota
	isWanted
	isExtra
)

// appendUnit decides for the devices of one unit, of which as many are offered
// as the plan wants, and appends them by replica.
func (s *step) appendUnit(entries []Entry, resource string, p *part) []Entry {
	candidates, surplus := s.candidates(resource, p)
	slices.SortFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.replica, b.replica))
	})
	healthy := s.healthy(p.unit)
	kept := candidates[:0] // In place: there may be thousands.
	for i, c := range candidates {
		switch {
		case i < len(p.want):
			c.Phase, c.Since, c.Applied = Offered, time.Time{}, time.Time{}
			c.Healthy = healthy
			kept = append(kept, c)
		case !c.fresh:
			kept = s.appendSurplus(kept, resource, c)
		}
	}
	kept = append(kept, surplus...)
	slices.SortFunc(kept, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.replica, b.replica), cmp.Compare(a.ID, b.ID))
	})
	for _, c := range kept {
		entries = append(entries, c.Entry)
	}
	return entries
}

// candidates are the unit's devices that may be offered. Surplus are those in
// the list that cannot be, as far as they stay listed.
func (s *step) candidates(resource string, p *part) (candidates, surplus []candidate) {
	shared := len(p.want) > 0 && Entry{Device: p.want[0]}.shared()
	candidates = make([]candidate, 0, len(p.old)+len(p.want))
	var wanted map[string]int
	if len(p.old) > 0 { // Most units are new, or all of their devices are listed.
		wanted = make(map[string]int, len(p.want))
	}
	for i := range p.want {
		if wanted != nil {
			wanted[p.want[i].ID] = i
		}
	}
	listed := make([]bool, len(p.want))
	for _, e := range p.old {
		c := candidate{Entry: e, rank: isExtra, replica: replica(e.ID)}
		place, isNamed := wanted[e.ID]
		if isNamed {
			listed[place] = true
		}
		switch {
		case len(p.want) == 0 || e.shared() != shared:
			surplus = s.appendSurplus(surplus, resource, c)
			continue
		case isNamed:
			c.rank, c.Device = isWanted, p.want[place]
			c.Healthy = e.Healthy // As the kubelet was told, until it is decided.
		}
		if s.held(resource, e.ID) {
			c.rank = isHeld
		}
		candidates = append(candidates, c)
	}
	if s.blocked(p.unit, way{resource, shared}) {
		return candidates, surplus
	}
	for i, d := range p.want {
		if !listed[i] {
			candidates = append(candidates, candidate{Entry: Entry{Device: d}, rank: isWanted, replica: replica(d.ID), fresh: true})
		}
	}
	return candidates, surplus
}

// healthy is the unit's health now. A unit that is not on the node any more is
// not healthy.
func (s *step) healthy(unit string) bool {
	fault, present := s.faults[unit]
	return present && fault == ""
}

// appendSurplus moves a device that the plan does not want one step on its way
// out, and appends it unless it is there.
func (s *step) appendSurplus(kept []candidate, resource string, c candidate) []candidate {
	if s.isHeld(resource, c.Entry) {
		if c.Phase != Closing {
			c.Phase, c.Since, c.Applied = Closing, s.now, time.Time{}
		}
		c.Healthy = s.healthy(c.Unit) && s.now.Before(c.Since.Add(s.timing.RetireAfter))
		return append(kept, c)
	}
	if s.removable(resource, c.Entry) {
		return kept
	}
	// A kubelet that shows the device no more may have lost its stream, or may
	// have an older list yet to read in which the device is Healthy. So the clock
	// starts only when the stream that is open was given the list.
	if c.Phase != Retiring || s.calls.Lost[resource] {
		c.Phase, c.Since, c.Applied = Retiring, time.Time{}, time.Time{}
	}
	if c.Since.IsZero() && s.calls.Sent[resource] && !c.Healthy {
		c.Since = s.now
	}
	c.Healthy = false
	switch {
	case s.seen.applied.has(resource, c.ID):
		c.Applied = time.Time{}
	case c.Applied.IsZero() && !c.Since.IsZero() && s.seen.appliedKnown && s.seen.appliedAt.After(c.Since):
		c.Applied = s.now
	}
	return append(kept, c)
}
