package mig

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Layout is which partitions one GPU should have. The zero Layout turns MIG mode off.
type Layout struct {
	// MIG is true if MIG mode should be on. A GPU with MIG on and no Partitions cannot run
	// anything.
	MIG bool
	// Partitions are in any order. A profile may occur more than once, or with a Count of 0.
	Partitions []PartitionCount
}

// PartitionCount is a number of partitions with one profile.
type PartitionCount struct {
	Profile Profile
	Count   int
}

// String returns, for example, "2 × 1g.5gb, 1 × 3g.20gb", "no partition" or "MIG off".
func (l Layout) String() string {
	var texts []string
	for _, c := range l.Partitions {
		if c.Count > 0 {
			texts = append(texts, fmt.Sprintf("%d × %s", c.Count, c.Profile))
		}
	}
	switch {
	case !l.MIG:
		return "MIG off"
	case texts == nil:
		return "no partition"
	}
	return strings.Join(texts, ", ")
}

// ErrNoMIG means that the GPU cannot have partitions at all.
var ErrNoMIG = errors.New("the GPU has no MIG")

// NamedLayout returns the layout that this name has in mig-parted's default configuration and
// generate-config, for a GPU with the geometry:
//
//	all-disabled    MIG off
//	all-enabled     MIG on, no partition
//	all-balanced    two 1g, one 2g and, where the GPU has it, one 3g; of two slices, two 1g
//	all-<profile>   as many of the profile as fit; "+" may be written ".",
//	                as in a resource name
//
// Partitions are sorted by Compare. The error is ErrUnknownProfile if the GPU does not have the
// profile, ErrUnlisted if that is not known yet, and ErrNoMIG if the geometry has no profiles and
// the name is not all-disabled.
func NamedLayout(name string, g Geometry) (Layout, error) {
	layout, err := namedLayout(name, g)
	if err != nil {
		return Layout{}, fmt.Errorf("MIG layout %q: %w", name, err)
	}
	return layout, nil
}

func namedLayout(name string, g Geometry) (Layout, error) {
	switch {
	case name == "all-disabled":
		return Layout{}, nil
	case len(g.Profiles) == 0 && !g.Unlisted:
		return Layout{}, ErrNoMIG
	case name == "all-enabled":
		return Layout{MIG: true}, nil
	case len(g.Profiles) == 0:
		return Layout{}, ErrUnlisted
	case name == "all-balanced":
		return balanced(g)
	}
	profile, ok := strings.CutPrefix(name, "all-")
	if !ok {
		return Layout{}, errors.New("not one of all-disabled, all-enabled, all-balanced and all-<profile>")
	}
	// This is unambiguous, because no profile has a "." right after the memory.
	p, err := ParseProfile(strings.Replace(profile, "gb.", "gb+", 1))
	if err != nil {
		return Layout{}, err
	}
	info, ok := g.ProfileInfo(p)
	if !ok {
		return Layout{}, g.unknown(p)
	}
	return Layout{MIG: true, Partitions: []PartitionCount{{g.Name(p), info.Max * (p.Slices / p.Compute)}}}, nil
}

func balanced(g Geometry) (Layout, error) {
	layout := Layout{MIG: true}
	for _, want := range []struct{ slices, count int }{{1, 2}, {2, 1}, {3, 1}} {
		if want.slices == g.Slices {
			break // It is the whole GPU.
		}
		// Of the profiles with this many slices, the first in Compare's order is the plain one:
		// without attributes and with the least memory (1g.5gb, not 1g.10gb).
		i := slices.IndexFunc(g.Profiles, func(info ProfileInfo) bool { return info.Profile.Slices == want.slices })
		if i >= 0 {
			layout.Partitions = append(layout.Partitions, PartitionCount{g.Profiles[i].Profile, want.count})
		} else if want.slices < 3 {
			return Layout{}, fmt.Errorf("%dg: %w", want.slices, ErrUnknownProfile)
		}
	}
	return layout, nil
}
