package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"os/user"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/rollout"
	"github.com/virgate/virgate/internal/status"
)

func rolloutCommand() *cli.Command {
	return &cli.Command{
		Name:  "rollout",
		Usage: "gives many nodes a profile or a MIG layout, a few at a time, and takes it back",
		Description: "Sets the label nvidia.com/device-plugin.config, or with --mig-config nvidia.com/mig.config, " +
			"waits until each\n" +
			"node has what it should, and stops at the first one that is in the way. What it does lies in a " +
			"ConfigMap in\n" +
			"Virgate's namespace: anyone who may write there can continue from another machine.\n\n" +
			"Example: kubectl virgate rollout start inference -l pool=gpu --max-unavailable 5% --pause-after 1",
		Flags:  hidden(clusterFlags()),
		Before: refuseClusterFlags,
		Commands: []*cli.Command{rolloutStartCommand(), rolloutStatusCommand(), {
			Name:      "pause",
			Usage:     "has the rollout begin no further node",
			ArgsUsage: "[ROLLOUT]",
			Action: func(ctx context.Context, cmd *cli.Command) error {
				client, r, err := oneRollout(ctx, cmd, false)
				if err == nil {
					err = client.Pause(ctx, r.ID)
					if err == nil {
						_, err = fmt.Fprintf(cmd.Root().Writer,
							"rollout %s is paused: kubectl virgate rollout resume %s goes on\n", r.ID, r.ID)
					}
				}
				return err
			},
		}, {
			Name:      "resume",
			Usage:     "continues a rollout that was paused, has stopped, or whose program has ended",
			ArgsUsage: "[ROLLOUT]",
			Flags:     flagTable.Of(nil, "[rollout resume]"),
			Action: func(ctx context.Context, cmd *cli.Command) error {
				if err := notNegative(cmd, "pause-after"); err != nil {
					return err
				}
				return driveRollout(ctx, cmd, func(client *rollout.Client, r *rollout.Rollout) (*rollout.Rollout,
					error) {
					return client.Drive(ctx, r.ID, rollout.Resume{
						SkipFailed:     cmd.Bool("skip-failed"),
						PauseAfter:     cmd.Int("pause-after"),
						AllowUnhealthy: cmd.Bool("ignore-unallocatable"),
					})
				}, false)
			},
		}, {
			Name:      "undo",
			Usage:     "puts every node back to what it had",
			ArgsUsage: "[ROLLOUT]",
			Flags:     flagTable.Of(nil, "[rollout undo]"),
			Action: func(ctx context.Context, cmd *cli.Command) error {
				return driveRollout(ctx, cmd, func(client *rollout.Client, r *rollout.Rollout) (*rollout.Rollout,
					error) {
					return client.Undo(ctx, r.ID, cmd.Bool("now"))
				}, true)
			},
		}, {
			Name:      "forget",
			Usage:     "deletes the record of an ended rollout, which cannot be undone afterwards",
			ArgsUsage: "ROLLOUT",
			Flags:     flagTable.Of(nil, "[rollout forget]"),
			Action: func(ctx context.Context, cmd *cli.Command) error {
				if cmd.Args().Len() != 1 {
					return command.Usage(errors.New(
						"rollout forget needs the name of one rollout, as rollout status has it"))
				}
				client, err := rolloutClient(cmd)
				if err != nil {
					return err
				}
				return client.Forget(ctx, cmd.Args().First(), cmd.Bool("unfinished"))
			},
		}},
	}
}

// hidden returns flags with the names of these, without their values and not in any help. In a
// command they stand in place of those of the root, which all its commands would have.
func hidden(flags []cli.Flag) []cli.Flag {
	var all []cli.Flag
	for _, flag := range flags {
		f := command.Flag{
			Names:  flag.Names(),
			Kind:   command.KindText,
			Hidden: true,
		}
		if !flag.(cli.DocGenerationFlag).TakesValue() {
			f.Kind = command.KindBool
		}
		all = append(all, f.New(nil))
	}
	return all
}

// refuseClusterFlags returns an error for flags of the commands that show the cluster.
func refuseClusterFlags(ctx context.Context, cmd *cli.Command) (context.Context, error) {
	for _, flag := range clusterFlags() {
		if name := flag.Names()[0]; cmd.IsSet(name) || cmd.Root().IsSet(name) {
			return ctx, command.UnknownFlag(cmd, name)
		}
	}
	return ctx, nil
}

func rolloutStartCommand() *cli.Command {
	return &cli.Command{
		Name:      "start",
		Usage:     "begins a rollout, and waits for its end",
		ArgsUsage: "PROFILE",
		Flags:     append(flagTable.Of(nil, "[rollout start]", "domain"), command.OutputFlag()),
		Action:    startRollout,
	}
}

