package sharing

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// tally counts by unit: devices that pods use, that the container must have,
// that could be picked.
type tally struct {
	used, required, left int
	// board is the unit's board.
	board string
}

// cost is what a policy minimises, the first number first, by taking so many
// devices of each unit.
type cost [4]int

func (p Policy) cost(tallies []tally, picks []int) cost {
	boards, boardPicks := map[string]*tally{}, map[string]int{}
	for u, unit := range tallies {
		if boards[unit.board] == nil {
			boards[unit.board] = &tally{}
		}
		boards[unit.board].used += unit.used
		boards[unit.board].required += unit.required
		boardPicks[unit.board] += picks[u]
	}
	// used and more are the sums, over the devices taken, of what pods have of
	// the unit and of what the container had of it just before.
	sum := func(unit tally, count int) (used, more int) {
		for already := range count {
			used, more = used+unit.used, more+unit.required+already
		}
		return used, more
	}
	var used, more, boardUsed, boardMore, inUse int
	for u, count := range picks {
		a, b := sum(tallies[u], count)
		used, more = used+a, more+b
	}
	for name, count := range boardPicks {
		a, b := sum(*boards[name], count)
		boardUsed, boardMore = boardUsed+a, boardMore+b
		inUse += count * (boards[name].used + boards[name].required)
	}
	switch p {
	case Packed:
		return cost{-inUse}
	case Spread:
		return cost{more, boardMore, used + more, boardUsed + boardMore}
	default:
		return cost{used + more, more, boardUsed + boardMore, boardMore}
	}
}

// boardOf is the board of a unit as far as it is known.
func (q question) boardOf(unit string) string {
	for _, u := range q.units {
		if u.ID == unit {
			return u.GPU
		}
	}
	return unit
}

// checkBest compares the healthy devices picked with every other way to pick as
// many.
func checkBest(t *testing.T, q question, policy Policy, got []string) {
	t.Helper()
	var tallies []tally
	var picks []int
	wanted := 0
	var last string
	for _, device := range q.devices {
		if device.Unit != last {
			last = device.Unit
			tallies, picks = append(tallies, tally{board: q.boardOf(last)}), append(picks, 0)
		}
		unit := &tallies[len(tallies)-1]
		switch {
		case slices.Contains(q.must, device.ID):
			unit.required++
		case !device.Healthy:
		case !slices.Contains(q.available, device.ID):
			unit.used++
		default:
			unit.left++
			if slices.Contains(got, device.ID) {
				picks[len(picks)-1]++
				wanted++
			}
		}
	}
	mine := policy.cost(tallies, picks)
	everyWay(tallies, nil, wanted, func(other []int) {
		if c := policy.cost(tallies, other); slices.Compare(c[:], mine[:]) < 0 {
			t.Errorf("%+v: %q takes %v of %+v at cost %v, but %v is %v", q, got, picks, tallies, mine, other, c)
		}
	})
}

// everyWay calls visit with each way to take so many devices of the units.
func everyWay(tallies []tally, sofar []int, wanted int, visit func([]int)) {
	if len(sofar) == len(tallies) {
		if wanted == 0 {
			visit(sofar)
		}
		return
	}
	for count := range 1 + min(wanted, tallies[len(sofar)].left) {
		everyWay(tallies, append(slices.Clone(sofar), count), wanted-count, visit)
	}
}

// whole returns the unit of a device that is a whole board alone; nil for any
// other.
func (q question) whole(id string) *Unit {
	for i := range q.units {
		if u := &q.units[i]; u.ID == id && !u.Partition() {
			return u
		}
	}
	return nil
}

// free returns the healthy devices that may be picked.
func (q question) free() []string {
	var free []string
	for _, device := range q.devices {
		if device.Healthy && slices.Contains(q.available, device.ID) && !slices.Contains(q.must, device.ID) {
			free = append(free, device.ID)
		}
	}
	return free
}

