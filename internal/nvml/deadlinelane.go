package nvml

import "sync"

// laneLimit bounds each of the tables of handles in lanes. Handles beyond it
// are forgotten, and their calls then stand with those of the library.
const laneLimit = 1 << 16

// lanes says which calls are made one at a time: those for a board's handle, with
// the handles that came from it, and the look-ups at an index. The boards at an
// index are not the same for ever: one that is stuck must not keep the next one
// there from being looked up, nor a board's former handle the board.
type lanes struct {
	mu      sync.Mutex
	library *lane
	indices map[int]*lane

	devices   map[Device]*lane
	instances map[GPUInstance]*lane
	computes  map[ComputeInstance]*lane
}

func newLanes() *lanes {
	return &lanes{
		library: newLane(), indices: map[int]*lane{}, devices: map[Device]*lane{},
		instances: map[GPUInstance]*lane{}, computes: map[ComputeInstance]*lane{},
	}
}

// lookUp is the lane of the index.
func (l *lanes) lookUp(index int) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.indices[index] == nil {
		l.indices[index] = newLane()
	}
	return l.indices[index]
}

// found is the lane of the handle that was looked up, a new one for a new handle.
func (l *lanes) found(device Device) *lane {
	if known := of(l, l.devices, device); known != l.library {
		return known
	}
	belongs(l, l.devices, device, newLane(), nil)
	return of(l, l.devices, device)
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
