package sharing

import (
	"cmp"
	"slices"
)

// Listing is what the kubelet is told of a resource.
type Listing struct {
	Resource string
	// Devices include those on their way out, which the plan does not have.
	Devices []Device
}

// Occupancy counts the devices of a unit under one name. Each device is in one
// state, so that the three together are what is listed.
type Occupancy struct {
	// Resource is the name; GPU is empty for a unit that is not in the node.
	Resource, GPU, Unit string
	// Allocated are held by containers, healthy or not; Free are Healthy and not
	// held, Unhealthy neither.
	Free, Allocated, Unhealthy int
}

// Occupancies count the listed devices, by resource and unit in the order of the
// lists.
func Occupancies(gpus []GPU, listings []Listing, allocations []Allocation) []Occupancy {
	board := BoardOf(gpus)
	type device struct{ resource, id string }
	held := map[device]bool{}
	for _, a := range allocations {
		for _, id := range a.Devices {
			held[device{a.Resource, id}] = true
		}
	}
	var list []Occupancy
	for _, listing := range listings {
		first := len(list)
		at := map[string]int{}
		for _, d := range listing.Devices {
			i, known := at[d.Unit]
			if !known {
				i = len(list) - first
				at[d.Unit] = i
				list = append(list, Occupancy{Resource: listing.Resource, GPU: board[d.Unit], Unit: d.Unit})
			}
			count := &list[first+i]
			switch {
			case held[device{listing.Resource, d.ID}]:
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

// BoardOf is the UUID of the board behind each unit of the inventory.
func BoardOf(gpus []GPU) map[string]string {
	board := map[string]string{}
	for _, gpu := range gpus {
		board[gpu.UUID] = gpu.UUID
		for _, partition := range gpu.Partitions {
			board[partition.UUID] = gpu.UUID
		}
	}
	return board
}

// Sharers is the number of containers that hold devices of the unit, each
// counted once whatever the names under which it does.
func (u UnitUsage) Sharers() int {
	containers := map[Container]bool{}
	for _, holder := range u.Holders {
		containers[holder.holder()] = true
	}
	return len(containers)
}

// Tenants is the number of namespaces that hold devices of the unit. A holder
// without a namespace may be of a pod that is gone, and is not counted.
func (u UnitUsage) Tenants() int {
	namespaces := map[string]bool{}
	for _, holder := range u.Holders {
		if holder.Namespace != "" {
			namespaces[holder.Namespace] = true
		}
	}
	return len(namespaces)
}

// Oversubscription is how often a board's units are given away.
type Oversubscription struct {
	GPU string
	// Ratio is the number of held devices by that of offered units: above 1,
	// containers really share.
	Ratio float64
}

// Oversubscriptions are of the boards with units that are offered, by UUID.
func Oversubscriptions(usages []UnitUsage) []Oversubscription {
	type count struct{ held, units int }
	boards := map[string]count{}
	for _, usage := range usages {
		if usage.Resource == "" {
			continue
		}
		c := boards[usage.Unit.GPU]
		boards[usage.Unit.GPU] = count{c.held + usage.Held(), c.units + 1}
	}
	list := make([]Oversubscription, 0, len(boards))
	for gpu, c := range boards {
		list = append(list, Oversubscription{GPU: gpu, Ratio: float64(c.held) / float64(c.units)})
	}
	slices.SortFunc(list, func(a, b Oversubscription) int { return cmp.Compare(a.GPU, b.GPU) })
	return list
}
