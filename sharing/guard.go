package sharing

import (
	"math"
	"slices"
	"time"
)

// MemoryGuard says how much memory of a shared unit a container may use, and what becomes of
// one that uses more. It is no wall: nothing keeps a process from allocating. The zero value
// guards nothing.
type MemoryGuard struct {
	// Share limits a device to its share of the unit's memory, Bytes to so many, Ratio to
	// such a part of it. One of them is set.
	Share bool
	Bytes uint64
	Ratio float64
	// Grace is how long a container may use more.
	Grace time.Duration
	// Evict has its pod evicted then; otherwise it is only reported.
	Evict bool
}

// limit is what a container with so many devices of a unit may use of its memory, in bytes.
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

// SetLimits gives the containers that are guarded their limits. Planned is what the profile
// wants, listed what the kubelet is told. Left out are holders of which it is not certain
// that they hold shares of what is guarded: by a claim, from another plan, or of a unit that
// is on its way to another sharing mode or whose memory is unknown.
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
	grown := map[string]bool{} // Listed with its own ID and as many shares as it is to have: one of them.
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
				devices[id][h.holder()] = 0 // Also where another holding is certain.
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

// Excess is the memory in bytes beyond the container's limit; 0 within it and without one.
func (c ContainerUtilization) Excess() float64 {
	if c.Limit == nil || c.Memory == nil {
		return 0
	}
	return max(0, *c.Memory-*c.Limit)
}
