// Command virgate is a Kubernetes device plugin and DRA driver that shares a node's NVIDIA GPUs
// among pods: whole, time-sliced, by MPS and as MIG partitions.
//
// This package only parses flags and environment variables and prints results. Start with run.go;
// most other subcommands have a file of their own name. The plugin itself is wired up and run by
// internal/daemon.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	for _, template := range []*string{&cli.CommandHelpTemplate, &cli.SubcommandHelpTemplate} {
		*template = helpWords.Replace(*template)
	}
	code := run(ctx, os.Args, os.LookupEnv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// helpWords changes the library's help of a command: it omits the command's group in the program's
// help, and says which command above it has the inherited options.
var helpWords = strings.NewReplacer(
	"{{if .Category}}\n\nCATEGORY:\n   {{.Category}}{{end}}", "",
	"GLOBAL OPTIONS:", "OPTIONS OF {{(index .Lineage 1).FullName}}:",
)

// programName is the name of the root command in help and messages.
const programName = "virgate"

// errSilent ends the program with exit code 1 after the reason has been printed.
var errSilent = errors.New("already reported")

// run runs the program and is independent of the process. It returns the exit code: 0, 1 when
// something failed, 2 for a wrong command line.
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
		Writer:          stdout,
		ErrWriter:       stderr,
		HideHelpCommand: true, // The library's exits with 3 for an unknown topic.
		ExitErrHandler:  func(context.Context, *cli.Command, error) {},
		Flags: []cli.Flag{&cli.BoolFlag{
			Name:    versionFlag,
			Aliases: []string{"v"},
			Usage:   "print the version",
			Local:   true,
		}},
		Commands: slices.Concat(
			group("Check and try, also without a GPU", planCommand(environment), checkCommand(environment),
				simCommand(), demoCommand()),
			group("Cluster", clusterCommand(environment), rolloutCommand(), uninstallCommand(environment)),
			group("Node", runCommand(environment, stderr), mpsCommand(environment, stderr), statusCommand(),
				healthCommand(), gpuCommand(), migCommand(environment)),
			group("Other", versionCommand()),
			[]*cli.Command{
				configManagerCommand(environment, stderr),
				featureDiscoveryCommand(environment, stderr),
				endDaemonSetCommand(environment),
			},
		),
		Action: func(_ context.Context, cmd *cli.Command) error { return cli.ShowRootCommandHelp(cmd) },
	}
	if len(args) > 0 && filepath.Base(args[0]) == "kubectl-virgate" {
		root = kubectlPlugin(root)
	}
	var noTopic error
	prepare(root, func(err error) { noTopic = err })
	err := cmp.Or(root.Run(ctx, impliedCommand(args)), noTopic)
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

// environment looks up a variable, like os.LookupEnv.
type environment func(name string) (value string, ok bool)

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// kubectlPlugin makes the command cluster the whole program, for kubectl to run as a plugin.
func kubectlPlugin(program *cli.Command) *cli.Command {
	plugin := program.Command("cluster")
	plugin.Name, plugin.Category = "kubectl virgate", ""
	plugin.Writer, plugin.ErrWriter = program.Writer, program.ErrWriter
	plugin.HideHelpCommand, plugin.ExitErrHandler = program.HideHelpCommand, program.ExitErrHandler
	plugin.Flags = append(plugin.Flags, &cli.BoolFlag{
		Name:  versionFlag,
		Usage: "print the version",
		Local: true,
	})
	for _, cmd := range append(plugin.Commands, plugin) {
		cmd.Description = strings.ReplaceAll(cmd.Description, "virgate cluster ", plugin.Name+" ")
	}
	return plugin
}

// group gives the commands the heading under which the program's help lists them.
func group(heading string, commands ...*cli.Command) []*cli.Command {
	for _, cmd := range commands {
		cmd.Category = heading
	}
	return commands
}

// prepare sets up the command and its subcommands. It sorts what their help lists, and gives a
// command help to those without arguments. It makes a usageError of every wrong flag, unknown
// command, and argument that a command does not accept. A hidden command accepts all arguments,
// like NVIDIA's. After --help an argument is a topic, as with the command help; noTopic gets the
// error about an unknown topic, because the library cannot return it.
func prepare(cmd *cli.Command, noTopic func(error)) {
	cmd.OnUsageError = func(_ context.Context, cmd *cli.Command, err error, _ bool) error {
		if flag, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); unknown {
			return unknownFlag(cmd, flag)
		}
		if missing := requiredFlags.FindStringSubmatch(err.Error()); missing != nil {
			return usageError{fmt.Errorf("%s needs --%s", nameOf(cmd), strings.ReplaceAll(missing[1], ", ", " and --"))}
		}
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.FullName())}
	}
	action, hasCommands := cmd.Action, len(cmd.Commands) > 0
	if action == nil {
		action = func(_ context.Context, cmd *cli.Command) error { return cli.ShowSubcommandHelp(cmd) }
	}
	takesArguments := cmd.ArgsUsage != "" || cmd.Hidden
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error {
		first := cmd.Args().First()
		switch {
		case cmd.Args().Present() && !takesArguments && hasCommands:
			return unknownCommand(cmd, strings.TrimSpace(nameOf(cmd)+" command"), "", first)
		case cmd.Args().Present() && !takesArguments:
			return usageError{fmt.Errorf("%s takes no argument, got %q", nameOf(cmd), first)}
		case cmd.Root().Bool(versionFlag):
			return printVersion(ctx, cmd)
		}
		return action(ctx, cmd)
	}
	cmd.CommandNotFound = func(ctx context.Context, cmd *cli.Command, word string) {
		if takesArguments {
			noTopic(cli.ShowCommandHelp(ctx, cmd.Lineage()[1], cmd.Name))
			return
		}
		noTopic(unknownCommand(cmd, "help topic", nameOf(cmd), word))
	}
	for _, child := range cmd.Commands {
		prepare(child, noTopic)
	}
	if !cmd.SkipFlagParsing && cmd.ArgsUsage == "" { // An argument may be "help" or "h".
		cmd.Commands = append(cmd.Commands, helpCommand(cmd))
	}
	slices.SortFunc(cmd.Commands, func(a, b *cli.Command) int { return strings.Compare(a.Name, b.Name) })
	names := make(map[cli.Flag]string, len(cmd.Flags)) // Names allocates a slice at each call.
	for _, flag := range cmd.Flags {
		names[flag] = flag.Names()[0]
	}
	slices.SortFunc(cmd.Flags, func(a, b cli.Flag) int { return strings.Compare(names[a], names[b]) })
}

