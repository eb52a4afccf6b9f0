package sharing

import "slices"

// exclude returns the boards without what the selectors name. A board whose
// partitions are all named is gone like one that is named itself: nothing of
// it is left to say anything about.
func exclude(boards []GPU, selectors []Selector, notes *warnings) []GPU {
	matched := make([]bool, len(selectors))
	// named looks at every selector, also after the first hit: a second one for
	// the same board did match something.
	named := func(matches func(Selector) bool) bool {
		found := false
		for i, selector := range selectors {
			if matches(selector) {
				matched[i], found = true, true
			}
		}
		return found
	}

	var kept []GPU
	for _, board := range boards {
		whole := named(func(s Selector) bool { return s.MatchGPU(board) })
		partitions := slices.DeleteFunc(slices.Clone(board.Partitions), func(p Partition) bool {
			return named(func(s Selector) bool { return s.MatchPartition(board, p) })
		})
		if whole || len(partitions) == 0 && len(board.Partitions) > 0 {
			continue
		}
		board.Partitions = partitions
		kept = append(kept, board)
	}
	for i, selector := range selectors {
		if !matched[i] {
			notes.addf("exclude[%d]: %q names nothing on this node", i, selector)
		}
	}
	return kept
}
