package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/rollout"
	"github.com/virgate/virgate/sharing"
)

// A node plans within 5 s, or reports that it could not.
const forecastTimeout, allForecasts = 8 * time.Second, 2 * time.Minute

// planRollout is start with --dry-run. It returns an error if nodes would refuse.
func planRollout(ctx context.Context, cmd *cli.Command, client *rollout.Client, spec rollout.Spec) error {
	config, _, err := kube.UserConfig(cmd.String("kubeconfig"), cmd.String("context"))
	if err != nil {
		return err
	}
	reader, err := cluster.NewClient(config)
	if err != nil {
		return err
	}
	options := cluster.Options{
		Domain:        spec.Domain,
		Namespace:     cmd.String("virgate-namespace"),
		StatusTimeout: forecastTimeout,
		AllTimeout:    allForecasts,
	}
	forecast, err := client.Forecast(ctx, spec,
		func(ctx context.Context, nodes []cluster.Node, label, value string) (map[string]nodereport.Forecast, error) {
			return reader.Forecasts(ctx, options, nodes, label, value)
		})
	if err != nil {
		return err
	}
	names := namesOf(forecast.Nodes, func(n rollout.NodeForecast) string { return "node/" + n.Name })
	err = show(cmd, forecast, names, func(out *text) { out.forecast(forecast) })
	if err != nil || len(forecast.Unfit()) == 0 {
		return err
	}
	return command.ErrSilent
}

func (t *text) forecast(f rollout.Forecast) {
	t.Line("%s to %s, %d at once; nothing was changed", cluster.Count(len(f.Nodes), "node"), f.To, f.Max)
	if len(f.Resources) > 0 {
		t.Line("")
		table := t.Table("RESOURCE", "BEFORE", "LOWEST", "AFTER", "WAITS FOR PODS")
		for _, r := range f.Resources {
			table.Row(r.Name, r.Before, r.Lowest, r.After, r.Waiting)
		}
		table.End()
	}
	kept := 0
	destroyed := 0
	made := 0
	layouts := 0
	busy, waits := busyTable(f)
	for _, n := range f.Nodes {
		for _, l := range n.Layouts {
			kept = kept + l.Kept
			destroyed = destroyed + l.Destroyed
			made = made + l.Made
			layouts = layouts + 1
		}
	}
	if layouts > 0 {
		t.Line("\nMIG partitions of %d GPUs: %d kept, %d destroyed, %d made", layouts, kept, destroyed, made)
	}
	if waits > 0 {
		t.Line(
			"\nwaiting for pods that keep a GPU as it is, %d of %d nodes; the rollout stops at its --timeout if they "+
				"do not end:", waits, len(f.Nodes))
		t.WriteString(busy)
	}
	t.reasons("refusing, or left with nothing to offer", f.Nodes,
		func(n rollout.NodeForecast) []string { return n.Unfit })
	t.reasons("not known and not counted", f.Nodes, func(n rollout.NodeForecast) []string {
		return slices.DeleteFunc([]string{n.Unknown}, func(why string) bool { return why == "" })
	})
	if len(f.LeftOut) > 0 {
		t.Line("\nleft out, because they cannot follow now, %s:", cluster.Count(len(f.LeftOut), "node"))
		for _, reason := range f.LeftOut {
			t.Line("  %s", reason)
		}
	}
	t.reasons("with warnings", f.Nodes, func(n rollout.NodeForecast) []string { return n.Warnings })
}

// busyTable returns a table of the pods that keep GPUs from changing, and the number of nodes with
// such pods.
func busyTable(f rollout.Forecast) (rows string, nodes int) {
	var t text
	table := t.Table("NODE", "WAVE", "GPU", "PODS")
	for _, n := range f.Nodes {
		for _, u := range n.Busy {
			table.Row(n.Name, n.Wave, u.Index, cmp.Or(strings.Join(u.Pods, " "), u.Reason, sharing.UnnamedHolder))
		}
		nodes += min(1, len(n.Busy))
	}
	table.End()
	return t.String(), nodes
}

// reasons prints the nodes that have reasons, with nodes of the same reason together.
func (t *text) reasons(what string, nodes []rollout.NodeForecast, of func(rollout.NodeForecast) []string) {
	const most = 5
	var all []string
	names, count := map[string][]string{}, 0
	for _, n := range nodes {
		list := of(n)
		for _, reason := range list {
			if names[reason] == nil {
				all = append(all, reason)
			}
			names[reason] = append(names[reason], n.Name)
		}
		count += min(1, len(list))
	}
	if count > 0 {
		t.Line("\n%s, %d of %d nodes:", what, count, len(nodes))
	}
	for _, reason := range all {
		list := names[reason]
		text := strings.Join(list[:min(most, len(list))], ", ")
		if more := len(list) - most; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		t.Line("  %s: %s", text, reason)
	}
}
