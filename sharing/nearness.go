package sharing

import "cmp"

// nearness is how near whole boards are to each other. Boards are numbered by
// seat, in the order of the list.
type nearness struct {
	seats int
	// scores has the score of seats a and b at a*seats+b; 0 for a seat with
	// itself.
	scores []int
}

// mostSeats bounds the memory and the time that nearness takes. No known node
// has as many boards.
const mostSeats = 64

// newNearness returns the nearness of the boards. It is nil for more than
// mostSeats boards, and when every pair is as near as any other, because then
// any choice is as good as the order of the list.
func newNearness(boards []*Unit) *nearness {
	if len(boards) > mostSeats {
		return nil
	}
	links := make(map[[2]string]Link)
	for _, board := range boards {
		for _, link := range board.Links {
			links[[2]string{board.ID, link.Peer}] = link
		}
	}
	n := &nearness{seats: len(boards), scores: make([]int, len(boards)*len(boards))}
	uneven := false
	for i, a := range boards {
		for j, b := range boards[:i] {
			there, back := links[[2]string{a.ID, b.ID}], links[[2]string{b.ID, a.ID}]
			score := pairScore(there, back, numaScore(a, b))
			n.scores[i*n.seats+j], n.scores[j*n.seats+i] = score, score
			uneven = uneven || score != n.scores[1]
		}
	}
	if !uneven {
		return nil
	}
	return n
}

func (n *nearness) score(a, b int) int { return n.scores[a*n.seats+b] }

// nvlinkScore is what one NVLink counts. This and levelScore are the numbers of
// NVIDIA's plugin (go-gpuallocator, gpuallocator/besteffort_policy.go), so that
// what the two choose can be compared.
const nvlinkScore = 100

// pairScore is the nearness of two boards: the NVLinks between them and their
// distance on the bus, for which their NUMA nodes stand in when it is unknown.
// The two ways are the same one unless one of them could not be read.
func pairScore(there, back Link, numa int) int {
	bus := max(levelScore(there.Level), levelScore(back.Level))
	return nvlinkScore*max(there.NVLinks, back.NVLinks) + cmp.Or(bus, numa)
}

// levelScore is what the distance on the bus counts; 0 when unknown.
func levelScore(level string) int {
	switch level {
	case "internal":
		return 60
	case "single":
		return 50
	case "multiple":
		return 40
	case "hostbridge":
		return 30
	case "node":
		return 20
	case "system":
		return 10
	}
	return 0
}

// numaScore is the distance on the bus as far as NUMA nodes tell it; 0 when
// they are unknown.
func numaScore(a, b *Unit) int {
	switch {
	case a.NUMANode < 0 || b.NUMANode < 0:
		return 0
	case a.NUMANode == b.NUMANode:
		return levelScore("node")
	}
	return levelScore("system")
}
