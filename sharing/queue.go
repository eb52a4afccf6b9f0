package sharing

// queue is a heap of the units that have healthy devices left, the best one
// first. Devices are picked from the first unit only; container/heap would box
// every unit.
type queue struct {
	*choice
	heap []int
}

func (c *choice) newQueue() queue {
	q := queue{choice: c, heap: make([]int, 0, len(c.units))}
	for b := range c.units {
		if unit := &c.units[b]; unit.left > 0 {
			unit.boardPicks = c.board(b).picks
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
//
// The pick changes the rank of all units of the board. Theirs are looked up
// only when they come first, which is soon enough: except under Packed, a pick
// never makes a unit better; and under Packed the units of the board picked from
// are all before any other.
func (q *queue) fix() {
	if q.units[q.heap[0]].left == 0 {
		last := len(q.heap) - 1
		q.heap[0] = q.heap[last]
		q.heap = q.heap[:last]
	}
	for len(q.heap) > 0 {
		q.down(0)
		first := q.heap[0]
		picks := q.board(first).picks
		if q.units[first].boardPicks == picks {
			return
		}
		q.units[first].boardPicks = picks
	}
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
