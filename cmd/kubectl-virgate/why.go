package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/status"
)

func clusterWhyCommand() *cli.Command {
	return &cli.Command{
		Name:            "why",
		Usage:           "says why a pod waits for a GPU",
		ArgsUsage:       "POD",
		HideHelpCommand: true, // A pod may be named help or h.
		Description: "Names the nodes that do not take POD of --namespace, or NAMESPACE/POD, the causes, and what " +
			"would help.\n\n" +
			"Example: kubectl virgate why -n research training-0",
		Flags:  flagTable.Of(nil, "[why]"),
		Action: whyAPodWaits,
	}
}

func whyAPodWaits(ctx context.Context, cmd *cli.Command) error {
	if err := serveAlone(cmd); err != nil {
		return err
	}
	switch {
	case cmd.Args().Len() != 1:
		return command.Usage(fmt.Errorf("%s takes one pod, got %d; see %s --help", command.NameOf(cmd),
			cmd.Args().Len(), cmd.FullName()))
	case cmd.Bool("watch"):
		return command.Usage(fmt.Errorf("--watch: %s looks once", command.NameOf(cmd)))
	case cmd.String("selector") != "":
		return command.Usage(fmt.Errorf("--selector: %s looks at all nodes, as the scheduler does",
			command.NameOf(cmd)))
	}
	options, client, namespace, err := clusterOptions(cmd)
	if err != nil {
		return err
	}
	if asked := cmd.String("namespace"); asked != "" {
		namespace = asked
	}
	namespace, name, err := cluster.ParsePod(cmd.Args().First(), namespace)
	if err != nil {
		return command.Usage(fmt.Errorf("%s %q: %w", command.NameOf(cmd), cmd.Args().First(), err))
	}
	began := time.Now()
	answer, err := client.Why(ctx, options, namespace, name)
	if cmd.Bool("verbose") {
		_, _ = fmt.Fprintf(cmd.Root().ErrWriter, "%d requests, in %s\n", client.Lists.Load(),
			time.Since(began).Round(time.Millisecond))
	}
	if err != nil {
		return fmt.Errorf("%s", status.Plain(err.Error()))
	}
	return show(cmd, answer, []string{"pod/" + name}, func(out *text) { out.why(answer, command.Wide(cmd)) })
}

// why prints the verdict in the first line, then the nodes by cause, then what helps.
func (t *text) why(a cluster.Answer, wide bool) {
	line := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	t.Line("%s.", line(a.Verdict))
	most := 3
	if wide {
		most = 1 << 20
	}
	for _, group := range a.Groups {
		causes := make([]string, len(group.Causes))
		for i, cause := range group.Causes {
			causes[i] = cause.Text
		}
		t.Line("  %s: %s (%s)", cluster.Count(len(group.Nodes), "node"), line(strings.Join(causes, "; ")),
			cluster.Some(group.Nodes, most))
		if len(group.Holders) > 0 {
			t.Line("    held by %s", cluster.Some(group.Holders, most))
		}
		shown := group.Details[:min(most, len(group.Details))]
		for _, detail := range shown {
			t.Line("    %s", line(detail))
		}
		if left := len(group.Details) - len(shown); left > 0 {
			t.Line("    and %d more: -o wide has them", left)
		}
	}
	for _, help := range a.Help {
		t.Line("To help: %s.", line(help))
	}
	for _, note := range a.Notes {
		t.Line("Note: %s", line(note))
	}
}
