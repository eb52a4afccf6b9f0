package mig

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Notes of the blocks of a board. The shortest reading is that of a board that
// nothing happens to.
const (
	noteBusy   = "in use"
	noteDoomed = "goes"
	noteFresh  = "new"
)

// Before are the blocks of a board for Draw, with what is in use and what the
// change destroys; the zero Change destroys nothing.
func (c Change) Before(have []Instance) []Block {
	var blocks []Block
	for _, i := range have {
		var partitions []Profile
		busy, doomed := 0, 0
		for _, compute := range i.Computes {
			partitions = append(partitions, i.Partition(compute))
			if compute.Busy {
				busy++
			}
			if slices.Contains(c.Doomed, compute.UUID) {
				doomed++
			}
		}
		var notes []string
		notes = noted(notes, noteBusy, busy, len(i.Computes))
		notes = noted(notes, noteDoomed, doomed, len(i.Computes))
		blocks = append(blocks, Block{i.Placement, labels(i.Profile, partitions), strings.Join(notes, ", ")})
	}
	return blocks
}

// After are the blocks of the board as it is when the steps are made, with what
// is in use and what is new.
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
		busy, kept := 0, 0
		for _, i := range have {
			for _, compute := range i.Computes {
				if i.Placement != placement || !slices.Contains(c.Kept, compute.UUID) {
					continue
				}
				kept++
				if compute.Busy {
					busy++
				}
			}
		}
		var notes []string
		notes = noted(notes, noteBusy, busy, len(partitions))
		notes = noted(notes, noteFresh, len(partitions)-kept, len(partitions))
		blocks = append(blocks, Block{placement, labels(partitions[0].Instance(), partitions), strings.Join(notes, ", ")})
	}
	slices.SortFunc(blocks, func(a, b Block) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	return blocks
}

// noted adds a note on count of all partitions of a GPU instance.
func noted(notes []string, text string, count, all int) []string {
	switch {
	case count == 0:
		return notes
	case count < all:
		text = strconv.Itoa(count) + " " + text
	}
	return append(notes, text)
}

// labels name a GPU instance by its partitions: "1g.5gb", "2×1c.2g.10gb",
// "1c+2c of 3g.20gb", "(2g.10gb)" for one without, and in less room "1g".
func labels(instance Profile, partitions []Profile) []string {
	short := strconv.Itoa(instance.Slices) + "g" + instance.Attributes
	slices.SortFunc(partitions, Compare)
	switch distinct := slices.Compact(slices.Clone(partitions)); {
	case len(partitions) == 0:
		return []string{"(" + instance.String() + ")", "(" + short + ")"}
	case len(partitions) == 1:
		return []string{partitions[0].String(), short}
	case len(distinct) == 1:
		return []string{strconv.Itoa(len(partitions)) + "×" + partitions[0].String(), strconv.Itoa(len(partitions)) + "×" + short}
	}
	sizes := make([]string, len(partitions))
	for i, p := range partitions {
		sizes[i] = strconv.Itoa(p.Compute) + "c"
	}
	together := strings.Join(sizes, "+")
	return []string{together + " of " + instance.String(), together + " of " + short, together}
}
