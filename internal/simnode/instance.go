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
	// start is the first of its slices in the GPU instance.
	start, slices int
	uuid          string
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
	start, _ := i.computeRoom(slices)
	c := &computeInstance{
		instance: i, start: start, slices: slices,
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

// computeRoom is the last place in the GPU instance for a compute instance of so
// many slices, which leaves most room for larger ones; false when there is none.
// Compute instances begin at a multiple of the next power of two: which places a
// driver allows it lists itself (nvidia-smi mig -lcipp), and this is stricter than
// a mere count of slices, as drivers are.
func (i *gpuInstance) computeRoom(slices int) (start int, ok bool) {
	align := 1
	for align < slices {
		align *= 2
	}
	for at := 0; at+slices <= i.shape.Profile.Slices; at += align {
		free := true
		for _, c := range i.computes {
			free = free && (c.start+c.slices <= at || at+slices <= c.start)
		}
		if free {
			start, ok = at, true
		}
	}
	return start, ok
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
