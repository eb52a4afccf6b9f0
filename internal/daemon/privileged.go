package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Privileged has every operation that changes the node's GPUs and their device nodes, for which this
// program's container must be privileged or have the driver's files. Nothing else in the program
// needs that, so a separate container could do it. GPUs are named by UUID, except where a PCI bus ID
// is given. Methods may be called from any goroutine, but Apply for one GPU only from one at a time.
// They return soon after ctx ends.
type Privileged struct {
	gpus        GPUs
	node        *nvml.Node
	partitioner *nvml.Partitioner
}

// maker returns what makes device nodes; nil if there are no such nodes.
func (p Privileged) maker() host.NodeMaker {
	if p.gpus.MakeNodes == nil {
		return nil
	}
	return p
}

func (p Privileged) releases(options Options, file *state.File) release.Driver {
	driver := release.Driver{
		Releaser: p.node,
		Store:    state.Section[release.Release]{File: file, Name: state.ReleaseSection},
	}
	if options.AllowReset && p.gpus.Reset != nil {
		driver.Reset = p.Reset
	}
	if p.gpus.SetPersistence != nil { // Needed also without AllowReset: an earlier run may have had it.
		driver.Persistence = &release.Persistence{
			On:    p.Persistence,
			Set:   p.SetPersistence,
			Store: state.Section[release.PersistenceOff]{File: file, Name: state.PersistenceSection},
			Boot:  options.BootID,
		}
	}
	return driver
}

func (p Privileged) driverSettings(file *state.File) gpusettings.DriverSettings {
	settings := gpusettings.DriverSettings{
		Store:          state.Section[gpusettings.ChangedGPU]{File: file, Name: state.SettingSection},
		ComputeMode:    p.node.ComputeMode,
		SetComputeMode: p.SetComputeMode,
	}
	if p.gpus.SetTimeSlice != nil {
		settings.SetTimeSlice = p.SetTimeSlice
	}
	return settings
}

// State is as in nvml.Partitioner.
func (p Privileged) State(ctx context.Context, gpu string) (sharing.MIGState, error) {
	return p.partitioner.State(ctx, gpu)
}

// Apply is as in nvml.Partitioner.
func (p Privileged) Apply(ctx context.Context, gpu string, step mig.Step) error {
	return p.partitioner.Apply(ctx, gpu, step)
}

// errNodesNotPermitted is why no device nodes are made. Without this check, NVIDIA's program would
// fail with an error that does not name the missing right.
var errNodesNotPermitted = errors.New(
	"this program may not make it, which requires a privileged container: the chart's mig.manage")

var errDriverClosed = errors.New("a label of the Node pauses this program")

// MakeNodes lets NVIDIA's program make the device nodes that these files of the driver describe.
func (p Privileged) MakeNodes(ctx context.Context, files []string) error {
	if p.gpus.NotPermitted != nil && p.gpus.NotPermitted() {
		return errNodesNotPermitted
	}
	return p.run(ctx, settingLimit, "the making of device nodes",
		func(ctx context.Context) error { return p.gpus.MakeNodes(ctx, files) })
}

// run runs one of NVIDIA's programs, unless the driver is closed: it would load a module that was
// just unloaded.
func (p Privileged) run(ctx context.Context, limit time.Duration, what string, do func(context.Context) error) error {
	if p.node.Closed() {
		return errDriverClosed
	}
	return abandonable(ctx, limit, what, do)
}

// Reset resets the GPU with that PCI bus ID, which this program must have closed.
func (p Privileged) Reset(ctx context.Context, pciBusID string) error {
	return p.run(ctx, resetLimit, "the reset",
		func(ctx context.Context) error { return p.gpus.Reset(ctx, pciBusID) })
}

// Persistence reports whether the GPU with that PCI bus ID is in persistence mode.
func (p Privileged) Persistence(ctx context.Context, pciBusID string) (on bool, err error) {
	answer := make(chan bool, 1)
	err = abandonable(ctx, settingLimit, "nvidia-smi", func(ctx context.Context) error {
		on, err := p.gpus.Persistence(ctx, pciBusID)
		answer <- on
		return err
	})
	if err == nil {
		on = <-answer
	}
	return on, err
}

// SetPersistence turns persistence mode on or off.
func (p Privileged) SetPersistence(ctx context.Context, pciBusID string, on bool) error {
	return p.run(ctx, settingLimit, "nvidia-smi",
		func(ctx context.Context) error { return p.gpus.SetPersistence(ctx, pciBusID, on) })
}

// SetComputeMode is as in gpusettings.DriverSettings.
func (p Privileged) SetComputeMode(ctx context.Context, gpu string, mode sharing.ComputeMode) error {
	return p.node.SetComputeMode(ctx, gpu, mode)
}

// SetTimeSlice is as in gpusettings.DriverSettings.
func (p Privileged) SetTimeSlice(ctx context.Context, gpu string, slice sharing.TimeSlice) (err error) {
	set := func() {
		err = abandonable(ctx, settingLimit, "nvidia-smi",
			func(ctx context.Context) error { return p.gpus.SetTimeSlice(ctx, gpu, slice) })
	}
	if !p.node.OpensAll() {
		set()
		return err
	}
	if closed := p.node.OpenAll(set); closed != nil { // nvidia-smi opens all GPUs, too.
		return closed
	}
	return err
}
