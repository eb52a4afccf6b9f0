package sharing

import (
	"cmp"
	"math"
	"slices"
)

// DeviceSet chooses among a resource's devices as the kubelet has them. It never changes, so any
// number of goroutines may use it.
type DeviceSet struct {
	policy AllocationPolicy
	// ids and healthy describe the listed devices, of which there may be thousands. position is the
	// position of each ID in the list.
	ids      []string
	healthy  []bool
	position map[string]int
	// groups are the devices by unit, in the order in which the list first names
	// the units; groupOf is the group of each device.
	groups  []unitGroup
	groupOf []int
	// gpuUnits are the groups of each GPU; GPUs are in the order of their first units.
	gpuUnits [][]int
	// topology connects the GPUs that a container can have whole and alone, and wholeGPUs has the
	// group of each GPU, ascending. Both are nil if all GPUs are equally near.
	topology  *topology
	wholeGPUs []int
	// mps has the groups that are shared by MPS; nil for none.
	mps map[int]bool
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

// NewDeviceSet returns the set of the listed devices, from which Prefer chooses by the policy; an
// unknown policy acts as Distributed. The list may have more devices than the plan, such as
// unhealthy devices that are about to be removed. If it repeats an ID, only the first one counts.
//
// The units, in any order, describe the hardware behind the devices. A device whose unit is missing
// counts as a GPU of its own, without links.
func NewDeviceSet(devices []Device, units []Unit, policy AllocationPolicy) *DeviceSet {
	x := &DeviceSet{
		policy:   policy,
		position: make(map[string]int, len(devices)),
		ids:      make([]string, len(devices)),
		healthy:  make([]bool, len(devices)),
		groupOf:  make([]int, len(devices)),
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
		x.ids[at] = device.ID
		x.healthy[at] = device.Healthy
		x.groupOf[at] = group
		x.position[device.ID] = at
		x.groups[group].members = append(x.groups[group].members, at)
		if ModeOf(device.ID).Shares > 0 {
			if x.mps == nil {
				x.mps = map[int]bool{}
			}
			x.mps[group] = true
		}
	}
	x.findWholeGPUs(devices, known)
	return x
}

// Index returns the position of the device in the list; false if the list lacks it.
func (x *DeviceSet) Index(id string) (at int, ok bool) {
	at, ok = x.position[id]
	return at, ok
}

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
	x.topology = newTopology(whole)
	if x.topology != nil {
		x.wholeGPUs = groups
	}
}

// Prefer returns the devices that a container should get: size IDs, first those of must, then the
// best of available. The kubelet asks for this in GetPreferredAllocation.
// docs/explanation/placement.md has an example of each rule.
//
// If every healthy available device is a whole GPU that a container has alone, the policy does not
// matter. The container gets the GPUs that are connected best to each other and to those of must,
// by NVLinks, distance on the PCI bus and NUMA nodes. Of equally good sets it gets the one that
// leaves the best connected GPUs to others. If no links are known, or there are too many GPUs, the
// order of the list decides.
//
// Otherwise the policy picks units. Healthy devices of the list that are neither available nor in
// must are in use by pods; unhealthy devices that are not available are not. A GPU's use is the sum
// over its units.
//
//   - Distributed: the least used unit first, counting the picks made so far
//   - Packed: the most used GPU first, counting the picks made so far, and of its
//     units the most used
//   - Spread: the unit with the fewest picks first, so distinct units while there
//     are any; then the GPU with the fewest; then the least used
//
// Several MPS shares are always of one unit: the first by the policy that has enough of them.
//
// Ties are broken by fewer picks (more for Packed), then by the least used GPU, fewer unhealthy
// devices, and the order of the list.
//
// Prefer never fails, and returns as many IDs as it can. The last resort are unhealthy devices,
// then IDs that the list does not have. With fewer than size IDs to choose from it returns all of
// them; with more than size in must, the first size of these in the order of the list; with no IDs,
// nil. The order and repetition of IDs in available and must make no difference.
func (x *DeviceSet) Prefer(available, must []string, size int) []string {
	if size <= 0 {
		return nil
	}
	c := x.newChoice(available, must)
	picked := make([]string, 0, min(size, len(available)+len(must)))
	picked = take(c.takeAll(picked, required, size), c.required, size)
	picked = c.takeHealthy(picked, size)
	picked = take(c.takeAll(picked, free, size), c.unknown, size)
	if len(picked) == 0 {
		return nil
	}
	return picked
}

