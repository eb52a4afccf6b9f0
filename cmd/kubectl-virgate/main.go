// Command kubectl-virgate is a plugin of kubectl: kubectl virgate shows the GPUs of all nodes of a
// cluster and who holds them, says why a pod waits for one, and gives many nodes another profile.
//
// A person runs it, with their own rights. This package only parses flags and prints results; it
// starts with cluster.go and rollout.go. internal/cluster reads the cluster, internal/rollout changes
// nodes.
package main

import (
	"context"
	_ "embed" // for flagFile
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
)

func main() { os.Exit(command.Main(run)) }

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

// text is the output for people; the commands add what they print.
type text struct{ command.Text }

// run runs the program and is independent of the process. It returns the exit code.
func run(ctx context.Context, args []string, _ command.Environment, stdout, stderr io.Writer) int {
	if len(args) > 0 && filepath.Base(args[0]) == completer {
		args = slices.Insert(slices.Clone(args), 1, command.CompleteWord)
	}
	return command.Run(ctx, rootCommand(stdout, stderr), withoutCluster(args))
}

func rootCommand(stdout, stderr io.Writer) *cli.Command {
	views := clusterCommands()
	return &cli.Command{
		Name:  "kubectl virgate",
		Usage: "shows the GPUs of all nodes of a cluster and who holds them, and gives nodes another profile",
		Description: "Without a command it shows the nodes. It reads Nodes and pods, and with the right to\n" +
			"port-forward to Virgate's pods each node's status page. Only rollout changes anything.\n\n" +
			"Example: kubectl virgate nodes -l nvidia.com/device-plugin.config=inference",
		Version:   version,
		Writer:    stdout,
		ErrWriter: stderr,
		Flags: append(append(clusterFlags(), flagTable.Of(nil, "[connection]")...), &cli.BoolFlag{
			Name:  command.VersionFlag,
			Usage: "print the version",
			Local: true,
		}),
		Action:   views[0].Action,
		Commands: append(views, rolloutCommand(), command.VersionCommand()),
	}
}

// The flags. They never change.
//
//go:embed flags.txt
var flagFile string

var flagTable = command.ParseFlags(flagFile)

// completer is the name under which kubectl calls a program to complete the plugin's words.
const completer = "kubectl_complete-virgate"

// clusterFlags returns the flags of the commands that show the cluster, but those of all commands.
func clusterFlags() []cli.Flag { return append(flagTable.Of(nil, "[cluster]"), command.OutputFlag()) }

// show is command.Show with a text of this program.
func show(cmd *cli.Command, value any, names []string, write func(*text)) error {
	return command.Show(cmd, value, names, func() string {
		var out text
		write(&out)
		return out.String()
	})
}

// withoutCluster removes the word cluster, so that the old spellings kubectl virgate cluster why and
// kubectl virgate help cluster why still work.
func withoutCluster(args []string) []string {
	at := 1
	if len(args) > 1 && (args[1] == "help" || args[1] == "h") {
		at = 2
	}
	if len(args) > at && args[at] == "cluster" {
		return slices.Delete(slices.Clone(args), at, at+1)
	}
	return args
}
