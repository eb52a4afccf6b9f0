package migchange

import (
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// keepCapacity puts off changes that would leave a resource without devices although
// the wanted layouts have some of it. As long as none of its devices stays, only half of
// the GPUs change that have some to lose; the others follow when the first offer it
// again. What a pod holds counts neither way: it goes when the pod has ended.
func (r *Reconciler) keepCapacity(gpus []sharing.GPU, looks []*look) {
	if r.Resources == nil || !slices.ContainsFunc(looks, func(l *look) bool { return len(l.Steps) > 0 }) {
		return
	}
	byGPU := map[string]*look{}
	for _, l := range looks {
		if len(l.Steps) > 0 {
			byGPU[l.gpu.UUID] = l
		}
	}
	// A change that ends sets its limits first, then the journal, and is under way no more in
	// the end. They are read the other way round, so that none is taken to be over too early.
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
		for i, l := range looks {
			if !waiting[l.gpu.UUID] {
				continue
			}
			if most--; most < 0 {
				looks[i] = l.putOff("the other GPUs with its resource change first")
				byGPU[l.gpu.UUID] = looks[i]
			}
		}
	}
}

// oneFirst puts off all changes of MIG mode but one until one has come true. Whatever keeps the
// driver from it, such as another program that has the GPUs open, shows only when the mode is
// set, and no other GPU is to leave service for that. The one is the first of those that have
// failed least often: it keeps its turn however long its withdrawal takes, even when a GPU that
// fails every time has a shorter pause.
func (r *Reconciler) oneFirst(looks []*look) {
	if r.executor.modeChanges.Load() {
		return
	}
	changes := func(l *look) bool { return l.Record != nil && l.Record.Before.MIG != l.Record.After.MIG }
	var one *look
	for _, l := range looks {
		if changes(l) && (one == nil || l.failures < one.failures) {
			one = l
		}
	}
	for i, l := range looks {
		if changes(l) && (l != one || r.changes.room() < mostChanges) {
			looks[i] = l.putOff("another GPU changes its MIG mode first")
		}
	}
}

// putOff has the GPU offered as it is, but for what a pod holds and has to go.
func (l *look) putOff(reason string) *look {
	offer := maps.Clone(l.Offer)
	for _, unit := range l.Withdraw {
		offer[unit] = true
	}
	return &look{
		gpu:        l.gpu,
		managedGPU: l.managedGPU,
		Decision: Decision{
			State:  nodereport.LayoutPending,
			Reason: reason,
			Offer:  offer,
		},
	}
}

// afterwards are the GPUs as they will be, as far as resources depend on that.
func afterwards(gpus []sharing.GPU, journal Journal, looks map[string]*look) []sharing.GPU {
	gpus = slices.Clone(gpus)
	for i := range gpus {
		record, known := journal.record(gpus[i].UUID)
		if l := looks[gpus[i].UUID]; l != nil {
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
