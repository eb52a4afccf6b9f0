package agent

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// releasedFault is why a unit is not given to claims while its GPU is released.
const releasedFault = "its GPU is released"

// geometry is how a GPU could be divided, or why that is not known. It is that of the GPU for as
// long as the program runs.
type geometry struct {
	state   sharing.MIGState
	unknown error
}

// readGeometries reads how the GPUs could be divided that are to be, or of which claims have parts
// or may have been given some, where that is not known yet. Only draLoop calls it: a driver that
// hangs must not delay a plan.
func (a *agent) readGeometries(ctx context.Context, s *state) {
	if a.Partitioner == nil || s.profile == nil {
		return
	}
	view := a.DRA.Claims.View()
	held := view.HeldPlaces()
	divided := func(gpu sharing.GPU) bool {
		whole := dra.Place(gpu.UUID, nil)
		return s.profile.Profile.DRA.DynamicMIG || view.Paths[whole] == claims.LeavingDRA || hasPart(held, whole)
	}
	known := map[string]geometry{}
	if last := a.dra.geometries.Load(); last != nil {
		known = maps.Clone(*last)
	}
	news := false
	for _, gpu := range s.gpus {
		if g, read := known[gpu.UUID]; !gpu.MIGCapable || !divided(gpu) || read && g.unknown == nil {
			continue
		}
		before := known[gpu.UUID].unknown
		state, err := a.Partitioner.State(ctx, gpu.UUID)
		known[gpu.UUID] = geometry{state, err}
		news = news || !sameError(before, err)
	}
	if news {
		a.dra.geometries.Store(&known)
		a.requestPlan()
	}
}

// onDemandGPUs are those whose partitions are made for claims, and why others are not. Known
// false says that this has not been found out yet.
func (a *agent) onDemandGPUs(gpus []sharing.GPU, p sharing.Profile, without dra.Features) (onDemand map[string]mig.Geometry, why []string, known bool) {
	onDemand = map[string]mig.Geometry{}
	if !p.DRA.DynamicMIG || without.Counters || a.Partitioner == nil {
		return onDemand, nil, true
	}
	geometries := a.dra.geometries.Load()
	if geometries == nil {
		geometries = &map[string]geometry{}
	}
	known = true
	for _, gpu := range gpus {
		g, read := (*geometries)[gpu.UUID]
		if !gpu.MIGCapable {
			continue
		}
		known = known && read
		if g.unknown != nil {
			why = append(why, fmt.Sprintf("dra.dynamicMIG: GPU %d: %v", gpu.Index, g.unknown))
			continue
		}
		yes, reason := dra.OnDemand(gpu, g.state, p)
		if yes {
			onDemand[gpu.UUID] = g.state.Geometry
		} else if reason != "" {
			why = append(why, reason)
		}
	}
	return onDemand, why, known
}

// leavesOnDemand are the GPUs that the profile does not have divided on demand, and of which claims
// have parts made all the same: those that leave DRA, for what was given before, and those of which
// a claim has a part that is gone since a reboot.
func (a *agent) leavesOnDemand(units map[string]draUnit, gpus []sharing.GPU, view claims.View) map[string]mig.Geometry {
	leaving := map[string]mig.Geometry{}
	geometries := a.dra.geometries.Load()
	if geometries == nil {
		return leaving
	}
	wanted := map[string]bool{} // GPUs of which anything is wanted.
	for _, unit := range units {
		wanted[unit.GPU] = wanted[unit.GPU] || unit.wanted
	}
	gone := view.HeldPlaces()
	maps.DeleteFunc(gone, func(place string, _ dra.Claim) bool { return units[place].ID != "" })
	for _, gpu := range gpus {
		whole, g := dra.Place(gpu.UUID, nil), (*geometries)[gpu.UUID]
		if g.unknown == nil && len(g.state.Geometry.Profiles) > 0 && view.Paths[whole].Offered() && (!wanted[gpu.UUID] || hasPart(gone, whole)) {
			leaving[gpu.UUID] = g.state.Geometry
		}
	}
	return leaving
}

