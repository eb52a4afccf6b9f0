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

// DRA is what is known about DRA on the node.
type DRA struct {
	// Node has an offer's information about the node, except its GPUs, its plan and its claims.
	Node  dra.Node
	State dra.DriverState
	View  claims.View
	// Geometries are how GPUs could be divided, by UUID. It is nil if this program makes no
	// partitions, and lacks GPUs that have not been read yet.
	Geometries map[string]Geometry
}

// Geometry is how a GPU could be divided, or why that is not known. It stays the same while the
// program runs.
type Geometry struct {
	State   sharing.MIGState
	Unknown error
}

// Unit is a unit of the plan, or one that could be made.
type Unit struct {
	claims.Unit
	// Resource and Planned come from the plan; empty if the plan does not have the unit.
	Resource string
	Planned  sharing.Unit
	// ForDRA is true if the profile offers the unit by DRA.
	ForDRA bool
	// At is the partition; nil for a whole GPU.
	At *sharing.Partition
}

// PluginUnit returns the UUID that the device plugin must refuse if the unit is DRA's: the unit's
// own or, while the unit does not exist, its GPU's.
func (u Unit) PluginUnit() string { return cmp.Or(u.ID, u.GPU) }

// Follows reports whether the unit has the path of the GPU of which it is a part.
func (u Unit) Follows() bool { return u.Parent != "" && u.Parent != u.Name }

// ByDRA reports whether a claim may get the unit at any moment.
func (u Unit) ByDRA(paths map[string]units.Path) bool {
	return paths[u.Name].ByDRA() || paths[dra.UnitName(u.GPU, nil)].ByDRA()
}

// NoDRA is the warning about a profile with dra.resources if this program serves no claims.
const NoDRA = "dra: nothing is offered by DRA, as this Virgate was started without --dra, the chart's dra.enabled"

// releasedFault is why claims do not get a unit while its GPU is released.
const releasedFault = "its GPU is released"

// warnings returns which parts of the profile's dra section have no effect here.
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
// unknown is true while this is not known yet.
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

// wanted returns the plan's units that DRA should offer, by UUID. An API server without
// DRAConsumableCapacity would give one claim the whole device, so shared units then stay with the
// device plugin.
func (d *Decision) wanted(f *Facts) map[string]bool {
	wanted := map[string]bool{}
	for _, r := range d.Plan.Resources {
		for _, u := range r.Units {
			_, divided := d.onDemand.gpus[u.GPU]
			offered := f.Profile.DRA.Offers(r.Name) && (u.Replicas < 2 || !f.DRA.State.Without.Shares)
			wanted[u.ID] = d.unitNames[u.ID].Name != "" && (divided || offered)
		}
	}
	return wanted
}

// released reports whether the unit is kept free for an operator or a pause.
func (d *Decision) released(unit string) bool {
	return d.Owners[unit].ReservedFor(units.Pause, units.Release)
}

