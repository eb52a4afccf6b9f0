// Command virgate is a Kubernetes device plugin and DRA driver that shares a node's NVIDIA GPUs
// among pods: whole, time-sliced, by MPS and as MIG partitions.
//
// This package only parses flags and environment variables and prints results. Start with run.go;
// most other subcommands have a file of their own name. The plugin itself is wired up and run by
// internal/daemon. What a person runs for a whole cluster is cmd/kubectl-virgate.
package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/urfave/cli/v3"
	"k8s.io/klog/v2"

	"github.com/virgate/virgate/internal/command"
)

func main() {
	librariesLogTo = func(log *slog.Logger, inJSON bool) {
		klog.SetSlogLogger(log)
		if inJSON {
			slog.SetDefault(log) // For what the standard library logs.
		}
	}
	os.Exit(command.Main(run))
}

// librariesLogTo gives client-go's lines the format of the others. It changes the whole process, so
// main sets it; tests run several commands at once.
var librariesLogTo = func(_ *slog.Logger, _ bool) {}

// environment looks up a variable, like os.LookupEnv.
type environment = command.Environment

// text is the output for people; the commands add what they print.
type text struct{ command.Text }

// show is command.Show with a text of this program.
func show(cmd *cli.Command, value any, names []string, write func(*text)) error {
	return command.Show(cmd, value, names, func() string {
		var out text
		write(&out)
		return out.String()
	})
}

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

// run runs the program and is independent of the process. It returns the exit code.
func run(ctx context.Context, args []string, environment environment, stdout, stderr io.Writer) int {
	return command.Run(ctx, rootCommand(environment, stdout, stderr), impliedCommand(args))
}

func rootCommand(environment environment, stdout, stderr io.Writer) *cli.Command {
	return &cli.Command{
		Name:  "virgate",
		Usage: "shares a node's NVIDIA GPUs among pods",
		Description: "Virgate offers a node's GPUs to pods: whole, time-sliced, by MPS or as MIG partitions, as\n" +
			"resources of a device plugin or by claims of Dynamic Resource Allocation (DRA).\n" +
			"It reads the configuration of NVIDIA's device plugin.\n\n" +
			"kubectl virgate, a program of its own, shows a whole cluster and changes many nodes.\n\n" +
			"Exit codes: 0 for success, 1 when something failed or what was checked is wrong, 2 for a\n" +
			"wrong command line. The help of a command says where 1 means more.",
		Version:   version,
		Writer:    stdout,
		ErrWriter: stderr,
		Metadata:  elsewhere(),
		Flags: []cli.Flag{&cli.BoolFlag{
			Name:    command.VersionFlag,
			Aliases: []string{"v"},
			Usage:   "print the version",
			Local:   true,
		}},
		Commands: slices.Concat(
			command.Group("Check and try, also without a GPU", planCommand(environment), checkCommand(environment),
				schemaCommand(), simCommand()),
			command.Group("Cluster", uninstallCommand(environment)),
			command.Group("Node", runCommand(environment, stderr), mpsCommand(environment, stderr), statusCommand(),
				healthCommand(), gpuCommand(), migCommand(environment)),
			command.Group("Other", command.CompletionCommand(), command.VersionCommand()),
			[]*cli.Command{
				configManagerCommand(environment, stderr),
				featureDiscoveryCommand(environment, stderr),
				endDaemonSetCommand(environment),
			},
		),
		Action: func(_ context.Context, cmd *cli.Command) error { return cli.ShowRootCommandHelp(cmd) },
	}
}

// elsewhere returns the words that are no commands of this program, each with a text for users who type it.
func elsewhere() map[string]any {
	words := map[string]any{
		"demo":    "make demo in a clone of the repository runs virgate-demo",
		"install": "the Helm chart installs Virgate",
	}
	for word, what := range map[string]string{
		"cluster": "",
		"gpus":    " gpus",
		"nodes":   " nodes",
		"page":    " --serve 127.0.0.1:8080",
		"rollout": " rollout",
		"tenants": " tenants",
		"why":     " why",
	} {
		words[word] = "use kubectl virgate" + what + ", which is a program of its own"
	}
	return words
}

// impliedCommand adds the command that the program's name stands for. It lets the image replace
// NVIDIA's image without other changes, under the names of NVIDIA's programs. --version alone is
// left to the root command.
func impliedCommand(args []string) []string {
	if len(args) > 0 && (len(args) != 2 || !slices.Contains([]string{"--" + command.VersionFlag, "-v"}, args[1])) {
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
