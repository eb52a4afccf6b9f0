package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/wake"
)

const featureDiscoveryName = "gpu-feature-discovery"

// featureDiscoverySettings returns the flags of NVIDIA's program that a profile can set too.
func featureDiscoverySettings() []configs.Setting {
	return []configs.Setting{
		{
			Path:       "flags.migStrategy",
			Flag:       "mig-strategy",
			Env:        "GFD_MIG_STRATEGY",
			EnvAliases: []string{"MIG_STRATEGY"},
			Default:    "none",
			Usage:      "how GPUs with MIG enabled are offered",
		},
		{
			Path:       "flags.failOnInitError",
			Flag:       "fail-on-init-error",
			Env:        "GFD_FAIL_ON_INIT_ERROR",
			EnvAliases: []string{"FAIL_ON_INIT_ERROR"},
			Type:       configs.TypeBool,
			Default:    "true",
			Usage:      "end when the driver cannot be opened; false labels the node as one without GPUs until it can",
		},
		{
			Path:    "flags.gfd.oneshot",
			Flag:    "oneshot",
			Env:     "GFD_ONESHOT",
			Type:    configs.TypeBool,
			Default: "false",
			Usage:   "end when the labels are written",
		},
		{
			Path:    "flags.gfd.noTimestamp",
			Flag:    "no-timestamp",
			Env:     "GFD_NO_TIMESTAMP",
			Type:    configs.TypeBool,
			Default: "false",
			Usage:   "leave out the label with the time",
		},
		{
			Path:    "flags.gfd.sleepInterval",
			Flag:    "sleep-interval",
			Env:     "GFD_SLEEP_INTERVAL",
			Default: "60s",
			Usage: "the time between two readings of the GPUs, infinite for one at the start and at each change of " +
				"the profile",
		},
		{
			Path:    "flags.gfd.outputFile",
			Flag:    "output-file",
			Aliases: []string{"output", "o"},
			Env:     "GFD_OUTPUT_FILE",
			Default: "/etc/kubernetes/node-feature-discovery/features.d/gfd",
			Usage:   "the file of node feature discovery with the labels; empty prints them",
		},
		{
			Path:    "flags.gfd.machineTypeFile",
			Flag:    "machine-type-file",
			Env:     "GFD_MACHINE_TYPE_FILE",
			Default: machineTypeFile,
			Usage:   "the file with the machine's name",
		},
		{
			Path:       "flags.useNodeFeatureAPI",
			Flag:       "use-node-feature-api",
			Env:        "GFD_USE_NODE_FEATURE_API",
			EnvAliases: []string{"USE_NODE_FEATURE_API"},
			Type:       configs.TypeBool,
			Default:    "true",
			Usage:      "write a NodeFeature object and not the file",
		},
		{
			Path:    "flags.deviceDiscoveryStrategy",
			Flag:    "device-discovery-strategy",
			Env:     "DEVICE_DISCOVERY_STRATEGY",
			Default: "auto",
			Usage:   "how GPUs are found: auto or nvml",
		},
		{
			Path:    "flags.nvidiaDriverRoot",
			Flag:    "nvidia-driver-root",
			Aliases: []string{"driver-root"},
			Env:     "NVIDIA_DRIVER_ROOT",
			Default: "/",
			Usage:   "where the driver is installed on the host",
		},
		{
			Path:       "flags.plugin.containerDriverRoot",
			Flag:       "driver-root-ctr-path",
			Aliases:    []string{"container-driver-root"},
			Env:        "DRIVER_ROOT_CTR_PATH",
			EnvAliases: []string{"CONTAINER_DRIVER_ROOT"},
			Default:    "/driver-root",
			Usage:      "where that is mounted in this container",
		},
	}
}

// featureDiscoveryCommand does what NVIDIA's GPU feature discovery does, so that its manifests work
// with this image. On a node that Virgate serves, run --feature-labels makes it unnecessary.
func featureDiscoveryCommand(environment environment, stderr io.Writer) *cli.Command {
	settings := featureDiscoverySettings()
	return &cli.Command{
		Name:  featureDiscoveryName,
		Usage: "labels the node through node feature discovery, like NVIDIA's GPU feature discovery",
		Description: "For manifests of NVIDIA's GPU feature discovery in which only the image is replaced.\n" +
			"The profile is followed while running; SIGHUP reads it again. virgate run --feature-labels needs no " +
			"such helper.\n\n" +
			"Example: virgate gpu-feature-discovery --node sim:dgx-a100 --use-node-feature-api=false --output-file= " +
			"--oneshot",
		Flags: append(flagsOf(settings),
			flagTable.Of(environment, "[gpu-feature-discovery]", "node", "sim-world", "[log]")...),
		Hidden: true,
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := checkFollowed(cmd, "config-file"); err != nil {
				return err
			}
			d := &featureDiscovery{
				cmd: cmd,
				file: &configsource.File{
					Path:      cmd.String("config-file"),
					Overrides: overridesOf(cmd, environment, settings),
					Done:      ctx.Done(),
				},
			}
			d.pod, _ = environment("POD_NAME")
			return withLog(cmd, stderr, func(log *slog.Logger) error {
				d.log = log
				return d.run(ctx)
			})
		},
	}
}

// featureDiscovery is one run of the command. library is opened with the first profile.
type featureDiscovery struct {
	cmd  *cli.Command
	log  *slog.Logger
	file *configsource.File
	pod  string

	library nvml.Library
	// startup are the settings with which the library was opened.
	startup configs.StartupSettings
	// unread is why the GPUs could not be read the last time.
	unread     error
	mismatches nvml.Mismatches
}