func (c *choice) takeAll(picked []string, of deviceState, size int) []string {
	for at, state := range c.state {
		if state == of && len(picked) < size {
			picked = append(picked, c.ids[at])
			c.count(c.groupOf[at])
		}
	}
	return picked
}

// takeHealthy takes healthy devices: whole GPUs by their links, other devices one by one from the
// unit that is best at that moment.
func (c *choice) takeHealthy(picked []string, size int) []string {
	if c.topology != nil {
		if free, ok := c.freeWholeGPUs(); ok {
			return c.takeLinked(picked, free, size)
		}
	}
	ranks := make([]rank, len(c.gpus))
	if c.mps != nil && size > 1 {
		c.keepTogether(size - len(picked))
	}
	for len(picked) < size {
		best, found := c.bestUnit(ranks)
		if !found {
			break
		}
		picked = append(picked, c.ids[c.pick(best)])
		ranks[c.groups[best].gpu] = rank{}
	}
	return picked
}

// keepTogether leaves only one unit to pick from if this many devices must be of one unit: the unit
// of the container's other devices, or else the first by the policy that has enough. If no unit has
// enough, it leaves out the units shared by MPS.
func (c *choice) keepTogether(wanted int) {
	chosen := noGroup
	best := rank{none}
	for group := range c.units {
		unit, r := &c.units[group], c.rank(group)
		if unit.picks > 0 && c.mps[group] {
			chosen = group
			break
		}
		if unit.left >= wanted && r.less(&best) {
			chosen, best = group, r
		}
	}
	for group := range c.units {
		if chosen != noGroup && group != chosen || chosen == noGroup && c.mps[group] {
			c.units[group].left = 0
		}
	}
}

// freeWholeGPUs returns the positions in the topology of the free and healthy GPUs, ascending. ok
// is false if some free healthy device is not a whole GPU, because links do not tell how much of a
// shared GPU a container gets.
func (c *choice) freeWholeGPUs() (places []int, ok bool) {
	for group, unit := range c.units {
		if unit.left == 0 {
			continue
		}
		place, whole := slices.BinarySearch(c.wholeGPUs, group)
		if !whole {
			return nil, false
		}
		places = append(places, place)
	}
	return places, true
}

// takeLinked takes the free GPUs that are connected best to each other and to the GPUs that the
// container already has.
func (c *choice) takeLinked(picked []string, places []int, size int) []string {
	wanted := min(size-len(picked), len(places))
	var own []int
	for place, group := range c.wholeGPUs {
		if c.units[group].picks > 0 {
			own = append(own, place)
		}
	}
	for _, place := range c.topology.bestSet(places, own, wanted) {
		picked = append(picked, c.ids[c.pick(c.wholeGPUs[place])])
	}
	return picked
}

func take(picked, ids []string, size int) []string {
	return append(picked, ids[:min(len(ids), max(0, size-len(picked)))]...)
}

// choice is one call of Prefer.
type choice struct {
	*DeviceSet
	// state is the caller's information about each device of the list.
	state []deviceState
	// required and unknown are the IDs of must and of available that the list lacks, sorted.
	required, unknown []string
	units             []unitState
	gpus              []use
}

type deviceState uint8

const (
	held deviceState = iota
	free
	required
	taken
)

// unitState is a unit during one call of Prefer.
type unitState struct {
	use
	// left is the number of healthy devices that may still be picked.
	left int
	// next is the index in the unitGroup's members from which to search for the next such device.
	next int
}

