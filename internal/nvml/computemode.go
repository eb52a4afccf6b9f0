package nvml

import (
	"context"
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// computeModes are the compute modes that drivers have.
var computeModes = map[ComputeMode]sharing.ComputeMode{
	ComputeDefault:          sharing.DefaultComputeMode,
	ComputeProhibited:       sharing.ProhibitedCompute,
	ComputeExclusiveProcess: sharing.ExclusiveProcess,
}

// ComputeMode returns the compute mode of the GPU with that UUID, and the binding of the kernel
// driver to it, 0 if unknown. After a change of the binding, an earlier setting is lost.
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

// SetComputeMode sets the compute mode. The change takes effect at once. It is lost when the driver
// is reloaded or the GPU is reset. The error is mig.ErrNoPermission if permission is lacking.
func (n *Node) SetComputeMode(ctx context.Context, gpu string, wanted sharing.ComputeMode) error {
	for mode, name := range computeModes {
		if name == wanted {
			return withMeaning(NewPartitioner(n.lib, nil).with(ctx, gpu,
				func(g *migGPU) error { return g.lib.DeviceSetComputeMode(g.device, mode) }))
		}
	}
	return fmt.Errorf("no compute mode %q", wanted)
}