// run writes the labels at intervals and when the profile changes, until ctx ends. It then removes
// the file, as NVIDIA's program does, unless the labels were to be written only once.
func (d *featureDiscovery) run(ctx context.Context) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	changed := wake.NewSignal()
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		_ = d.file.Watch(watching, changed.Notify)
	})
	defer watch.Wait()
	defer stop()

	var config configs.Config
	var again <-chan time.Time
	var since time.Time
	for began := false; ; began = true {
		select {
		case <-ctx.Done():
			return d.remove(config.Discovery)
		case <-again:
		case <-hangups:
			since = time.Now()
		case <-changed: // It is signalled at once for the first profile.
			since = time.Now()
		}
		next, err := d.file.Config()
		if err == nil {
			err = next.Discovery.Err
		}
		if err == nil {
			if interval := next.Discovery.SleepInterval; interval < shortestPause &&
				interval != config.Discovery.SleepInterval {
				d.log.Warn("the sleep interval is too short, a number without a unit counts nanoseconds", "interval",
					interval, "used", shortestPause)
			}
			config = next
			err = d.label(ctx, config, since)
		}
		_, lasting := d.mismatches.Lasting(d.unread)
		switch {
		case ctx.Err() != nil:
			return d.remove(config.Discovery)
		case lasting != nil:
			return lasting
		case err != nil && (!began || config.Discovery.Oneshot):
			return err
		case err != nil:
			d.log.Error("labels not written, trying again", "error", err)
		case config.Discovery.Oneshot:
			return nil
		}
		again = time.After(pause(config.Discovery.SleepInterval, err))
	}
}

const (
	// shortestPause spares the driver and the API server. NVIDIA's program reads a plain 60 as 60
	// ns.
	shortestPause = time.Second
	// longestRetry is the retry time for an interval that is infinite or long.
	longestRetry = time.Minute
)

// pause returns how long to wait after the labels were written; with err, after writing them
// failed.
func pause(interval time.Duration, err error) time.Duration {
	if err != nil {
		interval = min(interval, longestRetry)
	}
	return max(interval, shortestPause)
}

// label reads the GPUs and writes the labels.
func (d *featureDiscovery) label(ctx context.Context, config configs.Config, since time.Time) error {
	n := features.Node{
		Profile: config.Profile,
		Machine: machineName(config.Discovery.MachineTypeFile, d.log),
		VGPUs:   vgpus(os.DirFS(pciDevices), d.log),
	}
	if !config.Discovery.NoTimestamp {
		n.Timestamp = since.Unix()
	}
	err := d.read(&n, config.Startup)
	d.unread = err
	if err != nil && config.Startup.FailOnInitError {
		return err
	} else if err != nil {
		d.log.Warn("the GPUs cannot be read, the node is labelled as one without", "error", err)
	}
	labels := features.Labels(n)
	switch {
	case config.Discovery.UseNodeFeatureAPI:
		return d.writeNodeFeature(ctx, labels)
	case d.cmd.IsSet("output-file") && d.cmd.String("output-file") == "":
		return nodestatus.PrintFeatures(d.cmd.Root().Writer, labels)
	}
	return nodestatus.WriteFeatureFile(config.Discovery.OutputFile, labels)
}

// read opens the driver, reads the input for the labels and closes the driver.
func (d *featureDiscovery) read(n *features.Node, startup configs.StartupSettings) error {
	if d.library == nil || startup != d.startup {
		library, err := openLibrary(d.cmd.String("node"), d.cmd.String("sim-world"), startup)
		if err != nil {
			return err
		}
		d.library, d.startup = nvml.WithDeadlines(library, nvml.Limits{}), startup
	}
	if err := d.library.Init(); err != nil {
		return fmt.Errorf("open the driver: %w", err)
	}
	defer func() {
		if err := d.library.Shutdown(); err != nil {
			d.log.Warn("the driver could not be closed", "error", err)
		}
	}()
	gpus, err := nvml.Scan(d.library)
	if err != nil && len(gpus) == 0 {
		return err
	} else if err != nil {
		d.log.Warn("not all GPUs could be read", "error", err)
	}
	versions := nvml.ReadVersions(d.library)
	n.GPUs = gpus
	n.Driver = versions.Driver
	n.CUDA = versions.CUDA
	return nil
}

func (d *featureDiscovery) writeNodeFeature(ctx context.Context, labels map[string]string) error {
	node := d.cmd.String("node-name")
	if node == "" {
		return command.Usage(errors.New("--use-node-feature-api needs --node-name"))
	}
	config, err := kube.RESTConfig(d.cmd.String("kubeconfig"))
	if err != nil {
		return err
	}
	object, err := nodestatus.NewNodeFeature(config, node, nodestatus.FeatureOutput{
		Kind:      nodestatus.FeaturesToNFD,
		Namespace: d.cmd.String("namespace"),
		Name:      "nvidia-features-for-" + node,
		Pod:       d.pod,
	})
	if err != nil {
		return err
	}
	return object.Write(ctx, labels)
}

// remove removes the file that was kept up to date.
func (d *featureDiscovery) remove(settings configs.FeatureDiscovery) error {
	if settings.UseNodeFeatureAPI || settings.Oneshot || settings.OutputFile == "" ||
		d.cmd.IsSet("output-file") && d.cmd.String("output-file") == "" {
		return nil
	}
	if err := os.Remove(settings.OutputFile); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the labels: %w", err)
	}
	return nil
}
