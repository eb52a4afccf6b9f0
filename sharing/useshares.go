package sharing

// shares say who is granted how much of each unit.
type shares struct {
	// holders has the number of devices that a container holds of a unit.
	holders map[string]map[Container]int
	// replicas is how many devices stand for a unit; only of those that are
	// offered.
	replicas map[string]int
	// memory is the unit's, in bytes; only where it is known.
	memory map[string]uint64
}

// newShares leaves out holders without a name, which may be of pods that are
// gone.
func newShares(gpus []GPU, resources []Resource, allocations []Allocation) shares {
	s := shares{holders: map[string]map[Container]int{}, replicas: map[string]int{}, memory: map[string]uint64{}}
	for _, resource := range resources {
		for _, unit := range resource.Units {
			s.replicas[unit.ID] = unit.Replicas
		}
	}
	for _, gpu := range gpus {
		s.memory[gpu.UUID] = gpu.Memory
		for _, partition := range gpu.Partitions {
			s.memory[partition.UUID] = partition.Memory
		}
	}
	for _, usage := range Usage(nil, allocations) {
		held := map[Container]int{}
		for _, holder := range usage.Holders {
			if holder.Pod != "" {
				held[holder.holder()] += len(holder.Devices)
			}
		}
		s.holders[usage.Unit.ID] = held
	}
	return s
}

// over is the memory in bytes that a holder of so many devices uses beyond its
// fair share, which is the unit's memory by the devices that stand for it, times
// those held. Time-slicing limits no memory: whoever uses more leaves others
// less. It is unknown for a unit that is offered no more.
func (s shares) over(unit string, devices int, used Figure) Figure {
	replicas, offered := s.replicas[unit]
	total := s.memory[unit]
	if !used.Known || !offered || replicas < 1 || total == 0 {
		return Figure{}
	}
	fair := float64(total) * float64(min(devices, replicas)) / float64(replicas)
	return KnownFigure(max(0, used.Value-fair))
}
