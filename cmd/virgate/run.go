package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/plugin"
)

func runCommand(environment environment, stderr io.Writer) *cli.Command {
	flags := flagTable.Of(environment, "[node]", "[profile]", "[profiles]", "[api]", "[kubelet]", "[run]", "[log]",
		"[use]", "[http]", "[report]", "[grants]", "[dra]")
	cmd := &cli.Command{
		Name:  "run",
		Usage: "serves the node's GPUs to the kubelet until it is told to stop",
		Description: "Changes of the profile, of the GPUs and of the kubelet are followed while running.\n" +
			"SIGHUP makes it read its inputs again, SIGTERM ends it and leaves the devices to a successor.\n\n" +
			"Example: virgate run --node sim:dgx-a100 --config profile.yaml --device-plugin-dir /tmp/dp",
		Flags: append(flags, settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			for _, name := range []string{
				"removal-delay", "stop-after", "retire-after", "rescan", "probe", "drain-timeout", "sample",
			} {
				if cmd.Duration(name) <= 0 {
					return command.Usage(fmt.Errorf("--%s must be more than 0, got %s", name, cmd.Duration(name)))
				}
			}
			return withLog(cmd, stderr, func(log *slog.Logger) error { return serve(ctx, cmd, environment, log) })
		},
	}
	return command.ShortHelp(cmd, "config", "config-map", "default-config", "node-name", "kubeconfig", "node",
		"nvidia-driver-root", "mig-strategy", "device-list-strategy", "shared-devices-allocation-policy", "dra",
		"device-plugin-dir", "control-socket", "listen", "watch-pods", "evict-over-limit", "feature-labels",
		"allow-gpu-reset", "drain-on-exit", "log-level", "log-format")
}

// withLog runs a command that runs for long, with a log as --log-level and --log-format say. In JSON the
// command's error is a line of the log, too.
func withLog(cmd *cli.Command, stderr io.Writer, run func(log *slog.Logger) error) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cmd.String("log-level"))); err != nil {
		return command.Usage(fmt.Errorf("--log-level: expected debug, info, warn or error (got %q)",
			cmd.String("log-level")))
	}
	options := &slog.HandlerOptions{Level: level}
	log := slog.New(slog.NewTextHandler(stderr, options))
	inJSON := cmd.String("log-format") == "json"
	if inJSON {
		log = slog.New(slog.NewJSONHandler(stderr, options))
	}
	librariesLogTo(log, inJSON)
	err := run(log)
	if err == nil || !inJSON {
		return err
	}
	log.Error("ended", "error", err)
	return errors.Join(command.ErrSilent, err)
}

func serve(ctx context.Context, cmd *cli.Command, environment environment, log *slog.Logger) error {
	options := daemon.Options{
		Settings: agent.Settings{
			SampleInterval:    cmd.Duration("sample"),
			Listen:            cmd.String("listen"),
			ListenWhenServing: cmd.Bool("listen-when-serving"),
			NodeName:          cmd.String("node-name"),
			Logger:            log,
			Version:           version,
		},
		PluginDir:          pluginDir(cmd),
		PodResourcesSocket: podResources(cmd, "/host"),
		Timing: plugin.Timing{
			RemovalDelay: cmd.Duration("removal-delay"),
			RetireAfter:  cmd.Duration("retire-after"),
			StopAfter:    cmd.Duration("stop-after"),
		},
		Rescan:          cmd.Duration("rescan"),
		Probe:           cmd.Duration("probe"),
		BootID:          bootID(log, cmd.String("boot-id-file"), cmd.String("node")),
		HostRoot:        cmd.String("host-root"),
		CDIDir:          cdiDir(cmd),
		MPSSocket:       cmd.String("mps-socket"),
		ControlSocket:   cmd.String("control-socket"),
		ControlRequired: cmd.IsSet("control-socket"),
		AllowReset:      cmd.Bool("allow-gpu-reset"),
		GPUs: func(startup configs.StartupSettings) (daemon.GPUs, error) {
			gpus, err := openGPUs(cmd, startup, log)
			if node := cmd.String("node"); node == "auto" || node == "nvml" {
				visible, _ := environment("NVIDIA_VISIBLE_DEVICES")
				options := driverOptions(startup)
				options.HostRoot = cmd.String("host-root")
				gpus.Kernel = driver.Kernel{Options: options, VisibleDevices: visible}
			}
			return gpus, err
		},
	}
	if cmd.Bool("drain-on-exit") {
		options.DrainTimeout = cmd.Duration("drain-timeout")
	}
	var err error
	options.HTTP, err = httpOptions(cmd)
	if err != nil {
		return err
	}
	options.Pods, err = watchedPods(cmd, log)
	if err != nil {
		return err
	}
	options.Guard.Evict, err = evictor(cmd)
	if err != nil {
		return err
	}
	options.DRA, err = draOptions(cmd)
	if err != nil {
		return err
	}
	output, err := featureOutput(cmd, environment)
	if err != nil {
		return err
	}
	factLog := log
	if output.Kind == "" { // Rules rarely need what could not be read.
		factLog = slog.New(slog.DiscardHandler)
	}
	options.RuleFeatures = features.Node{
		Machine: machineName(cmd.String("machine-type-file"), factLog),
		VGPUs:   vgpus(os.DirFS(pciDevices), factLog),
	}
	if output.Kind != "" {
		options.Features = &features.Node{
			Machine:   options.RuleFeatures.Machine,
			VGPUs:     options.RuleFeatures.VGPUs,
			Models:    cmd.Bool("feature-models"),
			Timestamp: time.Now().Unix(),
		}
	}
	options.Reporter, err = newReporter(cmd, output, log)
	if err != nil {
		return err
	}
	options.Profile, err = profileOptions(cmd, overrides(cmd, environment), log)
	if err != nil {
		return err
	}
	options.ClientLabels, err = newClientLabels(cmd, options.Profile.Labels)
	if err != nil {
		return err
	}
	options.PauseClients = cmd.Bool("mig-pause-clients")
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	options.Reload = hangups
	return daemon.Run(ctx, options)
}

// podResources returns the path of PodResources' socket. If no flag names it and its folder is not
// mounted, it tries the host's root, which the GPU Operator mounts for its drivers.
func podResources(cmd *cli.Command, hostRoot string) string {
	socket := cmd.String("pod-resources-socket")
	if cmd.IsSet("pod-resources-socket") || isDirectory(filepath.Dir(socket)) ||
		!isDirectory(filepath.Dir(hostRoot+socket)) {
		return socket
	}
	return hostRoot + socket
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// bootID returns the kernel's ID of this boot, "" if it cannot be read. A simulated or recorded
// node has another ID than the machine, so that its GPUs are not shown as lost when the program
// serves the machine next.
func bootID(log *slog.Logger, path, node string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		log.Warn("boot ID not read, a reboot does not clear fatal errors", "error", err)
	}
	id := strings.TrimSpace(string(data))
	if other, _, _ := strings.Cut(node, "+"); id != "" && other != "auto" && other != "nvml" {
		id += " " + other
	}
	return id
}

// cdiDir returns where the CDI specs are written. Specs of a simulated node must not replace real
// ones, so they are written where runtimes look only if --cdi-dir is set.
func cdiDir(cmd *cli.Command) string {
	if strings.HasPrefix(cmd.String("node"), "sim:") && !cmd.IsSet("cdi-dir") {
		return ""
	}
	return cmd.String("cdi-dir")
}