// rolloutSpec returns the rollout that the flags of start describe.
func rolloutSpec(cmd *cli.Command) (rollout.Spec, error) {
	spec := rollout.Spec{
		To:             cmd.Args().First(),
		MIG:            cmd.Bool("mig-config"),
		Label:          cmd.String("label"),
		Selector:       cmd.String("selector"),
		MaxUnavailable: cmd.String("max-unavailable"),
		PauseAfter:     cmd.Int("pause-after"),
		Timeout:        cmd.Duration("timeout"),
		Domain:         cmd.String("domain"),
		AllowUnhealthy: cmd.Bool("ignore-unallocatable"),
		SkipUnready:    cmd.Bool("skip-unready"),
	}
	_, err := rollout.ParseMax(spec.MaxUnavailable, 1)
	switch {
	case cmd.Args().Len() != 1:
		return spec, command.Usage(fmt.Errorf("rollout start needs one profile, got %q", cmd.Args().Slice()))
	case spec.Selector == "":
		return spec, command.Usage(errors.New("rollout start needs --selector: which nodes"))
	case err != nil:
		return spec, command.Usage(fmt.Errorf("--max-unavailable: %w", err))
	case spec.Timeout < time.Second:
		return spec, command.Usage(fmt.Errorf("--timeout must be 1s at least, got %s", spec.Timeout))
	case spec.Domain == "" || strings.Contains(spec.Domain, "/"):
		return spec, command.Usage(fmt.Errorf("--domain: expected a domain such as nvidia.com, got %q", spec.Domain))
	case !cmd.Bool("dry-run") && cmd.IsSet("output"):
		return spec, command.Usage(errors.New("--output is for --dry-run"))
	}
	return spec, notNegative(cmd, "pause-after")
}

func notNegative(cmd *cli.Command, flag string) error {
	if number := cmd.Int(flag); number < 0 {
		return command.Usage(fmt.Errorf("--%s must not be less than 0, got %d", flag, number))
	}
	return nil
}

// rolloutClient returns a client whose driver has a unique name.
func rolloutClient(cmd *cli.Command) (*rollout.Client, error) {
	namespace := cmd.String("virgate-namespace")
	if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
		return nil, command.Usage(fmt.Errorf("--virgate-namespace: %q cannot be a namespace: %s", namespace,
			problems[0]))
	}
	config, _, err := kube.UserConfig(cmd.String("kubeconfig"), cmd.String("context"))
	if err != nil {
		return nil, err
	}
	name := "somebody"
	if who, err := user.Current(); err == nil {
		name = who.Username
	}
	host, _ := os.Hostname()
	client, err := rollout.NewClient(config, namespace,
		fmt.Sprintf("%s@%s (process %d, %s)", name, cmp.Or(host, "unknown"), os.Getpid(),
			time.Now().UTC().Format("15:04:05.000")))
	if err == nil {
		client.Notice = func(text string) { _, _ = fmt.Fprintln(cmd.Root().ErrWriter, status.Plain(text)) }
	}
	return client, err
}

func startRollout(ctx context.Context, cmd *cli.Command) error {
	spec, err := rolloutSpec(cmd)
	if err != nil {
		return err
	}
	client, err := rolloutClient(cmd)
	if err != nil {
		return err
	}
	defer sayRequests(cmd, client)
	defer endAtSecondSignal(ctx)()
	if cmd.Bool("dry-run") {
		return planRollout(ctx, cmd, client, spec)
	}
	r, err := client.Start(ctx, spec)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(cmd.Root().Writer, "rollout %s: %s to %s, %d at once\n",
		r.ID, cluster.Count(len(r.Nodes), "node"), r.To, r.Max)
	return showProgress(cmd, client,
		func() (*rollout.Rollout, error) { return client.Drive(ctx, r.ID, rollout.Resume{}) })
}

// oneRollout returns the named rollout, or the only one that has not ended, or, with ended, the
// last one.
func oneRollout(ctx context.Context, cmd *cli.Command, ended bool) (*rollout.Client, *rollout.Rollout, error) {
	client, err := rolloutClient(cmd)
	if err != nil {
		return nil, nil, err
	}
	if cmd.Args().Len() > 1 {
		return nil, nil, command.Usage(fmt.Errorf("rollout %s takes the name of one rollout, got %q", cmd.Name,
			cmd.Args().Slice()))
	}
	if cmd.Args().Present() {
		r, err := client.Find(ctx, cmd.Args().First())
		return client, r, err
	}
	list, err := client.List(ctx)
	if err != nil {
		return nil, nil, err
	}
	var open []*rollout.Rollout
	for _, r := range list {
		if !r.Phase.Ended() {
			open = append(open, r)
		}
	}
	switch {
	case len(open) == 1:
		return client, open[0], nil
	case len(open) > 1:
		return nil, nil, command.Usage(fmt.Errorf("%d rollouts have not ended: name one, as rollout status has them",
			len(open)))
	case ended && len(list) > 0:
		return client, list[len(list)-1], nil
	}
	return nil, nil, errors.New("there is no such rollout: see kubectl virgate rollout status")
}

