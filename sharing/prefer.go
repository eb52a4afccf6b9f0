package sharing

import "slices"

// Prefer returns the devices that a container should get: size IDs, first those
// of must, then the best of available by the index's policy. This is what the
// kubelet asks in GetPreferredAllocation.
//
// A unit is used by as many pods as it has healthy devices in the list that are
// neither available nor in must; an unhealthy device that is not available is
// nobody's. The units are taken
//
//   - Distributed: least used first, the picks made so far counted
//   - Packed: most used first, the picks made so far counted
//   - Spread: fewest picks first, so distinct units while there are any; then
//     least used
//
// and where that leaves a choice, by fewer picks (more for Packed), by fewer
// unhealthy devices, by the order of the list. So exclusive units, of which
// every free one is unused, come in the order of the list.
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

// choice is one call of Prefer.
type choice struct {
	*Index
	// state says of each device of the list what the caller said of it.
	state []deviceState
	// required and unknown are the IDs of must and of available that are not in
	// the list, sorted. They belong to no unit.
	required, unknown []string
	units             []unitState
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
}

// newChoice sorts what the caller said by device and by unit.
func (x *Index) newChoice(available, must []string) *choice {
	c := &choice{
		Index: x,
		state: make([]deviceState, len(x.devices)),
		units: make([]unitState, len(x.buckets)),
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

// takeRequired takes what the container must have.
func (c *choice) takeRequired(picked []string, size int) []string {
	for at, state := range c.state {
		if state == required && len(picked) < size {
			picked = append(picked, c.devices[at].ID)
			c.units[c.bucketOf[at]].picks++
		}
	}
	return take(picked, c.required, size)
}

// takeHealthy takes healthy devices, each from the unit that is best then.
func (c *choice) takeHealthy(picked []string, size int) []string {
	queue := c.newQueue()
	for len(picked) < size && len(queue.heap) > 0 {
		picked = append(picked, c.devices[c.pick(queue.heap[0])].ID)
		queue.fix()
	}
	return picked
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
	unit.picks++
	return at
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
