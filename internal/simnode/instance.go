package simnode

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// gpuInstance is a GPU instance of a board.
type gpuInstance struct {
	id        int
	handle    nvml.GPUInstance
	shape     mig.Shape
	placement mig.Placement
	computes  []*computeInstance
}

// computeInstance is a compute instance, which is a MIG device.
type computeInstance struct {
	instance *gpuInstance
	id       int
	slices   int
	uuid     string
	// index is the MIG device index on the board.
	index          int
	handle         nvml.Device
	instanceHandle nvml.ComputeInstance
	processes      []nvml.Process
}

// profile is what the MIG device is called.
func (c *computeInstance) profile() mig.Profile {
	p := c.instance.shape.Profile
	p.Compute = c.slices
	return p
}

// addInstance makes a GPU instance where there is room for it. IDs are used
// again.
func (n *Node) addInstance(b *board, shape mig.Shape, at mig.Placement) *gpuInstance {
	id := lowest(1, func(id int) bool { return b.instance(id) == nil })
	i := &gpuInstance{id: id, handle: nvml.GPUInstance(n.handle()), shape: shape, placement: at}
	b.instances = append(b.instances, i)
	return i
}

// addCompute makes a compute instance where there are slices for it. Its UUID is
// a new one, but the same again when the node is.
func (n *Node) addCompute(b *board, i *gpuInstance, slices int) *computeInstance {
	c := &computeInstance{
		instance: i, slices: slices,
		id:             lowest(0, func(id int) bool { return i.compute(id) == nil }),
		index:          lowest(0, func(index int) bool { return b.computeAt(index) == nil }),
		uuid:           "MIG-" + nameUUID(fmt.Sprintf("%s/gpu/%d/mig/%d", n.name, b.ordinal, b.cuts)),
		handle:         nvml.Device(n.handle()),
		instanceHandle: nvml.ComputeInstance(n.handle()),
	}
	b.cuts++
	i.computes = append(i.computes, c)
	n.devices[c.handle] = target{board: b, compute: c}
	return c
}

// lowest is the lowest number from first on that is free.
func lowest(first int, free func(int) bool) int {
	for !free(first) {
		first++
	}
	return first
}

func (b *board) instance(id int) *gpuInstance {
	i := slices.IndexFunc(b.instances, func(i *gpuInstance) bool { return i.id == id })
	if i < 0 {
		return nil
	}
	return b.instances[i]
}

func (b *board) instanceAt(at mig.Placement) *gpuInstance {
	i := slices.IndexFunc(b.instances, func(i *gpuInstance) bool { return i.placement == at })
	if i < 0 {
		return nil
	}
	return b.instances[i]
}

// computeAt is the MIG device at the index.
func (b *board) computeAt(index int) *computeInstance {
	for _, i := range b.instances {
		for _, c := range i.computes {
			if c.index == index {
				return c
			}
		}
	}
	return nil
}

func (i *gpuInstance) compute(id int) *computeInstance {
	at := slices.IndexFunc(i.computes, func(c *computeInstance) bool { return c.id == id })
	if at < 0 {
		return nil
	}
	return i.computes[at]
}

func (n *Node) findInstance(handle nvml.GPUInstance) (*board, *gpuInstance) {
	for _, b := range n.boards {
		for _, i := range b.instances {
			if i.handle == handle {
				return b, i
			}
		}
	}
	return nil, nil
}

func (n *Node) findCompute(handle nvml.ComputeInstance) (*board, *computeInstance) {
	for _, b := range n.boards {
		for _, i := range b.instances {
			for _, c := range i.computes {
				if c.instanceHandle == handle {
					return b, c
				}
			}
		}
	}
	return nil, nil
}
