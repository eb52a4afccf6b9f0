package claims

import (
	"context"
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/dra"
)

// OnMake sets the function that makes units for claims that do not exist yet: partitions, or the
// whole of a divided GPU. There is one call at a time for each GPU, and meanwhile no claim gets
// another unit of the GPU. OnMake must be called before Load.
func (t *Table) OnMake(make func(ctx context.Context, unitName string) error) { t.make = make }

// lockGPUs waits until nothing is being made on the GPUs of which the claim gets parts.
func (t *Table) lockGPUs(ctx context.Context, c dra.Claim) (unlock func(), err error) {
	units, gpus := t.units.Load().byName, map[string]bool{}
	for _, r := range c.Results {
		if with := units[r.UnitName()].Parent; with != "" && !r.Admin {
			gpus[with] = true
		}
	}
	var locked []chan struct{}
	unlock = func() {
		for _, lock := range locked {
			<-lock
		}
	}
	for _, gpu := range slices.Sorted(maps.Keys(gpus)) { // Always in the same order, to prevent a deadlock.
		kept, _ := t.gpus.LoadOrStore(gpu, make(chan struct{}, 1))
		lock := kept.(chan struct{})
		select {
		case lock <- struct{}{}:
			locked = append(locked, lock)
		case <-ctx.Done():
			unlock()
			return nil, refuse(NotMade, "claim %s: another partition of its GPU is being made: %w", c, ctx.Err())
		}
	}
	return unlock, nil
}

// makeMissing makes the claim's units that do not exist, and waits until containers can use them.
func (t *Table) makeMissing(ctx context.Context, c dra.Claim) error {
	for _, r := range c.Results {
		for made := false; !r.Admin; {
			units := t.units.Load()
			unit, known := units.byName[r.UnitName()]
			switch {
			case !known:
				return refuse(NoDevice, "claim %s: the node has no %s now", c, r.Device)
			case unit.ID == "" && !made:
				if err := t.make(ctx, unit.Name); err != nil {
					return refuse(NotMade, "claim %s: %s is not made: %w", c, r.Device, err)
				}
				made = true
				continue // It may exist already.
			case unit.ID == "", made && unit.Fault != "":
				select {
				case <-units.changed:
					continue
				case <-ctx.Done():
					return refuse(NotMade, "claim %s: %s was made, and cannot be given yet: %s: %w", c, r.Device,
						unit.Fault, ctx.Err())
				}
			}
			break
		}
	}
	return nil
}
