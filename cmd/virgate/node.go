package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/internal/nvml/trace"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/sharing"
)

// openGPUs returns the node's GPUs according to --node, --record and the settings of the driver,
// with deadlines for driver calls. It does not call the driver yet.
func openGPUs(cmd *cli.Command, startup configs.StartupSettings, log *slog.Logger) (daemon.GPUs, error) {
	library, err := openLibrary(cmd.String("node"), cmd.String(simnode.WorldFlag), startup)
	if err != nil {
		return daemon.GPUs{}, err
	}
	var gpus daemon.GPUs
	if simulated, ok := library.(*simnode.Node); ok {
		gpus = daemon.Simulated(simulated, simulated)
	} else {
		gpus = daemon.GPUs{
			Library: nvml.WithDeadlines(library, nvml.Limits{}),
			Proc:    os.DirFS(cmp.Or(cmd.String("proc"), "/proc")),
			Close:   func() {},
		}
		// What the kernel does not report, or not from the machine's own namespace, counts as
		// hidden.
		if !strings.HasPrefix(cmd.String("node"), "trace:") {
			gpus.ProcessesHidden, gpus.NotPermitted = !usage.InInitialNamespace(gpus.Proc),
				notPermitted(gpus.Proc, startup, cmd.String("host-root"))
		}
	}
	gpus.Name = cmd.String("node")
	gpus.DriverReplaced, err = driverReplaced(cmd, startup, log)
	if err != nil {
		return gpus, err
	}
	if gpus.Reset == nil && !strings.HasPrefix(gpus.Name, "trace:") {
		gpus.SetTimeSlice = func(ctx context.Context, gpu string, slice sharing.TimeSlice) error {
			return driver.SetTimeSlice(ctx, driverOptions(startup), gpu, slices.Index(sharing.TimeSlices(), slice))
		}
		gpus.MakeNodes = func(ctx context.Context, files []string) error {
			options := driverOptions(startup)
			options.HostRoot = cmd.String("host-root")
			return driver.MakeNodes(ctx, options, files)
		}
		gpus.Reset = func(ctx context.Context, busID string) error {
			return driver.ResetGPU(ctx, driverOptions(startup), busID)
		}
		gpus.Persistence = func(ctx context.Context, busID string) (bool, error) {
			return driver.Persistence(ctx, driverOptions(startup), busID)
		}
		gpus.SetPersistence = func(ctx context.Context, busID string, on bool) error {
			return driver.SetPersistence(ctx, driverOptions(startup), busID, on)
		}
	}
	path := cmd.String("record")
	if path == "" {
		return gpus, nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return gpus, fmt.Errorf("record: %w", err)
	}
	gpus.Library = trace.Record(gpus.Library, file, trace.Options{
		Plain:  !cmd.Bool("record-mask"),
		Failed: func(err error) { log.Warn("recording ends", "file", path, "error", err) },
	})
	gpus.Close = func() {
		if err := file.Close(); err != nil {
			log.Warn("recording may not be complete", "file", path, "error", err)
		}
	}
	return gpus, nil
}

// driverReplaced returns the function that watches the driver root given by --driver-root-watch, or
// nil without that flag.
func driverReplaced(
	cmd *cli.Command,
	startup configs.StartupSettings,
	log *slog.Logger,
) (func(context.Context) error, error) {
	path := cmd.String("driver-root-watch")
	if path == "" {
		return nil, nil
	}
	watch := driver.RootWatch{
		Mounted: startup.ContainerDriverRoot,
		Host:    path,
		Logger:  log,
	}
	if err := watch.Check(); err != nil {
		return nil, command.Usage(fmt.Errorf("--driver-root-watch: %w", err))
	}
	return watch.Run, nil
}

func openLibrary(name, world string, process configs.StartupSettings) (nvml.Library, error) {
	if simulated, ok := strings.CutPrefix(name, "sim:"); ok {
		return openSimulated(simulated, world)
	}
	if world != "" {
		return nil, command.Usage(fmt.Errorf("--sim-world %q goes with a simulated node, not with --node %s", world,
			name))
	}
	if name == "auto" || name == "nvml" {
		return driver.Open(driverOptions(process))
	}
	if path, ok := strings.CutPrefix(name, "trace:"); ok {
		return openTrace(path)
	}
	return nil, command.Usage(fmt.Errorf("--node %q is none of auto, nvml, trace:FILE, sim:NAME, sim:FILE", name))
}

func driverOptions(process configs.StartupSettings) driver.Options {
	return driver.Options{
		DriverRoot:          process.DriverRoot,
		ContainerDriverRoot: process.ContainerDriverRoot,
		DevRoot:             process.DevRoot,
	}
}

// notPermitted returns a function that reports whether this process may not partition GPUs. Until a
// driver is there to tell, which may be installed later, it checks at each call. After that the
// result is kept, because a container's rights do not change.
func notPermitted(proc fs.FS, startup configs.StartupSettings, hostRoot string) func() bool {
	capabilities := daemon.Capabilities(startup, hostRoot)
	find := func() bool { return !host.MayPartition(proc, "/dev", capabilities, os.TempDir(), "/dev") }
	found := sync.OnceValue(find)
	return func() bool {
		if _, err := capabilities.Major(); err != nil {
			return find()
		}
		return found()
	}
}

// readNodeFile reads the file of --node. It must be a regular file: no signal would end the wait
// for a FIFO or a terminal here.
func readNodeFile(path string) ([]byte, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read --node: %s is not a regular file", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read --node: %w", err)
	}
	return data, nil
}

func openTrace(path string) (nvml.Library, error) {
	data, err := readNodeFile(path)
	if err != nil {
		return nil, err
	}
	lib, err := trace.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return lib, nil
}

// openSimulated returns the node of that name or file, in the world of --sim-world.
func openSimulated(name, world string) (*simnode.Node, error) {
	node, err := namedNode(name)
	if err == nil && world != "" {
		if err := node.SetWorld(world); err != nil {
			return nil, command.Usage(fmt.Errorf("--sim-world: %w", err))
		}
	}
	return node, err
}

func namedNode(name string) (*simnode.Node, error) {
	base, _, _ := strings.Cut(name, "+")
	if !slices.Contains(simnode.Names(), base) {
		data, err := readNodeFile(name)
		if err == nil {
			return simnode.Load(name, data)
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	return simnode.New(name)
}
