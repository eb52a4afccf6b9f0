package sharing

import (
	"cmp"
	"slices"
)

// ContendedFrom is the ratio of its time from which a board that several
// containers compute on has none to spare.
const ContendedFrom = 0.9

// Contention says how the containers on a board hinder each other.
type Contention struct {
	GPU string
	// MaxShare is the part, 0 to 1, that the container which computes most has of
	// what all containers compute. Near 1 with several active ones, the others
	// get little.
	MaxShare float64
	// Contended says that at least two containers compute and that the board is
	// busy for ContendedFrom of its time.
	Contended bool
}

// contention looks at the boards of which it is known who computes how much. A
// board on which nobody does has no entry.
func contention(boards []BoardUse, containers []ContainerUse) []Contention {
	type load struct {
		sum, most float64
		active    int
		unknown   bool
	}
	loads := map[string]*load{}
	for _, c := range containers {
		l := loads[c.GPU]
		if l == nil {
			l = &load{}
			loads[c.GPU] = l
		}
		l.unknown = l.unknown || !c.SM.Known
		l.sum += c.SM.Value
		l.most = max(l.most, c.SM.Value)
		if c.SM.Value > 0 {
			l.active++
		}
	}
	var list []Contention
	for _, board := range boards {
		l := loads[board.GPU]
		if l == nil || l.unknown || l.sum == 0 {
			continue
		}
		list = append(list, Contention{
			GPU: board.GPU, MaxShare: l.most / l.sum,
			Contended: l.active >= 2 && board.SM.Known && board.SM.Value >= ContendedFrom,
		})
	}
	slices.SortFunc(list, func(a, b Contention) int { return cmp.Compare(a.GPU, b.GPU) })
	return list
}
