package mig

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Block is a GPU instance in a drawing.
type Block struct {
	Placement Placement
	// Labels say what it is, the longest first; the first one with room is shown.
	Labels []string
	// Note is shown below the label.
	Note string
}

// narrowest is the number of characters of a slot below which nothing could be
// read; a drawing is wider than it may be rather than this.
const narrowest = 3

// Draw shows the memory slots of a board with what lies on them, as lines of at
// most width characters, each ended by a line feed, without colours:
//
//	0        1        2        3        4        5        6        7
//	┌─────────────────┬────────┬────────┬───────────────────────────────────┐
//	│2g.10gb          │1g.5gb  │1g.5gb  │3g.20gb                            │
//	│in use           │        │        │new                                │
//	└─────────────────┴────────┴────────┴───────────────────────────────────┘
//
// A slot without an instance has a "·". A block outside the slots or over
// another one is left out. It is empty for a board without slots.
func Draw(slots, width int, blocks []Block) string {
	if slots < 1 {
		return ""
	}
	cell := max((width-1)/slots, narrowest+1)
	blocks = tiled(slots, blocks)
	var numbers, top, label, note, bottom strings.Builder
	for slot := range slots {
		numbers.WriteString(padded(strconv.Itoa(slot), cell))
	}
	for n, block := range blocks {
		inner := block.Placement.Size*cell - 1
		edges := [...]string{"┬", "│", "│", "┴"}
		if n == 0 {
			edges = [...]string{"┌", "│", "│", "└"}
		}
		top.WriteString(edges[0] + strings.Repeat("─", inner))
		label.WriteString(edges[1] + padded(fitting(block.Labels, inner), inner))
		note.WriteString(edges[2] + padded(block.Note, inner))
		bottom.WriteString(edges[3] + strings.Repeat("─", inner))
	}
	return strings.TrimRight(numbers.String(), " ") + "\n" +
		top.String() + "┐\n" + label.String() + "│\n" + note.String() + "│\n" + bottom.String() + "┘\n"
}

// tiled are the blocks by start, with one for each slot that none covers.
func tiled(slots int, blocks []Block) []Block {
	blocks = slices.Clone(blocks)
	slices.SortStableFunc(blocks, func(a, b Block) int { return a.Placement.Start - b.Placement.Start })
	var tiles []Block
	next := 0
	empty := func(until int) {
		for ; next < until; next++ {
			tiles = append(tiles, Block{Placement: Placement{Start: next, Size: 1}, Labels: []string{"·"}})
		}
	}
	for _, b := range blocks {
		at := b.Placement
		if at.Start < next || at.Size < 1 || at.Size > slots-at.Start {
			continue
		}
		empty(at.Start)
		tiles = append(tiles, b)
		next += at.Size
	}
	empty(slots)
	return tiles
}

// fitting is the first label that has room, else the last one.
func fitting(labels []string, room int) string {
	for _, label := range labels {
		if utf8.RuneCountInString(label) <= room {
			return label
		}
	}
	if len(labels) == 0 {
		return ""
	}
	return labels[len(labels)-1]
}

// padded is the text cut or filled with blanks to so many characters.
func padded(text string, room int) string {
	return fmt.Sprintf("%-*.*s", room, room, text)
}
