package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// The methods here change a board's partitions as NVML's calls of like names do
// (nvml.h). Their errors are *nvml.Error.

// SetMIG turns MIG mode on or off. On boards before Hopper the mode is pending
// until the board is reset, which Heal is; later ones change at once. It is
// IN_USE while there are GPU instances or processes.
func (n *Node) SetMIG(gpu int, on bool) error {
	return n.cutting("DeviceSetMigMode", gpu, func(b *board) nvml.Return { return b.setMode(on) })
}

// AnyPlacement lets CreateGPUInstance choose.
const AnyPlacement = -1

// CreateGPUInstance makes a GPU instance of the published profile ID, at the
// memory slot or AnyPlacement, and returns its ID. INSUFFICIENT_RESOURCES says
// that there is no room or that the slot is taken, NOT_SUPPORTED that MIG is
// off.
func (n *Node) CreateGPUInstance(gpu, profile, start int) (id int, err error) {
	err = n.cutting("DeviceCreateGpuInstance", gpu, func(b *board) nvml.Return {
		i, code := n.createInstance(b, profile, start)
		if code == nvml.Success {
			id = i.id
		}
		return code
	})
	return id, err
}

// room finds where the shape can go.
func (b *board) room(shape mig.Shape, start int) (mig.Placement, nvml.Return) {
	var kept []mig.Placed
	for _, i := range b.instances {
		kept = append(kept, mig.Placed{Profile: i.shape.Profile, Placement: i.placement})
	}
	// Whether one more of the profile is legal at all, by count, slices and
	// media engines, does not depend on where it goes.
	one := mig.Layout{MIG: true, Partitions: []mig.Count{{Profile: shape.Profile, Count: 1}}}
	placed, err := b.geometry.Place(one, kept)
	if err != nil {
		return mig.Placement{}, nvml.InsufficientResources
	}
	if start == AnyPlacement {
		return placed[0].Placement, nvml.Success
	}
	wanted := mig.Placement{Start: start, Size: shape.Size}
	if !slices.Contains(shape.Starts, start) {
		return wanted, nvml.InvalidArgument
	}
	for _, k := range kept {
		if k.Placement.Overlaps(wanted) {
			return wanted, nvml.InsufficientResources
		}
	}
	return wanted, nvml.Success
}

// CreateComputeInstance makes a compute instance on so many of the GPU
// instance's slices; it is a new MIG device, with the UUID returned.
func (n *Node) CreateComputeInstance(gpu, gi, slices int) (id int, uuid string, err error) {
	err = n.cutting("GpuInstanceCreateComputeInstance", gpu, func(b *board) nvml.Return {
		i := b.instance(gi)
		if i == nil {
			return nvml.NotFound
		}
		c, code := n.createCompute(b, i, slices)
		if code == nvml.Success {
			id, uuid = c.id, c.uuid
		}
		return code
	})
	return id, uuid, err
}

// DestroyComputeInstance is IN_USE while a process runs on it.
func (n *Node) DestroyComputeInstance(gpu, gi, ci int) error {
	return n.cutting("ComputeInstanceDestroy", gpu, func(b *board) nvml.Return {
		i := b.instance(gi)
		if i == nil || i.compute(ci) == nil {
			return nvml.NotFound
		}
		return n.destroyCompute(i.compute(ci))
	})
}

// DestroyGPUInstance is IN_USE while there are compute instances.
func (n *Node) DestroyGPUInstance(gpu, gi int) error {
	return n.cutting("GpuInstanceDestroy", gpu, func(b *board) nvml.Return {
		i := b.instance(gi)
		if i == nil {
			return nvml.NotFound
		}
		return b.destroyInstance(i)
	})
}

// cutting makes a call that changes a board's partitions.
func (n *Node) cutting(call string, gpu int, change func(*board) nvml.Return) error {
	n.mu.Lock()
	b, _ := n.board(gpu)
	n.mu.Unlock()
	if err := n.enter(call, b); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	code := nvml.InvalidArgument
	if b != nil {
		code = nvml.GPUIsLost
		if !b.lost && !b.pulled {
			code = change(b)
		}
	}
	if code != nvml.Success {
		return failed(with(call, gpu), code)
	}
	return nil
}
