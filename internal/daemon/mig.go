package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
)

// MIGOptions are the inputs of ApplyMIG.
type MIGOptions struct {
	GPUs GPUs
	// Simulated is true if no kubelet serves these GPUs and they end with the program: then there
	// is no journal.
	Simulated bool
	// PluginDir and PodResourcesSocket are as in Options; the journal is in PluginDir.
	PluginDir, PodResourcesSocket string
	// WithoutKubelet assumes that no pod holds a GPU.
	WithoutKubelet bool
	// Capabilities reads the driver's files that describe the device nodes of partitions; the zero
	// value reads this machine's.
	Capabilities migcaps.Reader
	Logger       *slog.Logger
}

// ApplyMIG brings the GPUs once to the wanted MIG layout, as far as possible now, on a node that no
// Virgate serves. It also makes the device nodes of the partitions, and returns the state of the
// GPUs. It fails if a Virgate serves the node or the GPUs cannot be read.
func ApplyMIG(ctx context.Context, o MIGOptions, wanted sharing.MIGConfig) ([]nodereport.GPULayout, error) {
	options := migchange.Options{Partitioner: o.GPUs.Partitioner(nil), Logger: o.Logger}
	var known []nvml.KnownGPU
	var gpus []sharing.GPU
	if !o.Simulated {
		lock, err := lockOnce(ctx, o.PluginDir)
		if err != nil {
			return nil, err
		}
		defer func() { _ = lock.Release() }()
		file := state.NewFile(o.PluginDir, o.Logger)
		file.Load()
		options.Store = file
		known, err = (state.Section[nvml.KnownGPU]{File: file, Name: state.GPUSection}).Load()
		if err != nil {
			return nil, err
		}
		if !o.WithoutKubelet {
			claims := cdi.NewClaims(func() ([]sharing.GPU, error) { return gpus, nil })
			kubelet := podresources.New(podresources.Options{
				Socket:        o.PodResourcesSocket,
				CheckpointDir: o.PluginDir,
				Claimed:       claimedUnits(func() ([]sharing.GPU, error) { return gpus, nil }, claims),
				Logger:        o.Logger,
			})
			defer func() { _ = kubelet.Close() }()
			options.Holders = kubelet.Held
		}
	}
	options.Inputs = func() (_ []sharing.GPU, _ sharing.MIGConfig, err error) {
		gpus, err = nvml.Scan(o.GPUs.Library, known...)
		return gpus, wanted, err
	}
	layouts, err := migchange.Once(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("read GPUs: %w", err)
	}
	if err := o.makeNodes(ctx); err != nil {
		o.Logger.Warn("device nodes of partitions not made: pods may be refused them", "error", err)
	}
	return layouts, nil
}

// makeNodes lets the driver's program make the device nodes of all partitions, because the kernel
// module makes none. Existing nodes are left alone.
func (o MIGOptions) makeNodes(ctx context.Context) error {
	if o.GPUs.MakeNodes == nil {
		return nil
	}
	gpus, err := nvml.Scan(o.GPUs.Library)
	if err != nil {
		return err
	}
	var files []string
	var unread error // The first one is enough.
	for _, gpu := range gpus {
		for _, partition := range gpu.Partitions {
			nodes, err := o.Capabilities.Partition(gpu.Minor, partition.GI, partition.CI)
			unread = cmp.Or(unread, err)
			for _, node := range nodes {
				files = append(files, node.Access)
			}
		}
	}
	slices.Sort(files)
	files = slices.Compact(files)
	if len(files) > 0 {
		err = o.GPUs.MakeNodes(ctx, files)
	}
	return errors.Join(unread, err)
}

// lockOnce takes the lock of an existing device-plugins directory that no Virgate serves.
func lockOnce(ctx context.Context, dir string) (*state.Lock, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("find --device-plugin-dir: %w", err)
	}
	waiting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	lock, err := state.Acquire(waiting, dir, func(err error) { giveUp(err) })
	if err != nil {
		return nil, errors.Join(context.Cause(waiting), err)
	}
	return lock, nil
}
