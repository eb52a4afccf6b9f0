package agent

import (
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// unreachable is how many free slots of the board no GPU instance can take now.
func unreachable(cut sharing.Cut) int {
	var taken, open []mig.Placement
	used := 0
	for _, instance := range cut.Instances {
		used += instance.Profile.Slices
		taken = append(taken, instance.Placement)
	}
	for _, shape := range cut.Geometry.Shapes {
		if used+shape.Profile.Slices > cut.Geometry.Slices {
			continue
		}
		for _, start := range shape.Starts {
			at := mig.Placement{Start: start, Size: shape.Size}
			if start >= 0 && start+shape.Size <= cut.Geometry.Slots && !slices.ContainsFunc(taken, at.Overlaps) {
				open = append(open, at)
			}
		}
	}
	count := 0
	for slot := range cut.Geometry.Slots {
		at := mig.Placement{Start: slot, Size: 1}
		if !slices.ContainsFunc(taken, at.Overlaps) && !slices.ContainsFunc(open, at.Overlaps) {
			count++
		}
	}
	return count
}
