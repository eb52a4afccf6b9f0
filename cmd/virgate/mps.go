package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"

	"github.com/urfave/cli/v3"
	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/sharing"
)

// mpsCommand runs the MPS daemons. It also replaces NVIDIA's mps-control-daemon.
func mpsCommand(environment environment, stderr io.Writer) *cli.Command {
	// Only the settings about the driver's place are used; the others are accepted but ignored.
	// --mps-root is left out, because it is another path here than for virgate run.
	accepted := slices.DeleteFunc(configs.Settings(), func(s configs.Setting) bool { return s.Flag == "mps-root" })
	obeyed := []string{"nvidia-driver-root", "container-driver-root"}
	settings := slices.DeleteFunc(slices.Clone(accepted),
		func(s configs.Setting) bool { return !slices.Contains(obeyed, s.Flag) })
	flags := append(flagsOf(accepted, obeyed...),
		flagTable.Of(environment, "node", "sim-world", "driver-root-watch", "[mps]", "[log]")...)
	return &cli.Command{
		Name:  "mps",
		Usage: "runs NVIDIA's MPS daemons for the GPUs that virgate run shares by MPS",
		Description: "One nvidia-cuda-mps-control for each GPU or partition. It needs root, the host's process " +
			"IDs, and\n" +
			"the right to set compute modes; virgate run, which says for which GPUs, does not.\n" +
			"SIGTERM ends the daemons and restores the compute modes.\n\n" +
			"Example: virgate mps --mps-root /run/nvidia/mps",
		Flags: flags,
		Commands: []*cli.Command{{
			Name: "mount-shm",
			Usage: "mounts the memory that daemons and pods share, a tmpfs of half the machine's with a directory " +
				"for each GPU",
			Description: "Only where what virgate mps mounts does not reach the host, as in NVIDIA's DaemonSets, " +
				"whose init container\n" +
				"this is. It does nothing where that is mounted already.\n\nExample: virgate mps mount-shm",
			Action: func(_ context.Context, cmd *cli.Command) error {
				return mps.MountShm(cmd.String("mps-root"), cmd.String("proc"))
			},
		}, {
			Name:            mps.InDriverRoot,
			Hidden:          true,
			ArgsUsage:       "...",
			SkipFlagParsing: true, // They are the program's.
			Action: func(_ context.Context, cmd *cli.Command) error {
				return mps.EnterDriverRoot(cmd.Args().Slice())
			},
		}},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			config, err := configs.Parse("", nil, overridesOf(cmd, environment, settings))
			if err != nil {
				return command.Usage(err)
			}
			return withLog(cmd, stderr, func(log *slog.Logger) error {
				return superviseMPS(ctx, cmd, config.Startup, log)
			})
		},
	}
}

func superviseMPS(ctx context.Context, cmd *cli.Command, startup configs.StartupSettings, log *slog.Logger) error {
	gpus, err := openGPUs(cmd, startup, log)
	if err != nil {
		return err
	}
	defer gpus.Close()
	root := cmd.String("mps-root")
	if err := mps.CheckRoot(root); err != nil {
		return fmt.Errorf("--mps-root: %w", err)
	}
	if err := os.MkdirAll(root, 0o755); err != nil { //nolint:gosec // pods' users enter it
		return fmt.Errorf("--mps-root: %w", err)
	}
	lock, err := state.Acquire(ctx, root, func(err error) { log.Info("standing by", "because", err) })
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() { _ = lock.Release() }()
	// NVIDIA's config-manager sends it when the profile changes. Ignore it: virgate run reports
	// such changes.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	// Without the Kernel, only look-ups of released GPUs are refused, even if Init opens all GPUs: a
	// daemon that ends must be able to restore its GPU's compute mode although another one is released.
	node := nvml.NewNode(gpus.Library, nvml.Options{Logger: log})
	mismatch := lastingMismatch{found: make(chan error, 1)}
	return mps.Run(ctx, mps.Options{
		Root:   root,
		Proc:   cmd.String("proc"),
		OwnShm: true,
		Logger: log.With("component", "mps"),
		Control: mps.Program{
			// NVIDIA's runtime puts it into this container; otherwise it is in the driver root.
			Find: func() (string, string, error) {
				root, path, err := driver.FindProgram(driver.Options{}, mps.ProgramName)
				if err != nil {
					var other error
					root, path, other = driver.FindProgram(driverOptions(startup), mps.ProgramName)
					if other != nil {
						return "", "", errors.Join(err, other)
					}
				}
				return root, path, nil
			},
			MultiUser: cmd.Bool("multi-user"),
			Proc:      cmd.String("proc"),
			Logger:    log.With("component", "mps"),
		},
		Who: func(pid int) string { return usage.Describe(os.DirFS(cmd.String("proc")), pid) },
		ComputeMode: func(ctx context.Context, gpu string) (sharing.ComputeMode, error) {
			mode, _, err := node.ComputeMode(ctx, gpu)
			mismatch.note(err)
			return mode, err
		},
		SetComputeMode: node.SetComputeMode,
		KeepClosed:     node.SetReleased,
		DriverReplaced: func(ctx context.Context) error {
			group, ctx := errgroup.WithContext(ctx)
			group.Go(func() error { return mismatch.wait(ctx) })
			if gpus.DriverReplaced != nil {
				group.Go(func() error { return gpus.DriverReplaced(ctx) })
			}
			return group.Wait()
		},
	})
}

// lastingMismatch collects the results of all attempts to open the driver.
type lastingMismatch struct {
	mu         sync.Mutex
	mismatches nvml.Mismatches
	found      chan error
}

func (m *lastingMismatch) note(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, lasting := m.mismatches.Lasting(err); lasting != nil {
		select {
		case m.found <- lasting:
		default:
		}
	}
}

// wait returns a mismatch that lasts, or nil when ctx ends.
func (m *lastingMismatch) wait(ctx context.Context) error {
	select {
	case err := <-m.found:
		return err
	case <-ctx.Done():
		return nil
	}
}
