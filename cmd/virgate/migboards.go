package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// cutBoard is a board with how it is cut.
type cutBoard struct {
	gpu sharing.GPU
	cut sharing.Cut
}

// boardPlan is what a layout means for a board.
type boardPlan struct {
	cutBoard
	layout mig.Layout
	change mig.Change
	// wanted is false for a board of which nothing is asked, or which cannot have
	// it; problem then says why not.
	wanted  bool
	problem error
}

func readCuts(ctx context.Context, lib nvml.Library) ([]cutBoard, error) {
	gpus, err := nvml.Scan(lib)
	if err != nil {
		return nil, fmt.Errorf("read GPUs: %w", err)
	}
	partitioner := nvml.NewPartitioner(lib, nil)
	boards := make([]cutBoard, len(gpus))
	for i, gpu := range gpus {
		cut, err := partitioner.Cut(ctx, gpu.UUID)
		if err != nil {
			return nil, err
		}
		boards[i] = cutBoard{gpu, cut}
	}
	return boards, nil
}

// markBusy takes the named partitions for ones in use.
func markBusy(boards []cutBoard, names []string) error {
	for _, name := range names {
		selector, err := sharing.ParseSelector(name)
		if err != nil {
			return usageError{fmt.Errorf("--busy: %w", err)}
		}
		found := false
		for _, board := range boards {
			for _, partition := range board.gpu.Partitions {
				if selector.MatchPartition(board.gpu, partition) {
					found = true
					board.use(partition.UUID)
				}
			}
		}
		if !found {
			return usageError{fmt.Errorf("--busy %q names no partition of this node", name)}
		}
	}
	return nil
}

// use marks the partition as one in use.
func (b cutBoard) use(uuid string) {
	for i := range b.cut.Instances {
		for n := range b.cut.Instances[i].Computes {
			if compute := &b.cut.Instances[i].Computes[n]; compute.UUID == uuid {
				compute.Busy = true
			}
		}
	}
}

// errWholeBusy and errPending keep a board from its layout, whatever is cut.
var (
	errWholeBusy = errors.New("the GPU is in use as a whole, and MIG mode changes only when it is not")
	errPending   = errors.New("another MIG mode is pending: the GPU must be reset first")
)

// planBoards is what the layout means for each board, with a warning for what
// chooses none.
func planBoards(boards []cutBoard, wanted sharing.Repartition) (plans []boardPlan, warnings []string) {
	ids := make([]sharing.BoardID, len(boards))
	for i, board := range boards {
		ids[i] = board.cut.Board
		p := boardPlan{cutBoard: board}
		p.layout, p.wanted, p.problem = wanted.Layout(board.cut.Board, board.cut.Geometry)
		if p.wanted {
			p.change, p.problem = mig.Repartition(board.cut.Geometry, board.cut.MIG, board.cut.Instances, p.layout)
		}
		switch {
		case p.problem != nil || !p.wanted:
		case board.cut.Pending != board.cut.MIG:
			p.problem = errPending
		case p.layout.MIG && !board.cut.MIG && board.cut.Busy:
			p.problem = errWholeBusy
		}
		if wanted.WhenBusy == sharing.Refuse && !p.change.Complete() {
			p.change = mig.Change{Blocked: p.change.Blocked}
		}
		plans = append(plans, p)
	}
	return plans, wanted.Unmatched(ids)
}
