package mig

import (
	"fmt"
	"slices"
)

// instance is a GPU instance with its partitions: a live one, or one that a
// placement has to be found for.
type instance struct {
	shape      Shape
	placement  Placement
	partitions []Profile
	// free is the number of compute slices that no partition computes on.
	free int
}

func newInstance(shape Shape, p Profile, at Placement) instance {
	return instance{
		shape:      shape,
		placement:  at,
		partitions: []Profile{p},
		free:       p.Slices - p.Compute,
	}
}

// take puts the partition into the instance, if it belongs there and has room.
func (i *instance) take(p Profile) bool {
	if i.shape.Profile != p.Instance() || i.free < p.Compute {
		return false
	}
	i.partitions = append(i.partitions, p)
	i.free -= p.Compute
	return true
}

// instances are the GPU instances behind the kept partitions, by start. A kept
// partition that the geometry does not list still takes its slots and slices:
// the driver has made it, so it is real.
func (g Geometry) instances(kept []Placed) ([]instance, error) {
	kept = slices.Clone(kept)
	slices.SortFunc(kept, comparePlaced)
	var live []instance
	for _, k := range kept {
		at := k.Placement
		if at.Start < 0 || at.Size < 1 || at.Size > g.Slots-at.Start {
			return nil, fmt.Errorf("kept %s at %s lies outside the board's %d slots", k.Profile, at, g.Slots)
		}
		// In the order of starts, only the last instance can reach this far.
		if n := len(live); n > 0 && live[n-1].placement.Overlaps(at) {
			last := &live[n-1]
			if last.placement != at || !last.take(k.Profile) {
				return nil, fmt.Errorf("kept %s at %s overlaps kept %s at %s", k.Profile, at, last.partitions[0], last.placement)
			}
			continue
		}
		shape, ok := g.Shape(k.Profile)
		if !ok {
			shape = Shape{Profile: k.Profile.Instance()}
		}
		live = append(live, newInstance(shape, k.Profile, at))
	}
	return live, nil
}

// fill puts each partition into the first GPU instance with room for it: a live
// one, which settles where the partition is placed, or an opened one, which the
// search has to place. It returns the live ones, in their order, and then those
// that it opened.
//
// Partitions must come largest first: then no more GPU instances are opened
// than needed, because GPU instances of at most 3 slices fill without loss in
// that order, and of a larger one a board has only one.
func (g Geometry) fill(partitions []Profile, live []instance) []instance {
	all := slices.Clone(live)
	for _, p := range partitions {
		i := 0
		for i < len(all) && !all[i].take(p) {
			i++
		}
		if i == len(all) {
			shape, _ := g.Shape(p)
			all = append(all, newInstance(shape, p, Placement{}))
		}
	}
	return all
}