// use is how much of a unit, or of all units of a GPU, is used during one call of Prefer.
type use struct {
	// used counts the healthy devices that pods hold, picks the devices that this container gets.
	used, picks, unhealthy int
}

// newChoice records the state of each device and unit from available and must.
func (x *DeviceSet) newChoice(available, must []string) *choice {
	c := &choice{
		DeviceSet: x,
		state:     make([]deviceState, len(x.ids)),
		units:     make([]unitState, len(x.groups)),
		gpus:      make([]use, len(x.gpuUnits)),
	}
	c.unknown = c.mark(available, free)
	c.required = c.mark(must, required)
	if len(c.required) > 0 {
		c.unknown = slices.DeleteFunc(c.unknown, func(id string) bool {
			_, found := slices.BinarySearch(c.required, id)
			return found
		})
	}
	for at, group := range x.groupOf {
		switch {
		case group == noGroup:
		case !x.healthy[at]:
			c.units[group].unhealthy++
			c.gpu(group).unhealthy++
		case c.state[at] == held:
			c.units[group].used++
			c.gpu(group).used++
		case c.state[at] == free:
			c.units[group].left++
		}
	}
	return c
}

// mark notes the state of the devices and returns the IDs that the list lacks, sorted.
func (c *choice) mark(ids []string, state deviceState) []string {
	var unknown []string
	for _, id := range ids {
		if at, known := c.position[id]; known {
			c.state[at] = state
		} else {
			unknown = append(unknown, id)
		}
	}
	slices.Sort(unknown)
	return slices.Compact(unknown)
}

// pick takes the unit's next healthy device and returns its position.
func (c *choice) pick(group int) int {
	unit, members := &c.units[group], c.groups[group].members
	unit.next += slices.IndexFunc(members[unit.next:],
		func(at int) bool { return c.state[at] == free && c.healthy[at] })
	at := members[unit.next]
	c.state[at] = taken
	unit.left--
	c.count(group)
	return at
}

func (c *choice) count(group int) {
	c.units[group].picks++
	c.gpu(group).picks++
}

func (c *choice) gpu(group int) *use { return &c.gpus[c.groups[group].gpu] }

// bestUnit returns the unit to pick from next; found is false if no healthy device is left. ranks
// are the ranks of each GPU's best unit; a zero rank is computed again.
func (c *choice) bestUnit(ranks []rank) (group int, found bool) {
	lowest := &rank{none}
	for gpu := range ranks {
		best := &ranks[gpu]
		if *best == (rank{}) {
			*best = rank{none}
			for _, unit := range c.gpuUnits[gpu] {
				if r := c.rank(unit); c.units[unit].left > 0 && r.less(best) {
					*best = r
				}
			}
		}
		if best.less(lowest) {
			lowest = best
		}
	}
	return lowest[byPlace] - 1, lowest[0] != none
}

// rank compares units, element by element from the left; Prefer picks from the unit with the lower
// rank. The last element is the unit's position in groups, from 1. If there is no unit, the first
// element is none.
type rank [byPlace + 1]int

const byPlace, none = 7, math.MaxInt

func (r *rank) less(other *rank) bool {
	for i := range r {
		if r[i] != other[i] {
			return r[i] < other[i]
		}
	}
	return false
}

// rank implements the policy. Of units that the policy does not distinguish, the first wins.
func (c *choice) rank(group int) rank {
	unit, gpu := &c.units[group], c.gpu(group)
	load, gpuLoad := unit.used+unit.picks, gpu.used+gpu.picks
	switch c.policy {
	case Packed:
		// All units of one GPU come before those of the next.
		return rank{
			-gpuLoad, -gpu.picks, gpu.unhealthy, c.groups[group].gpu, -load, -unit.picks, unit.unhealthy, group + 1,
		}
	case Spread:
		return rank{unit.picks, gpu.picks, load, gpuLoad, unit.unhealthy, byPlace: group + 1}
	default:
		return rank{load, unit.picks, gpuLoad, gpu.picks, unit.unhealthy, byPlace: group + 1}
	}
}
