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

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
)

func demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "shows the main job on a simulated node, in seconds and without a GPU",
		Description: "Runs the real program between a simulated driver and a simulated kubelet, and checks\n" +
			"each step. It ends with exit code 0 only if every step came true.\n\n" +
			"Example: virgate demo --serve, then open http://localhost:9400/status",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "scenario", Value: "main", Usage: "main: time-slicing, a live switch, a fault; mig: a GPU is cut anew under running pods"},
			&cli.BoolFlag{Name: "serve", Usage: "keep running afterwards, with HTTP on --listen"},
			&cli.StringFlag{Name: "listen", Value: "localhost:9400", Usage: "the HTTP address with --serve"},
			&cli.BoolFlag{Name: "verbose", Usage: "print the program's log on standard error"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("demo takes no argument, got %q", cmd.Args().First())}
			}
			listen := ""
			if cmd.Bool("serve") {
				listen = cmd.String("listen")
				// Known before the first step, not in the middle of them.
				listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
				if err != nil {
					return fmt.Errorf("--listen: %w", err)
				}
				if err := listener.Close(); err != nil {
					return fmt.Errorf("--listen: %w", err)
				}
			}
			log := slog.New(slog.DiscardHandler)
			if cmd.Bool("verbose") {
				log = slog.New(slog.NewTextHandler(cmd.Root().ErrWriter, nil))
			}
			scenario, known := scenarios()[cmd.String("scenario")]
			if !known {
				return usageError{fmt.Errorf("--scenario %q is neither main nor mig", cmd.String("scenario"))}
			}
			return demo(ctx, cmd.Root().Writer, log, listen, scenario)
		},
	}
}

// stage is what the demo plays on: a simulated node, a simulated kubelet and
// the real program between them.
type stage struct {
	node    *simnode.Node
	kubelet *simkubelet.Kubelet
	// profile is the path of the profile that the program watches.
	profile string
	out     io.Writer
	// broken are the steps that did not come true.
	broken []string
}

// scenario is a node, the profile that it begins with, and what is played.
type scenario struct {
	node    string
	profile []byte
	steps   func(*stage) []step
	// crowd is played at the end when the demo goes on serving; nil for nothing.
	crowd func(*stage, context.Context) error
}

func scenarios() map[string]scenario {
	return map[string]scenario{
		"main": {"dgx-a100", timesSlicedBy(10), (*stage).mainSteps, (*stage).crowd},
		"mig":  {"h100+all-1g.10gb", cutBy("all-1g.10gb"), (*stage).migSteps, nil},
	}
}

// demo sets the stage, plays, and clears up.
func demo(ctx context.Context, out io.Writer, log *slog.Logger, listen string, scenario scenario) error {
	node, err := simnode.New(scenario.node)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "virgate")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()

	s := &stage{
		node: node, out: out, profile: filepath.Join(dir, "profile.yaml"),
		kubelet: simkubelet.New(simkubelet.Options{Dir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock"), Logger: log.With("component", "kubelet")}),
	}
	if err := s.replace(scenario.profile); err != nil {
		return err
	}
	holders := podresources.New(podresources.Options{Socket: filepath.Join(dir, "pr.sock"), CheckpointDir: filepath.Join(dir, "dp"), Logger: log})
	defer func() { _ = holders.Close() }()
	started, err := (&policy.File{Path: s.profile}).Config()
	if err != nil {
		return err
	}
	driver := nvml.NewNode(node, nvml.Options{Logger: log, Rescan: 300 * time.Millisecond, Probe: 300 * time.Millisecond})

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.kubelet.Run(ctx) })
	group.Go(func() error {
		return agent.Run(ctx, agent.Options{
			Node: driver, Health: driver,
			Policy: &policy.File{Path: s.profile, Started: started.Process},
			Plugin: plugin.NewManager(plugin.Options{
				Dir: filepath.Join(dir, "dp"), Kubelet: holders, Logger: log,
				Timing: plugin.Timing{Quiet: time.Second},
			}),
			Holders: holders, Listen: listen, Logger: log, Version: version,
			Meter: newSampler(backend{Library: node, simulated: node}, "", nil, log), SampleInterval: time.Second,
			Partitioner: nvml.NewPartitioner(node, driver.Quiet), Journal: &memoryJournal{}, Refresh: driver.LookAgain,
		})
	})
	group.Go(func() error {
		defer cancel()
		if err := s.play(ctx, scenario.steps(s)); err != nil {
			return err
		}
		if listen != "" && len(s.broken) == 0 {
			if scenario.crowd != nil {
				if err := scenario.crowd(s, ctx); err != nil {
					return err
				}
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

func (s *stage) say(format string, arguments ...any) {
	_, _ = fmt.Fprintf(s.out, format+"\n", arguments...)
}

// check says what came true, or remembers that it did not.
func (s *stage) check(ok bool, format string, arguments ...any) {
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
func (s *stage) replace(data []byte) error {
	next := s.profile + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	if err := os.Rename(next, s.profile); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	return nil
}
