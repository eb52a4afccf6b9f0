package sharing

import (
	"cmp"
	"math/big"
	"slices"
)

// topology is how well whole GPUs are connected. A GPU's place is its index in the list.
type topology struct {
	gpus int
	// scores has the score for places a and b at a*gpus+b; 0 for a GPU with itself.
	scores []int
}

// maxTopologyGPUs limits memory and time. No known node has more GPUs.
const maxTopologyGPUs = 64

// newTopology returns the topology of the GPUs. It is nil for more than maxTopologyGPUs, and if all
// pairs are connected equally well, because the order of the list is then as good.
func newTopology(gpus []*Unit) *topology {
	if len(gpus) > maxTopologyGPUs {
		return nil
	}
	links := make(map[[2]string]Link)
	for _, gpu := range gpus {
		for _, link := range gpu.Links {
			links[[2]string{gpu.ID, link.Peer}] = link
		}
	}
	n := &topology{gpus: len(gpus), scores: make([]int, len(gpus)*len(gpus))}
	uneven := false
	for i, a := range gpus {
		for j, b := range gpus[:i] {
			there, back := links[[2]string{a.ID, b.ID}], links[[2]string{b.ID, a.ID}]
			score := pairScore(there, back, numaScore(a, b))
			n.scores[i*n.gpus+j], n.scores[j*n.gpus+i] = score, score
			uneven = uneven || score != n.scores[1]
		}
	}
	if !uneven {
		return nil
	}
	return n
}

func (n *topology) score(a, b int) int { return n.scores[a*n.gpus+b] }

// nvlinkScore is the score of one NVLink. It and levelScore use the numbers of NVIDIA's plugin
// (go-gpuallocator, gpuallocator/besteffort_policy.go), so that choices can be compared.
const nvlinkScore = 100

// pairScore returns how well two GPUs are connected: by NVLinks and by their distance on the bus
// or, if that is unknown, by their NUMA nodes. there and back differ only if one of them could not
// be read.
func pairScore(there, back Link, numa int) int {
	bus := max(levelScore(there.Level), levelScore(back.Level))
	return nvlinkScore*max(there.NVLinks, back.NVLinks) + cmp.Or(bus, numa)
}

// levelScore returns the score of the distance on the bus; 0 when unknown.
func levelScore(level string) int {
	levels := [...]string{"system", "node", "hostbridge", "multiple", "single", "internal"}
	return 10 * (slices.Index(levels[:], level) + 1)
}

// numaScore returns the score of the distance that the NUMA nodes imply; 0 when they are unknown.
func numaScore(a, b *Unit) int {
	switch {
	case a.NUMANode < 0 || b.NUMANode < 0:
		return 0
	case a.NUMANode == b.NUMANode:
		return levelScore("node")
	}
	return levelScore("system")
}

// setSearch searches for the GPUs that a container should get together. GPUs are numbered here by
// their place among the free ones.
//
// The best set has the greatest sum of scores over its pairs, including pairs with GPUs that the
// container has anyway. Of equal sets, the best one leaves the greatest sum over the pairs of the
// remaining free GPUs, so well connected groups stay whole for the next pod. Then the first in the
// order of the list wins.
type setSearch struct {
	free, wanted int
	// scores has the score of two free GPUs at a*free+b.
	scores []int
	// toOwn is the sum of each free GPU's scores with the GPUs that the container has anyway,
	// toFree the sum with the other free GPUs.
	toOwn, toFree []int
	// chosen is the set under consideration, ascending if exact; best is the best so far.
	chosen, best []int
	bestScore    setScore
}

// setScore is the quality of a set.
type setScore struct {
	// inside is the sum of the scores within the set.
	inside int
	// left is the sum within the remaining GPUs, minus a number that is the same for all sets.
	left int
}

func (m setScore) better(other setScore) bool {
	return m.inside > other.inside || m.inside == other.inside && m.left > other.left
}

// maxComparedSets is how many sets are compared one by one. It is the number of ways to choose 8
// GPUs of 16; comparing them takes a fraction of a millisecond.
const maxComparedSets = 12870

// bestSet returns as many of the free places as are wanted, ascending: the ones that are connected
// best to each other and to own. At least that many must be free. If there are more than
// maxComparedSets sets, it returns a good set that may not be the best.
func (n *topology) bestSet(free, own []int, wanted int) []int {
	if wanted == len(free) {
		return free
	}
	s := newSetSearch(n, free, own, wanted)
	if combinationsWithin(len(free), wanted, maxComparedSets) {
		s.compareAll(0, setScore{})
	} else {
		s.grow()
	}
	for i, at := range s.best {
		s.best[i] = free[at]
	}
	return s.best
}

func newSetSearch(n *topology, free, own []int, wanted int) *setSearch {
	s := &setSearch{
		free:   len(free),
		wanted: wanted,
		scores: make([]int, len(free)*len(free)),
		chosen: make([]int, 0, wanted),
		toOwn:  make([]int, len(free)),
		toFree: make([]int, len(free)),
	}
	for a, place := range free {
		for b, other := range free {
			score := n.score(place, other)
			s.scores[a*s.free+b] = score
			s.toFree[a] += score
		}
		for _, other := range own {
			s.toOwn[a] += n.score(place, other)
		}
	}
	return s
}

// compareAll completes the chosen GPUs, whose score is m, in every way with GPUs from a place on.
func (s *setSearch) compareAll(from int, m setScore) {
	missing := s.wanted - len(s.chosen)
	if missing == 0 {
		s.keepBest(m)
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

// with returns the score of a set with score m after adding the GPU at. together is the sum of that
// GPU's scores with the GPUs of the set. The GPU is no longer free, so its scores with the free
// GPUs are subtracted from left. Its scores with the set were subtracted before, so together is
// added back.
func (s *setSearch) with(m setScore, at, together int) setScore {
	return setScore{inside: m.inside + s.toOwn[at] + together, left: m.left + together - s.toFree[at]}
}

func (s *setSearch) keepBest(m setScore) {
	if s.best == nil || m.better(s.bestScore) {
		s.best, s.bestScore = append(s.best[:0], s.chosen...), m
	}
}

// grow starts a set with each free GPU in turn, adds the best GPU until the set is complete, and
// keeps the best set.
func (s *setSearch) grow() {
	together := make([]int, s.free)
	taken := make([]bool, s.free)
	for seed := range s.free {
		clear(together)
		clear(taken)
		taken[seed] = true
		m := s.add(setScore{}, seed, together)
		for len(s.chosen) < s.wanted {
			at, found := -1, setScore{}
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
		s.keepBest(m)
		s.chosen = s.chosen[:0]
	}
}

// add chooses one more GPU and adds its scores to each GPU's sum with the chosen ones.
func (s *setSearch) add(m setScore, at int, together []int) setScore {
	m = s.with(m, at, together[at])
	s.chosen = append(s.chosen, at)
	for other := range together {
		together[other] += s.scores[at*s.free+other]
	}
	return m
}

// combinationsWithin reports whether there are at most this many ways to choose k of n.
func combinationsWithin(n, k, most int) bool {
	return new(big.Int).Binomial(int64(n), int64(k)).Cmp(big.NewInt(int64(most))) <= 0
}
