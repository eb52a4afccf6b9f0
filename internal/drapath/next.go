package drapath

import "github.com/virgate/virgate/internal/units"

// pathFacts are what a unit's next path follows from.
type pathFacts struct {
	// wanted says that the profile has the unit offered by DRA, late that a claim was given it
	// although the device plugin has it.
	wanted, late bool
	// vacated says that Allocate refuses the unit and that no pod holds it, partsLeft that no
	// partition of it is the device plugin's any more.
	vacated, partsLeft bool
	// unallocated says that no claim has the unit, or was given it.
	unallocated bool
}

// nextPath is where a unit goes from its path. A unit that is gone is wanted by nobody, and is the
// device plugin's should it come back.
func nextPath(path units.Path, is pathFacts) units.Path {
	switch path {
	case units.Plugin:
		if is.wanted || is.late {
			return units.LeavingPlugin
		}
	case units.LeavingPlugin:
		switch {
		case !is.wanted && !is.late:
			return units.Plugin
		case !is.vacated || !is.partsLeft:
		case is.wanted:
			return units.DRA
		default:
			return units.LeavingDRA // For the late claim alone.
		}
	case units.DRA:
		if !is.wanted {
			return units.LeavingDRA
		}
	case units.LeavingDRA:
		switch {
		case is.wanted:
			return units.DRA
		case is.unallocated:
			return units.Plugin
		}
	}
	return path
}
