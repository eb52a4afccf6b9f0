package nvml

import "sync"

// laneLimit bounds each of the tables of handles in lanes. Handles beyond it
// are forgotten, and their calls then stand with those of the library.
const laneLimit = 1 << 16

// lanes says which board a handle belongs to. A board is known by its index, so
// that looking up its handle anew is stuck with it.
type lanes struct {
	mu      sync.Mutex
	library *lane
	boards  map[int]*lane

	devices   map[Device]*lane
	instances map[GPUInstance]*lane
	computes  map[ComputeInstance]*lane
}

func newLanes() *lanes {
	return &lanes{
		library: newLane(), boards: map[int]*lane{}, devices: map[Device]*lane{},
		instances: map[GPUInstance]*lane{}, computes: map[ComputeInstance]*lane{},
	}
}

// board is the lane of the board at the index.
func (l *lanes) board(index int) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.boards[index] == nil {
		l.boards[index] = newLane()
	}
	return l.boards[index]
}

// of is the lane of the handle in the table, which is one of l's.
func of[Handle comparable](l *lanes, table map[Handle]*lane, handle Handle) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if known := table[handle]; known != nil {
		return known
	}
	return l.library
}

// belongs notes that the handle came from a call on the lane.
func belongs[Handle comparable](l *lanes, table map[Handle]*lane, handle Handle, to *lane, err error) {
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(table) >= laneLimit {
		clear(table)
	}
	table[handle] = to
}
