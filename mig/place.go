package mig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

var (
	// ErrNoRoom says that a profile exists on the board, but not beside the
	// other partitions: whatever the placements, or around the kept ones.
	ErrNoRoom = errors.New("no room on the board")
	// ErrUnknownProfile says that the board cannot be cut into such partitions.
	ErrUnknownProfile = errors.New("the board has no such profile")
)

// Placed is a partition and where its GPU instance lies. Partitions that share
// a GPU instance, as two of 1c.2g.10gb do, have the same Placement.
type Placed struct {
	Profile   Profile   `json:"profile"`
	Placement Placement `json:"placement"`
}

// Place finds room on the board for the wanted partitions beside the kept ones,
// which stay where they are, and returns the wanted ones in order of their
// start; nil for none. What is kept is not part of what is wanted.
//
// The search is exact: where some placement exists, one is found. An error
// names the profile that has no room and wraps ErrNoRoom or ErrUnknownProfile;
// it is another one when the kept partitions contradict each other or the
// board, when a count is negative, or when partitions are wanted with MIG off.
//
// A partition that computes on a part of its GPU instance first goes into a GPU
// instance of its kind, kept or new, that has as many compute slices free; only
// then is another one opened. Compute instances are counted within their GPU
// instance, not placed, and which sizes of them exist is left to the driver.
//
// Of several placements Place takes the one that the search meets first: see
// preferred.
func (g Geometry) Place(wanted Layout, kept []Placed) ([]Placed, error) {
	partitions, err := g.expand(wanted)
	if err != nil {
		return nil, err
	}
	live, err := g.instances(kept)
	if err != nil {
		return nil, err
	}
	all := g.fill(partitions, live)
	if err := g.arrange(all[len(live):], live); err != nil {
		return nil, err
	}
	var placed []Placed
	for n, i := range all {
		fresh := i.partitions
		if n < len(live) {
			fresh = fresh[len(live[n].partitions):]
		}
		for _, p := range fresh {
			placed = append(placed, Placed{p, i.placement})
		}
	}
	slices.SortFunc(placed, comparePlaced)
	return placed, nil
}

func comparePlaced(a, b Placed) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Start, b.Placement.Start),
		Compare(a.Profile, b.Profile),
	)
}

// expand lists the wanted partitions one by one, the largest first.
func (g Geometry) expand(wanted Layout) ([]Profile, error) {
	var list []Profile
	for _, c := range wanted.Partitions {
		if c.Count < 0 {
			return nil, fmt.Errorf("place %d of %s: the count is negative", c.Count, c.Profile)
		}
		if c.Count == 0 {
			continue
		}
		if !wanted.MIG {
			return nil, fmt.Errorf("place %s: the layout has MIG off", c.Profile)
		}
		if _, ok := g.Shape(c.Profile); !ok {
			return nil, fmt.Errorf("place %w", g.unknown(c.Profile))
		}
		// Each partition needs a compute slice: a bound that keeps absurd
		// counts out of memory.
		if c.Count > g.Slices {
			return nil, fmt.Errorf("place %d of %s on %d slices: %w", c.Count, c.Profile, g.Slices, ErrNoRoom)
		}
		for range c.Count {
			list = append(list, c.Profile)
		}
	}
	slices.SortFunc(list, func(p, q Profile) int { return Compare(q, p) })
	return list, nil
}

// unknown is the error for a profile that no shape has.
func (g Geometry) unknown(p Profile) error {
	if len(g.Shapes) == 0 {
		return fmt.Errorf("%s: %w", p, ErrUnknownProfile)
	}
	names := make([]string, len(g.Shapes))
	for i, shape := range g.Shapes {
		names[i] = shape.Profile.String()
	}
	return fmt.Errorf("%s: %w (it has %s)", p, ErrUnknownProfile, strings.Join(names, ", "))
}
