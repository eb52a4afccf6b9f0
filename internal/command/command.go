// Package command has what the command lines of Virgate's programs have in common: help, errors
// about unknown commands and flags, exit codes, and output as tables, text and JSON. What a program does is
// in its package below cmd.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
)

// Main calls run for this process, and returns its exit code. SIGINT and SIGTERM end the context.
func Main(
	run func(ctx context.Context, args []string, environment Environment, stdout, stderr io.Writer) int,
) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	for _, template := range []*string{&cli.CommandHelpTemplate, &cli.SubcommandHelpTemplate} {
		*template = helpWords.Replace(*template)
	}
	return run(ctx, os.Args, os.LookupEnv, onTerminal(os.Stdout, os.LookupEnv), os.Stderr)
}

// helpWords changes the library's help of a command: it omits the command's group in the program's
// help, and says which command above it has the inherited options.
var helpWords = strings.NewReplacer(
	"{{if .Category}}\n\nCATEGORY:\n   {{.Category}}{{end}}", "",
	"GLOBAL OPTIONS:", "OPTIONS OF {{(index .Lineage 1).FullName}}:",
)

// ErrSilent ends the program after the reason has been printed.
var ErrSilent = errors.New("already reported")

// Run runs the program and is independent of the process. It returns the exit code: 0, 1 when
// something failed, 2 for a wrong command line. The root has the program's name, version and output.
// Its Metadata may have words that are no commands, each with a text for users who type it.
func Run(ctx context.Context, root *cli.Command, args []string) int {
	root.HideVersion = true     // The library's flag would take -v.
	root.HideHelpCommand = true // The library's exits with 3 for an unknown topic.
	root.ExitErrHandler = func(context.Context, *cli.Command, error) {}
	if len(args) > 1 && args[1] == CompleteWord {
		complete(ctx, root, args[2:])
		return 0
	}
	if word := elsewhere(root, args); word != "" {
		_, _ = fmt.Fprintf(root.ErrWriter, "%s: %v\n", root.Name, unknownCommand(root, "command", "", word))
		return 2
	}
	var noTopic error
	prepare(root, func(err error) { noTopic = err })
	err := cmp.Or(root.Run(ctx, args), noTopic)
	if err == nil {
		return 0
	}
	if !errors.Is(err, ErrSilent) {
		_, _ = fmt.Fprintf(root.ErrWriter, "%s: %v\n", root.Name, err)
	}
	if _, usage := errors.AsType[usageError](err); usage {
		return 2
	}
	return 1
}

// elsewhere returns the first word of the command line if the root's Metadata has it. It is checked
// before the flags, so that the error names the word and not a flag that the root does not have.
func elsewhere(root *cli.Command, args []string) string {
	if len(args) > 1 && root.Metadata[args[1]] != nil {
		return args[1]
	}
	return ""
}

// Environment looks up a variable, like os.LookupEnv.
type Environment func(name string) (value string, ok bool)

// Usage returns an error about the command line, which ends the program with exit code 2.
func Usage(err error) error { return usageError{err} }

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Group gives the commands the heading under which the program's help lists them.
func Group(heading string, commands ...*cli.Command) []*cli.Command {
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
			return UnknownFlag(cmd, flag)
		}
		if missing := requiredFlags.FindStringSubmatch(err.Error()); missing != nil {
			return usageError{fmt.Errorf("%s needs --%s", NameOf(cmd), strings.ReplaceAll(missing[1], ", ", " and --"))}
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
			return unknownCommand(cmd, strings.TrimSpace(NameOf(cmd)+" command"), "", first)
		case cmd.Args().Present() && !takesArguments:
			return usageError{fmt.Errorf("%s takes no argument, got %q", NameOf(cmd), first)}
		case cmd.Root().Bool(VersionFlag):
			return PrintVersion(ctx, cmd)
		}
		return action(ctx, cmd)
	}
	cmd.CommandNotFound = func(ctx context.Context, cmd *cli.Command, word string) {
		if takesArguments {
			noTopic(cli.ShowCommandHelp(ctx, cmd.Lineage()[1], cmd.Name))
			return
		}
		noTopic(unknownCommand(cmd, "help topic", NameOf(cmd), word))
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

// NameOf returns a command's name in messages: its words after the program's name.
func NameOf(cmd *cli.Command) string {
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
					return unknownCommand(topic, "help topic", NameOf(topic), word)
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
	// With them among the known, the nearest of the others is not suggested.
	if !slices.ContainsFunc(known, func(command string) bool { return strings.HasPrefix(command, word) }) {
		known = slices.AppendSeq(known, maps.Keys(cmd.Metadata))
	}
	near := meant(word, known, name)
	switch {
	case cmd.Metadata[near] != nil:
		return usageError{fmt.Errorf("no %s %q; %s; see %s --help", what, name(word), cmd.Metadata[near],
			cmd.FullName())}
	case near != "":
		return usageError{fmt.Errorf("no %s %q, did you mean %s?", what, name(word), near)}
	}
	return usageError{fmt.Errorf("no %s %q; see %s --help", what, name(word), cmd.FullName())}
}

// UnknownFlag returns an error that the command has no such flag, and which may be meant.
func UnknownFlag(cmd *cli.Command, name string) error {
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

// VersionCommand prints the root's version.
func VersionCommand() *cli.Command {
	return &cli.Command{
		Name:   "version",
		Usage:  "prints the version",
		Action: PrintVersion,
	}
}

// VersionFlag is the root's flag that does the same as VersionCommand.
const VersionFlag = "version"

// PrintVersion prints the program's name and version.
func PrintVersion(_ context.Context, cmd *cli.Command) error {
	root := cmd.Root()
	_, err := fmt.Fprintf(root.Writer, "%s %s (%s, %s/%s)\n", root.Name, root.Version, runtime.Version(), runtime.GOOS,
		runtime.GOARCH)
	return err
}
