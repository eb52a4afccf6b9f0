package sharing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// UnitUsage says who shares a unit.
type UnitUsage struct {
	// Unit is the hardware. Of a unit that no resource offers any more only ID
	// is set: the rest is not known here.
	Unit Unit
	// Resource is the name under which the unit is offered now; empty when it
	// is not. A holder may hold it under another name.
	Resource string
	// Holders are the containers that hold devices of the unit, each with those
	// devices only, by namespace, pod, container and resource.
	Holders []Allocation
}

// Held is the number of devices of the unit that containers hold.
func (u UnitUsage) Held() int {
	count := 0
	for _, holder := range u.Holders {
		count += len(holder.Devices)
	}
	return count
}

// Usage joins what is offered with what is held: every unit of the resources,
// in their order, held or not, then the units that are held but not offered, by
// ID. What is held is joined by the unit in the device ID and not by the
// resource, so a pod that got its device under an earlier profile still counts.
// Devices that name neither a unit of the resources nor a board or partition by
// UUID are another plugin's and left out.
func Usage(resources []Resource, allocations []Allocation) []UnitUsage {
	holders := holdersByUnit(allocations)
	var all []UnitUsage
	for _, resource := range resources {
		for _, unit := range resource.Units {
			all = append(all, UnitUsage{Unit: unit, Resource: resource.Name, Holders: holders[unit.ID]})
			delete(holders, unit.ID)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(holders)) {
		if strings.HasPrefix(id, gpuPrefix) || strings.HasPrefix(id, migPrefix) {
			all = append(all, UnitUsage{Unit: Unit{ID: id}, Holders: holders[id]})
		}
	}
	return all
}

// holdersByUnit splits the allocations by unit, one entry a container and
// resource.
func holdersByUnit(allocations []Allocation) map[string][]Allocation {
	sorted := slices.SortedFunc(slices.Values(allocations), compareHolders)
	holders := make(map[string][]Allocation)
	for _, allocation := range sorted {
		for _, id := range allocation.Devices {
			unit, _, _ := ParseDeviceID(id)
			list := holders[unit]
			if last := len(list) - 1; last < 0 || compareHolders(list[last], allocation) != 0 {
				holder := allocation
				holder.Devices = nil
				list = append(list, holder)
			}
			holder := &list[len(list)-1]
			holder.Devices = append(holder.Devices, id)
			holders[unit] = list
		}
	}
	for _, list := range holders {
		for i := range list {
			slices.Sort(list[i].Devices)
			list[i].Devices = slices.Compact(list[i].Devices)
		}
	}
	return holders
}

func compareHolders(a, b Allocation) int {
	return cmp.Or(compareContainers(a.holder(), b.holder()), cmp.Compare(a.Resource, b.Resource))
}
