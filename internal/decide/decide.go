// Package decide decides what the node offers, in a series of pure steps over one snapshot of the
// facts. The loop of package agent runs them for the profile in force and acts on the Decision. The
// forecast runs them for another profile.
//
// Read decide.go first, then dra.go (which units DRA offers) and mps.go (when MPS shares can be
// used).
package decide

import (
	"slices"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// Facts are the input of a decision. They are not modified.
type Facts struct {
	GPUs         []sharing.GPU
	Profile      sharing.Profile
	Reservations []units.Reservation
	// Warnings are added unchanged to the plan's warnings.
	Warnings []string
	// MayReset and MayEvict are what this program is allowed to do.
	MayReset, MayEvict bool
	// Host is which units the node can grant, and what prevents the others.
	Host grant.Host
	// MPS is the state of the daemons; nil in a forecast, which ignores them.
	MPS *MPS
	// DRA is nil if this program serves no claims.
	DRA *DRA
}

// Decision is what the node should offer.
type Decision struct {
	// Plan is the device plugin's plan.
	Plan sharing.Plan
	// Owners are the owners of the units, by UUID.
	Owners map[string]units.Owner
	// Units are the units that are or could be offered, by name (dra.UnitName), if this program
	// serves claims. It is nil while the possible partitions of a GPU have not been read yet.
	Units map[string]Unit
	// Offer is DRA's new offer; nil leaves the published offer unchanged.
	Offer *dra.Offer

	// unitNames has the names of the node's units, by UUID.
	unitNames map[string]dra.NamedUnit
	// forDRA are the plan's units that DRA should offer, by UUID.
	forDRA map[string]bool
	// onDemand are the GPUs whose partitions are made for claims.
	onDemand onDemand
	// withReleased is the plan that still has released and paused units.
	withReleased sharing.Plan
}

// Decide returns what the node should offer. It depends only on the facts.
func Decide(f Facts) Decision {
	var d Decision
	for _, step := range steps {
		step(&f, &d)
	}
	return d
}

// steps run in this order, so each step can use the results of earlier ones.
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

// assignOwners finds the owners of all units of the node. A unit that the profile does not offer
// may also be DRA's, or reserved.
func assignOwners(f *Facts, d *Decision) {
	d.unitNames = dra.UnitNames(f.GPUs)
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
			Path:   paths[dra.UnitName(gpu.UUID, nil)],
			ForDRA: d.forDRA[gpu.UUID],
		})
		for _, p := range gpu.Partitions {
			all = append(all, units.Unit{
				UUID:   p.UUID,
				GPU:    gpu.UUID,
				Path:   paths[d.unitNames[p.UUID].Name],
				ForDRA: d.forDRA[p.UUID],
			})
		}
	}
	d.Owners = units.Owners(all, f.Reservations)
}

// dropReserved removes reserved units from the plan. A unit that an MPS daemon reserves remains,
// because containers can use it as shares of the daemon.
func dropReserved(_ *Facts, d *Decision) {
	reservedFor := func(purposes ...units.Purpose) func(sharing.Unit) bool {
		return func(u sharing.Unit) bool { return d.Owners[u.ID].ReservedFor(purposes...) }
	}
	d.withReleased = d.Plan.Drop(reservedFor(units.MIGChange))
	d.Plan = d.withReleased.Drop(reservedFor(units.Pause, units.Release))
}

// MayNotReset is why Virgate resets no GPU.
const MayNotReset = "this Virgate may not reset GPUs: it requires virgate run --allow-gpu-reset, the chart's mig.reset"

// addWarnings warns about releases and pauses, and about actions that this program is not allowed
// to take.
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

// markNotOnHost marks units that cannot be granted because a CDI entry, a device node or a
// permission is missing.
func markNotOnHost(f *Facts, d *Decision) { d.Plan = d.Plan.MarkUnavailable(f.Host.Obstacles) }

// splitByPath leaves the device plugin its own units, and makes DRA's offer from the others.
func splitByPath(f *Facts, d *Decision) {
	if f.DRA != nil {
		d.split(f)
		return
	}
	if len(f.Profile.DRA.Resources) > 0 || f.Profile.DRA.All {
		d.warn(NoDRA)
	}
}
