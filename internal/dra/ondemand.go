package dra

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// OnDemand reports whether partitions of the GPU are made for claims and, if the profile asks for
// that in vain, why not. A GPU that a MIG layout chooses gets the layout instead.
func OnDemand(gpu sharing.GPU, state sharing.MIGState, p sharing.Profile) (yes bool, why string) {
	if !p.DRA.DynamicMIG || !p.MIG.Manage || len(state.Geometry.Profiles) == 0 {
		return false, ""
	}
	if _, wanted, err := p.MIG.Layout(state.GPU, state.Geometry); wanted || err != nil {
		return false, ""
	}
	switch {
	case p.MIGStrategy != sharing.MIGMixed:
		return false, fmt.Sprintf("dra.dynamicMIG: has no effect with MIG strategy %q, it takes %s", p.MIGStrategy,
			sharing.MIGMixed)
	case !gpu.MIG && modeNeedsReset(gpu):
		return false,
			fmt.Sprintf("dra.dynamicMIG: GPU %d is offered whole: its MIG mode is off, and changing that takes a reset",
				gpu.Index)
	}
	return true, ""
}

// modeNeedsReset reports whether the GPU must be reset to change its MIG mode: Ampere needs a
// reset, later architectures do not (NVIDIA MIG User Guide, "Enable MIG Mode").
func modeNeedsReset(gpu sharing.GPU) bool {
	return gpu.Architecture == "ampere" || gpu.Architecture == ""
}

// onDemand adds the devices of GPUs whose partitions are made for claims: every placement of every
// offered profile, and the whole GPU if its MIG mode can change.
//
// Partitions come in the order of GPUs, followed by whole GPUs in reverse order. So partitions
// gather on the first GPUs, and the last GPUs stay whole.
func (b *builder) onDemand() {
	for uuid, geometry := range b.OnDemand {
		b.supplies[uuid] = geometry.Supply()
	}
	divided, whole := asTheyCouldBe(b.GPUs, b.OnDemand)
	b.possible(divided)
	slices.Reverse(whole)
	for _, gpu := range whole {
		b.possible([]sharing.GPU{gpu})
	}
}

// asTheyCouldBe returns the GPUs that are divided on demand, with all their possible partitions,
// and those of them that can be allocated whole.
func asTheyCouldBe(gpus []sharing.GPU, geometries map[string]mig.Geometry) (divided, whole []sharing.GPU) {
	for _, gpu := range gpus {
		geometry, onDemand := geometries[gpu.UUID]
		if !onDemand {
			continue
		}
		parts := gpu
		parts.MIG, parts.Partitions = true, nil
		for i, p := range geometry.Placements() {
			at := placed(gpu, geometry, p)
			at.Index = firstPlace + i
			parts.Partitions = append(parts.Partitions, *at)
		}
		divided = append(divided, parts)
		if !modeNeedsReset(gpu) {
			gpu.MIG, gpu.Partitions = false, nil
			whole = append(whole, gpu)
		}
	}
	return divided, whole
}

// OnDemandUnits returns the units that are offered on GPUs divided on demand, in no particular
// order. The UUIDs of their partitions are artificial: no driver uses them.
func OnDemandUnits(gpus []sharing.GPU, geometries map[string]mig.Geometry, profile sharing.Profile) []Possible {
	divided, whole := asTheyCouldBe(gpus, geometries)
	return append(possible(divided, profile), possible(whole, profile)...)
}

// firstPlace is beyond the MIG device indexes of any GPU, because no selector of a profile refers
// to a partition that does not exist.
const firstPlace = 1000

// possible adds what a plan would offer of the GPUs with all possible partitions.
func (b *builder) possible(gpus []sharing.GPU) {
	for _, p := range possible(gpus, b.Profile) {
		if p.Partition != nil {
			// It has no UUID until it exists, and another one each time it is made.
			at := *p.Partition
			at.UUID = ""
			p.Partition = &at
		}
		p.Unit.Health = cmp.Or(b.Plan.Health[p.GPU.UUID], p.Unit.Health)
		d := b.device(p.GPU, p.Partition, p.Resource, p.Unit)
		d.takes = takes(b.OnDemand[p.GPU.UUID], p.Partition)
		b.add(d)
	}
}

// Possible is a unit that a GPU could have, whether it exists now or not, and the resource as which
// it would be offered. Partition is nil for the whole GPU.
type Possible struct {
	GPU       sharing.GPU
	Partition *sharing.Partition
	Resource  sharing.Resource
	Unit      sharing.Unit
}

// possible returns the possible units of the GPUs that are offered. It excludes MPS shares, because
// there is no daemon before the partition exists.
func possible(gpus []sharing.GPU, profile sharing.Profile) (list []Possible) {
	planned := map[string]Possible{}
	for _, r := range sharing.NewPlan(gpus, profile).Resources {
		for _, unit := range r.Units {
			planned[unit.ID] = Possible{Resource: r, Unit: unit}
		}
	}
	add := func(gpu sharing.GPU, id string, at *sharing.Partition) {
		if p, ok := planned[id]; ok && profile.DRA.Offers(p.Resource.Name) && p.Unit.MPS.Shares == 0 {
			p.GPU, p.Partition = gpu, at
			list = append(list, p)
		}
	}
	for _, gpu := range gpus {
		add(gpu, gpu.UUID, nil)
		for i := range gpu.Partitions {
			add(gpu, gpu.Partitions[i].UUID, &gpu.Partitions[i])
		}
	}
	return list
}

// placed returns the partition that the GPU would have at this placement, with the health of the
// existing one. Its UUID is artificial: no driver uses it.
func placed(gpu sharing.GPU, geometry mig.Geometry, p mig.Partition) *sharing.Partition {
	at := &sharing.Partition{
		UUID:      gpu.UUID + "/" + p.Profile.String() + "/" + p.Placement.String(),
		Profile:   p.Profile,
		Placement: p.Placement,
		Memory:    geometry.InstanceMemory(p.Profile) << 20,
	}
	has := geometry.Engines[p.Profile]
	at.Attributes = sharing.PartitionAttributes{
		Multiprocessors: has.Multiprocessors,
		CopyEngines:     has.CopyEngines,
		Decoders:        has.Decoders,
		Encoders:        has.Encoders,
		JPEGEngines:     has.JPEGEngines,
		OFAEngines:      has.OFAEngines,
	}
	for _, have := range gpu.Partitions {
		if have.Profile == p.Profile && have.Placement == p.Placement {
			at.Health = have.Health
		}
	}
	return at
}
