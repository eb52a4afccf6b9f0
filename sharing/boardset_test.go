package sharing

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// randomNearness has few scores, so that many sets are equally good.
func randomNearness(r *rand.Rand, seats int) *nearness {
	n := &nearness{seats: seats, scores: make([]int, seats*seats)}
	for a := range seats {
		for b := range a {
			score := 10 * r.IntN(4)
			n.scores[a*seats+b], n.scores[b*seats+a] = score, score
		}
	}
	return n
}

// within is the sum of the scores over the pairs of the seats.
func (n *nearness) within(seats []int) int {
	sum := 0
	for i, a := range seats {
		for _, b := range seats[:i] {
			sum += n.score(a, b)
		}
	}
	return sum
}

// without returns what is not in others.
func without[T comparable](all, others []T) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return slices.Contains(others, one) })
}

// everySet calls visit with each set of so many, first ones first.
func everySet[T any](all []T, wanted int, sofar []T, visit func([]T)) {
	if wanted == 0 {
		visit(sofar)
		return
	}
	for i := range all {
		everySet(all[i+1:], wanted-1, append(slices.Clone(sofar), all[i]), visit)
	}
}

func TestNearestIsTheFirstBestSet(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 500 {
		n := randomNearness(r, 2+r.IntN(8))
		seats := r.Perm(n.seats)
		own := seats[:r.IntN(n.seats)]
		free := without(seats, own)
		slices.Sort(free)
		wanted := 1 + r.IntN(len(free))

		var want []int
		var best [2]int
		everySet(free, wanted, nil, func(set []int) {
			merit := [2]int{n.within(slices.Concat(own, set)), n.within(without(free, set))}
			if want == nil || slices.Compare(merit[:], best[:]) > 0 {
				want, best = set, merit
			}
		})
		if got := n.nearest(free, own, wanted); !slices.Equal(got, want) {
			t.Fatalf("%d of %v with %v by %+v: %v, want %v", wanted, free, own, n, got, want)
		}
	}
}

// Where there are too many sets to compare, the answer still finds groups that
// plainly belong together, and is never worse than the order of the list.
func TestNearestAmongMany(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for _, seats := range []int{20, 33, mostSeats} {
		n := randomNearness(r, seats)
		free := make([]int, seats)
		for i := range free {
			free[i] = i
		}
		group := free[seats-10 : seats-1]
		for _, a := range group {
			for _, b := range group {
				if a != b {
					n.scores[a*seats+b] = 100
				}
			}
		}
		if got := n.nearest(free, nil, len(group)); !slices.Equal(got, group) {
			t.Errorf("%d of %d boards: %v, want %v", len(group), seats, got, group)
		}
		if got := n.nearest(without(free, group[:2]), group[:2], len(group)-2); !slices.Equal(got, group[2:]) {
			t.Errorf("%d of %d boards with 2: %v, want %v", len(group)-2, seats, got, group[2:])
		}
		for wanted := 6; wanted < seats-6; wanted++ {
			got := n.nearest(free, nil, wanted)
			if len(slices.Compact(slices.Clone(got))) != wanted || !slices.IsSorted(got) {
				t.Fatalf("%d of %d boards: %v", wanted, seats, got)
			}
			if mine, listed := n.within(got), n.within(free[:wanted]); mine < listed {
				t.Errorf("%d of %d boards: %v has %d, the first ones have %d", wanted, seats, got, mine, listed)
			}
		}
	}
}

// Of two groups that serve as well, the one that is used up goes first.
func TestNearestAmongManyLeavesGroupsWhole(t *testing.T) {
	const seats = 20
	n := &nearness{seats: seats, scores: make([]int, seats*seats)}
	var free []int
	for a := range seats {
		free = append(free, a)
		for b := range a {
			if a < 8 || a < 15 && b >= 8 {
				n.scores[a*seats+b], n.scores[b*seats+a] = 100, 100
			}
		}
	}
	want := free[8:15]
	if got := n.nearest(free, nil, len(want)); !slices.Equal(got, want) {
		t.Errorf("%d of groups 0-7 and 8-14: %v", len(want), got)
	}
}

func TestSetsUpTo(t *testing.T) {
	for _, test := range []struct {
		n, k int
		want bool
	}{
		{8, 4, true}, {16, 8, true}, {16, 1, true}, {16, 16, true}, {17, 8, false}, {17, 6, true}, {17, 7, false},
		{17, 11, true}, {17, 10, false}, {64, 1, true}, {64, 2, true}, {64, 3, false}, {43, 3, true}, {44, 3, false},
		{64, 62, true}, {64, 32, false}, {1, 1, true},
	} {
		if got := setsUpTo(test.n, test.k, mostSets); got != test.want {
			t.Errorf("setsUpTo(%d, %d) = %v", test.n, test.k, got)
		}
	}
}
