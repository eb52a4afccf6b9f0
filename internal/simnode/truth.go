package simnode

import (
	"cmp"
	"slices"
)

// Board is what a board really is, whatever the library answers.
type Board struct {
	UUID string
	// Name is NVML's product name.
	Name string
	// Index is the one in the driver's enumeration, -1 for a board that was
	// removed.
	Index int
	// MIG is the mode in force.
	MIG bool
	// Lost says that the board has fallen off the bus.
	Lost bool
	// Partitions are in the order of their MIG device indexes; nil for none.
	Partitions []Partition
}

// Partition is a MIG device of a Board.
type Partition struct {
	UUID string
	// Profile is written as nvidia-smi does: "1g.5gb".
	Profile string
	// GPUInstance and ComputeInstance are its IDs on the board.
	GPUInstance, ComputeInstance int
}

// Boards are all boards, also those that were removed, in the order in which
// they were made. The result shares no memory with the node.
func (n *Node) Boards() []Board {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Concat(n.boards, n.pulled)
	slices.SortFunc(all, func(a, b *board) int { return cmp.Compare(a.ordinal, b.ordinal) })
	boards := make([]Board, len(all))
	for i, b := range all {
		boards[i] = Board{
			UUID: b.uuid, Name: b.name, Index: slices.Index(n.boards, b), MIG: b.mig, Lost: b.lost,
			Partitions: b.partitions(),
		}
	}
	return boards
}

func (b *board) partitions() []Partition {
	var computes []*computeInstance
	for _, i := range b.instances {
		computes = append(computes, i.computes...)
	}
	slices.SortFunc(computes, func(a, b *computeInstance) int { return cmp.Compare(a.index, b.index) })
	var partitions []Partition
	for _, c := range computes {
		partitions = append(partitions, Partition{
			UUID: c.uuid, Profile: c.profile().String(), GPUInstance: c.instance.id, ComputeInstance: c.id,
		})
	}
	return partitions
}
