package migchange

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// PartitionRequest asks for a partition, or for the whole GPU, to exist.
type PartitionRequest struct {
	// GPU is the GPU's UUID.
	GPU string
	// Partition is a GPU instance with one compute instance of its size; nil for the whole GPU,
	// with MIG mode off.
	Partition *mig.Partition
	// Keep returns GPU instances that must stay, whether they seem to be used or not.
	Keep func() []mig.Partition
}

// waitingRequest waits for Run. Run starts it, or the caller cancels it when its context ends;
// whichever sets taken first wins. The result of a started one is sent on done.
type waitingRequest struct {
	PartitionRequest
	taken *atomic.Bool
	done  chan<- error
}

var errReleased = errors.New("the GPU is released, or another program changes its MIG layout now")

var errBlocked = errors.New("another GPU is released, and this driver opens all GPUs at once")

// CreatePartition makes the requested partition; Run must be running. It destroys partitions that are in the way and
// unused; the others stay. ctx limits the time until it starts: once started, it is finished. Use
// it only for GPUs without a wanted MIG layout.
func (r *Reconciler) CreatePartition(ctx context.Context, request PartitionRequest) error {
	done, taken := make(chan error, 1), &atomic.Bool{}
	select {
	case r.requests <- waitingRequest{request, taken, done}:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		if taken.CompareAndSwap(false, true) {
			return ctx.Err()
		}
		return <-done
	}
}

// beginRequests starts the requests that can start now, and returns the others.
func (r *Reconciler) beginRequests(
	ctx context.Context,
	gpus []sharing.GPU,
	list []waitingRequest,
) (waiting []waitingRequest) {
	if len(list) > 0 {
		r.journal.load()
	}
	for _, c := range list {
		i := slices.IndexFunc(gpus, func(gpu sharing.GPU) bool { return gpu.UUID == c.GPU })
		if i < 0 {
			c.done <- errReleased
			continue
		}
		g := r.managed(gpus[i])
		if g == nil || r.changes.room() == 0 {
			waiting = append(waiting, c) // The end of a change wakes Run.
			continue
		}
		if _, begun := r.journal.current().record(c.GPU); begun {
			c.done <- errors.New("an interrupted change of the GPU's partitions is not finished")
			continue
		}
		if !c.taken.CompareAndSwap(false, true) {
			continue
		}
		if !r.changes.start(g, func() { c.done <- r.executor.makeRoom(ctx, g, c.PartitionRequest) }) {
			c.done <- errBlocked
		}
	}
	return waiting
}

func endRequests(list []waitingRequest, err error) {
	for _, c := range list {
		c.done <- err
	}
}

// makeRoom carries out a request, in the goroutine that has the GPU.
func (e *executor) makeRoom(ctx context.Context, g *managedGPU, request PartitionRequest) error {
	holders := Holders{err: errHoldersUnknown}
	if e.Holders != nil {
		holders = NewHolders(e.Holders(ctx))
	}
	if !holders.known() {
		return holders.err
	}
	state, err := e.Partitioner.State(ctx, request.GPU)
	if err != nil {
		return err
	}
	state = holders.markHeld(request.GPU, state)
	e.progress.see(g, state)
	target, err := request.target(state, holders.pods[request.GPU])
	if err != nil {
		return err
	}
	steps, err := mig.Steps(state.Enabled, state.Instances, target)
	if err != nil || len(steps) == 0 {
		return err
	}
	if state.NotPermitted {
		return fmt.Errorf("%w: %s", mig.ErrNoPermission, NotPermitted)
	}
	record := Record{
		GPU:    request.GPU,
		Before: state.Layout(),
		After:  target,
	}
	if err := e.journal.save(func(j Journal) Journal { return j.begin(record) }); err != nil {
		return err
	}
	g.inTheWay = nil
	e.progress.report(g, nodereport.LayoutPending, "a partition is being made for a claim")
	return e.finish(ctx, g, record, holders)
}

// target returns the layout with the requested partition, everything that must stay, and what fits of the rest.
// The error wraps mig.ErrInUse if something in the way must stay.
func (request PartitionRequest) target(state sharing.MIGState, wholeHolder string) (mig.PlacedLayout, error) {
	switch {
	case state.Enabled == (request.Partition != nil):
	case wholeHolder != "":
		return mig.PlacedLayout{}, fmt.Errorf("the GPU is %w as a whole by %s", mig.ErrInUse, wholeHolder)
	case state.Busy:
		return mig.PlacedLayout{}, fmt.Errorf("the GPU is %w as a whole by a process", mig.ErrInUse)
	case state.ProcessesHidden:
		return mig.PlacedLayout{}, fmt.Errorf("%w: %s", mig.ErrInUse, useUnknown)
	}
	left := state.Geometry.Supply()
	take := func(p mig.Partition) bool {
		after := maps.Clone(left)
		for name, n := range state.Geometry.Needs(p) {
			if after[name] -= n; after[name] < 0 {
				return false
			}
		}
		left = after
		return true
	}
	target := mig.PlacedLayout{MIG: request.Partition != nil}
	if request.Partition != nil {
		take(*request.Partition)
		target.Partitions = append(target.Partitions, *request.Partition)
	}
	keep := request.Keep()
	stays := func(i mig.Instance) bool {
		at := mig.Partition{Profile: i.Profile, Placement: i.Placement}
		return state.ProcessesHidden || slices.Contains(keep, at) ||
			slices.ContainsFunc(i.Computes, func(c mig.Compute) bool { return c.Busy })
	}
	for _, staying := range []bool{true, false} {
		for _, i := range state.Instances {
			at := mig.Partition{Profile: i.Profile, Placement: i.Placement}
			switch {
			case stays(i) != staying:
			case request.Partition != nil && at == *request.Partition &&
				(!staying || len(i.Computes) == 1 && i.Partition(i.Computes[0]) == at.Profile):
			case request.Partition != nil && take(at):
				for _, c := range i.Computes {
					target.Partitions = append(target.Partitions,
						mig.Partition{Profile: i.Partition(c), Placement: i.Placement})
				}
			case staying:
				return mig.PlacedLayout{}, fmt.Errorf("%s at %s is in the way and %w", i.Profile, i.Placement,
					mig.ErrInUse)
			}
		}
	}
	slices.SortFunc(target.Partitions, func(a, b mig.Partition) int { return a.Placement.Start - b.Placement.Start })
	return target, nil
}
