package drapath

import (
	"context"
	"maps"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// readGeometries reads how GPUs can be divided, where that is not known yet. It reads GPUs that the
// profile divides on demand, and GPUs of which claims have parts or may have been allocated some.
// Only Run calls it, because a hanging driver must not delay a plan.
func (p *Paths) readGeometries(ctx context.Context, inputs Inputs) {
	if p.deps.Partitioner == nil || inputs.Profile == nil {
		return
	}
	view := p.Claims.View()
	held := view.HeldUnits()
	divided := func(gpu sharing.GPU) bool {
		whole := dra.UnitName(gpu.UUID, nil)
		return inputs.Profile.DRA.DynamicMIG || view.Paths[whole] == units.LeavingDRA || decide.HasPart(held, whole)
	}
	known := map[string]decide.Geometry{}
	if last := p.geometries.Load(); last != nil {
		known = maps.Clone(*last)
	}
	news := false
	for _, gpu := range inputs.GPUs {
		if g, read := known[gpu.UUID]; !gpu.MIGCapable || !divided(gpu) || read && g.Unknown == nil {
			continue
		}
		before := known[gpu.UUID].Unknown
		state, err := p.deps.Partitioner.State(ctx, gpu.UUID)
		known[gpu.UUID] = decide.Geometry{State: state, Unknown: err}
		news = news || err == nil || before == nil || before.Error() != err.Error()
	}
	if news {
		p.geometries.Store(&known)
		p.deps.Replan()
	}
}

// withoutPlugin reports whether the device plugin has no unit of the GPU other than the GPU itself.
func withoutPlugin(all map[string]decide.Unit, paths map[string]units.Path, gpu string) bool {
	for unitName, unit := range all {
		if unit.GPU == gpu && unit.Parent == "" && !paths[unitName].ByDRA() {
			return false
		}
	}
	return true
}

// makeUnit makes a partition for a claim, or a whole GPU.
func (p *Paths) makeUnit(ctx context.Context, unitName string) error {
	all := p.Units()
	unit := all[unitName]
	room := migchange.PartitionRequest{GPU: unit.GPU, Keep: func() []mig.Partition { return p.claimed(unit.Parent) }}
	if unit.At != nil {
		room.Partition = &mig.Partition{Profile: unit.At.Profile, Placement: unit.At.Placement}
	}
	return p.deps.MIG.CreatePartition(ctx, room)
}

// claimed returns the GPU instances that claims have of the GPU with that name.
func (p *Paths) claimed(gpu string) (instances []mig.Partition) {
	all := p.Units()
	for unitName := range p.Claims.View().HeldUnits() {
		if unit := all[unitName]; unit.Parent == gpu && unit.At != nil {
			instances = append(instances, mig.Partition{
				Profile:   unit.At.Profile.Instance(),
				Placement: unit.At.Placement,
			})
		}
	}
	return instances
}
