package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "shows the main features on a simulated node, in seconds and without a GPU",
		Description: "Runs the real program between a simulated driver and a simulated kubelet, and checks\n" +
			"each step. The exit code is 0 only if every step succeeded.\n\n" +
			"Example: virgate demo --serve, then open http://localhost:9400/status",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "scenario", Value: "main", Usage: "main: time-slicing, live switches, a fault; mig: a GPU gets another MIG layout under running pods"},
			worldFlag(),
			&cli.BoolFlag{Name: "serve", Usage: "keep running afterwards, with HTTP on --listen"},
			&cli.StringFlag{Name: "listen", Value: "localhost:9400", Usage: "the HTTP address with --serve"},
			&cli.BoolFlag{Name: "verbose", Usage: "print the program's log on standard error"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			listen := ""
			if cmd.Bool("serve") {
				listen = cmd.String("listen")
				// So that an address in use is reported before the first step.
				listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
				if err == nil {
					err = listener.Close()
				}
				if err != nil {
					return fmt.Errorf("--listen: %w", err)
				}
			}
			log := slog.New(slog.DiscardHandler)
			if cmd.Bool("verbose") {
				log = textLog(cmd)
			}
			scenario, known := scenarios()[cmd.String("scenario")]
			if !known {
				return usageError{fmt.Errorf("--scenario %q is neither main nor mig", cmd.String("scenario"))}
			}
			node, err := openSimulated(scenario.node, cmd.String("sim-world"))
			if err != nil {
				return err
			}
			return demo(ctx, cmd.Root().Writer, log, listen, node, scenario)
		},
	}
}

// demoNode is the real program between a simulated node and a simulated kubelet.
type demoNode struct {
	node *simnode.Node
	// gpus are the node's at the start.
	gpus    []sharing.GPU
	kubelet *simkubelet.Kubelet
	// profile is the path of the profile that the program watches.
	profile string
	out     io.Writer
	// broken are the steps that did not come true.
	broken []string
}

// scenario is a node, the profile it starts with, and the steps of the demo.
type scenario struct {
	node    string
	profile []byte
	steps   func(*demoNode) []step
	// afterwards runs when the demo keeps serving.
	afterwards func(*demoNode, context.Context) error
}

func scenarios() map[string]scenario {
	return map[string]scenario{
		"main": {"dgx-a100", timesSlicedBy(10), (*demoNode).mainSteps, (*demoNode).fillNode},
		"mig":  {"h100+all-1g.10gb", withLayout("all-1g.10gb"), (*demoNode).migSteps, func(*demoNode, context.Context) error { return nil }},
	}
}

// demo starts everything, goes through the steps, and cleans up.
func demo(ctx context.Context, out io.Writer, log *slog.Logger, listen string, node *simnode.Node, scenario scenario) error {
	dir, err := os.MkdirTemp("", "virgate")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()

	gpus, err := nvml.Scan(node)
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	s := &demoNode{
		node: node, gpus: gpus, out: out, profile: filepath.Join(dir, "profile.yaml"),
		kubelet: simkubelet.New(simkubelet.Options{Dir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock"), Logger: log.With("component", "kubelet")}),
	}
	if err := s.replace(scenario.profile); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.kubelet.Run(ctx) })
	group.Go(func() error {
		return daemon.Run(ctx, daemon.Options{
			GPUs:      func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(node, node), nil },
			Profile:   daemon.ProfileOptions{Path: s.profile},
			PluginDir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock"),
			Timing: plugin.Timing{RemovalDelay: time.Second}, Rescan: 300 * time.Millisecond, Probe: 300 * time.Millisecond,
			Settings: agent.Settings{SampleInterval: time.Second, Listen: listen, Logger: log, Version: version},
		})
	})
	group.Go(func() error {
		defer cancel()
		if err := s.playSteps(ctx, scenario.steps(s)); err != nil {
			return err
		}
		if listen != "" && len(s.broken) == 0 {
			if err := scenario.afterwards(s, ctx); err != nil {
				return err
			}
			s.say("\nServing on http://%s (/status, /metrics, /plan, /readyz). Ctrl-C ends it.", listen)
			<-ctx.Done()
		}
		return nil
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("demo: %w", err)
	}
	if len(s.broken) > 0 {
		return fmt.Errorf("demo: %d steps did not come true: %v", len(s.broken), s.broken)
	}
	return nil
}

func (s *demoNode) say(format string, arguments ...any) {
	_, _ = fmt.Fprintf(s.out, format+"\n", arguments...)
}

// check prints whether something came true, and remembers when it did not.
func (s *demoNode) check(ok bool, format string, arguments ...any) {
	mark := "✓"
	message := fmt.Sprintf(format, arguments...)
	if !ok {
		mark = "✗"
		s.broken = append(s.broken, message)
	}
	s.say("   %s %s", mark, message)
}

// timesSlicedBy is a profile in the form of NVIDIA's device plugin.
func timesSlicedBy(replicas int) []byte {
	return fmt.Appendf(nil, `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: %d
`, replicas)
}

// replace makes data the profile, as an operator's editor would.
func (s *demoNode) replace(data []byte) error {
	next := s.profile + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return err
	}
	return os.Rename(next, s.profile)
}
