package sharing

import "slices"

// choice is one call of Prefer.
type choice struct {
	*Index
	// state says of each device of the list what the caller said of it.
	state []deviceState
	// required and unknown are the IDs of must and of available that are not in
	// the list, sorted. They belong to no unit.
	required, unknown []string
	units             []unitState
	boards            []boardState
}

type deviceState uint8

const (
	held deviceState = iota
	free
	required
	taken
)

// unitState is a unit during one call of Prefer.
type unitState struct {
	// used is the number of healthy devices that pods hold.
	used int
	// picks is the number of devices that this container gets.
	picks int
	// left is the number of healthy devices that may still be picked.
	left int
	// next is where in the bucket to look for one.
	next int
	// boardPicks is the number of picks from the board for which the unit has
	// its place in the queue.
	boardPicks int
}

// boardState is a board during one call of Prefer.
type boardState struct {
	// used and picks are the sums over the board's units.
	used, picks int
}

// newChoice sorts what the caller said by device and by unit.
func (x *Index) newChoice(available, must []string) *choice {
	c := &choice{
		Index:  x,
		state:  make([]deviceState, len(x.devices)),
		units:  make([]unitState, len(x.buckets)),
		boards: make([]boardState, len(x.boardSick)),
	}
	c.unknown = c.mark(available, free)
	c.required = c.mark(must, required)
	if len(c.required) > 0 {
		c.unknown = slices.DeleteFunc(c.unknown, func(id string) bool {
			_, found := slices.BinarySearch(c.required, id)
			return found
		})
	}
	for at, state := range c.state {
		if !x.devices[at].Healthy {
			continue
		}
		switch unit := &c.units[x.bucketOf[at]]; state {
		case held:
			unit.used++
			c.board(x.bucketOf[at]).used++
		case free:
			unit.left++
		}
	}
	return c
}

// mark notes the state of the devices and returns the IDs that the list does
// not have, sorted, each once.
func (c *choice) mark(ids []string, state deviceState) []string {
	var unknown []string
	for _, id := range ids {
		if at, known := c.position[id]; known {
			c.state[at] = state
		} else {
			unknown = append(unknown, id)
		}
	}
	slices.Sort(unknown)
	return slices.Compact(unknown)
}

// pick takes the unit's next healthy device and returns its position.
func (c *choice) pick(b int) int {
	unit, members := &c.units[b], c.buckets[b].members
	at := members[unit.next]
	for c.state[at] != free || !c.devices[at].Healthy {
		unit.next++
		at = members[unit.next]
	}
	c.state[at] = taken
	unit.left--
	c.count(b)
	return at
}

// count counts a device of the unit as picked.
func (c *choice) count(b int) {
	c.units[b].picks++
	c.board(b).picks++
}

// board is the state of the unit's board.
func (c *choice) board(b int) *boardState { return &c.boards[c.buckets[b].board] }
