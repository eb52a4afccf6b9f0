// Command virgate shares a node's NVIDIA GPUs among pods: whole, by time-slicing, by MPS and as
// MIG partitions, through the kubelet's device plugins or by Dynamic Resource Allocation. This package translates the command line; what runs is put together in
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
	"sort"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	code := run(ctx, os.Args, os.LookupEnv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// programName is that under which help and messages call the root command.
const programName = "virgate"

// errSilent ends the program with exit code 1 when the reason has been printed.
var errSilent = errors.New("already reported")

// run is the program apart from the process it runs in. It returns the exit code: 0,
// 1 when something failed, 2 for a wrong command line.
func run(ctx context.Context, args []string, environment environment, stdout, stderr io.Writer) int {
	root := &cli.Command{
		Name:  programName,
		Usage: "shares a node's NVIDIA GPUs among pods",
		Description: "Virgate offers a node's GPUs to pods: whole, time-sliced, by MPS or as MIG partitions, as\n" +
			"resources of a device plugin or by claims of Dynamic Resource Allocation (DRA).\n" +
			"It reads the configuration of NVIDIA's device plugin.\n\n" +
			"Try it without a GPU: virgate demo\n\n" +
			"Exit codes: 0 for success, 1 when something failed or what was checked is wrong, 2 for a\n" +
			"wrong command line. The help of a command says where 1 means more.",
		Writer: stdout, ErrWriter: stderr,
		HideHelpCommand: true, // The library's answers an unknown topic with exit code 3.
		ExitErrHandler:  func(context.Context, *cli.Command, error) {},
		Flags:           []cli.Flag{&cli.BoolFlag{Name: versionFlag, Aliases: []string{"v"}, Usage: "print the version", Local: true}},
		Commands: slices.Concat(
			group("Check and try, also without a GPU", planCommand(environment), checkCommand(environment), simCommand(), demoCommand()),
			group("Cluster", clusterCommand(environment), rolloutCommand(), uninstallCommand(environment)),
			group("Node", runCommand(environment, stderr), mpsCommand(environment, stderr), statusCommand(), healthCommand(), gpuCommand(), migCommand(environment)),
			group("Other", versionCommand()),
			[]*cli.Command{configManagerCommand(environment, stderr), featureDiscoveryCommand(environment, stderr)},
		),
		Action: func(_ context.Context, cmd *cli.Command) error { return cli.ShowRootCommandHelp(cmd) },
	}
	prepare(root)
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

// group gives the commands the heading under which the program's help lists them.
func group(heading string, commands ...*cli.Command) []*cli.Command {
	for _, cmd := range commands {
		cmd.Category = heading
	}
	return commands
}

// prepare sorts what the help of the command and its subcommands lists, gives those without
// arguments a command help, and makes a usageError of every wrong flag, unknown command, and
// argument that a command does not take. A hidden command lets arguments pass, like NVIDIA's.
func prepare(cmd *cli.Command) {
	cmd.OnUsageError = func(_ context.Context, cmd *cli.Command, err error, _ bool) error {
		if flag, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); unknown {
			return unknownFlag(cmd, flag)
		}
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.FullName())}
	}
	action, hasCommands := cmd.Action, len(cmd.Commands) > 0
	if action == nil {
		action = func(_ context.Context, cmd *cli.Command) error { return cli.ShowSubcommandHelp(cmd) }
	}
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error {
		name := strings.TrimSpace(strings.TrimPrefix(cmd.FullName(), cmd.Root().Name))
		switch {
		case cmd.Root().Bool(versionFlag):
			return printVersion(ctx, cmd)
		case !cmd.Args().Present() || cmd.ArgsUsage != "" || cmd.Hidden:
			return action(ctx, cmd)
		case hasCommands:
			return unknownCommand(cmd, strings.TrimSpace(name+" command"), cmd.Args().First())
		}
		return usageError{fmt.Errorf("%s takes no argument, got %q", name, cmd.Args().First())}
	}
	for _, child := range cmd.Commands {
		prepare(child)
	}
	if !cmd.SkipFlagParsing && cmd.ArgsUsage == "" { // An argument may be "help" or "h".
		cmd.Commands = append(cmd.Commands, helpCommand(cmd))
	}
	slices.SortFunc(cmd.Commands, func(a, b *cli.Command) int { return strings.Compare(a.Name, b.Name) })
	sort.Sort(cli.FlagsByName(cmd.Flags))
}

// helpCommand shows the help of the parent, or of the subcommand that its arguments name. Only
// the program's own is listed.
func helpCommand(parent *cli.Command) *cli.Command {
	return &cli.Command{
		Name:      "help",
		Aliases:   []string{"h"},
		Category:  "Other",
		Usage:     "shows the help of the program or of a command",
		ArgsUsage: "[COMMAND…]",
		Hidden:    parent.Name != programName,
		Action: func(ctx context.Context, cmd *cli.Command) error {
			topic := parent
			for _, word := range cmd.Args().Slice() {
				next := topic.Command(word)
				if next == nil {
					return unknownCommand(topic, "help topic", strings.TrimPrefix(topic.FullName()+" ", programName+" ")+word)
				}
				topic = next
			}
			if topic == cmd.Root() {
				return cli.ShowRootCommandHelp(topic)
			}
			return cli.ShowCommandHelp(ctx, topic.Lineage()[1], topic.Name)
		},
	}
}

// unknownCommand says in a sentence that the command has no such subcommand, and which may be meant.
func unknownCommand(cmd *cli.Command, what, name string) error {
	var known []string
	for _, child := range cmd.VisibleCommands() {
		known = append(known, child.Name)
	}
	words := strings.Fields(name)
	if near := configs.Nearest(words[len(words)-1], known); near != "" {
		return usageError{fmt.Errorf("no %s %q, did you mean %s?", what, name, strings.Join(append(words[:len(words)-1], near), " "))}
	}
	return usageError{fmt.Errorf("no %s %q; see %s --help", what, name, cmd.FullName())}
}

func unknownFlag(cmd *cli.Command, name string) error {
	dashed := func(name string) string { return strings.Repeat("-", min(len(name), 2)) + name }
	var known []string
	for _, flag := range cmd.VisibleFlags() {
		known = append(known, flag.Names()[0])
	}
	if near := configs.Nearest(name, known); near != "" {
		return usageError{fmt.Errorf("%s has no flag %s, did you mean %s?", cmd.FullName(), dashed(name), dashed(near))}
	}
	return usageError{fmt.Errorf("%s has no flag %s; see %s --help", cmd.FullName(), dashed(name), cmd.FullName())}
}

// impliedCommand adds the command that the program's name stands for: it takes the
// place of programs of NVIDIA's image when only the image is replaced, and is kubectl's plugin.
// --version alone is the program's.
func impliedCommand(args []string) []string {
	if len(args) > 0 && (len(args) != 2 || !slices.Contains([]string{"--" + versionFlag, "-v"}, args[1])) {
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
		Name:   "version",
		Usage:  "prints the version",
		Action: printVersion,
	}
}

// versionFlag is the root's flag that does what the command version does.
const versionFlag = "version"

func printVersion(_ context.Context, cmd *cli.Command) error {
	_, err := fmt.Fprintf(cmd.Root().Writer, "virgate %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}
