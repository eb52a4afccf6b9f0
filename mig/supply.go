package mig

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Counters are amounts by name of a GPU's parts: what a GPU has, or what a GPU instance uses. Names
// are DNS labels, as Kubernetes requires.
//
// They express the rules of Place where only sums of numbers can be compared, as with the shared
// counters of a ResourceSlice. GPU instances fit together if and only if the sum of what they use
// exceeds the Supply in no counter.
type Counters map[string]int

// Supply returns what a GPU of the geometry has: each memory slot, the compute slices, and counters
// that limit the number of instances with media engines and of instances with a maximum of their
// own. The memory counter, in bytes, limits nothing, because the slots do. It is for readers that
// count memory.
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

// Needs returns what the partition's GPU instance uses of the Supply.
func (g Geometry) Needs(p Partition) Counters {
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

// InstanceMemory returns the memory of a GPU instance of the profile in MiB: the driver's value or,
// without one, 1 GiB less than in the profile's name, which may be rounded up.
func (g Geometry) InstanceMemory(p Profile) uint64 {
	if memory := g.Memory[p]; memory > 0 {
		return memory
	}
	return uint64(max(0, p.MemoryGB-1)) << 10
}

// Placements returns all placements that GPU instances of the geometry can have, smaller profiles
// first. The order within a profile suits a caller that takes the first free one while instances
// come and go one by one: the upper half of the GPU comes first, because a 4g needs the lower half.
// Within a half, single slots go upwards, because the last slot of a 7-slice GPU has no slice of
// its own and is useful only together with the slot before it. Of all orders in which the instances
// of a mixture can arrive, 7 % end with an instance that has no place on a 7-slice GPU. With the
// order of preferred, which is for instances that are all known in advance, it is 13 %.
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

// slotName returns the name that NVIDIA's DRA driver uses for the slot.
func slotName(slot int) string { return fmt.Sprintf("memory-slice-%d", slot) }

func maximumName(p Profile) string { return "max-" + p.Label() }

// Label returns the profile as a part of a DNS label: 1g10gb, 1g10gb-me for 1g.10gb+me and
// 1g24gb-no-me for 1g.24gb-me.
func (p Profile) Label() string {
	return strings.NewReplacer("+", "-", ",", "-", "gb-", "gb-no-", "me.all", "me-all", ".", "").Replace(p.String())
}