// split is splitByPath for a program that serves claims.
func (d *Decision) split(f *Facts) {
	view := f.DRA.View
	all := d.plannedUnits(f)
	leaving := d.leaving(f, all)
	offered := d.addOnDemand(f, all, leaving)
	if !d.onDemand.unknown {
		d.Units = all
	}
	plan := d.Plan.MarkUnavailable(f.Host.NoCDIEntry)
	byDRA := plan.Drop(func(u sharing.Unit) bool {
		unitName := d.unitNames[u.ID].Name
		return !all[unitName].ForDRA || view.Paths[unitName] != units.DRA ||
			f.DRA.State.Without.Taints && (all[unitName].Fault != "" || !u.Health.Healthy())
	})
	d.Plan = d.Plan.Drop(func(u sharing.Unit) bool {
		owner := d.Owners[u.ID]
		return owner.Path != units.Plugin || !owner.Offered
	})
	if d.onDemand.unknown {
		return // The previous offer stays for the moment, so devices do not come and go at each start.
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

// fault returns why claims cannot use the unit or, if unit is empty, the GPU.
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

// plannedUnits returns the units of the plan, by unit name, including released ones.
func (d *Decision) plannedUnits(f *Facts) map[string]Unit {
	all := map[string]Unit{}
	for _, r := range d.withReleased.Resources {
		for _, u := range r.Units {
			named := d.unitNames[u.ID]
			if named.Name == "" {
				continue
			}
			unit := Unit{claims.Unit{
				Name:   named.Name,
				ID:     u.ID,
				GPU:    u.GPU,
				Memory: u.Memory,
			}, r.Name, u, d.forDRA[u.ID], named.Partition}
			if _, divided := d.onDemand.gpus[u.GPU]; unit.ForDRA && !divided {
				unit.Device = dra.DeviceName(u.GPU, named.Partition, u)
				if u.Replicas > 1 {
					unit.Shares = int64(u.Replicas)
				}
			}
			unit.Fault = d.fault(f, u.ID, "")
			if d.released(u.ID) {
				unit.Fault = releasedFault
			}
			all[named.Name] = unit
		}
	}
	return all
}

// leaving returns the GPUs that the profile does not divide on demand, but whose parts must still
// be made for claims. Either the GPU is leaving DRA and claims were allocated parts before, or a
// claim has a part that is gone since a reboot.
func (d *Decision) leaving(f *Facts, all map[string]Unit) map[string]mig.Geometry {
	leaving := map[string]mig.Geometry{}
	wanted := map[string]bool{} // GPUs with a unit that the profile offers by DRA.
	for _, unit := range all {
		wanted[unit.GPU] = wanted[unit.GPU] || unit.ForDRA
	}
	gone := f.DRA.View.HeldUnits()
	maps.DeleteFunc(gone, func(unitName string, _ dra.Claim) bool { return all[unitName].ID != "" })
	for _, gpu := range f.GPUs {
		whole, g := dra.UnitName(gpu.UUID, nil), f.DRA.Geometries[gpu.UUID]
		if g.Unknown == nil && len(g.State.Geometry.Profiles) > 0 && f.DRA.View.Paths[whole].ByDRA() &&
			(!wanted[gpu.UUID] || HasPart(gone, whole)) {
			leaving[gpu.UUID] = g.State.Geometry
		}
	}
	return leaving
}

// addOnDemand adds the partitions that could be made for claims to all, and returns the GPUs to
// offer in this way. Such a GPU has one path, which begins when all its units have left the device
// plugin. GPUs in leaving get no new claims.
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
		whole := dra.UnitName(gpu.UUID, nil)
		unit := all[whole]
		unit.Name = whole
		unit.GPU = gpu.UUID
		unit.Parent = whole
		unit.ForDRA = unit.ForDRA ||
			wanted
		unit.Needs = g.Supply()
		unit.Supply = g.Supply()
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
			unitName := dra.UnitName(gpu.UUID, at)
			if other, there := all[unitName]; id == "" && there && other.ID != "" {
				return
			}
			takes := g.Needs(mig.Partition{Profile: at.Profile, Placement: at.Placement})
			all[unitName] = Unit{
				claims.Unit{
					Name:   unitName,
					ID:     id,
					GPU:    gpu.UUID,
					Parent: whole,
					Needs:  takes,
					Supply: g.Supply(),
					Fault:  fault(id),
				},
				all[unitName].Resource, sharing.Unit{}, wanted, at,
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
		unitName := dra.UnitName(possible.GPU.UUID, possible.Partition)
		unit := all[unitName]
		unit.Resource, unit.Device = possible.Resource.Name,
			dra.DeviceName(possible.GPU.UUID, possible.Partition, possible.Unit)
		if possible.Unit.Replicas > 1 {
			unit.Shares = int64(possible.Unit.Replicas)
		}
		all[unitName] = unit
	}
	return offered
}

// HasPart reports whether a part of the unit is among them.
func HasPart[T any](unitNames map[string]T, unit string) bool {
	for unitName := range unitNames {
		if strings.HasPrefix(unitName, unit+"-") {
			return true
		}
	}
	return false
}
