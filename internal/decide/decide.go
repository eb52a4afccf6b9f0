// Package decide is what the node offers, as a list of pure steps over one snapshot of the facts.
// The loop of package agent takes them for the profile in force and acts on the Decision, and the
// forecast takes them for another profile.
//
// Read decide.go first, then dra.go (which units DRA offers) and mps.go (when shares by MPS can be
// used).
package decide

import (
	"slices"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Facts are what a decision follows from. They are not modified.
type Facts struct {
	GPUs         []sharing.GPU
	Profile      sharing.Profile
	Reservations []units.Reservation
	// Warnings are added to the plan's as they are.
	Warnings []string
	// MayReset and MayEvict say what this program is allowed to do.
	MayReset, MayEvict bool
	// Host says which units the node can grant, and what others lack.
	Host plugin.Host
	// MPS are the daemons; nil in a forecast, which ignores them.
	MPS *MPS
	// DRA is nil where this program serves no claims.
	DRA *DRA
}

// Decision is what the node is to offer.
type Decision struct {
	// Plan is the device plugin's.
	Plan sharing.Plan
	// Owners are the units' owners, by UUID.
	Owners map[string]units.Owner
	// Units are those that are offered, or could be, by place (dra.Place), where this program
	// serves claims; nil while a GPU's possible partitions have not been read yet.
	Units map[string]Unit
	// Offer is DRA's new offer; nil leaves what is published.
	Offer *dra.Offer

	// places are the places of the units that the node has, by UUID.
	places map[string]dra.Placed
	// forDRA are the units of the plan that are to be offered by DRA, by UUID.
	forDRA map[string]bool
	// onDemand are the GPUs whose partitions are made for claims.
	onDemand onDemand
	// withReleased is the plan before releases and pauses are left out.
	withReleased sharing.Plan
}

// Decide says what the node is to offer, from the facts alone.
func Decide(f Facts) Decision {
	var d Decision
	for _, step := range steps {
		step(&f, &d)
	}
	return d
}

// steps are taken in this order: a later one may use what an earlier one found.
var steps = []func(*Facts, *Decision){
	planUnits,
	assignOwners,
	dropReserved,
	addWarnings,
	markNotOnHost,
	markMPSNotReady,
	splitByPath,
}

func planUnits(f *Facts, d *Decision) { d.Plan = sharing.NewPlan(f.GPUs, f.Profile) }

// assignOwners finds the owners of all units of the node: also a unit that the profile does not
// offer may be DRA's, or reserved.
func assignOwners(f *Facts, d *Decision) {
	d.places = dra.Places(f.GPUs)
	var paths map[string]units.Path
	if f.DRA != nil {
		d.onDemand = f.DRA.divided(f.GPUs, f.Profile)
		d.forDRA, paths = d.wanted(f), f.DRA.View.Paths
	}
	var all []units.Unit
	for _, gpu := range f.GPUs {
		all = append(all, units.Unit{
			UUID:   gpu.UUID,
			GPU:    gpu.UUID,
			Path:   paths[dra.Place(gpu.UUID, nil)],
			ForDRA: d.forDRA[gpu.UUID],
		})
		for _, p := range gpu.Partitions {
			all = append(all, units.Unit{
				UUID:   p.UUID,
				GPU:    gpu.UUID,
				Path:   paths[d.places[p.UUID].Name],
				ForDRA: d.forDRA[p.UUID],
			})
		}
	}
	d.Owners = units.Owners(all, f.Reservations)
}

// dropReserved leaves reserved units out of the plan. A unit that an MPS daemon reserves stays in
// it, because containers can use it as shares of the daemon.
func dropReserved(_ *Facts, d *Decision) {
	reservedFor := func(purposes ...units.Purpose) func(sharing.Unit) bool {
		return func(u sharing.Unit) bool { return d.Owners[u.ID].ReservedFor(purposes...) }
	}
	d.withReleased = d.Plan.Without(reservedFor(units.MIGChange))
	d.Plan = d.withReleased.Without(reservedFor(units.Pause, units.Release))
}

// MayNotReset is why no GPU is reset.
const MayNotReset = "this Virgate may not reset GPUs: it takes virgate run --allow-gpu-reset, or mig.reset of the chart"

// addWarnings warns of what is released, and of what this program is not allowed to do.
func addWarnings(f *Facts, d *Decision) {
	for _, r := range f.Reservations {
		if (r.Purpose == units.Pause || r.Purpose == units.Release) && !slices.Contains(d.Plan.Warnings, r.Text) {
			d.warn(r.Text)
		}
	}
	d.warn(f.Warnings...)
	if f.Profile.MIG.Reset && !f.MayReset {
		d.warn("mig.reset has no effect: " + MayNotReset)
	}
	evicts := slices.ContainsFunc(d.Plan.Resources, func(r sharing.Resource) bool {
		return slices.ContainsFunc(r.Units, func(u sharing.Unit) bool { return u.Guard.Evict })
	})
	if evicts && !f.MayEvict {
		d.warn("memory: " + nodereport.ErrMayNotEvict.Error())
	}
}

func (d *Decision) warn(warnings ...string) {
	d.Plan.Warnings = append(slices.Clip(d.Plan.Warnings), warnings...)
}

// markNotOnHost marks what cannot be granted: there is no CDI entry, no device node, or no
// permission.
func markNotOnHost(f *Facts, d *Decision) { d.Plan = d.Plan.Withhold(f.Host.Obstacles) }

// splitByPath leaves to the device plugin what is its own, and makes DRA's offer of the rest.
func splitByPath(f *Facts, d *Decision) {
	if f.DRA != nil {
		d.split(f)
		return
	}
	if len(f.Profile.DRA.Resources) > 0 || f.Profile.DRA.All {
		d.warn(NoDRA)
	}
}
