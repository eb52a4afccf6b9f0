package sharing

// Prefer returns the devices that a container should get: size IDs, first those
// of must, then the best of available. This is what the kubelet asks in
// GetPreferredAllocation. docs/placement.md has an example of each rule.
//
// Where all healthy devices of available are whole boards that a container has
// alone, it gets the boards that are linked best to each other and to those of
// must, by NVLinks, the distance on the bus and NUMA nodes; of equally good
// sets the one that leaves the best linked boards to others. The policy does
// not matter then. Where no links or too many boards are known, that is the
// order of the list.
//
// Otherwise units are taken by the index's policy. A unit is used by as many
// pods as it has healthy devices in the list that are neither available nor in
// must; an unhealthy device that is not available is nobody's. The units of a
// board use the board together.
//
//   - Distributed: least used unit first, the picks made so far counted
//   - Packed: most used board first, the picks made so far counted, and of its
//     units the most used
//   - Spread: fewest picks from the unit first, so distinct units while there
//     are any; then fewest from the board; then least used
//
// Where that leaves a choice it is made by fewer picks (more for Packed), by the
// least used board, by fewer unhealthy devices, by the order of the list.
//
// It always returns as many IDs as it can: unhealthy ones and then those that
// the list does not have are the last resort, and nothing is an error. With
// fewer than size IDs to choose from it returns them all; with more than size in
// must, the first size of these in the order of the list; with none, nil. The
// order and repetition of IDs in available and must make no difference.
func (x *Index) Prefer(available, must []string, size int) []string {
	if size <= 0 {
		return nil
	}
	c := x.newChoice(available, must)
	picked := make([]string, 0, min(size, len(available)+len(must)))
	picked = c.takeRequired(picked, size)
	picked = c.takeHealthy(picked, size)
	picked = c.takeSick(picked, size)
	picked = take(picked, c.unknown, size)
	if len(picked) == 0 {
		return nil
	}
	return picked
}

// takeRequired takes what the container must have.
func (c *choice) takeRequired(picked []string, size int) []string {
	for at, state := range c.state {
		if state == required && len(picked) < size {
			picked = append(picked, c.devices[at].ID)
			c.count(c.bucketOf[at])
		}
	}
	return take(picked, c.required, size)
}

// takeHealthy takes healthy devices: boards by their links where that makes
// sense, else each device from the unit that is best then.
func (c *choice) takeHealthy(picked []string, size int) []string {
	if c.near != nil {
		if free, ok := c.freeSeats(); ok {
			return c.takeNear(picked, free, size)
		}
	}
	queue := c.newQueue()
	for len(picked) < size && len(queue.heap) > 0 {
		picked = append(picked, c.devices[c.pick(queue.heap[0])].ID)
		queue.fix()
	}
	return picked
}

// freeSeats returns the seats of the boards that are free and healthy,
// ascending. It is not ok when some free healthy device is not a whole board
// alone: how much of a shared board a container gets does not depend on links.
func (c *choice) freeSeats() (seats []int, ok bool) {
	for b, unit := range c.units {
		if unit.left == 0 {
			continue
		}
		seat := c.buckets[b].seat
		if seat == noSeat {
			return nil, false
		}
		seats = append(seats, seat)
	}
	return seats, true
}

// takeNear takes those of the free boards that are linked best to each other
// and to the boards that the container has already.
func (c *choice) takeNear(picked []string, seats []int, size int) []string {
	wanted := min(size-len(picked), len(seats))
	var own []int
	for seat, b := range c.seats {
		if c.units[b].picks > 0 {
			own = append(own, seat)
		}
	}
	for _, seat := range c.near.nearest(seats, own, wanted) {
		picked = append(picked, c.devices[c.pick(c.seats[seat])].ID)
	}
	return picked
}

// takeSick takes unhealthy devices, in the order of the list.
func (c *choice) takeSick(picked []string, size int) []string {
	for at, state := range c.state {
		if len(picked) == size {
			break
		}
		if state == free {
			picked = append(picked, c.devices[at].ID)
		}
	}
	return picked
}

// take appends IDs until there are size.
func take(picked, ids []string, size int) []string {
	return append(picked, ids[:min(len(ids), max(0, size-len(picked)))]...)
}
