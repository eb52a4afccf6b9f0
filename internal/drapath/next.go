package drapath

import "github.com/virgate/virgate/internal/units"

// pathFacts are the facts that determine a unit's next path.
type pathFacts struct {
	// wanted is true if the profile offers the unit by DRA. late is true if a claim was allocated
	// the unit although the device plugin has it.
	wanted, late bool
	// vacated is true if Allocate refuses the unit and no pod holds it other than by a claim of
	// this driver. partsLeft is true if the device plugin has no partition of it any more.
	vacated, partsLeft bool
	// unallocated is true if no claim has the unit or was allocated it.
	unallocated bool
}

// nextPath returns the path that follows path. A unit that is gone is not wanted by DRA, and
// belongs to the device plugin if it comes back.
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
			return units.LeavingDRA // Only for the late claim.
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
