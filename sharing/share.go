package sharing

// selectShares gives each unit to the first share that selects it, in the order
// of the document, and mentions what a share asks for in vain.
func selectShares(units []candidate, shares []Share, notes *warnings) {
	for i, share := range shares {
		all, free := pool(units, share.Resource)
		switch {
		case len(all) == 0:
			notes.addf("%s: no unit of %s on this node", share.Path, share.Resource)
		case len(free) == 0:
			notes.addf("%s: earlier entries take every unit of %s", share.Path, share.Resource)
		default:
			for _, unit := range share.choose(all, free, notes) {
				unit.share = i
			}
		}
	}
}

// pool returns the units of a resource, and those that no share took yet.
func pool(units []candidate, resource string) (all, free []*candidate) {
	for i := range units {
		unit := &units[i]
		if unit.name != resource {
			continue
		}
		all = append(all, unit)
		if unit.share == exclusive {
			free = append(free, unit)
		}
	}
	return all, free
}

// choose returns those of the free units that the share selects.
func (s Share) choose(all, free []*candidate, notes *warnings) []*candidate {
	switch {
	case s.Select.All():
		return free
	case s.Select.List != nil:
		return s.chooseListed(all, free, notes)
	case s.Select.Count > len(free):
		notes.addf("%s.devices: %d units of %s wanted, %d free on this node",
			s.Path, s.Select.Count, s.Resource, len(free))
		return free
	default:
		return free[:s.Select.Count]
	}
}

func (s Share) chooseListed(all, free []*candidate, notes *warnings) []*candidate {
	var chosen []*candidate
	for i, selector := range s.Select.List {
		matching := matched(free, selector)
		chosen = append(chosen, matching...)
		switch {
		case len(matching) > 0:
		case len(matched(all, selector)) > 0:
			notes.addf("%s.devices[%d]: earlier entries take what %q selects of %s",
				s.Path, i, selector, s.Resource)
		default:
			notes.addf("%s.devices[%d]: %q selects no unit of %s on this node",
				s.Path, i, selector, s.Resource)
		}
	}
	return chosen
}

func matched(units []*candidate, selector Selector) []*candidate {
	var matching []*candidate
	for _, unit := range units {
		if unit.matches(selector) {
			matching = append(matching, unit)
		}
	}
	return matching
}
