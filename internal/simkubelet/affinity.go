package simkubelet

import (
	"cmp"
	"math/bits"
	"slices"
)

// nodes is a set of NUMA nodes that a container should get its devices from;
// nil for no wish.
type nodes map[int64]bool

// affinity is the topology manager's best-effort policy at container scope: the
// fewest NUMA nodes, then the lowest, that can serve all of the container's
// aligned requests. It is nil when the policy is none, when no requested
// resource knows NUMA nodes, and when no set of nodes will do.
//
// The real merge of several resources' hints intersects their sets of nodes;
// this looks for one set that serves all, which is the same for one resource.
// The caller holds the lock.
func (a *admission) affinity(container Container) nodes {
	if !a.kubelet.options.NUMAAligned {
		return nil
	}
	var wanted []string
	borne := nodes{}
	for resource, count := range container.Requests {
		d := a.process.devices[resource]
		if count == 0 || d == nil || !d.aligned() {
			continue
		}
		wanted = append(wanted, resource)
		for _, device := range d.all {
			for _, node := range nodesOf(device) {
				borne[node] = true
			}
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	for _, candidate := range subsets(borne) {
		serves := func(resource string) bool { return a.serves(candidate, resource, container.Requests[resource]) }
		if !slices.ContainsFunc(wanted, func(resource string) bool { return !serves(resource) }) {
			return candidate
		}
	}
	return nil
}

// serves says whether the nodes have enough devices that are free or reusable,
// and all of the reusable ones.
func (a *admission) serves(candidate nodes, resource string, count int) bool {
	d := a.process.devices[resource]
	matching := 0
	for id := range a.reusable[resource] {
		on := nodesOf(d.all[id])
		if len(on) == 0 {
			continue
		}
		if !candidate.any(on) {
			return false
		}
		matching++
	}
	for id := range d.healthy.without(a.process.allocated[resource]) {
		if candidate.any(nodesOf(d.all[id])) {
			matching++
		}
	}
	return matching >= count
}

func (n nodes) any(of []int64) bool {
	return slices.ContainsFunc(of, func(node int64) bool { return n[node] })
}

// split sorts available devices into those on the nodes, those on others and
// those on none. Without a wish, or where no device of the resource has a node,
// all are of the last kind.
func (n nodes) split(available set, d *devices) (aligned, unaligned, unbound set) {
	aligned, unaligned, unbound = set{}, set{}, set{}
	if n == nil || !d.aligned() {
		return aligned, unaligned, available
	}
	for id := range available {
		switch on := nodesOf(d.all[id]); {
		case len(on) == 0:
			unbound[id] = struct{}{}
		case n.any(on):
			aligned[id] = struct{}{}
		default:
			unaligned[id] = struct{}{}
		}
	}
	return aligned, unaligned, unbound
}

// subsets are all sets of one node or more, small ones first, then those with
// low nodes. A node has few NUMA nodes: eight make 255 sets.
func subsets(of nodes) []nodes {
	var list []int64
	for node := range of {
		list = append(list, node)
	}
	slices.Sort(list)
	masks := make([]uint, 0, 1<<len(list))
	for mask := uint(1); mask < 1<<len(list); mask++ {
		masks = append(masks, mask)
	}
	slices.SortFunc(masks, func(a, b uint) int {
		return cmp.Or(cmp.Compare(bits.OnesCount(a), bits.OnesCount(b)), cmp.Compare(a, b))
	})
	sets := make([]nodes, 0, len(masks))
	for _, mask := range masks {
		chosen := nodes{}
		for i, node := range list {
			if mask&(1<<i) != 0 {
				chosen[node] = true
			}
		}
		sets = append(sets, chosen)
	}
	return sets
}
