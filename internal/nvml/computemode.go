package nvml

import (
	"context"
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// computeModes are the modes that drivers have.
var computeModes = map[ComputeMode]sharing.ComputeMode{
	ComputeDefault:          sharing.DefaultComputeMode,
	ComputeProhibited:       sharing.ProhibitedCompute,
	ComputeExclusiveProcess: sharing.ExclusiveProcess,
}

// ComputeMode asks the driver for the compute mode of the GPU of that UUID, and for the binding
// of the kernel's driver to it, 0 when unknown: with another one, what was set is lost.
func (n *Node) ComputeMode(ctx context.Context, gpu string) (mode sharing.ComputeMode, binding uint64, err error) {
	err = NewPartitioner(n.lib, nil).with(ctx, gpu, func(g *migGPU) error {
		current, err := g.lib.DeviceGetComputeMode(g.device)
		if err != nil {
			return err
		}
		var known bool
		mode, known = computeModes[current]
		if !known {
			return fmt.Errorf("the driver has compute mode %d, which nvml.h does not name", current)
		}
		pci, err := g.lib.DeviceGetPciInfo(g.device)
		binding = pci.Binding
		return err
	})
	return mode, binding, withMeaning(err)
}

// SetComputeMode sets it, which takes effect at once and is lost when the driver is loaded again
// or the GPU is reset. An error for a lack of permission is mig.ErrNoPermission.
func (n *Node) SetComputeMode(ctx context.Context, gpu string, wanted sharing.ComputeMode) error {
	for mode, name := range computeModes {
		if name == wanted {
			return withMeaning(NewPartitioner(n.lib, nil).with(ctx, gpu,
				func(g *migGPU) error { return g.lib.DeviceSetComputeMode(g.device, mode) }))
		}
	}
	return fmt.Errorf("no compute mode %q", wanted)
}
