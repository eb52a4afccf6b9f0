package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func runCommand(environment environment, stderr io.Writer) *cli.Command {
	flags := append(nodeFlags(), configFlags(environment)...)
	flags = append(flags,
		&cli.StringFlag{Name: "pod-resources-socket", Value: "/var/lib/kubelet/pod-resources/kubelet.sock", Usage: "the kubelet's PodResources socket; without it the kubelet's checkpoint must do"},
		&cli.StringFlag{Name: "control-socket", Value: "/run/virgate/control.sock", Usage: "where a running Virgate takes orders; empty for nowhere"},
		&cli.StringFlag{Name: "listen", Value: ":9400", Usage: "the HTTP address of /healthz, /readyz, /metrics, /plan and the page /status; empty for none"},
		&cli.DurationFlag{Name: "rescan", Value: 30 * time.Second, Usage: "the time between two looks at what GPUs there are"},
		&cli.DurationFlag{Name: "probe", Value: 10 * time.Second, Usage: "the time between two looks at how the GPUs fare"},
		&cli.StringFlag{Name: "boot-id-file", Value: "/proc/sys/kernel/random/boot_id", Usage: "where the machine's boot ID is; a boot resets the GPUs"},
		&cli.DurationFlag{Name: "quiet-time", Value: 30 * time.Second, Usage: "how long a surplus device stays listed after the kubelet has applied that it is Unhealthy"},
		&cli.DurationFlag{Name: "retire-after", Value: 10 * time.Minute, Usage: "how long a surplus device that a pod holds stays Healthy"},
		&cli.BoolFlag{Name: "drain-on-exit", Usage: "withdraw all devices before ending, as for an uninstall; without it they are left to a successor"},
		&cli.DurationFlag{Name: "drain-timeout", Value: 2 * time.Minute, Usage: "how long that may take"},
		&cli.StringFlag{Name: "log-level", Value: "info", Usage: "debug, info, warn or error"},
	)
	return &cli.Command{
		Name:  "run",
		Usage: "serves the kubelet until it is told to stop",
		Description: "Changes of the profile, of the GPUs and of the kubelet are followed while running.\n" +
			"SIGHUP makes it look again, SIGTERM ends it and leaves the devices to a successor.\n\n" +
			"Example: virgate run --node sim:dgx-a100 --config profile.yaml --device-plugin-dir /tmp/dp",
		Flags: slices.Concat(pluginDirFlags(environment), flags, metricsFlags(), clusterFlags(environment), reportFlags(), grantFlags(), settingFlags()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("run takes no argument, got %q", cmd.Args().First())}
			}
			var level slog.Level
			if err := level.UnmarshalText([]byte(cmd.String("log-level"))); err != nil {
				return usageError{fmt.Errorf("--log-level: expected debug, info, warn or error (got %q)", cmd.String("log-level"))}
			}
			for _, name := range []string{"quiet-time", "retire-after", "rescan", "probe", "drain-timeout", "sample"} {
				if cmd.Duration(name) <= 0 {
					return usageError{fmt.Errorf("--%s must be more than 0, got %s", name, cmd.Duration(name))}
				}
			}
			return serve(ctx, cmd, environment, slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level})))
		},
	}
}

// serve puts the parts together and runs them.
func serve(ctx context.Context, cmd *cli.Command, environment environment, log *slog.Logger) error {
	rest := collectRarely(environment, settled)
	web, err := httpOptions(cmd)
	if err != nil {
		return err
	}
	pods, err := watchPods(cmd, log)
	if err != nil {
		return err
	}
	dir := pluginDir(cmd)
	file := state.NewFile(dir, log)
	reporter, err := newReporter(cmd, log)
	if err != nil {
		return err
	}
	profiles, err := openProfiles(ctx, cmd, overrides(cmd, environment), state.Profile{File: file}, replaced(reporter), log)
	if err != nil {
		return err
	}
	defer profiles.stop()

	library, err := openBackend(cmd, profiles.started, log)
	if err != nil {
		return err
	}
	defer library.close()
	if profiles.started.FailOnInitError {
		if err := tryDriver(ctx, library); err != nil {
			return err
		}
	}
	kubelet := podresources.New(podresources.Options{Socket: cmd.String("pod-resources-socket"), CheckpointDir: dir, Logger: log})
	defer func() { _ = kubelet.Close() }()
	node := nvml.NewNode(library, nvml.Options{
		Logger: log, Rescan: cmd.Duration("rescan"), Probe: cmd.Duration("probe"),
		Store: state.Health{File: file}, Boot: bootID(log, cmd.String("boot-id-file")),
	})
	claim := &claim{dir: dir, log: log, file: file}
	defer claim.release()
	look, stop := hangups()
	defer stop()
	options := agent.Options{
		Node:   node,
		Policy: profiles.Policy,
		Plugin: plugin.NewManager(plugin.Options{
			Dir: dir, Kubelet: kubelet, Store: state.Lists{File: file}, Logger: log.With("component", "plugin"),
			Timing: plugin.Timing{Quiet: cmd.Duration("quiet-time"), RetireAfter: cmd.Duration("retire-after")},
		}),
		Host:      newHost(cmd, profiles.started, kubelet, log),
		Holders:   kubelet,
		Health:    node,
		OnProfile: func(profile sharing.Profile) { node.SetHealth(profile.Health) },
		Keeper:    profiles.keeper,
		Kept:      file.Trouble,
		Claim:     claim.acquire,
		TakeOver:  node.TakeOver,

		Partitioner: nvml.NewPartitioner(library, node.Quiet),
		Journal:     state.Journal{File: file},
		Refresh:     node.LookAgain,

		Meter:          newSampler(library, cmd.String("proc"), pods.source(), log),
		SampleInterval: cmd.Duration("sample"),

		Listen:  cmd.String("listen"),
		HTTP:    web,
		Look:    look,
		Logger:  log,
		Version: version,

		NodeName: cmd.String("node-name"),
	}
	if reporter != nil {
		options.Reporter = reporter
	}
	options.Background = append(options.Background, profiles.keeper.Run, rest)
	if pods != nil {
		options.Background = append(options.Background, pods.run)
	}
	if cmd.Bool("drain-on-exit") {
		options.DrainTimeout = cmd.Duration("drain-timeout")
	}
	if path := cmd.String("control-socket"); path != "" {
		listener, err := listenControl(path)
		switch {
		case err == nil:
			options.Background = append(options.Background, func(ctx context.Context) error {
				return agent.ServeControl(ctx, listener, controlHandler(node, library.simulated))
			})
		case cmd.IsSet("control-socket"):
			return err
		default:
			log.Warn("no control socket", "error", err)
		}
	}
	log.Info("virgate starts", "version", version, "node", cmd.String("node"), "config", profiles.from)
	defer log.Info("virgate ends")
	return agent.Run(ctx, options)
}
