package main

import (
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// drawingWidth leaves room for the indent on a terminal of 80 columns.
const drawingWidth = 76

// drawLayout shows the slices of a board as it is, indented; a board without MIG
// mode has none.
func drawLayout(board sharing.BoardLayout) string {
	if !board.MIG {
		return "  MIG off\n"
	}
	return drawBlocks("  ", board.Slots, mig.Change{}.Before(board.Instances))
}

// drawBlocks draws them with indent before each line.
func drawBlocks(indent string, slots int, blocks []mig.Block) string {
	drawing := mig.Draw(slots, drawingWidth, blocks)
	return indent + strings.ReplaceAll(strings.TrimSuffix(drawing, "\n"), "\n", "\n"+indent) + "\n"
}
