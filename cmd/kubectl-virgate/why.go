package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/status"
)

func clusterWhyCommand(environment command.Environment) *cli.Command {
	return &cli.Command{
		Name:            "why",
		Usage:           "says why a pod waits for a GPU",
		ArgsUsage:       "POD",
		HideHelpCommand: true, // A pod may be named help or h.
		Description: "Names the nodes that do not take POD of --namespace, or NAMESPACE/POD, the causes, and what " +
			"would help.\n\n" +
			"Example: kubectl virgate why -n research training-0",
		Flags: []cli.Flag{&cli.StringFlag{
			Name:    "namespace",
			Aliases: []string{"n"},
			Usage:   "the pod's namespace; without it the kubeconfig context's",
		}},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			return whyAPodWaits(ctx, cmd, environment)
		},
	}
}

func whyAPodWaits(ctx context.Context, cmd *cli.Command, environment command.Environment) error {
	if err := serveAlone(cmd); err != nil {
		return err
	}
	output := cmd.String("output")
	switch {
	case cmd.Args().Len() != 1:
		return command.Usage(fmt.Errorf("%s takes one pod, got %d; see %s --help", command.NameOf(cmd),
			cmd.Args().Len(), cmd.FullName()))
	case output == "name":
		return command.Usage(fmt.Errorf("--output %q: %s has table, json and yaml", output, command.NameOf(cmd)))
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
	out := cmd.Root().Writer
	if output == "json" || output == "yaml" {
		data, err := json.MarshalIndent(answer, "", "  ")
		if err == nil && output == "yaml" {
			data, err = yaml.JSONToYAML(data)
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, strings.TrimSpace(string(data)))
		return err
	}
	var said text
	said.why(answer, output == "wide")
	verdict, rest, _ := strings.Cut(status.Plain(said.String()), "\n")
	if coloured(out, environment) {
		colour := map[string]string{
			"waiting":  "33",
			"starting": "33",
			"refused":  "31",
		}[answer.State]
		if colour != "" {
			verdict = "\x1b[" + colour + "m" + verdict + "\x1b[0m"
		}
	}
	_, err = io.WriteString(out, verdict+"\n"+rest)
	return err
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
