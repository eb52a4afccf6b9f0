package mig

import (
	"cmp"
	"slices"
)

// present is a partition that the board has.
type present struct {
	Compute
	profile Profile
	// instance is the place of its GPU instance in recut.have.
	instance int
}

// newRecut prepares the choice. wanted comes largest first, have by start.
func newRecut(g Geometry, have []Instance, wanted []Profile) *recut {
	g.Shapes = slices.Clone(g.Shapes)
	for i, shape := range g.Shapes {
		g.Shapes[i].Starts = preferred(shape)
	}
	r := &recut{geometry: g, have: have, wanted: wanted, shapes: make([]Shape, len(have)), quota: make(map[Profile]int)}
	for _, p := range wanted {
		r.quota[p]++
	}
	for i, instance := range have {
		shape, ok := g.Shape(instance.Profile)
		if !ok {
			// The driver has made it, so it is real.
			shape = Shape{Profile: instance.Profile}
		}
		r.shapes[i] = shape
		for _, c := range instance.Computes {
			r.present = append(r.present, present{c, instance.Partition(c), i})
		}
	}
	slices.SortStableFunc(r.present, r.rank)
	r.kept = make([]bool, len(r.present))
	r.ahead = make([]int, len(r.present)+1)
	for i, p := range slices.Backward(r.present) {
		r.ahead[i] = r.ahead[i+1] + r.weight(p)
	}
	return r
}

// rank orders partitions by how much they are worth keeping: those in use
// first, then those whose GPU instance lies where Place would put it, so that
// what stays leaves the most room.
func (r *recut) rank(p, q present) int {
	use := 0
	if p.Busy != q.Busy {
		use = 1
		if p.Busy {
			use = -1
		}
	}
	return cmp.Or(use,
		cmp.Compare(r.remoteness(p.instance), r.remoteness(q.instance)),
		cmp.Compare(p.instance, q.instance),
		cmp.Compare(q.Slices, p.Slices),
	)
}

// remoteness is the number of starts that Place prefers to that of the GPU
// instance.
func (r *recut) remoteness(i int) int {
	if at := slices.Index(r.shapes[i].Starts, r.have[i].Placement.Start); at >= 0 {
		return at
	}
	return len(r.shapes[i].Starts)
}

// weight is what keeping the partition counts for: one in use more than all
// free ones together.
func (r *recut) weight(p present) int {
	if p.Busy {
		return len(r.present) + 1
	}
	return 1
}
