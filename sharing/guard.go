package sharing

import (
	"math"
	"slices"
	"time"
)

// MemoryGuard is how much memory of a shared unit a container may use, and what happens to a
// container that uses more. It is no hard limit: a process can still allocate more. The zero value
// guards nothing.
type MemoryGuard struct {
	// Share limits each device to its share of the unit's memory, Bytes to this many bytes, and
	// Ratio to this part of the unit's memory. One of them is set.
	Share bool
	Bytes uint64
	Ratio float64
	// Grace is how long a container may exceed the limit.
	Grace time.Duration
	// Evict evicts the container's pod after Grace. Otherwise the excess is only reported.
	Evict bool
}

// limit returns the memory in bytes that a container with this many devices of a unit may use.
func (g MemoryGuard) limit(total uint64, devices, replicas int) float64 {
	limit := float64(g.Bytes)
	switch {
	case g.Share:
		limit = float64(total) / float64(replicas)
	case g.Ratio > 0:
		limit = float64(total) * g.Ratio
	}
	return math.Min(limit*float64(devices), float64(total))
}

// SetLimits sets the limits of the guarded containers. planned are the resources that the profile
// asks for, listed those that the kubelet has. It skips a holder unless it certainly holds shares
// of a guarded unit: not if it holds the unit by a claim or from another plan, or if the unit is
// changing its sharing mode or its memory is unknown.
func (r UtilizationReport) SetLimits(gpus []GPU, planned, listed []Resource, allocations []Allocation) {
	type offer struct {
		use  Use
		unit Unit
	}
	guarded := map[string]offer{}
	for _, resource := range planned {
		for _, unit := range resource.Units {
			if unit.Guard != (MemoryGuard{}) {
				guarded[unit.ID] = offer{Use{resource.Name, unit.Mode()}, unit}
			}
		}
	}
	if len(guarded) == 0 {
		return
	}
	now := map[string][]offer{}
	grown := map[string]bool{} // Units listed under their own ID too, which is then one of the planned shares.
	for _, resource := range listed {
		for _, device := range resource.Devices {
			grown[device.Unit] = grown[device.Unit] || device.ID == device.Unit
		}
		for _, unit := range resource.Units {
			now[unit.ID] = append(now[unit.ID], offer{Use{resource.Name, unit.Mode()}, unit})
		}
	}
	memory := newFairShares(gpus, nil, nil).memory
	devices := map[string]map[Container]int{}
	for _, usage := range Usage(nil, allocations) {
		id := usage.Unit.ID
		wanted, ok := guarded[id]
		if !ok || len(now[id]) != 1 || now[id][0].use != wanted.use ||
			now[id][0].unit.Replicas != wanted.unit.Replicas || memory[id] == 0 {
			continue
		}
		devices[id] = map[Container]int{}
		for _, h := range usage.Holders {
			certain := h.Pod != "" && !slices.ContainsFunc(h.Devices, func(device string) bool {
				held := Use{h.Resource, ModeOf(device)}
				keeps := h.Claim == "" && grown[id] && held.CanBecome(wanted.use)
				return held != wanted.use && !keeps
			})
			if _, other := devices[id][h.holder()]; other || !certain {
				devices[id][h.holder()] = 0 // Even if the container certainly has other shares.
				continue
			}
			devices[id][h.holder()] = len(h.Devices)
		}
	}
	for i := range r.Containers {
		c := &r.Containers[i]
		if count := devices[c.Unit][c.Container]; count > 0 && c.Memory != nil {
			unit := guarded[c.Unit].unit
			c.Guard, c.Limit = unit.Guard, new(unit.Guard.limit(memory[c.Unit], count, unit.Replicas))
		}
	}
}

// Excess returns the memory in bytes beyond the container's limit; 0 within the limit or without
// one.
func (c ContainerUtilization) Excess() float64 {
	if c.Limit == nil || c.Memory == nil {
		return 0
	}
	return max(0, *c.Memory-*c.Limit)
}
