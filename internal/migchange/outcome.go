package migchange

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Problem returns why nothing can be done about the GPU even if all of it is free; "" if something
// can.
func (d Decision) Problem() string {
	if d.State == nodereport.LayoutFailed || d.State == nodereport.LayoutResetRequired ||
		d.State == nodereport.LayoutBlocked && d.Change.Complete() {
		return d.Reason
	}
	return ""
}

// After returns the GPU as it will be after what can be done now. New partitions get a UUID that no
// driver uses.
func (d Decision) After(gpu sharing.GPU) sharing.GPU {
	if d.Record == nil {
		return gpu
	}
	have := slices.Clone(gpu.Partitions)
	gpu.MIG, gpu.Partitions = d.Change.MIG, nil
	for i, p := range d.Change.Result {
		next := sharing.Partition{
			UUID:      fmt.Sprintf("%s/new/%d", gpu.UUID, i),
			Profile:   p.Profile,
			Placement: p.Placement,
		}
		at := func(old sharing.Partition) bool { return old.Profile == p.Profile && old.Placement == p.Placement }
		if kept := slices.IndexFunc(have, at); kept >= 0 {
			next = have[kept]
			have = slices.Delete(have, kept, kept+1)
		}
		next.Index = i
		gpu.Partitions = append(gpu.Partitions, next)
	}
	return gpu
}

// Made returns how many partitions the steps create.
func (d Decision) Made() (count int) {
	for _, step := range d.Steps {
		if step.Action == mig.CreateCompute {
			count++
		}
	}
	return count
}

// Situation returns the GPU's situation with that configuration and those holders. It changes
// nothing, and any goroutine may call it.
func (r *Reconciler) Situation(
	ctx context.Context,
	gpu sharing.GPU,
	wanted sharing.MIGConfig,
	held []sharing.Allocation,
) (Situation, error) {
	state, err := r.Partitioner.State(ctx, gpu.UUID)
	if r.Changing(gpu.UUID) {
		err = errors.New("it is being partitioned just now")
	}
	if err != nil {
		return Situation{}, err
	}
	state.GPU.Index, state.NotPermitted = gpu.Index, state.NotPermitted || r.executor.refused.Load()
	holders := NewHolders(held, nil)
	if r.ByDRA != nil {
		holders.keep(r.ByDRA())
	}
	return Situation{
		GPU:       gpu.UUID,
		State:     state,
		Wanted:    wanted,
		Holders:   holders,
		KeptInMIG: slices.Contains(r.journal.current().Enabled, gpu.UUID),
	}, nil
}

// Unused returns the situation once the GPU is no longer used.
func (s Situation) Unused() Situation {
	s.Holders = Holders{}
	s.State.Busy = false
	s.State.ProcessesHidden = false
	s.State = s.State.WithBusy(func(string) bool { return false })
	for _, instance := range s.State.Instances {
		for i := range instance.Computes {
			instance.Computes[i].Busy = false
		}
	}
	return s
}
