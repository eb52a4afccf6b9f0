package main

import (
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// drawLayout shows the slices of a board as it is, indented; a board without MIG
// mode has none.
func drawLayout(board sharing.BoardLayout) string {
	if !board.MIG {
		return "  MIG off\n"
	}
	drawing := mig.Draw(board.Slots, drawingWidth, mig.Change{}.Before(board.Instances))
	return "  " + strings.ReplaceAll(strings.TrimSuffix(drawing, "\n"), "\n", "\n  ") + "\n"
}
