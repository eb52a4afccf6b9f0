// Package claims is the table of what DRA manages on this node: which units it offers, and which
// ResourceClaims have them.
//
// A unit, a whole GPU or a partition, is offered by the device plugin or by DRA, never by both.
// Which of them offers it, its Path, and the claims are written to disk before they take effect.
// The table answers the kubelet's Prepare and Unprepare, and has the final decision: the scheduler
// may allocate a unit that is still in use.
//
// Read claims.go first (what is stored), then check.go (when a claim may have its devices; it is
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
	// Name stays the same while the hardware exists: dra.UnitName.
	Name string
	// ID is the unit's UUID, GPU the UUID of its GPU. A unit without ID does not exist now, and is
	// made when a claim gets it.
	ID, GPU string
	// Parent is for units of a GPU that is divided for claims: the name of that GPU, for its parts
	// and for the GPU itself. The path of such a unit is the path of the GPU, and it Needs part of
	// the GPU's Supply. Parent is empty for other units, which cannot conflict with each other.
	Parent        string
	Needs, Supply map[string]int
	// Device is the name of the device as which the unit is offered now; empty if DRA does not
	// offer it. Shares is the number of its shares; 0 for an exclusive device.
	Device string
	Shares int64
	// Memory is in bytes; 0 when unknown.
	Memory uint64
	// Fault is why the unit cannot be used; empty if it can.
	Fault string
}

// kept is the data that outlives the program.
type kept struct {
	// Paths are the paths of units that are not the device plugin's, by unit name.
	Paths map[string]units.Path `json:"paths"`
	// Claims are the claims that were prepared and have not ended.
	Claims []dra.Claim `json:"claims"`
}

// within reports whether the unit is the GPU or a part of it.
func within(gpu, unitName string) bool {
	return unitName == gpu || strings.HasPrefix(unitName, gpu+"-")
}

// View is the table at one moment. It never changes.
type View struct {
	Paths  map[string]units.Path
	Claims []dra.Claim
	// Refused are the claims that did not get their devices, by UID, with the reason. The scheduler
	// counts their devices as taken while they are allocated.
	Refused map[string]Refused
}

// Refused is a claim that does not get its devices.
type Refused struct {
	Claim  dra.Claim `json:"claim"`
	Reason string    `json:"reason"`
	Cause  Cause     `json:"-"`
}

// Held returns the sorted names of the devices allocated to claims, each once, including refused
// claims. It is for dra.Node.
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

// HeldUnits returns the names of the units that claims have, with the first of these claims.
func (v View) HeldUnits() map[string]dra.Claim {
	held := map[string]dra.Claim{}
	for _, c := range v.Claims {
		for _, r := range c.Results {
			if _, known := held[r.UnitName()]; !known && !r.Admin {
				held[r.UnitName()] = c
			}
		}
	}
	return held
}

// Holder returns a claim that has the unit or a part of it.
func (v View) Holder(unitName string) (dra.Claim, bool) {
	for _, c := range v.Claims {
		has := func(r dra.Result) bool { return !r.Admin && within(unitName, r.UnitName()) }
		if slices.ContainsFunc(c.Results, has) {
			return c, true
		}
	}
	return dra.Claim{}, false
}

// RefusedUnits returns the names of the units that were allocated to refused claims.
func (v View) RefusedUnits() map[string]bool {
	unitNames := map[string]bool{}
	for _, refused := range v.Refused {
		for _, r := range refused.Claim.Results {
			unitNames[r.UnitName()] = unitNames[r.UnitName()] || !r.Admin
		}
	}
	return unitNames
}