func driveRollout(
	ctx context.Context,
	cmd *cli.Command,
	drive func(*rollout.Client, *rollout.Rollout) (*rollout.Rollout, error),
	ended bool,
) error {
	client, r, err := oneRollout(ctx, cmd, ended)
	if err != nil {
		return err
	}
	defer sayRequests(cmd, client)
	defer endAtSecondSignal(ctx)()
	return showProgress(cmd, client, func() (*rollout.Rollout, error) { return drive(client, r) })
}

func sayRequests(cmd *cli.Command, client *rollout.Client) {
	if cmd.Bool("verbose") {
		_, _ = fmt.Fprintf(cmd.Root().ErrWriter, "%d requests that read, %d watches, %d that wrote\n",
			client.Lists.Load(), client.Watches.Load(), client.Writes.Load())
	}
}

// endAtSecondSignal makes the next Ctrl-C end the program at once when ctx has ended, until stop is
// called.
func endAtSecondSignal(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { signal.Reset(os.Interrupt, syscall.SIGTERM) })
}

// showProgress shows how far the rollout is: as a bar on a terminal, otherwise as lines.
func showProgress(cmd *cli.Command, client *rollout.Client, drive func() (*rollout.Rollout, error)) error {
	out := cmd.Root().Writer
	_, bar := out.(command.Terminal)
	client.Progress = func(r *rollout.Rollout) {
		if bar {
			_, _ = fmt.Fprintf(out, "\r\x1b[K%s", progressBar(r))
		} else {
			_, _ = fmt.Fprintf(out, "%s %s\n", time.Now().UTC().Format(time.TimeOnly), progressLine(r))
		}
	}
	r, err := drive()
	if bar {
		_, _ = fmt.Fprintln(out)
	}
	if r == nil {
		return err
	}
	_, _ = io.WriteString(out, status.Plain(howToGoOn(r)))
	switch {
	case errors.Is(err, rollout.ErrInterrupted), errors.Is(err, rollout.ErrStopped):
		return command.ErrSilent
	}
	return err
}

func progressLine(r *rollout.Rollout) string {
	var counts []string
	for _, place := range rollout.NodeStates() {
		if count := r.Count(place); count > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", count, place))
		}
	}
	return fmt.Sprintf("%s: %s", r.Phase, strings.Join(counts, ", "))
}

func progressBar(r *rollout.Rollout) string {
	const width = 30
	ready, under := r.Count(rollout.Done, rollout.Skipped), r.Count(rollout.Pending)
	if r.Phase == rollout.TakingBack || r.Phase == rollout.TakenBack {
		ready, under = r.Count(rollout.Undone, rollout.Left, rollout.Waiting), r.Count(rollout.Undoing)
	}
	all := max(1, len(r.Nodes)) // Its nodes may all be gone.
	full, begun := width*ready/all, width*(ready+under)/all
	return fmt.Sprintf("[%s%s%s] %d/%d %s", strings.Repeat("#", full), strings.Repeat("-", begun-full),
		strings.Repeat(" ", width-begun), ready, len(r.Nodes), progressLine(r))
}

// howToGoOn describes the state of the rollout and what can be done.
func howToGoOn(r *rollout.Rollout) string {
	var t text
	t.Line("rollout %s is %s: %d of %d nodes have %s", r.ID, r.Phase, r.Count(rollout.Done), len(r.Nodes), r.To)
	for line := range strings.Lines(r.Reason) {
		t.Line("  %s", strings.TrimSpace(line))
	}
	switch r.Phase {
	case rollout.Finished:
		t.Line("kubectl virgate rollout undo %s takes it back", r.ID)
	case rollout.Paused, rollout.Running:
		t.Line("kubectl virgate rollout resume %s goes on, kubectl virgate rollout undo %s takes it back", r.ID, r.ID)
	case rollout.Stopped:
		t.Line(
			"kubectl virgate rollout resume %s waits for the nodes again, with --skip-failed it goes on without them, "+
				"kubectl virgate rollout undo %s takes it back", r.ID, r.ID)
	case rollout.TakingBack, rollout.Claiming:
		t.Line("kubectl virgate rollout undo %s goes on", r.ID)
	}
	return t.String()
}