// addOnDemand adds to units what the GPUs could have whose partitions are made for claims, and
// returns those of them that are to be offered so. Such a GPU has one path, which begins when
// each of its units has left the device plugin. Nothing more is offered of those of leaving.
func (a *agent) addOnDemand(
	units map[string]draUnit, gpus []sharing.GPU, onDemand, leaving map[string]mig.Geometry, p sharing.Profile, paths map[string]claims.Path, fault func(unit, gpu string) string,
) (offered map[string]mig.Geometry) {
	offered = map[string]mig.Geometry{}
	released, _ := a.released()
	for _, gpu := range gpus {
		g, wanted := onDemand[gpu.UUID]
		leaves := false
		if !wanted {
			if g, leaves = leaving[gpu.UUID]; !leaves {
				continue
			}
		}
		whole := dra.Place(gpu.UUID, nil)
		unit := units[whole]
		unit.Place, unit.GPU, unit.With, unit.wanted, unit.Takes, unit.Has = whole, gpu.UUID, whole, unit.wanted || wanted, g.Supply(), g.Supply()
		if unit.Fault == "" {
			unit.Fault = fault("", gpu.UUID)
		}
		units[whole] = unit
		if !paths[whole].Offered() {
			continue
		}
		if wanted && !released[gpu.UUID] && paths[whole] == claims.DRA {
			offered[gpu.UUID] = g
		}
		part := func(at *sharing.Partition, id string) {
			place := dra.Place(gpu.UUID, at)
			if other, there := units[place]; id == "" && there && other.ID != "" {
				return
			}
			takes := g.Takes(mig.Partition{Profile: at.Profile, Placement: at.Placement})
			units[place] = draUnit{
				claims.Unit{Place: place, ID: id, GPU: gpu.UUID, With: whole, Takes: takes, Has: g.Supply(), Fault: fault(id, gpu.UUID)},
				units[place].resource, sharing.Unit{}, wanted, at,
			}
		}
		for i := range gpu.Partitions {
			part(&gpu.Partitions[i], gpu.Partitions[i].UUID)
		}
		for _, at := range g.Placements() {
			part(&sharing.Partition{Profile: at.Profile, Placement: at.Placement}, "")
		}
	}
	for _, possible := range dra.OnDemandUnits(gpus, offered, p) {
		place := dra.Place(possible.GPU.UUID, possible.Partition)
		unit := units[place]
		unit.resource, unit.Device = possible.Resource.Name, dra.DeviceName(possible.GPU.UUID, possible.Partition, possible.Unit)
		if possible.Unit.Replicas > 1 {
			unit.Shares = int64(possible.Unit.Replicas)
		}
		units[place] = unit
	}
	return offered
}

// withoutPlugin says that nothing of the GPU is the device plugin's but the GPU itself.
func withoutPlugin(units map[string]draUnit, paths map[string]claims.Path, gpu string) bool {
	for place, unit := range units {
		if unit.GPU == gpu && unit.With == "" && !paths[place].Offered() {
			return false
		}
	}
	return true
}

// byDRA says that a claim may get the unit at any moment.
func (u draUnit) byDRA(paths map[string]claims.Path) bool {
	return paths[u.Place].Offered() || paths[dra.Place(u.GPU, nil)].Offered()
}

// hasPart says that a part of the unit is among the places.
func hasPart[T any](places map[string]T, unit string) bool {
	for place := range places {
		if strings.HasPrefix(place, unit+"-") {
			return true
		}
	}
	return false
}

// makeUnit makes a partition that a claim gets, or a whole GPU.
func (a *agent) makeUnit(ctx context.Context, place string) error {
	units := *a.dra.units.Load()
	unit := units[place]
	room := migchange.Room{GPU: unit.GPU, Keep: func() []mig.Partition { return a.claimed(unit.With) }}
	if unit.at != nil {
		room.Partition = &mig.Partition{Profile: unit.at.Profile, Placement: unit.at.Placement}
	}
	return a.mig.Cut(ctx, room)
}

// claimed are the GPU instances that claims have of the GPU at that place.
func (a *agent) claimed(gpu string) (instances []mig.Partition) {
	units := *a.dra.units.Load()
	for place := range a.DRA.Claims.View().HeldPlaces() {
		if unit := units[place]; unit.With == gpu && unit.at != nil {
			instances = append(instances, mig.Partition{Profile: unit.at.Profile.Instance(), Placement: unit.at.Placement})
		}
	}
	return instances
}
