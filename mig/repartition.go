package mig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Repartition is the smallest change of a board to the wanted layout. mode says
// whether MIG mode is on now, have is every GPU instance of the board.
//
// Partitions that the layout wants stay untouched, and those in use are neither
// destroyed nor moved. A free one is moved only where the layout cannot be had
// otherwise: as few as possible are destroyed, and so as few as possible made.
// Placements are searched exactly, so whatever can be reached is reached. Where
// partitions in use stand in the way, Blocked names as few of them as possible,
// and the steps do what can be done already and need not be undone when these
// are free: destroy what is not wanted, make what fits.
//
// Whether somebody uses the board as a whole, before EnableMIG, is for the
// caller to see.
//
// An error says that no board of this geometry can have the layout, and wraps
// ErrNoRoom, ErrUnknownProfile or ErrNoMIG, or that have contradicts itself. The
// Change is then zero.
func Repartition(g Geometry, mode bool, have []Instance, want Layout) (Change, error) {
	if want.MIG && len(g.Shapes) == 0 {
		return Change{}, fmt.Errorf("enable MIG: %w", ErrNoMIG)
	}
	wanted, err := g.expand(want)
	if err != nil {
		return Change{}, err
	}
	if err := g.arrange(g.fill(wanted, nil), nil); err != nil {
		return Change{}, err
	}
	have, err = g.listed(mode, have)
	if err != nil {
		return Change{}, err
	}
	change := newRecut(g, have, wanted).solve().change()
	switch {
	case want.MIG && !mode:
		change.Steps = slices.Insert(change.Steps, 0, modeStep(EnableMIG))
	case !want.MIG && mode && change.Complete():
		change.Steps = append(change.Steps, modeStep(DisableMIG))
	}
	return change, nil
}

// listed returns a copy of the GPU instances by start, with their compute
// instances by CI, or says what cannot be.
func (g Geometry) listed(mode bool, have []Instance) ([]Instance, error) {
	if !mode && len(have) > 0 {
		return nil, errors.New("a board with MIG off has GPU instances")
	}
	sorted := slices.Clone(have)
	slices.SortFunc(sorted, func(a, b Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	outlines := make([]Placed, len(sorted))
	for i, instance := range sorted {
		outlines[i] = Placed{instance.Profile, instance.Placement}
		computes := slices.Clone(instance.Computes)
		slices.SortFunc(computes, func(a, b Compute) int { return cmp.Compare(a.CI, b.CI) })
		sorted[i].Computes = computes
		free := instance.Profile.Slices
		for _, c := range computes {
			free -= c.Slices
			if c.Slices < 1 || free < 0 {
				return nil, fmt.Errorf("partition %s of GPU instance %d does not fit its %d slices", c.UUID, instance.GI, instance.Profile.Slices)
			}
		}
	}
	_, err := g.instances(outlines)
	return sorted, err
}
