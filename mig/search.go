package mig

import (
	"fmt"
	"slices"
	"strings"
)

// search looks for placements by trying and going back: a 7-slice board has
// 2,319 legal layouts in all, so nothing cleverer is needed.
type search struct {
	geometry Geometry
	// opened are the instances to place, largest first, each with its starts in
	// the order of preferred. On every known board the larger shape has no more
	// starts than the smaller, so that this is hardest first as well, and the
	// first try succeeds.
	opened []instance
	// placed are the live instances and the opened ones placed so far.
	placed []instance
	// deepest is how many of opened could be placed together at best.
	deepest int
}

// arrange sets the placement of every opened instance; they come largest first.
func (g Geometry) arrange(opened, live []instance) error {
	for i := range opened {
		opened[i].shape.Starts = preferred(opened[i].shape)
	}
	s := search{geometry: g, opened: opened, placed: slices.Clone(live)}
	if s.place(0, 0) {
		return nil
	}
	// Whatever fits with others fits without them, so the instances before the
	// deepest one fit together, and that one not with them.
	var beside []string
	for _, i := range append(slices.Clone(live), opened[:s.deepest]...) {
		for _, p := range i.partitions {
			beside = append(beside, p.String())
		}
	}
	missing := opened[s.deepest].partitions[0]
	if len(beside) == 0 {
		return fmt.Errorf("place %s: %w", missing, ErrNoRoom)
	}
	return fmt.Errorf("place %s beside %s: %w", missing, strings.Join(beside, ", "), ErrNoRoom)
}

// place finds placements for opened[n:], the first of them at one of its
// starts from number from on.
func (s *search) place(n, from int) bool {
	s.deepest = max(s.deepest, n)
	if n == len(s.opened) {
		return true
	}
	next := &s.opened[n]
	for i := from; i < len(next.shape.Starts); i++ {
		next.placement = Placement{Start: next.shape.Starts[i], Size: next.shape.Size}
		if !s.fits(*next) {
			continue
		}
		// Instances of one shape are alike: trying them in one order is enough.
		after := 0
		if n+1 < len(s.opened) && s.opened[n+1].shape.Profile == next.shape.Profile {
			after = i + 1
		}
		s.placed = append(s.placed, *next)
		if s.place(n+1, after) {
			return true
		}
		s.placed = s.placed[:len(s.placed)-1]
	}
	return false
}

// preferred are the shape's starts in the order that leaves most room for large
// profiles later. Those with an odd number of slices go to the high end: 4g
// fits at slot 0 only, and the last slot of a 7-slice board, which has no slice
// of its own, is best spent on a 3g or a 1g with double memory. The others go
// to the low end, where they leave slots 4 to 7 to a 3g.
func preferred(shape Shape) []int {
	starts := slices.Clone(shape.Starts)
	if shape.Profile.Slices%2 == 1 {
		slices.Reverse(starts)
	}
	return starts
}

// fits says that the instance may stand beside those already placed.
func (s *search) fits(next instance) bool {
	used, rivals := next.shape.Profile.Slices, 0
	for _, other := range s.placed {
		if other.placement.Overlaps(next.placement) || exclude(other.shape.Profile, next.shape.Profile) {
			return false
		}
		used += other.shape.Profile.Slices
		if rival(other.shape.Profile, next.shape.Profile) {
			rivals++
		}
	}
	return used <= s.geometry.Slices &&
		rivals < next.shape.Max &&
		next.placement.Start+next.placement.Size <= s.geometry.Slots
}
