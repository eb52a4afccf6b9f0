package plugin

import "slices"

// Remind says that somebody waits for the units' holders to go. Of those the
// kubelet may name some that are gone, until it gets a list: while one of the
// units has such a holder its list is repeated, once in each quiet time. The
// next call replaces the units.
func (m *Manager) Remind(units ...string) {
	m.awaited.Store(&units)
	m.planned.give()
}

// isAwaited says that Remind names the unit.
func (m *Manager) isAwaited(unit string) bool {
	awaited := m.awaited.Load()
	return awaited != nil && slices.Contains(*awaited, unit)
}

// Withdrawn says that the kubelet can have nothing of the units any more: the
// last plan has been taken up, no list has a device of theirs, and no call is
// under way that may have seen an older list. As no device leaves a list while
// a pod holds it, or shortly after it was granted or named, this holds only when
// the units were free for that long.
func (m *Manager) Withdrawn(units ...string) bool {
	serving := m.status.Load()
	if m.plan.Load() != serving.plan {
		return false
	}
	for _, s := range serving.servers {
		listed := slices.ContainsFunc(s.current.Load().list.Entries, func(e Entry) bool { return slices.Contains(units, e.Unit) })
		if listed || s.inFlight.Load() > 0 {
			return false
		}
	}
	return true
}
