package migchange

import (
	"context"
	"maps"
	"reflect"
	"slices"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

// offered is what may be offered of the GPUs that are being changed. It is not
// modified after it was published.
type offered struct {
	// only are the units by GPU, for GPUs that are limited.
	only map[string]map[string]bool
	// partitionsOnly are the GPUs that are never offered as a whole, also when their
	// MIG mode was found off: after a reset it may be.
	partitionsOnly map[string]bool
	// begun are the GPUs of which the journal has a change: under way, or interrupted.
	begun map[string]bool
}

// repartitioning completes "the device …".
const repartitioning = "is being repartitioned"

// Reservations are the units that must not be offered while GPUs are being changed.
func (r *Reconciler) Reservations() (list []units.Reservation) {
	now := r.offered.Load()
	for gpu, only := range now.only {
		list = append(list, units.Reservation{
			Purpose: units.MIGChange, GPU: gpu, Begun: now.begun[gpu], Text: repartitioning, Only: func(u units.Unit) bool { return !only[u.UUID] },
		})
	}
	for gpu := range now.partitionsOnly {
		list = append(list, units.Reservation{
			Purpose: units.MIGChange, GPU: gpu, Text: repartitioning, Only: func(u units.Unit) bool { return !u.Partition() },
		})
	}
	return list
}

// setLimit lets only those units of the GPU be offered, or with nil the whole GPU once
// the inventory shows it as it is. It says whether that is news.
func (r *Reconciler) setLimit(g *managedGPU, only map[string]bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if only == nil {
		r.allow(g)
	}
	if only == nil && g.stale || (only == nil) == (g.only == nil) && maps.Equal(g.only, only) {
		return false
	}
	g.only = only
	r.limit()
	return true
}

// offer is setLimit with a plan.
func (r *Reconciler) offer(ctx context.Context, g *managedGPU, only map[string]bool) {
	if r.setLimit(g, only) {
		r.Plan(ctx)
	}
}

func (r *Reconciler) allowAllocation(g *managedGPU) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.allow(g)
}

// allow is allowAllocation for who has the lock.
func (r *Reconciler) allow(g *managedGPU) {
	if g.refused != nil {
		g.refused = nil
		r.setRefusals()
	}
}

// setRefusals has Allocate refuse the units of the GPUs that are being changed. It must be called
// with the lock.
func (r *Reconciler) setRefusals() {
	refused := map[string]string{}
	for _, g := range r.gpus {
		for _, unit := range g.refused {
			refused[unit] = repartitioning
		}
	}
	r.Devices.SetRefusals(refused)
}

// limit publishes what may be offered. It must be called with the lock.
func (r *Reconciler) limit() {
	next := offered{only: map[string]map[string]bool{}, partitionsOnly: map[string]bool{}, begun: map[string]bool{}}
	for gpu, g := range r.gpus {
		if g.only != nil {
			next.only[gpu] = g.only
		}
	}
	for _, gpu := range r.journal.Enabled {
		next.partitionsOnly[gpu] = true
	}
	for _, change := range r.journal.Underway {
		next.begun[change.GPU] = true
		if next.only[change.GPU] == nil {
			// Nobody has looked yet at what of it is in both layouts.
			next.only[change.GPU] = map[string]bool{}
		}
	}
	r.offered.Store(&next)
}

// Status says of the GPUs that Virgate partitions how far they are, by index. The
// list must not be modified.
func (r *Reconciler) Status() []nodereport.GPULayout {
	return *r.status.Load()
}

// Results count what became of changes that had begun.
func (r *Reconciler) Results() (applied, undone, failed uint64) {
	return r.applied.Load(), r.undone.Load(), r.failed.Load()
}

func (r *Reconciler) publish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []nodereport.GPULayout{}
	waiting := false
	for _, g := range r.gpus {
		if g.status.State != "" {
			list = append(list, g.status)
			waiting = waiting || g.status.State != nodereport.LayoutApplied
		}
	}
	r.waiting.Store(waiting)
	slices.SortFunc(list, func(a, b nodereport.GPULayout) int { return a.Index - b.Index })
	if !reflect.DeepEqual(r.Status(), list) {
		r.status.Store(&list)
		r.Changed()
	}
}

// Changing says that a change of the GPU is being made.
func (r *Reconciler) Changing(gpu string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.gpus[gpu]
	return g != nil && g.changing
}

type stateReason struct {
	state  nodereport.LayoutState
	reason string
}

// report publishes how far the GPU is, and logs it when that is news.
func (r *Reconciler) report(g *managedGPU, state nodereport.LayoutState, reason string) {
	if g.status.State == state && g.status.Reason == reason {
		return
	}
	r.mu.Lock()
	g.status.State, g.status.Reason = state, reason
	r.mu.Unlock()
	r.publish()
	log := r.Logger.With("gpu", g.status.GPU, "layout", g.status.Wanted, "state", state)
	// Each try has its pending states; that it ended like the last is no news.
	news := g.logged != (stateReason{state, reason})
	switch {
	case state == "":
		return
	case state == nodereport.LayoutPending:
		log.Info("MIG layout", "reason", reason)
		return
	case !news:
	case state == nodereport.LayoutBlocked:
		log.Warn("MIG layout waits", "reason", reason)
	case state == nodereport.LayoutApplied:
		log.Info("MIG layout reached")
	default:
		log.Error("MIG layout not reached", "reason", reason)
	}
	g.logged = stateReason{state, reason}
}

func (r *Reconciler) see(g *managedGPU, state sharing.MIGState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g.status.MIG, g.status.Slots, g.status.Instances = state.Enabled, state.Geometry.Slots, state.Instances
	g.status.Resettable = !state.NeedsReboot
	g.status.Unreachable = state.Geometry.Unreachable(state.Instances)
}

// isShownBy says that the inventory has the GPU as it was left.
func (g *managedGPU) isShownBy(gpu sharing.GPU) bool {
	shown := map[string]bool{}
	for _, p := range gpu.Partitions {
		shown[p.UUID] = true
	}
	return gpu.MIG == g.status.MIG && maps.Equal(shown, g.left)
}
