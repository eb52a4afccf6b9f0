// Command virgate shares a node's NVIDIA GPUs among pods, by time-slicing and
// by MIG. This package translates the command line; what runs is put together in
// internal/daemon.
//
// Read main.go first, then run.go, the command that matters, with flags.go and
// node.go. status.go, control.go, gpu.go and plan.go ask and explain, cluster.go looks at
// all nodes of a cluster and rollout.go changes them, print.go has how that is
// printed; mig.go begins the mig commands and demo.go the demo.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	code := run(ctx, os.Args, os.LookupEnv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errSilent ends the program with exit code 1 when the reason has been printed.
var errSilent = errors.New("already reported")

// run is the program apart from the process it runs in. It returns the exit code: 0,
// 1 when something failed, 2 for a wrong command line.
func run(ctx context.Context, args []string, environment environment, stdout, stderr io.Writer) int {
	root := &cli.Command{
		Name:  "virgate",
		Usage: "shares a node's NVIDIA GPUs among pods",
		Description: "Virgate offers a node's GPUs to the kubelet: whole, time-sliced or as MIG partitions.\n" +
			"It reads the configuration of NVIDIA's device plugin.\n\n" +
			"Try it without a GPU: virgate demo",
		Writer: stdout, ErrWriter: stderr,
		Suggest:        true,
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Commands: []*cli.Command{
			runCommand(environment, stderr), planCommand(environment), checkCommand(environment),
			statusCommand(), healthCommand(), gpuCommand(), migCommand(environment), simCommand(), demoCommand(), uninstallCommand(environment), clusterCommand(environment), rolloutCommand(), versionCommand(),
			mpsCommand(environment, stderr), configManagerCommand(environment, stderr), featureDiscoveryCommand(environment, stderr),
		},
		Action: func(_ context.Context, cmd *cli.Command) error { return cli.ShowRootCommandHelp(cmd) },
	}
	addUsageErrors(root)
	err := root.Run(ctx, impliedCommand(args))
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errSilent):
		return 1
	}
	_, _ = fmt.Fprintf(stderr, "virgate: %v\n", err)
	if _, usage := errors.AsType[usageError](err); usage {
		return 2
	}
	return 1
}

// environment looks up a variable, as os.LookupEnv.
type environment func(name string) (value string, ok bool)

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// addUsageErrors makes a usageError of every wrong flag, unknown command, and argument that
// a command does not take. The hidden command lets them pass, like NVIDIA's.
func addUsageErrors(cmd *cli.Command) {
	cmd.OnUsageError = func(_ context.Context, cmd *cli.Command, err error, _ bool) error {
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.FullName())}
	}
	action, group := cmd.Action, len(cmd.Commands) > 0
	if action == nil {
		action = func(_ context.Context, cmd *cli.Command) error { return cli.ShowSubcommandHelp(cmd) }
	}
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error {
		name := strings.TrimPrefix(cmd.FullName(), cmd.Root().Name)
		switch {
		case !cmd.Args().Present() || cmd.ArgsUsage != "" || cmd.Hidden:
			return action(ctx, cmd)
		case group:
			return usageError{fmt.Errorf("no%s command %q; see %s --help", name, cmd.Args().First(), cmd.FullName())}
		}
		return usageError{fmt.Errorf("%s takes no argument, got %q", strings.TrimSpace(name), cmd.Args().First())}
	}
	for _, child := range cmd.Commands {
		addUsageErrors(child)
	}
}

// impliedCommand adds the command that the program's name stands for: it takes the
// place of programs of NVIDIA's image when only the image is replaced, and is kubectl's plugin.
func impliedCommand(args []string) []string {
	if len(args) > 0 {
		switch name := filepath.Base(args[0]); name {
		case "nvidia-device-plugin":
			return slices.Insert(slices.Clone(args), 1, "run")
		case "kubectl-virgate": // kubectl virgate
			return slices.Insert(slices.Clone(args), 1, "cluster")
		case "mps-control-daemon":
			return slices.Insert(slices.Clone(args), 1, "mps")
		case "config-manager", featureDiscoveryName:
			return slices.Insert(slices.Clone(args), 1, name)
		}
	}
	return args
}

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "prints the version",
		Action: func(_ context.Context, cmd *cli.Command) error {
			_, err := fmt.Fprintf(cmd.Root().Writer, "virgate %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
