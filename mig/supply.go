package mig

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Counters say how much there is of each part of a GPU, or how much of it a GPU instance
// takes, by the names of parts. Names are DNS labels, as Kubernetes wants them.
//
// Where sums of numbers are all that can be compared, as with the shared counters of a
// ResourceSlice, they stand for the rules by which Place judges: GPU instances fit
// together if and only if the sum of what they take is nowhere more than the Supply.
type Counters map[string]int

// Supply is what a GPU of the geometry has: each memory slot, the compute slices, and what
// limits the number of instances with media engines and of those with a maximum of their own.
// Memory, in bytes, limits nothing, as the slots do that: it is for whoever counts by it.
func (g Geometry) Supply() Counters {
	supply := Counters{"slices": g.Slices}
	for _, info := range g.Profiles {
		slot := (int(g.InstanceMemory(info.Profile)) + info.Size - 1) / max(1, info.Size)
		supply["memory"] = max(supply["memory"], g.Slots*slot<<20)
	}
	for slot := range g.Slots {
		supply[slotName(slot)] = 1
	}
	for _, info := range g.Profiles {
		switch {
		case info.Profile.has("+me"):
			supply["me"] = max(supply["me"], info.Max)
		case info.Profile.has("+me.all"):
			supply["media"] = g.Slots
		case info.Max < len(info.Starts):
			supply[maximumName(info.Profile)] = info.Max
		}
	}
	return supply
}

// Takes is what the partition's GPU instance takes of the Supply.
func (g Geometry) Takes(p Partition) Counters {
	profile, supply := p.Profile.Instance(), g.Supply()
	takes := Counters{"slices": profile.Slices, "memory": int(g.InstanceMemory(profile)) << 20}
	for slot := p.Placement.Start; slot < p.Placement.Start+p.Placement.Size; slot++ {
		takes[slotName(slot)] = 1
	}
	if profile.has("+me") {
		takes["me"] = 1
	}
	if all := supply["media"]; all > 0 && profile.has("+me.all") {
		takes["media"] = all
	} else if all > 0 && !profile.has("-me") {
		takes["media"] = 1
	}
	if supply[maximumName(profile)] > 0 {
		takes[maximumName(profile)] = 1
	}
	return takes
}

// InstanceMemory is the memory of a GPU instance of the profile in MiB: what the driver says,
// or else 1 GiB less than its name, which may be rounded up.
func (g Geometry) InstanceMemory(p Profile) uint64 {
	if memory := g.Memory[p]; memory > 0 {
		return memory
	}
	return uint64(max(0, p.MemoryGB-1)) << 10
}

// Placements are all places that GPU instances of the geometry can have, smaller profiles
// first, and those of each profile in an order for whoever takes the first that is free, as
// instances come and go one by one: the upper half of the GPU before the lower one, which a
// 4g needs; there a single slot from below, because the last slot of a 7-slice GPU has no
// slice of its own and is of use together with the one before it only. Of all orders in which the
// instances of a mixture can come, 7 % end with one that has no place on a 7-slice GPU; in the
// order of preferred, which is for instances that are all known before, 13 % do.
func (g Geometry) Placements() []Partition {
	var all []Partition
	for _, info := range g.Profiles {
		for _, start := range info.Starts {
			if start >= 0 && start+info.Size <= g.Slots {
				all = append(all, Partition{info.Profile, Placement{start, info.Size}})
			}
		}
	}
	half := func(p Partition) int { return p.Placement.Start / max(1, g.Slots/2) }
	slices.SortStableFunc(all, func(a, b Partition) int {
		within := cmp.Compare(b.Placement.Start, a.Placement.Start)
		if a.Placement.Size == 1 {
			within = -within
		}
		return cmp.Or(a.Profile.Compare(b.Profile), cmp.Compare(half(b), half(a)), within)
	})
	return all
}

// slotName is the name that NVIDIA's DRA driver has for it.
func slotName(slot int) string { return fmt.Sprintf("memory-slice-%d", slot) }

func maximumName(p Profile) string { return "max-" + p.Label() }

// Label is the profile as a part of a DNS label: 1g10gb, 1g10gb-me for 1g.10gb+me and
// 1g24gb-no-me for 1g.24gb-me.
func (p Profile) Label() string {
	return strings.NewReplacer("+", "-", ",", "-", "gb-", "gb-no-", "me.all", "me-all", ".", "").Replace(p.String())
}
