package agent

import (
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// unreachable is how many free slots of the board no GPU instance can take now.
func unreachable(cut sharing.Cut) int {
	taken, used := make([]bool, cut.Geometry.Slots), 0
	for _, instance := range cut.Instances {
		used += instance.Profile.Slices
		mark(taken, instance.Placement)
	}
	reached := make([]bool, len(taken))
	for _, shape := range cut.Geometry.Shapes {
		if used+shape.Profile.Slices > cut.Geometry.Slices {
			continue
		}
		for _, start := range shape.Starts {
			at := mig.Placement{Start: start, Size: shape.Size}
			if free(taken, at) {
				mark(reached, at)
			}
		}
	}
	count := 0
	for slot := range taken {
		if !taken[slot] && !reached[slot] {
			count++
		}
	}
	return count
}

func mark(slots []bool, at mig.Placement) {
	for slot := max(at.Start, 0); slot < min(at.Start+at.Size, len(slots)); slot++ {
		slots[slot] = true
	}
}

func free(slots []bool, at mig.Placement) bool {
	for slot := max(at.Start, 0); slot < min(at.Start+at.Size, len(slots)); slot++ {
		if slots[slot] {
			return false
		}
	}
	return at.Start >= 0 && at.Start+at.Size <= len(slots)
}
