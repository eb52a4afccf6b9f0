package sharing

import "cmp"

// DeviceSet is a resource's devices as the kubelet has them, to choose among them. It
// never changes, so any number of goroutines may use it.
type DeviceSet struct {
	policy AllocationPolicy
	// ids and healthy are of the devices in the list, of which there may be thousands;
	// position is the place of each ID.
	ids      []string
	healthy  []bool
	position map[string]int
	// groups are the devices by unit, in the order in which the list first names
	// the units; groupOf is the group of each device.
	groups  []unitGroup
	groupOf []int
	// gpuUnits are the groups of each GPU, GPUs in the order of first units.
	gpuUnits [][]int
	// topology is of the GPUs that a container can have whole and alone, and wholeGPUs
	// has the group of each, ascending; both nil when all GPUs are equally near.
	topology  *topology
	wholeGPUs []int
}

// unitGroup has the devices of one unit.
type unitGroup struct {
	// members are positions in the list, ascending.
	members []int
	// gpu is the place of the unit's GPU in gpuUnits.
	gpu int
}

// noGroup is the group of a repeated ID.
const noGroup = -1

// NewDeviceSet returns the set of the listed devices, from which Prefer chooses by
// the policy; an unknown one is Distributed. The list may have more than the plan,
// such as unhealthy devices that are about to be removed. Of an ID that it repeats,
// only the first counts.
//
// The units, in any order, describe the hardware behind the devices. A device whose
// unit is missing counts as a GPU of its own, without links.
func NewDeviceSet(devices []Device, units []Unit, policy AllocationPolicy) *DeviceSet {
	x := &DeviceSet{
		policy: policy, position: make(map[string]int, len(devices)),
		ids: make([]string, len(devices)), healthy: make([]bool, len(devices)), groupOf: make([]int, len(devices)),
	}
	known := make(map[string]Unit, len(units))
	for _, unit := range units {
		known[unit.ID] = unit
	}
	groupOfUnit := make(map[string]int)
	placeOfGPU := make(map[string]int)
	for at, device := range devices {
		if _, repeated := x.position[device.ID]; repeated {
			x.groupOf[at] = noGroup
			continue
		}
		group, met := groupOfUnit[device.Unit]
		if !met {
			group = len(x.groups)
			groupOfUnit[device.Unit] = group
			uuid := cmp.Or(known[device.Unit].GPU, device.Unit)
			gpu, met := placeOfGPU[uuid]
			if !met {
				gpu = len(x.gpuUnits)
				placeOfGPU[uuid] = gpu
				x.gpuUnits = append(x.gpuUnits, nil)
			}
			x.groups = append(x.groups, unitGroup{gpu: gpu})
			x.gpuUnits[gpu] = append(x.gpuUnits[gpu], group)
		}
		x.ids[at], x.healthy[at], x.groupOf[at] = device.ID, device.Healthy, group
		x.position[device.ID] = at
		x.groups[group].members = append(x.groups[group].members, at)
	}
	x.findWholeGPUs(devices, known)
	return x
}

// Index returns the place of the device in the list; false when the list lacks it.
func (x *DeviceSet) Index(id string) (at int, ok bool) {
	at, ok = x.position[id]
	return at, ok
}

// findWholeGPUs finds the GPUs that a container can have whole and alone.
func (x *DeviceSet) findWholeGPUs(devices []Device, known map[string]Unit) {
	var whole []*Unit
	var groups []int
	for i, group := range x.groups {
		first := devices[group.members[0]]
		unit, ok := known[first.Unit]
		if ok && !unit.Partition() && len(group.members) == 1 && first.ID == first.Unit {
			whole, groups = append(whole, &unit), append(groups, i)
		}
	}
	if x.topology = newTopology(whole); x.topology != nil {
		x.wholeGPUs = groups
	}
}
