package migchange

import (
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// keepCapacity postpones changes that would leave a resource without devices although the wanted
// layouts have some of it. While none of its devices would stay, only half of the GPUs that would
// lose some of it change; the others follow when the first ones offer it again. Devices that a pod
// holds count neither way: they go when the pod has ended.
func (r *Reconciler) keepCapacity(gpus []sharing.GPU, inspections []*inspection) {
	if r.Resources == nil || !slices.ContainsFunc(inspections, func(l *inspection) bool { return len(l.Steps) > 0 }) {
		return
	}
	byGPU := map[string]*inspection{}
	for _, l := range inspections {
		if len(l.Steps) > 0 {
			byGPU[l.gpu.UUID] = l
		}
	}
	// When a change ends, it first sets its limits, then the journal, and last stops being under
	// way. They are read in the opposite order, so that none seems to be over too early.
	changing := r.changes.gpus()
	journal := r.journal.current()
	limits := r.offers.limits()
	after := map[string]sharing.Resource{}
	for _, resource := range r.Resources(afterwards(gpus, journal, byGPU)) {
		after[resource.Name] = resource
	}
	for _, resource := range r.Resources(gpus) {
		stays, kept := after[resource.Name]
		if !kept {
			continue
		}
		lasting := false
		waiting := map[string]bool{}
		underWay := map[string]bool{}
		for _, unit := range stays.Units {
			if changing[unit.GPU] {
				underWay[unit.GPU] = true // Its old units may be gone already.
			}
		}
		gpuOf := map[string]string{}
		for _, unit := range resource.Units {
			gpuOf[unit.ID] = unit.GPU
		}
		for _, d := range resource.Devices {
			gpu := gpuOf[d.Unit]
			l := byGPU[gpu]
			goes := l != nil && slices.Contains(l.Withdraw, d.Unit)
			switch offered := limits[gpu] == nil || limits[gpu][d.Unit]; {
			case !d.Healthy:
			case offered && goes:
				waiting[gpu] = true
			case offered:
				lasting = true
			case goes:
				underWay[gpu] = true
			}
		}
		if lasting {
			continue
		}
		most := max(1, (len(waiting)+len(underWay))/2) - len(underWay)
		for i, l := range inspections {
			if !waiting[l.gpu.UUID] {
				continue
			}
			if most--; most < 0 {
				inspections[i] = l.postpone("the other GPUs with its resource change first")
				byGPU[l.gpu.UUID] = inspections[i]
			}
		}
	}
}

// oneFirst postpones all changes of MIG mode but one until one has succeeded. An obstacle, such as
// another program that has the GPUs open, shows only when the mode is set, and no other GPU should
// leave service for that. The one is the first GPU with the fewest failures. So it keeps its turn
// however long its withdrawal takes, even if a GPU that fails every time has a shorter pause.
func (r *Reconciler) oneFirst(inspections []*inspection) {
	if r.executor.modeChanges.Load() {
		return
	}
	changes := func(l *inspection) bool { return l.Record != nil && l.Record.Before.MIG != l.Record.After.MIG }
	var one *inspection
	for _, l := range inspections {
		if changes(l) && (one == nil || l.failures < one.failures) {
			one = l
		}
	}
	for i, l := range inspections {
		if changes(l) && (l != one || r.changes.room() < mostChanges) {
			inspections[i] = l.postpone("another GPU changes its MIG mode first")
		}
	}
}

// postpone returns the inspection without its change: the GPU stays offered, except units that a pod holds
// and that have to go.
func (l *inspection) postpone(reason string) *inspection {
	offer := maps.Clone(l.Offer)
	for _, unit := range l.Withdraw {
		offer[unit] = true
	}
	return &inspection{
		gpu:        l.gpu,
		managedGPU: l.managedGPU,
		Decision: Decision{
			State:  nodereport.LayoutPending,
			Reason: reason,
			Offer:  offer,
		},
	}
}

// afterwards returns the GPUs as they will be, as far as resources depend on it.
func afterwards(gpus []sharing.GPU, journal Journal, inspections map[string]*inspection) []sharing.GPU {
	gpus = slices.Clone(gpus)
	for i := range gpus {
		record, known := journal.record(gpus[i].UUID)
		if l := inspections[gpus[i].UUID]; l != nil {
			record, known = *l.Record, true
		}
		if !known {
			continue
		}
		gpus[i].MIG = record.After.MIG
		gpus[i].MIGPending = record.After.MIG
		gpus[i].Partitions = nil
		for n, p := range record.After.Partitions {
			gpus[i].Partitions = append(gpus[i].Partitions, sharing.Partition{
				UUID:      gpus[i].UUID + "/" + p.Placement.String() + p.Profile.String(),
				Index:     n,
				Profile:   p.Profile,
				Placement: p.Placement,
			})
		}
	}
	return gpus
}
