// Command virgate shares a node's NVIDIA GPUs among pods, by time-slicing and
// by MIG. main translates the command line; what runs is in internal/agent.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
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

// errSilent ends the program with exit code 1 when everything has been said.
var errSilent = errors.New("already reported")

// run is the program but for what belongs to the process. It returns the exit
// code: 0, 1 for what failed, 2 for a wrong command line.
func run(ctx context.Context, args []string, environment environment, stdout, stderr io.Writer) int {
	root := &cli.Command{
		Name:  "virgate",
		Usage: "shares a node's NVIDIA GPUs among pods",
		Description: "Virgate turns a node's GPUs into time-slice replicas or MIG-partition resources\n" +
			"and offers them to the kubelet. It reads the configuration of NVIDIA's device plugin.\n\n" +
			"Try it without a GPU: virgate demo",
		Writer: stdout, ErrWriter: stderr,
		Suggest:        true,
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Commands: []*cli.Command{
			runCommand(environment, stderr), planCommand(environment), checkCommand(),
			statusCommand(), healthCommand(), migCommand(environment), simCommand(), demoCommand(), versionCommand(),
			configManagerCommand(environment, stderr),
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usageError{fmt.Errorf("no command %q; see virgate --help", name)}
			}
			return cli.ShowRootCommandHelp(cmd)
		},
	}
	addUsageErrors(root)
	err := root.Run(ctx, byName(args))
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errSilent):
		return 1
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(stderr, "virgate: %v\n", err)
		return 2
	default:
		_, _ = fmt.Fprintf(stderr, "virgate: %v\n", err)
		return 1
	}
}

// environment looks up a variable, as os.LookupEnv.
type environment func(name string) (value string, ok bool)

// usageError is a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// addUsageErrors makes every wrong flag of every command a usageError.
func addUsageErrors(cmd *cli.Command) {
	cmd.OnUsageError = func(_ context.Context, cmd *cli.Command, err error, _ bool) error {
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.FullName())}
	}
	for _, child := range cmd.Commands {
		addUsageErrors(child)
	}
}
