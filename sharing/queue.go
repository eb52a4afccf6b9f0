package sharing

import "cmp"

// queue is a heap of the units that have healthy devices left, the best one
// first. A pick changes only the rank of the unit picked from, which is the
// first, so fix is the only operation; container/heap would box every unit.
type queue struct {
	*choice
	heap []int
}

func (c *choice) newQueue() queue {
	q := queue{choice: c, heap: make([]int, 0, len(c.units))}
	for b, unit := range c.units {
		if unit.left > 0 {
			q.heap = append(q.heap, b)
		}
	}
	for i := len(q.heap)/2 - 1; i >= 0; i-- {
		q.down(i)
	}
	return q
}

// fix restores the order after a pick from the first unit, and drops the unit
// when nothing is left of it.
func (q *queue) fix() {
	if q.units[q.heap[0]].left == 0 {
		last := len(q.heap) - 1
		q.heap[0] = q.heap[last]
		q.heap = q.heap[:last]
	}
	q.down(0)
}

// down moves the unit at place i of the heap to where it belongs.
func (q *queue) down(i int) {
	for {
		best := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(q.heap); child++ {
			if q.better(q.heap[child], q.heap[best]) {
				best = child
			}
		}
		if best == i {
			return
		}
		q.heap[i], q.heap[best] = q.heap[best], q.heap[i]
		i = best
	}
}

// better says that a device of unit a is to be picked before one of unit b.
func (q *queue) better(a, b int) bool {
	u, v := &q.units[a], &q.units[b]
	load := cmp.Compare(u.used+u.picks, v.used+v.picks)
	picks := cmp.Compare(u.picks, v.picks)
	var rank int
	switch q.policy {
	case Packed:
		rank = cmp.Or(-load, -picks)
	case Spread:
		rank = cmp.Or(picks, load)
	default:
		rank = cmp.Or(load, picks)
	}
	return cmp.Or(rank, cmp.Compare(q.buckets[a].sick, q.buckets[b].sick), cmp.Compare(a, b)) < 0
}
