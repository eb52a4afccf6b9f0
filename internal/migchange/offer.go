package migchange

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/virgate/virgate/internal/units"
)

// offered is what may be offered of the GPUs that are being changed. It is not modified once
// published.
type offered struct {
	// only are the units that may be offered, by GPU, for limited GPUs.
	only map[string]map[string]bool
	// partitionsOnly are the GPUs that are never offered as a whole, even if their MIG mode is off,
	// as it may be after a reset.
	partitionsOnly map[string]bool
	// begun are the GPUs with a change in the journal: under way, or interrupted.
	begun map[string]bool
}

// repartitioning completes "the device …".
const repartitioning = "is being repartitioned"

// offers controls what may be offered of the GPUs while they are changed, and what Allocate
// refuses. Any goroutine may call its methods; for one GPU, the goroutine that has its managedGPU.
type offers struct {
	*Options
	published atomic.Pointer[offered]

	mu sync.Mutex
	// only are the units that may be offered, by GPU, for limited GPUs.
	only map[string]map[string]bool
	// refused are the units that Allocate refuses, by GPU.
	refused map[string][]string
	journal Journal
}

func newOffers(o *Options) *offers {
	offers := &offers{
		Options: o,
		only:    map[string]map[string]bool{},
		refused: map[string][]string{},
	}
	offers.published.Store(&offered{})
	return offers
}

// Reservations returns the units that must not be offered while GPUs are being changed.
func (r *Reconciler) Reservations() []units.Reservation {
	return r.offers.published.Load().reservations()
}

func (o *offered) reservations() (list []units.Reservation) {
	for gpu, only := range o.only {
		list = append(list, units.Reservation{
			Purpose: units.MIGChange,
			GPU:     gpu,
			Begun:   o.begun[gpu],
			Text:    repartitioning,
			Only:    func(u units.Unit) bool { return !only[u.UUID] },
		})
	}
	for gpu := range o.partitionsOnly {
		list = append(list, units.Reservation{
			Purpose: units.MIGChange,
			GPU:     gpu,
			Text:    repartitioning,
			Only:    func(u units.Unit) bool { return !u.Partition() },
		})
	}
	return list
}

// limit allows only these units of the GPU to be offered. With nil it allows the whole GPU once the
// inventory is current. It reports whether that is a change.
func (o *offers) limit(g *managedGPU, only map[string]bool) bool {
	gpu := g.status.GPU
	o.mu.Lock()
	defer o.mu.Unlock()
	if only == nil {
		o.allowLocked(gpu)
	}
	before := o.only[gpu]
	if only == nil && g.stale || (only == nil) == (before == nil) && maps.Equal(before, only) {
		return false
	}
	o.only[gpu] = only
	if only == nil {
		delete(o.only, gpu)
	}
	o.publish()
	return true
}

// limitAndPlan calls limit, and Plan after a change.
func (o *offers) limitAndPlan(ctx context.Context, g *managedGPU, only map[string]bool) {
	if o.limit(g, only) {
		o.Plan(ctx)
	}
}

// limits returns the units that may be offered now, by GPU, for limited GPUs.
func (o *offers) limits() map[string]map[string]bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.only)
}

// refuse makes Allocate refuse the units that these changes withdraw.
func (o *offers) refuse(changes []*inspection) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range changes {
		o.refused[l.status.GPU] = l.Withdraw
	}
	o.setRefusals()
}

// allow ends all of Allocate's refusals for the GPU.
func (o *offers) allow(gpu string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.allowLocked(gpu)
}

func (o *offers) allowLocked(gpu string) {
	if o.refused[gpu] != nil {
		delete(o.refused, gpu)
		o.setRefusals()
	}
}

// setRefusals requires the lock, so that an older set cannot replace a newer one.
func (o *offers) setRefusals() {
	refused := map[string]string{}
	for _, list := range o.refused {
		for _, unit := range list {
			refused[unit] = repartitioning
		}
	}
	o.Devices.SetRefusals(refused)
}

// forget drops the state of the GPU. Its change in the journal still counts.
func (o *offers) forget(gpu string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.allowLocked(gpu)
	delete(o.only, gpu)
	o.publish()
}

// follow updates the offer from the new journal.
func (o *offers) follow(journal Journal) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.journal = journal
	o.publish()
}

// publish requires the lock, for the same reason as setRefusals.
func (o *offers) publish() {
	next := offered{
		only:           maps.Clone(o.only),
		partitionsOnly: map[string]bool{},
		begun:          map[string]bool{},
	}
	for _, gpu := range o.journal.Enabled {
		next.partitionsOnly[gpu] = true
	}
	for _, change := range o.journal.Underway {
		next.begun[change.GPU] = true
		if next.only[change.GPU] == nil {
			// It is not known yet which of its units are in both layouts.
			next.only[change.GPU] = map[string]bool{}
		}
	}
	o.published.Store(&next)
}
