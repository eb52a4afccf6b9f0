package mig

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Block is a GPU instance in a drawing.
type Block struct {
	Placement Placement
	// Labels are names for the block, the longest first. The first one that fits is shown.
	Labels []string
	// Note is shown below the label.
	Note string
}

// narrowest is the smallest width of a slot in characters. A narrower drawing would be unreadable,
// so the drawing becomes wider than requested instead.
const narrowest = 3

// Draw shows the memory slots of a GPU and the blocks on them, in lines of at most width
// characters, each ending with a line feed:
//
//	0        1        2        3        4        5        6        7
//	┌─────────────────┬────────┬────────┬───────────────────────────────────┐
//	│2g.10gb          │1g.5gb  │1g.5gb  │3g.20gb                            │
//	│in use           │        │        │new                                │
//	└─────────────────┴────────┴────────┴───────────────────────────────────┘
//
// A slot without an instance has a "·". A block that is outside the slots or overlaps another block
// is left out. The drawing of a GPU without slots is empty.
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
		above, below := "┬", "┴"
		if n == 0 {
			above, below = "┌", "└"
		}
		top.WriteString(above + strings.Repeat("─", inner))
		label.WriteString("│" + padded(fitting(block.Labels, inner), inner))
		note.WriteString("│" + padded(block.Note, inner))
		bottom.WriteString(below + strings.Repeat("─", inner))
	}
	return strings.TrimRight(numbers.String(), " ") + "\n" +
		top.String() + "┐\n" + label.String() + "│\n" + note.String() + "│\n" + bottom.String() + "┘\n"
}

// tiled returns the blocks sorted by start, with a block for each empty slot.
func tiled(slots int, blocks []Block) []Block {
	blocks = slices.SortedStableFunc(slices.Values(blocks),
		func(a, b Block) int { return a.Placement.Start - b.Placement.Start })
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

// fitting returns the first label that fits, otherwise the last one.
func fitting(labels []string, room int) string {
	last := ""
	for _, last = range labels {
		if utf8.RuneCountInString(last) <= room {
			break
		}
	}
	return last
}

// padded returns the text, truncated or padded to this many characters.
func padded(text string, room int) string {
	return fmt.Sprintf("%-*.*s", room, room, text)
}

// Before returns the blocks of a GPU for Draw, with notes on partitions that are in use and
// partitions that the change destroys. The zero Change destroys nothing.
func (c Change) Before(have []Instance) []Block {
	var blocks []Block
	for _, i := range have {
		var partitions []Profile
		busy, destroyed := 0, 0
		for _, compute := range i.Computes {
			partitions = append(partitions, i.Partition(compute))
			if compute.Busy {
				busy++
			}
			if slices.Contains(c.Doomed, compute.UUID) {
				destroyed++
			}
		}
		blocks = append(blocks, newBlock(i.Placement, i.Profile, partitions, busy, destroyed, "goes"))
	}
	return blocks
}

// After returns the blocks of the GPU after the steps, with notes on partitions that are in use and
// partitions that are new.
func (c Change) After(have []Instance) []Block {
	if c.Empty() {
		return c.Before(have)
	}
	at := make(map[Placement][]Profile)
	for _, p := range c.Result {
		at[p.Placement] = append(at[p.Placement], p.Profile)
	}
	var blocks []Block
	for placement, partitions := range at {
		busy, fresh := 0, len(partitions)
		for _, i := range have {
			for _, compute := range i.Computes {
				if i.Placement != placement || !slices.Contains(c.Kept, compute.UUID) {
					continue
				}
				fresh--
				if compute.Busy {
					busy++
				}
			}
		}
		blocks = append(blocks, newBlock(placement, partitions[0].Instance(), partitions, busy, fresh, "new"))
	}
	slices.SortFunc(blocks, func(a, b Block) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	return blocks
}

// newBlock notes how many of the partitions are in use, and how many the other note applies to. It
// omits a number that is all of them.
func newBlock(at Placement, instance Profile, partitions []Profile, busy, noted int, note string) Block {
	var notes []string
	for _, n := range []struct {
		count int
		text  string
	}{{busy, "in use"}, {noted, note}} {
		switch n.count {
		case 0:
		case len(partitions):
			notes = append(notes, n.text)
		default:
			notes = append(notes, strconv.Itoa(n.count)+" "+n.text)
		}
	}
	return Block{at, labels(instance, partitions), strings.Join(notes, ", ")}
}

// labels returns names for a GPU instance by its partitions: "1g.5gb", "2×1c.2g.10gb", "1c+2c of
// 3g.20gb", or "(2g.10gb)" if it has none; then shorter ones, such as "1g".
func labels(instance Profile, partitions []Profile) []string {
	short := strconv.Itoa(instance.Slices) + "g" + instance.Attributes
	slices.SortFunc(partitions, Profile.Compare)
	switch distinct := slices.Compact(slices.Clone(partitions)); {
	case len(partitions) == 0:
		return []string{"(" + instance.String() + ")", "(" + short + ")"}
	case len(partitions) == 1:
		return []string{partitions[0].String(), short}
	case len(distinct) == 1:
		return []string{
			strconv.Itoa(len(partitions)) + "×" + partitions[0].String(), strconv.Itoa(len(partitions)) + "×" + short,
		}
	}
	sizes := make([]string, len(partitions))
	for i, p := range partitions {
		sizes[i] = strconv.Itoa(p.Compute) + "c"
	}
	together := strings.Join(sizes, "+")
	return []string{together + " of " + instance.String(), together + " of " + short, together}
}