// rolloutView is a rollout in the form of -o json.
type rolloutView struct {
	rollout.Params
	Phase  rollout.Phase `json:"phase"`
	Reason string        `json:"reason,omitempty"`
	// Driver is the program that drives it, as far as is known. Renewed is the time when it last
	// confirmed that.
	Driver  string                    `json:"driver,omitempty"`
	Renewed time.Time                 `json:"renewed,omitzero"`
	Counts  map[rollout.NodeState]int `json:"counts"`
	Nodes   []rolloutNode             `json:"nodes"`
}

type rolloutNode struct {
	Name   string            `json:"name"`
	Wave   int               `json:"wave"`
	Place  rollout.NodeState `json:"place"`
	Since  time.Time         `json:"since,omitzero"`
	From   *string           `json:"from"`
	Reason string            `json:"reason,omitempty"`
	// Says is the node's own report now.
	Says string `json:"says"`
}

func newRolloutView(r *rollout.Rollout) rolloutView {
	view := rolloutView{
		Params:  r.Params,
		Phase:   r.Phase,
		Reason:  r.Reason,
		Driver:  r.Holder,
		Renewed: r.Renewed,
		Counts:  map[rollout.NodeState]int{},
	}
	for _, n := range r.Nodes {
		view.Counts[n.Record.State]++
		view.Nodes = append(view.Nodes,
			rolloutNode{
				n.Name, n.Record.Wave + 1, n.Record.State, n.Record.Since, n.Record.From, n.Record.Reason, n.Says(),
			})
	}
	return view
}

func rolloutStatusCommand() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "shows rollouts, and the nodes of the one that is named",
		ArgsUsage: "[ROLLOUT]",
		Flags:     []cli.Flag{command.OutputFlag()},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			client, err := rolloutClient(cmd)
			if err != nil {
				return err
			}
			defer sayRequests(cmd, client)
			list, err := client.List(ctx)
			if err != nil {
				return err
			}
			views := []rolloutView{}
			for _, r := range list {
				if !cmd.Args().Present() || r.ID == cmd.Args().First() {
					views = append(views, newRolloutView(r))
				}
			}
			if cmd.Args().Present() && len(views) == 0 {
				return fmt.Errorf("there is no rollout %s in the namespace %s", cmd.Args().First(),
					cmd.String("virgate-namespace"))
			}
			return showRollouts(cmd, views)
		},
	}
}

func showRollouts(cmd *cli.Command, views []rolloutView) error {
	names := namesOf(views, func(v rolloutView) string { return v.ID })
	return show(cmd, map[string]any{"rollouts": views}, names, func(out *text) { out.rollouts(cmd, views) })
}

func (t *text) rollouts(cmd *cli.Command, views []rolloutView) {
	if len(views) == 0 {
		t.Line("there is no rollout in the namespace %s", cmd.String("virgate-namespace"))
	} else {
		table := t.Table("ROLLOUT", "TO", "PHASE", "NODES", "WAITING", "PENDING", "DONE", "FAILED", "SKIPPED", "UNDONE",
			"DRIVER", "HEARD")
		for _, v := range views {
			heard := "-"
			if v.Driver != "" {
				heard = time.Since(v.Renewed).Round(time.Second).String() + " ago"
			}
			count := v.Counts
			table.Row(v.ID, v.To, v.Phase, len(v.Nodes), count[rollout.Waiting],
				count[rollout.Pending]+count[rollout.Undoing], count[rollout.Done], count[rollout.Failed],
				count[rollout.Skipped], count[rollout.Undone]+count[rollout.Left], cmp.Or(v.Driver, "-"), heard)
		}
		table.End()
	}
	for _, v := range views {
		if v.Reason != "" {
			t.Line("%s is %s: %s", v.ID, v.Phase, v.Reason)
		}
	}
	if cmd.Args().Present() {
		table := t.Table("NODE", "WAVE", "PLACE", "SINCE", "HAD", "NOTE")
		for _, n := range views[0].Nodes {
			since, from := "-", "-"
			if !n.Since.IsZero() {
				since = n.Since.UTC().Format(time.RFC3339)
			}
			if n.From != nil {
				from = *n.From
			}
			note := n.Reason
			if n.Place == rollout.Pending || n.Place == rollout.Undoing {
				note = n.Says
			}
			table.Row(n.Name, n.Wave, n.Place, since, from, note)
		}
		table.End()
	}
}
