package daemon

import (
	"context"
	"errors"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Privileged is every operation that changes the node's GPUs and their device nodes, for which this
// program's container must be privileged or have the driver's files. Nothing else in the program
// needs that. It is one interface so that a separate container can provide it. GPUs are named by
// UUID, except where a PCI bus ID is given. Methods may be called from any goroutine, but Apply for
// one GPU only from one at a time. They return soon after ctx ends.
type Privileged interface {
	// State and Apply are as in nvml.Partitioner.
	State(ctx context.Context, gpu string) (sharing.MIGState, error)
	Apply(ctx context.Context, gpu string, step mig.Step) error
	// MakeNodes lets NVIDIA's program make the device nodes that these files of the driver
	// describe.
	MakeNodes(ctx context.Context, files []string) error
	// Reset resets the GPU with that PCI bus ID, which this program must have closed.
	Reset(ctx context.Context, pciBusID string) error
	// Persistence reports whether the GPU with that PCI bus ID is in persistence mode;
	// SetPersistence turns the mode on or off.
	Persistence(ctx context.Context, pciBusID string) (bool, error)
	SetPersistence(ctx context.Context, pciBusID string, on bool) error
	// SetComputeMode and SetTimeSlice are as in gpusettings.DriverSettings.
	SetComputeMode(ctx context.Context, gpu string, mode sharing.ComputeMode) error
	SetTimeSlice(ctx context.Context, gpu string, slice sharing.TimeSlice) error
}

// ownRights implements Privileged if the program's own container has the rights.
type ownRights struct {
	gpus        GPUs
	node        *nvml.Node
	partitioner *nvml.Partitioner
}

// State implements Privileged.
func (o ownRights) State(ctx context.Context, gpu string) (sharing.MIGState, error) {
	return o.partitioner.State(ctx, gpu)
}

// Apply implements Privileged.
func (o ownRights) Apply(ctx context.Context, gpu string, step mig.Step) error {
	return o.partitioner.Apply(ctx, gpu, step)
}

// errNodesNotPermitted is why no device nodes are made. Without this check, NVIDIA's program would
// fail with an error that does not name the missing right.
var errNodesNotPermitted = errors.New(
	"this program may not make it, which requires a privileged container: the chart's mig.manage")

var errDriverClosed = errors.New("a label of the Node pauses this program")

// MakeNodes implements Privileged.
func (o ownRights) MakeNodes(ctx context.Context, files []string) error {
	if o.gpus.NotPermitted != nil && o.gpus.NotPermitted() {
		return errNodesNotPermitted
	}
	if o.node.Closed() { // nvidia-modprobe would load a module that was just unloaded.
		return errDriverClosed
	}
	return abandonable(ctx, settingLimit, "the making of device nodes", func(ctx context.Context) error {
		return o.gpus.MakeNodes(ctx, files)
	})
}

// Reset implements Privileged.
func (o ownRights) Reset(ctx context.Context, pciBusID string) error {
	if o.node.Closed() { // nvidia-smi would load the module, too.
		return errDriverClosed
	}
	return abandonable(ctx, resetLimit, "the reset",
		func(ctx context.Context) error { return o.gpus.Reset(ctx, pciBusID) })
}

// Persistence implements Privileged.
func (o ownRights) Persistence(ctx context.Context, pciBusID string) (on bool, err error) {
	answer := make(chan bool, 1)
	err = abandonable(ctx, settingLimit, "nvidia-smi", func(ctx context.Context) error {
		on, err := o.gpus.Persistence(ctx, pciBusID)
		answer <- on
		return err
	})
	if err == nil {
		on = <-answer
	}
	return on, err
}

// SetPersistence implements Privileged.
func (o ownRights) SetPersistence(ctx context.Context, pciBusID string, on bool) error {
	if o.node.Closed() { // As in MakeNodes.
		return errDriverClosed
	}
	return abandonable(ctx, settingLimit, "nvidia-smi",
		func(ctx context.Context) error { return o.gpus.SetPersistence(ctx, pciBusID, on) })
}

// SetComputeMode implements Privileged.
func (o ownRights) SetComputeMode(ctx context.Context, gpu string, mode sharing.ComputeMode) error {
	return o.node.SetComputeMode(ctx, gpu, mode)
}

// SetTimeSlice implements Privileged.
func (o ownRights) SetTimeSlice(ctx context.Context, gpu string, slice sharing.TimeSlice) (err error) {
	set := func() {
		err = abandonable(ctx, settingLimit, "nvidia-smi",
			func(ctx context.Context) error { return o.gpus.SetTimeSlice(ctx, gpu, slice) })
	}
	if !o.node.OpensAll() {
		set()
		return err
	}
	if closed := o.node.OpenAll(set); closed != nil { // nvidia-smi opens all GPUs, too.
		return closed
	}
	return err
}
