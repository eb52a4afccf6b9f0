package decide

import (
	"cmp"
	"fmt"
	"maps"
	"strings"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// DRA is what is known of DRA on the node.
type DRA struct {
	// Node has what an offer says of the node, but for its GPUs, its plan and its claims.
	Node  dra.Node
	State dra.DriverState
	View  claims.View
	// Geometries say how GPUs could be divided, by UUID. It is nil where none are, and lacks GPUs
	// that have not been read yet.
	Geometries map[string]Geometry
}

// Geometry is how a GPU could be divided, or why that is not known. It is that of the GPU for as
// long as the program runs.
type Geometry struct {
	State   sharing.MIGState
	Unknown error
}

// Unit is a unit of the plan, or one that could be made.
type Unit struct {
	claims.Unit
	// Resource and Planned are the plan's; empty where it does not have the unit.
	Resource string
	Planned  sharing.Unit
	// ForDRA says that the profile has it offered by DRA.
	ForDRA bool
	// At is the partition where it is one; nil for a whole GPU.
	At *sharing.Partition
}

// PluginUnit is the UUID that the device plugin must refuse when the unit is DRA's: its own, or its
// GPU's while it does not exist.
func (u Unit) PluginUnit() string { return cmp.Or(u.ID, u.GPU) }

// Follows says that its path is that of the GPU of which it is a part.
func (u Unit) Follows() bool { return u.With != "" && u.With != u.Place }

// ByDRA says that a claim may get the unit at any moment.
func (u Unit) ByDRA(paths map[string]units.Path) bool {
	return paths[u.Place].ByDRA() || paths[dra.Place(u.GPU, nil)].ByDRA()
}

// NoDRA is the warning about a profile with dra.resources where nobody serves claims.
const NoDRA = "dra: nothing is offered by DRA, as this Virgate was started without --dra, the chart's dra.enabled"

// releasedFault is why a unit is not given to claims while its GPU is released.
const releasedFault = "its GPU is released"

// warnings say what of the profile's dra section does not hold here.
func (f *DRA) warnings() (warnings []string) {
	off := func(is bool, feature, means string) {
		if is {
			warnings = append(warnings, "dra: the API server has "+feature+" turned off: "+means)
		}
	}
	off(f.State.Without.Shares, "DRAConsumableCapacity", "shared devices are offered by the device plugin")
	off(f.State.Without.Taints, "DRADeviceTaints",
		"faulty devices are left out, and claims that have them are not told by a taint")
	off(f.State.Without.Counters, "DRAPartitionableDevices",
		"a claim may be given a GPU that is still held in another sharing mode, and waits for it")
	for _, problem := range f.State.Problems {
		warnings = append(warnings, "dra: "+problem)
	}
	return warnings
}

// onDemand are the GPUs whose partitions are made for claims, by UUID, and why others are not.
// Unknown says that this has not been found out yet.
type onDemand struct {
	gpus    map[string]mig.Geometry
	why     []string
	unknown bool
}

func (f *DRA) divided(gpus []sharing.GPU, p sharing.Profile) onDemand {
	found := onDemand{gpus: map[string]mig.Geometry{}}
	if !p.DRA.DynamicMIG || f.State.Without.Counters || f.Geometries == nil {
		return found
	}
	for _, gpu := range gpus {
		g, read := f.Geometries[gpu.UUID]
		if !gpu.MIGCapable {
			continue
		}
		found.unknown = found.unknown || !read
		if g.Unknown != nil {
			found.why = append(found.why, fmt.Sprintf("dra.dynamicMIG: GPU %d: %v", gpu.Index, g.Unknown))
			continue
		}
		yes, reason := dra.OnDemand(gpu, g.State, p)
		if yes {
			found.gpus[gpu.UUID] = g.State.Geometry
		} else if reason != "" {
			found.why = append(found.why, reason)
		}
	}
	return found
}

// wanted are the units of the plan that are to be offered by DRA, by UUID. An API server without
// DRAConsumableCapacity would give one claim the whole device, so shared units stay with the
// device plugin there.
func (d *Decision) wanted(f *Facts) map[string]bool {
	wanted := map[string]bool{}
	for _, r := range d.Plan.Resources {
		for _, u := range r.Units {
			_, divided := d.onDemand.gpus[u.GPU]
			offered := f.Profile.DRA.Offers(r.Name) && (u.Replicas < 2 || !f.DRA.State.Without.Shares)
			wanted[u.ID] = d.places[u.ID].Name != "" && (divided || offered)
		}
	}
	return wanted
}

// released says that the unit is kept free for an operator or for a pause.
func (d *Decision) released(unit string) bool {
	return d.Owners[unit].ReservedFor(units.Pause, units.Release)
}

// split is splitByPath where this program serves claims.
func (d *Decision) split(f *Facts) {
	view := f.DRA.View
	all := d.plannedUnits(f)
	leaving := d.leaving(f, all)
	offered := d.addOnDemand(f, all, leaving)
	if !d.onDemand.unknown {
		d.Units = all
	}
	plan := d.Plan.Withhold(f.Host.NoCDIEntry)
	byDRA := plan.Without(func(u sharing.Unit) bool {
		place := d.places[u.ID].Name
		return !all[place].ForDRA || view.Paths[place] != units.DRA ||
			f.DRA.State.Without.Taints && (all[place].Fault != "" || !u.Health.Healthy())
	})
	d.Plan = d.Plan.Without(func(u sharing.Unit) bool {
		owner := d.Owners[u.ID]
		return owner.Path != units.Plugin || !owner.Offered
	})
	if d.onDemand.unknown {
		return // What was offered before stays so for a moment: nothing is to come and go at each start.
	}
	node := f.DRA.Node
	node.GPUs = f.GPUs
	node.Profile = f.Profile
	node.Plan = byDRA
	node.Held = view.Held()
	node.OnDemand = offered
	offer, err := dra.Build(node)
	d.warn(f.DRA.warnings()...)
	d.warn(d.onDemand.why...)
	if err != nil {
		d.warn("dra: " + err.Error())
		return
	}
	d.Offer = &offer
}

// fault says why claims cannot use the unit; with an empty unit, why they cannot use the GPU.
func (d *Decision) fault(f *Facts, unit, gpu string) string {
	health := cmp.Or(d.Plan.Health[gpu], d.Plan.Health[unit])
	switch {
	case !health.Healthy():
		return health.Reason
	case unit != "":
		return f.Host.NoCDIEntry[unit]
	}
	return ""
}

// plannedUnits are the units of the plan, by place; also those that are released.
func (d *Decision) plannedUnits(f *Facts) map[string]Unit {
	all := map[string]Unit{}
	for _, r := range d.withReleased.Resources {
		for _, u := range r.Units {
			place := d.places[u.ID]
			if place.Name == "" {
				continue
			}
			unit := Unit{claims.Unit{
				Place:  place.Name,
				ID:     u.ID,
				GPU:    u.GPU,
				Memory: u.Memory,
			}, r.Name, u, d.forDRA[u.ID], place.Partition}
			if _, divided := d.onDemand.gpus[u.GPU]; unit.ForDRA && !divided {
				unit.Device = dra.DeviceName(u.GPU, place.Partition, u)
				if u.Replicas > 1 {
					unit.Shares = int64(u.Replicas)
				}
			}
			unit.Fault = d.fault(f, u.ID, "")
			if d.released(u.ID) {
				unit.Fault = releasedFault
			}
			all[place.Name] = unit
		}
	}
	return all
}

// leaving are the GPUs that the profile does not have divided on demand, and of which claims have
// parts made all the same: those that leave DRA, for what was given before, and those of which a
// claim has a part that is gone since a reboot.
func (d *Decision) leaving(f *Facts, all map[string]Unit) map[string]mig.Geometry {
	leaving := map[string]mig.Geometry{}
	wanted := map[string]bool{} // GPUs of which anything is wanted.
	for _, unit := range all {
		wanted[unit.GPU] = wanted[unit.GPU] || unit.ForDRA
	}
	gone := f.DRA.View.HeldPlaces()
	maps.DeleteFunc(gone, func(place string, _ dra.Claim) bool { return all[place].ID != "" })
	for _, gpu := range f.GPUs {
		whole, g := dra.Place(gpu.UUID, nil), f.DRA.Geometries[gpu.UUID]
		if g.Unknown == nil && len(g.State.Geometry.Profiles) > 0 && f.DRA.View.Paths[whole].ByDRA() &&
			(!wanted[gpu.UUID] || HasPart(gone, whole)) {
			leaving[gpu.UUID] = g.State.Geometry
		}
	}
	return leaving
}

// addOnDemand adds to all the partitions that could be made for claims, and returns the GPUs that
// are to be offered so. Such a GPU has one path, which begins when each of its units has left the
// device plugin. GPUs in leaving get no new claims.
func (d *Decision) addOnDemand(
	f *Facts,
	all map[string]Unit,
	leaving map[string]mig.Geometry,
) (offered map[string]mig.Geometry) {
	offered = map[string]mig.Geometry{}
	paths := f.DRA.View.Paths
	for _, gpu := range f.GPUs {
		g, wanted := d.onDemand.gpus[gpu.UUID]
		leaves := false
		if !wanted {
			g, leaves = leaving[gpu.UUID]
			if !leaves {
				continue
			}
		}
		whole := dra.Place(gpu.UUID, nil)
		unit := all[whole]
		unit.Place = whole
		unit.GPU = gpu.UUID
		unit.With = whole
		unit.ForDRA = unit.ForDRA ||
			wanted
		unit.Takes = g.Supply()
		unit.Has = g.Supply()
		fault := func(id string) string {
			if d.released(gpu.UUID) {
				return releasedFault
			}
			return d.fault(f, id, gpu.UUID)
		}
		if unit.Fault == "" {
			unit.Fault = fault("")
		}
		all[whole] = unit
		if !paths[whole].ByDRA() {
			continue
		}
		if wanted && !d.released(gpu.UUID) && paths[whole] == units.DRA {
			offered[gpu.UUID] = g
		}
		part := func(at *sharing.Partition, id string) {
			place := dra.Place(gpu.UUID, at)
			if other, there := all[place]; id == "" && there && other.ID != "" {
				return
			}
			takes := g.Takes(mig.Partition{Profile: at.Profile, Placement: at.Placement})
			all[place] = Unit{
				claims.Unit{
					Place: place,
					ID:    id,
					GPU:   gpu.UUID,
					With:  whole,
					Takes: takes,
					Has:   g.Supply(),
					Fault: fault(id),
				},
				all[place].Resource, sharing.Unit{}, wanted, at,
			}
		}
		for i := range gpu.Partitions {
			part(&gpu.Partitions[i], gpu.Partitions[i].UUID)
		}
		for _, at := range g.Placements() {
			part(&sharing.Partition{Profile: at.Profile, Placement: at.Placement}, "")
		}
	}
	for _, possible := range dra.OnDemandUnits(f.GPUs, offered, f.Profile) {
		place := dra.Place(possible.GPU.UUID, possible.Partition)
		unit := all[place]
		unit.Resource, unit.Device = possible.Resource.Name,
			dra.DeviceName(possible.GPU.UUID, possible.Partition, possible.Unit)
		if possible.Unit.Replicas > 1 {
			unit.Shares = int64(possible.Unit.Replicas)
		}
		all[place] = unit
	}
	return offered
}

// HasPart says that a part of the unit is among the places.
func HasPart[T any](places map[string]T, unit string) bool {
	for place := range places {
		if strings.HasPrefix(place, unit+"-") {
			return true
		}
	}
	return false
}