// requiredFlags matches the library's message.
var requiredFlags = regexp.MustCompile(`^Required flags? "(.+)" not set$`)

// nameOf returns a command's name in messages: its words after the program's name.
func nameOf(cmd *cli.Command) string {
	return strings.TrimSpace(strings.TrimPrefix(cmd.FullName(), cmd.Root().Name))
}

// helpCommand shows the help of the parent, or of the subcommand that its arguments name. Only the
// program's own help command is listed.
func helpCommand(parent *cli.Command) *cli.Command {
	return &cli.Command{
		Name:      "help",
		Aliases:   []string{"h"},
		Category:  "Other",
		Usage:     "shows the help of the program or of a command",
		ArgsUsage: "[COMMAND…]",
		Hidden:    parent.Writer == nil,
		Action: func(ctx context.Context, cmd *cli.Command) error {
			topic := parent
			for _, word := range cmd.Args().Slice() {
				next := topic.Command(word)
				if next == nil {
					return unknownCommand(topic, "help topic", nameOf(topic), word)
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

// unknownCommand returns an error that the command has no such subcommand, and which may be meant.
// front has the words that begin the name.
func unknownCommand(cmd *cli.Command, what, front, word string) error {
	name := func(word string) string { return strings.TrimSpace(front + " " + word) }
	var known []string
	for _, child := range cmd.VisibleCommands() {
		known = append(known, child.Name)
	}
	if cmd.Name == programName { // Else uninstall would be suggested.
		known = append(known, "install")
	}
	near := meant(word, known, name)
	switch {
	case near == name("install"):
		return usageError{fmt.Errorf("no %s %q; the Helm chart installs Virgate; see %s --help", what, name(word),
			cmd.FullName())}
	case near != "":
		return usageError{fmt.Errorf("no %s %q, did you mean %s?", what, name(word), near)}
	}
	return usageError{fmt.Errorf("no %s %q; see %s --help", what, name(word), cmd.FullName())}
}

func unknownFlag(cmd *cli.Command, name string) error {
	dashed := func(name string) string { return strings.Repeat("-", min(len(name), 2)) + name }
	var known []string
	for _, flag := range append(cmd.VisibleFlags(), cmd.VisiblePersistentFlags()...) {
		known = append(known, flag.Names()[0])
	}
	if near := meant(name, known, dashed); near != "" {
		return usageError{fmt.Errorf("%s has no flag %s, did you mean %s?", cmd.FullName(), dashed(name), near)}
	}
	return usageError{fmt.Errorf("%s has no flag %s; see %s --help", cmd.FullName(), dashed(name), cmd.FullName())}
}

// meant returns which of the known words may be meant: up to three that begin with what was typed,
// or else the nearest.
func meant(typed string, known []string, write func(string) string) string {
	var longer []string
	for _, word := range known {
		if strings.HasPrefix(word, strings.ToLower(typed)) {
			longer = append(longer, write(word))
		}
	}
	if 0 < len(longer) && len(longer) <= 3 {
		return strings.Join(longer, " or ")
	}
	if near := configs.Nearest(typed, known); near != "" {
		return write(near)
	}
	return ""
}

// impliedCommand adds the command that the program's name stands for. It lets the image replace
// NVIDIA's image without other changes, under the names of NVIDIA's programs. --version alone is
// left to the root command.
func impliedCommand(args []string) []string {
	if len(args) > 0 && (len(args) != 2 || !slices.Contains([]string{"--" + versionFlag, "-v"}, args[1])) {
		switch name := filepath.Base(args[0]); name {
		case "nvidia-device-plugin":
			return slices.Insert(slices.Clone(args), 1, "run")
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

// versionFlag is the root's flag that does the same as the command version.
const versionFlag = "version"

func printVersion(_ context.Context, cmd *cli.Command) error {
	_, err := fmt.Fprintf(cmd.Root().Writer, "virgate %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS,
		runtime.GOARCH)
	return err
}
