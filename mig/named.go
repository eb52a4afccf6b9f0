package mig

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNoMIG says that the board cannot be cut at all.
var ErrNoMIG = errors.New("the board has no MIG")

// NamedLayout is the layout that mig-parted's shipped configuration and its
// generate-config know by that name, for a board of that geometry:
//
//	all-disabled    MIG off
//	all-enabled     MIG on, no partition
//	all-balanced    two 1g, one 2g and, where the board has it, one 3g
//	all-<profile>   as many of the profile as the board takes; "+" may be
//	                written ".", as in a resource name
//
// Partitions are listed by Compare. A profile that the board does not have is
// an ErrUnknownProfile. Only all-disabled is for a board without shapes; any
// other name is an ErrNoMIG there.
func NamedLayout(name string, g Geometry) (Layout, error) {
	layout, err := namedLayout(name, g)
	if err != nil {
		return Layout{}, fmt.Errorf("MIG layout %q: %w", name, err)
	}
	return layout, nil
}

func namedLayout(name string, g Geometry) (Layout, error) {
	if name == "all-disabled" {
		return Layout{}, nil
	}
	if len(g.Shapes) == 0 {
		return Layout{}, ErrNoMIG
	}
	switch name {
	case "all-enabled":
		return Layout{MIG: true}, nil
	case "all-balanced":
		return balanced(g)
	}
	profile, ok := strings.CutPrefix(name, "all-")
	if !ok {
		return Layout{}, errors.New("not one of all-disabled, all-enabled, all-balanced and all-<profile>")
	}
	return uniform(profile, g)
}

func balanced(g Geometry) (Layout, error) {
	layout := Layout{MIG: true}
	for _, want := range []struct{ slices, count int }{{1, 2}, {2, 1}, {3, 1}} {
		shape, ok := g.base(want.slices)
		if ok {
			layout.Partitions = append(layout.Partitions, Count{shape.Profile, want.count})
		} else if want.slices < 3 {
			return Layout{}, fmt.Errorf("%dg: %w", want.slices, ErrUnknownProfile)
		}
	}
	return layout, nil
}

// base is the plain shape with that many slices: by Compare the first of them,
// which has no attributes and the least memory (1g.5gb, not 1g.10gb).
func (g Geometry) base(slices int) (Shape, bool) {
	for _, shape := range g.Shapes {
		if shape.Profile.Slices == slices {
			return shape, true
		}
	}
	return Shape{}, false
}

func uniform(written string, g Geometry) (Layout, error) {
	// No profile has a "." right after its memory, so this is unambiguous.
	p, err := ParseProfile(strings.Replace(written, "gb.", "gb+", 1))
	if err != nil {
		return Layout{}, err
	}
	shape, ok := g.Shape(p)
	if !ok {
		return Layout{}, g.unknown(p)
	}
	perInstance := p.Slices / p.Compute
	return Layout{MIG: true, Partitions: []Count{{p, shape.Max * perInstance}}}, nil
}
