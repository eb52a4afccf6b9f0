package sharing

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
)

// Repartition says which partitions Virgate makes of the node's boards. The
// zero Repartition makes none and uses what is there.
type Repartition struct {
	// Manage allows Virgate to make and destroy partitions and to change MIG
	// modes. Without it nothing is ever cut.
	Manage bool
	// Name is the wanted layout's; empty for none, which leaves every board as it
	// is.
	Name string
	// Blocks are the layout; none where Name is built in, see mig.NamedLayout.
	Blocks []LayoutBlock
	// WhenBusy says what happens to a board with partitions in use that the layout
	// has no place for.
	WhenBusy WhenBusy
}

// WhenBusy is one of the constants below.
type WhenBusy string

const (
	// Wait does what can be done and the rest when the partitions are free.
	Wait WhenBusy = "wait"
	// Refuse leaves the board as it is until the whole layout can be had.
	Refuse WhenBusy = "refuse"
)

// LayoutBlock says how the boards that it chooses are to be cut.
type LayoutBlock struct {
	// Filters are those of which a board must pass one; none for any board.
	Filters []BoardFilter
	// All chooses every board that passes; else Indexes has the driver's indexes
	// of the chosen ones, in the order of the document, and is not empty.
	All     bool
	Indexes []int
	// Layout is what they are to be cut into, smaller profiles first.
	Layout mig.Layout
}

// Layout is what the board should be cut into. Of several blocks that choose
// it the last counts, as mig-parted applies them in order (mig-parted v0.15,
// pkg/mig/config). wanted is false where nothing is asked of the board: without
// Manage or a name, with no block that chooses it, and for a board without MIG
// where all boards are chosen or MIG is to be off.
//
// geometry is what the board can be cut into, the zero one for a board without
// MIG. The error says that the board cannot have what is asked of it, and names
// the layout, but not the board; nothing is wanted then.
func (r Repartition) Layout(board BoardID, geometry mig.Geometry) (layout mig.Layout, wanted bool, err error) {
	layout, wanted, err = r.layout(board, geometry)
	if err == nil && wanted {
		_, err = geometry.Place(layout, nil)
	}
	if err != nil && r.Blocks != nil {
		err = fmt.Errorf("MIG layout %q: %w", r.Name, err)
	}
	if err != nil {
		return mig.Layout{}, false, err
	}
	return layout, wanted, nil
}

func (r Repartition) layout(board BoardID, geometry mig.Geometry) (mig.Layout, bool, error) {
	capable := len(geometry.Shapes) > 0
	if !r.Manage || r.Name == "" {
		return mig.Layout{}, false, nil
	}
	if r.Blocks == nil {
		if !capable {
			return mig.Layout{}, false, nil
		}
		layout, err := mig.NamedLayout(r.Name, geometry)
		return layout, err == nil, err
	}
	for _, block := range slices.Backward(r.Blocks) {
		if !block.chooses(board) {
			continue
		}
		if capable {
			return block.Layout, true, nil
		}
		if block.Layout.MIG && !block.All {
			return mig.Layout{}, false, mig.ErrNoMIG
		}
		return mig.Layout{}, false, nil
	}
	return mig.Layout{}, false, nil
}

func (b LayoutBlock) chooses(board BoardID) bool {
	return b.passes(board) && (b.All || slices.Contains(b.Indexes, board.Index))
}

// Unmatched says which blocks and indexes of the layout choose no board of the
// node, for a warning each; nil when all do. One document serves unlike nodes,
// so this is no error.
func (r Repartition) Unmatched(boards []BoardID) []string {
	if !r.Manage {
		return nil
	}
	var notes warnings
	for n, block := range r.Blocks {
		var passed []BoardID
		for _, board := range boards {
			if block.passes(board) {
				passed = append(passed, board)
			}
		}
		if len(passed) == 0 {
			notes.addf("MIG layout %q: block %d is for no GPU of this node", r.Name, n)
			continue
		}
		for _, index := range block.Indexes {
			if !slices.ContainsFunc(passed, func(b BoardID) bool { return b.Index == index }) {
				notes.addf("MIG layout %q: block %d: GPU %d is not on this node or does not pass the filter", r.Name, n, index)
			}
		}
	}
	return notes.sorted()
}

func (b LayoutBlock) passes(board BoardID) bool {
	return len(b.Filters) == 0 || slices.ContainsFunc(b.Filters, func(f BoardFilter) bool { return f.Match(board) })
}
