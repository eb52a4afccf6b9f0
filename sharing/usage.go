package sharing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// UnitUsage says who holds devices of a unit.
type UnitUsage struct {
	// Unit is the hardware. If no resource offers it any more, only ID is known.
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

// Usage joins what is offered with what is held: every unit of the resources in their
// order, held or not, then units that are held but not offered, by ID. It goes by the unit
// in the device ID and not by the resource, so that a device granted under an earlier
// profile still counts. Devices that name neither a unit of the resources nor the UUID of a
// GPU or partition are another plugin's and left out.
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

// holdersByUnit splits the allocations by unit, container and resource.
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

// DeviceCount counts a unit's devices under one name. Each device is in one state,
// so the three counts add up to the devices in the list.
type DeviceCount struct {
	// Resource is the name; GPU is empty for a unit that the node does not have.
	Resource, GPU, Unit string
	// Allocated counts devices that containers hold, healthy or not; of the others,
	// Free counts the healthy ones and Unhealthy the rest.
	Free, Allocated, Unhealthy int
}

// CountDevices counts the listed devices by resource and unit, in the lists' order.
func CountDevices(gpus []GPU, listed []Resource, allocations []Allocation) []DeviceCount {
	gpu := GPUByUnit(gpus)
	type device struct{ resource, id string }
	held := map[device]bool{}
	for _, a := range allocations {
		for _, id := range a.Devices {
			held[device{a.Resource, id}] = true
		}
	}
	var list []DeviceCount
	for _, resource := range listed {
		at := map[string]int{}
		for _, d := range resource.Devices {
			i, known := at[d.Unit]
			if !known {
				i = len(list)
				at[d.Unit] = i
				list = append(list, DeviceCount{Resource: resource.Name, GPU: gpu[d.Unit], Unit: d.Unit})
			}
			count := &list[i]
			switch {
			case held[device{resource.Name, d.ID}]:
				count.Allocated++
			case d.Healthy:
				count.Free++
			default:
				count.Unhealthy++
			}
		}
	}
	return list
}

// GPUByUnit returns the UUID of the GPU behind each unit of the inventory.
func GPUByUnit(gpus []GPU) map[string]string {
	byUnit := map[string]string{}
	for _, gpu := range gpus {
		byUnit[gpu.UUID] = gpu.UUID
		for _, partition := range gpu.Partitions {
			byUnit[partition.UUID] = gpu.UUID
		}
	}
	return byUnit
}

// Sharers is how many containers hold devices of the unit, under whatever names.
func (u UnitUsage) Sharers() int {
	same := func(a, b Allocation) bool { return a.holder() == b.holder() }
	return len(slices.CompactFunc(slices.Clone(u.Holders), same))
}

// Tenants is the number of namespaces whose containers hold devices of the unit. A
// holder without a namespace does not count, as its pod may be gone.
func (u UnitUsage) Tenants() int {
	namespaces := map[string]bool{}
	for _, holder := range u.Holders {
		if holder.Namespace != "" {
			namespaces[holder.Namespace] = true
		}
	}
	return len(namespaces)
}

// Oversubscriptions say by UUID of each GPU that has units on offer how many containers'
// worth of them is handed out: held devices divided by offered units. Above 1, containers
// share.
func Oversubscriptions(usages []UnitUsage) map[string]float64 {
	held, units := map[string]int{}, map[string]int{}
	for _, usage := range usages {
		if usage.Resource != "" {
			held[usage.Unit.GPU] += usage.Held()
			units[usage.Unit.GPU]++
		}
	}
	ratios := make(map[string]float64, len(units))
	for gpu, offered := range units {
		ratios[gpu] = float64(held[gpu]) / float64(offered)
	}
	return ratios
}

// Container names a container of a pod on this node.
type Container struct{ Namespace, Pod, Name string }

func compareContainers(a, b Container) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Name, b.Name))
}

func (a Allocation) holder() Container { return Container{a.Namespace, a.Pod, a.Container} }
