package sharing

import "slices"

// boardSet is the search for the boards that a container should get together.
// Boards are numbered here by their place among those that are free.
//
// The best set has the greatest sum of scores over its pairs, those with boards
// that the container has anyway included. Among equals it leaves the greatest
// sum over the pairs of free boards that remain, so that a pair or a group with
// good links stays whole for the next pod; and then it is the first by the
// order of the list.
type boardSet struct {
	free, wanted int
	// scores has the score of two free boards at a*free+b.
	scores []int
	// toOwn is the sum of each free board's scores with those that the
	// container has anyway, toFree that with the other free ones.
	toOwn, toFree []int
	// chosen is the set that is looked at, ascending in the exact search.
	chosen []int
	best   []int
	merit  merit
}

// merit is how good a set is.
type merit struct {
	// inside is the sum of the scores within the set.
	inside int
	// left is the sum within what remains, less a number that is the same for
	// all sets.
	left int
}

func (m merit) better(other merit) bool {
	return m.inside > other.inside || m.inside == other.inside && m.left > other.left
}

// mostSets is how many sets are compared one by one: all that there are for 8
// boards of 16, which takes a fraction of a millisecond.
const mostSets = 12870

// nearest returns those wanted of the free seats that go best together and with
// own, ascending. There must be at least as many as wanted. Beyond mostSets it
// returns a good set, which may not be the best.
func (n *nearness) nearest(free, own []int, wanted int) []int {
	if wanted == len(free) {
		return free
	}
	s := newBoardSet(n, free, own, wanted)
	if setsUpTo(len(free), wanted, mostSets) {
		s.compareAll(0, merit{})
	} else {
		s.grow()
	}
	for i, at := range s.best {
		s.best[i] = free[at]
	}
	return s.best
}

func newBoardSet(n *nearness, free, own []int, wanted int) *boardSet {
	s := &boardSet{
		free: len(free), wanted: wanted,
		scores: make([]int, len(free)*len(free)),
		toOwn:  make([]int, len(free)),
		toFree: make([]int, len(free)),
		chosen: make([]int, 0, wanted),
	}
	for a, seat := range free {
		for b, other := range free {
			score := n.score(seat, other)
			s.scores[a*s.free+b] = score
			s.toFree[a] += score
		}
		for _, other := range own {
			s.toOwn[a] += n.score(seat, other)
		}
	}
	return s
}

// compareAll completes the chosen boards in every way with boards from a place
// on. m is the merit of those chosen.
func (s *boardSet) compareAll(from int, m merit) {
	missing := s.wanted - len(s.chosen)
	if missing == 0 {
		s.offer(m)
		return
	}
	for at := from; at <= s.free-missing; at++ {
		together := 0
		row := s.scores[at*s.free : (at+1)*s.free]
		for _, other := range s.chosen {
			together += row[other]
		}
		s.chosen = append(s.chosen, at)
		s.compareAll(at+1, s.with(m, at, together))
		s.chosen = s.chosen[:len(s.chosen)-1]
	}
}

// with is the merit of a set of merit m and one more board, whose scores with
// the boards of the set sum up to together. What leaves the free boards takes
// its scores with them along; those within the set would be taken twice.
func (s *boardSet) with(m merit, at, together int) merit {
	return merit{inside: m.inside + s.toOwn[at] + together, left: m.left + together - s.toFree[at]}
}

// offer keeps the chosen boards if they are the best so far.
func (s *boardSet) offer(m merit) {
	if s.best == nil || m.better(s.merit) {
		s.best, s.merit = append(s.best[:0], s.chosen...), m
	}
}

// grow begins with each free board once, adds the one that fits best until
// there are enough, and keeps the best of these sets.
func (s *boardSet) grow() {
	together := make([]int, s.free)
	taken := make([]bool, s.free)
	for seed := range s.free {
		clear(together)
		clear(taken)
		taken[seed] = true
		m := s.add(merit{}, seed, together)
		for len(s.chosen) < s.wanted {
			at, found := -1, merit{}
			for other := range s.free {
				if taken[other] {
					continue
				}
				if next := s.with(m, other, together[other]); at < 0 || next.better(found) {
					at, found = other, next
				}
			}
			taken[at] = true
			m = s.add(m, at, together)
		}
		slices.Sort(s.chosen)
		s.offer(m)
		s.chosen = s.chosen[:0]
	}
}

// add chooses one more board and keeps count of each board's scores with those
// chosen.
func (s *boardSet) add(m merit, at int, together []int) merit {
	m = s.with(m, at, together[at])
	s.chosen = append(s.chosen, at)
	for other := range together {
		together[other] += s.scores[at*s.free+other]
	}
	return m
}

// setsUpTo says that there are at most so many ways to choose k of n.
func setsUpTo(n, k, most int) bool {
	ways := 1
	for i := range min(k, n-k) {
		// Never a fraction: the product so far is a binomial coefficient.
		if ways = ways * (n - i) / (i + 1); ways > most {
			return false
		}
	}
	return true
}
