package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
)

// setMode makes the mode the pending one, and the current one where that needs
// no reset.
func (b *board) setMode(on bool) nvml.Return {
	switch {
	case b.geometry.Shapes == nil:
		return nvml.NotSupported
	case len(b.instances) > 0 || len(b.processes) > 0:
		return nvml.InUse
	}
	b.migPending = on
	if b.architecture >= nvml.Hopper {
		b.mig = on
	}
	return nvml.Success
}

// createInstance makes a GPU instance of the published profile ID, at the slot
// or AnyPlacement.
func (n *Node) createInstance(b *board, profile, start int) (*gpuInstance, nvml.Return) {
	if !b.mig {
		return nil, nvml.NotSupported
	}
	shape, known := b.shape(profile)
	if !known {
		return nil, nvml.InvalidArgument
	}
	placement, code := b.room(shape, start)
	if code != nvml.Success {
		return nil, code
	}
	return n.addInstance(b, shape, placement), nvml.Success
}

func (b *board) destroyInstance(i *gpuInstance) nvml.Return {
	if len(i.computes) > 0 {
		return nvml.InUse
	}
	b.instances = slices.DeleteFunc(b.instances, func(other *gpuInstance) bool { return other == i })
	return nvml.Success
}

func (n *Node) createCompute(b *board, i *gpuInstance, slices int) (*computeInstance, nvml.Return) {
	if slices < 1 || slices > i.shape.Profile.Slices {
		return nil, nvml.InvalidArgument
	}
	if _, room := i.computeRoom(slices); !room {
		return nil, nvml.InsufficientResources
	}
	return n.addCompute(b, i, slices), nvml.Success
}

func (n *Node) destroyCompute(c *computeInstance) nvml.Return {
	if len(c.processes) > 0 {
		return nvml.InUse
	}
	i := c.instance
	i.computes = slices.DeleteFunc(i.computes, func(other *computeInstance) bool { return other == c })
	delete(n.devices, c.handle)
	return nvml.Success
}
