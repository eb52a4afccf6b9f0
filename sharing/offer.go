package sharing

import (
	"fmt"

	"github.com/virgate/virgate/mig"
)

// candidate is a unit on its way through the steps of a plan.
type candidate struct {
	board *GPU
	// partition is nil for a whole board.
	partition *Partition
	// name is the resource before a share renames it.
	name string
	// share is the index of the share that took the unit; exclusive if none.
	share int
}

// exclusive is the share of a unit that no entry of the profile took.
const exclusive = -1

// matches says that the selector names the unit.
func (c candidate) matches(s Selector) bool {
	if c.partition == nil {
		return s.MatchGPU(*c.board)
	}
	return s.MatchPartition(*c.board, *c.partition)
}

// offer returns the units that the MIG strategy leaves, by board and partition.
func offer(boards []GPU, strategy MIGStrategy, notes *warnings) []candidate {
	var (
		units []candidate
		// A container under "single" must find one kind of hardware behind the
		// name, so one board with MIG rules out the whole ones, even while it
		// has no partitions: it may be about to get some.
		onlyPartitions = strategy == MIGSingle && anyMIG(boards)
		kind           = prevailing(boards)
	)
	for i := range boards {
		board := &boards[i]
		switch {
		case !board.MIG && onlyPartitions:
			notes.addf("%s: not offered: MIG is off, while MIG strategy %q offers partitions only on this node",
				describe(board), strategy)
		case !board.MIG:
			units = append(units, candidate{board: board, share: exclusive})
		case strategy != MIGSingle && strategy != MIGMixed:
			notes.addf("%s: not offered: MIG is enabled, and MIG strategy %q offers whole GPUs only",
				describe(board), MIGNone)
		case len(board.Partitions) == 0:
			notes.addf("%s: not offered: MIG is enabled, and there are no partitions", describe(board))
		default:
			units = append(units, partitions(board, strategy == MIGSingle, kind, notes)...)
		}
	}
	return units
}

// partitions returns the board's partitions, or only those of one kind, and
// mentions the others. A partition whose profile is unknown has no name to be
// offered under.
func partitions(board *GPU, oneKind bool, kind mig.Profile, notes *warnings) []candidate {
	var units []candidate
	others := make(map[mig.Profile]int)
	for j := range board.Partitions {
		partition := &board.Partitions[j]
		switch {
		case partition.Profile.IsZero():
			notes.addf("%s: partition %d (%s) not offered: its MIG profile is unknown",
				describe(board), partition.Index, partition.UUID)
		case oneKind && partition.Profile != kind:
			others[partition.Profile]++
		default:
			units = append(units, candidate{board: board, partition: partition, share: exclusive})
		}
	}
	for profile, count := range others {
		notes.addf("%s: %d × %s not offered: MIG strategy %q offers one kind of partition, on this node %s",
			describe(board), count, profile, MIGSingle, kind)
	}
	return units
}

// prevailing returns the MIG profile with the most partitions, the smaller one
// of two that have as many; the zero profile when there are no partitions.
// Sick partitions count: a fault must not change what a node advertises.
func prevailing(boards []GPU) mig.Profile {
	counts := make(map[mig.Profile]int)
	for _, board := range boards {
		if !board.MIG {
			continue
		}
		for _, partition := range board.Partitions {
			counts[partition.Profile]++
		}
	}
	delete(counts, mig.Profile{})
	var best mig.Profile
	for profile, count := range counts {
		if count > counts[best] || count == counts[best] && mig.Compare(profile, best) < 0 {
			best = profile
		}
	}
	return best
}

func anyMIG(boards []GPU) bool {
	for _, board := range boards {
		if board.MIG {
			return true
		}
	}
	return false
}

// describe names a board in a warning.
func describe(g *GPU) string { return fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID) }