// byLinks says that links decide, and not the policy.
func (q question) byLinks() bool {
	free := q.free()
	return len(free) > 0 && !slices.ContainsFunc(free, func(id string) bool { return q.whole(id) == nil })
}

// checkBestLinked compares the boards picked with every other set.
func checkBestLinked(t *testing.T, q question, got []string) {
	t.Helper()
	sum := func(ids []string) int {
		total := 0
		for i, a := range ids {
			for _, b := range ids[:i] {
				if u, v := q.whole(a), q.whole(b); u != nil && v != nil {
					total += pairScore(linkTo(u, b), linkTo(v, a), numaScore(u, v))
				}
			}
		}
		return total
	}
	free := q.free()
	var picked, others, best []string
	for _, id := range got {
		if slices.Contains(free, id) {
			picked = append(picked, id)
		} else if slices.Contains(q.must, id) {
			others = append(others, id)
		}
	}
	var most [2]int
	everySet(free, len(picked), nil, func(set []string) {
		merit := [2]int{sum(slices.Concat(others, set)), sum(without(free, set))}
		if best == nil || slices.Compare(merit[:], most[:]) > 0 {
			best, most = set, merit
		}
	})
	if !slices.Equal(picked, best) {
		t.Errorf("%+v: %q, but the best of %q with %q are %q", q, got, free, others, best)
	}
}

func linkTo(u *Unit, peer string) Link {
	for _, link := range u.Links {
		if link.Peer == peer {
			return link
		}
	}
	return Link{}
}

// Large questions, where a wrong heap would show: each pick must be the best at
// its time by a plain search.
func TestPreferPicksTheBestEachTime(t *testing.T) {
	for _, policy := range []Policy{Distributed, Packed, Spread} {
		for _, boards := range []int{1, 2, 7, 50} {
			t.Run(fmt.Sprintf("%s on %d boards", policy, boards), func(t *testing.T) {
				r := rand.New(rand.NewPCG(3, uint64(boards)))
				var devices []Device
				var available []string
				var hardware []Unit
				tallies, boardTallies := make([]tally, 50), map[string]*tally{}
				for u := range tallies {
					unit := Unit{ID: string(rune('A' + u)), GPU: fmt.Sprint("GPU-", u%boards)}
					if boardTallies[unit.GPU] == nil {
						boardTallies[unit.GPU] = &tally{}
					}
					hardware, tallies[u].board = append(hardware, unit), unit.GPU
					for replica := range 20 {
						device := Device{ID: NewDeviceID(unit.ID, replica), Unit: unit.ID, Healthy: true}
						devices = append(devices, device)
						if r.IntN(3) == 0 {
							available = append(available, device.ID)
							tallies[u].left++
						} else {
							tallies[u].used++
							boardTallies[unit.GPU].used++
						}
					}
				}
				for i, id := range NewIndex(devices, hardware, policy).Prefer(available, nil, 200) {
					unit, _, _ := ParseDeviceID(id)
					at := int([]rune(unit)[0] - 'A')
					mine := policy.rank(tallies[at], *boardTallies[tallies[at].board], at%boards)
					for u, other := range tallies {
						rank := policy.rank(other, *boardTallies[other.board], u%boards)
						if other.left > 0 && cmp.Or(slices.Compare(rank[:], mine[:]), cmp.Compare(u, at)) < 0 {
							t.Fatalf("pick %d is of unit %d at %v, but unit %d is at %v", i, at, mine, u, rank)
						}
					}
					tallies[at].left--
					tallies[at].required++
					boardTallies[tallies[at].board].required++
				}
			})
		}
	}
}

// rank is the place of a healthy unit of a board: of two, the lesser is picked
// from first.
func (p Policy) rank(unit, board tally, number int) [5]int {
	load, boardLoad := unit.used+unit.required, board.used+board.required
	switch p {
	case Packed:
		return [5]int{-boardLoad, -board.required, number, -load, -unit.required}
	case Spread:
		return [5]int{unit.required, board.required, load, boardLoad}
	default:
		return [5]int{load, unit.required, boardLoad, board.required}
	}
}
