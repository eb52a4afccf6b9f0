// Package claims is the one table of what this node has by Dynamic Resource Allocation: which
// units are offered so, and which ResourceClaims have them.
//
// A unit, a whole GPU or a partition, is offered by the device plugin or by DRA, never by
// both. Which of them it is, its Path, and the claims are on disk before they have an effect.
// The table answers the kubelet's Prepare and Unprepare, and is the last arbiter: the scheduler
// may give a unit away that somebody still has.
//
// Read claims.go first (what is kept), then check.go (when a claim may have its devices; it is
// pure) and table.go. docs/internals/dra.md has the reasons.
package claims

import (
	"slices"
	"strings"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
)

// Unit is a unit of the node as it is now.
type Unit struct {
	// Place is its name for as long as the hardware is there: dra.Place.
	Place string
	// ID is its UUID, GPU that of its GPU. A unit without ID is not there now, and is made when a
	// claim gets it.
	ID, GPU string
	// With is the place of the GPU of which it is a part that is made for claims, or which it is
	// itself: its path is that GPU's. Such units take of what their GPU Has. With is empty for
	// others, which cannot be in each other's way.
	With       string
	Takes, Has map[string]int
	// Device is the name of the device as which the unit is offered now, with so many Shares; 0
	// for an exclusive one. Device is empty where it is not offered by DRA.
	Device string
	Shares int64
	// Memory is in bytes; 0 when unknown.
	Memory uint64
	// Fault says why it cannot be used; empty when it can.
	Fault string
}

// kept is what outlives the program.
type kept struct {
	// Paths are those of the units that are not the device plugin's, by place.
	Paths map[string]units.Path `json:"paths"`
	// Claims have been prepared, and are not over.
	Claims []dra.Claim `json:"claims"`
}

// within says that the place is that of the GPU, or of a part of it.
func within(gpu, place string) bool { return place == gpu || strings.HasPrefix(place, gpu+"-") }

// View is the table at one moment. It is not changed afterwards.
type View struct {
	Paths  map[string]units.Path
	Claims []dra.Claim
	// Refused are the claims that were not given their devices, by UID, with the reason.
	// The scheduler counts their devices as taken for as long as they are allocated.
	Refused map[string]Refused
}

// Refused is a claim that does not get its devices.
type Refused struct {
	Claim  dra.Claim `json:"claim"`
	Reason string    `json:"reason"`
	Cause  Cause     `json:"-"`
}

// Held are the names of the devices that claims have been given, sorted, each once: those that
// have them and those that were refused. It is for dra.Node.
func (v View) Held() []string {
	var held []string
	add := func(c dra.Claim) {
		for _, r := range c.Results {
			if !r.Admin {
				held = append(held, r.Device)
			}
		}
	}
	for _, c := range v.Claims {
		add(c)
	}
	for _, r := range v.Refused {
		add(r.Claim)
	}
	slices.Sort(held)
	return slices.Compact(held)
}

// HeldPlaces are the places of the units that claims have, with the first of those claims.
func (v View) HeldPlaces() map[string]dra.Claim {
	held := map[string]dra.Claim{}
	for _, c := range v.Claims {
		for _, r := range c.Results {
			if _, known := held[r.Place()]; !known && !r.Admin {
				held[r.Place()] = c
			}
		}
	}
	return held
}

// Holder is a claim that has the unit at the place, or a part of it.
func (v View) Holder(place string) (dra.Claim, bool) {
	for _, c := range v.Claims {
		if slices.ContainsFunc(c.Results, func(r dra.Result) bool { return !r.Admin && within(place, r.Place()) }) {
			return c, true
		}
	}
	return dra.Claim{}, false
}

// RefusedPlaces are the places of the units that refused claims were given.
func (v View) RefusedPlaces() map[string]bool {
	places := map[string]bool{}
	for _, refused := range v.Refused {
		for _, r := range refused.Claim.Results {
			places[r.Place()] = places[r.Place()] || !r.Admin
		}
	}
	return places
}
