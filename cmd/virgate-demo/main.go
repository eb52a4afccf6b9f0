// Command virgate-demo shows Virgate's main features on a simulated node, in seconds and without a
// GPU: the real program runs between a simulated driver and a simulated kubelet.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/simnode"
)

func main() { os.Exit(command.Main(run)) }

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

// run runs the program with these arguments and outputs, and returns the exit code.
func run(ctx context.Context, args []string, _ command.Environment, stdout, stderr io.Writer) int {
	root := &cli.Command{
		Name:  "virgate-demo",
		Usage: "shows the main features on a simulated node, in seconds and without a GPU",
		Description: "Runs the real program between a simulated driver and a simulated kubelet, and checks\n" +
			"each step. The exit code is 0 only if every step succeeded.\n\n" +
			"Example: virgate-demo --serve, then open http://localhost:9400/status",
		Version:   version,
		Writer:    stdout,
		ErrWriter: stderr,
		Flags: []cli.Flag{
			&cli.StringFlag{
				Name:  "scenario",
				Value: "main",
				Usage: "main: time-slicing, live switches, a fault; mig: a GPU gets another MIG layout under running " +
					"pods; guard: pods use more memory than is theirs; mps: time slices, MPS and whole GPUs, and a " +
					"daemon that dies; dra: claims instead of the device plugin, partitions on demand, and back",
			},
			&cli.StringFlag{Name: simnode.WorldFlag, Usage: simnode.WorldUsage},
			&cli.BoolFlag{Name: "serve", Usage: "keep running afterwards, with HTTP on --listen"},
			&cli.StringFlag{
				Name:  "listen",
				Value: "localhost:9400",
				Usage: "the HTTP address with --serve",
			},
			&cli.BoolFlag{Name: "verbose", Usage: "print the program's log on standard error"},
			&cli.BoolFlag{
				Name:    command.VersionFlag,
				Aliases: []string{"v"},
				Usage:   "print the version",
			},
		},
		Action: play,
	}
	return command.Run(ctx, root, args)
}

// play plays the scenario that the command line names.
func play(ctx context.Context, cmd *cli.Command) error {
	listen := ""
	if cmd.Bool("serve") {
		listen = cmd.String("listen")
		// Try the address first, so that one in use is reported before the first step.
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
		if err == nil {
			if _, port, _ := net.SplitHostPort(listen); port == "0" {
				listen = listener.Addr().String() // The page of the cluster needs to know the port.
			}
			err = listener.Close()
		}
		if err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	if cmd.Bool("verbose") {
		log = slog.New(slog.NewTextHandler(cmd.ErrWriter, nil))
	}
	scenario, known := scenarios()[cmd.String("scenario")]
	if !known {
		return command.Usage(fmt.Errorf("--scenario %q is none of main, mig, guard, mps, dra", cmd.String("scenario")))
	}
	node, err := simnode.New(scenario.node)
	if err != nil {
		return err
	}
	if world := cmd.String(simnode.WorldFlag); world != "" {
		if err := node.SetWorld(world); err != nil {
			return command.Usage(fmt.Errorf("--%s: %w", simnode.WorldFlag, err))
		}
	}
	return demo(ctx, cmd.Writer, log, listen, node, scenario)
}
