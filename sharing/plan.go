package sharing

import (
	"cmp"
	"fmt"
	"slices"
)

// NewPlan decides what a node with these boards advertises under the profile.
// The steps, each on the result of the one before:
//
//  1. exclude: drop the boards and partitions that Profile.Exclude names
//  2. offer: by MIG strategy, as whole boards, as partitions or not at all
//  3. name: the resource each unit belongs to
//  4. select: give each unit to the first share that selects it
//  5. replicate and rename: one resource per final name, with its devices
//  6. copy each unit's health to its devices
//
// Health comes last so that it never changes what is advertised, only whether
// it is healthy. Planning cannot fail: what the profile asks for and the node
// does not have, and what the node has and cannot offer, is a warning. The
// order of boards and partitions does not matter, and gpus is not modified.
func NewPlan(gpus []GPU, p Profile) Plan {
	boards := ordered(gpus)
	plan := Plan{Faults: faults(boards), Grants: p.Grants}

	var notes warnings
	boards = exclude(boards, p.Exclude, &notes)
	units := offer(boards, p.MIGStrategy, &notes)
	nameUnits(units, p)
	selectShares(units, p.Shares, &notes)
	plan.Resources = resources(units, p, &notes)
	p.Grants.warn(plan.Resources, &notes)
	plan.Warnings = notes.sorted()
	return plan
}

// ordered returns a deep enough copy of the boards, sorted by index, with
// sorted partitions.
func ordered(gpus []GPU) []GPU {
	boards := slices.Clone(gpus)
	slices.SortFunc(boards, func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range boards {
		partitions := slices.Clone(boards[i].Partitions)
		slices.SortFunc(partitions, func(a, b Partition) int {
			return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
		})
		boards[i].Partitions = partitions
	}
	return boards
}

// faults says of every board and partition why it must not be used.
func faults(boards []GPU) map[string]string {
	byUnit := make(map[string]string)
	for _, board := range boards {
		byUnit[board.UUID] = board.Fault
		for _, partition := range board.Partitions {
			byUnit[partition.UUID] = cmp.Or(board.Fault, partition.Fault)
		}
	}
	return byUnit
}

// warnings collects what a plan has to say beside its resources.
type warnings []string

func (w *warnings) addf(format string, args ...any) {
	*w = append(*w, fmt.Sprintf(format, args...))
}

func (w warnings) sorted() []string {
	slices.Sort(w)
	return slices.Compact(w)
}
