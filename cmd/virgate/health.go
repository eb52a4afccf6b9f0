package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/sharing"
)

func healthCommand() *cli.Command {
	return &cli.Command{
		Name:  "health",
		Usage: "shows the health of a running Virgate's GPUs and partitions, and clears it",
		Description: "Talks to a virgate run on the same machine.\n\n" +
			"Example: virgate health",
		Flags: []cli.Flag{
			controlSocketFlag(),
			outputFlag("table"),
		},
		Commands: []*cli.Command{clearCommand()},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usageError{fmt.Errorf("no health command %q; see virgate health --help", name)}
			}
			return healthOrder(ctx, cmd, http.MethodGet, "/health", nil)
		},
	}
}

func clearCommand() *cli.Command {
	return &cli.Command{
		Name:  "clear",
		Usage: "says that a GPU or partition may be used again, whatever it reported",
		Description: "It is offered again when the next probe finds nothing wrong. A GPU stands for all of\n" +
			"its partitions. Reset or replace a GPU with a fatal error first: this does neither.\n\n" +
			"Example: virgate health clear --gpu 0",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "gpu", Required: true, Usage: "a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("health clear takes no argument, got %q", cmd.Args().First())}
			}
			return healthOrder(ctx, cmd, http.MethodPost, "/health/clear", url.Values{"gpu": {cmd.String("gpu")}})
		},
	}
}

// healthOrder asks the running program and prints the health that it answers.
func healthOrder(ctx context.Context, cmd *cli.Command, method, path string, arguments url.Values) error {
	asJSON, err := wantsJSON(cmd, "table")
	if err != nil {
		return err
	}
	answer, err := askControl(ctx, cmd.String("control-socket"), method, path, arguments)
	if err != nil {
		return err
	}
	if asJSON {
		_, err := cmd.Root().Writer.Write(answer)
		return err
	}
	var report sharing.HealthReport
	if err := json.Unmarshal(answer, &report); err != nil {
		return fmt.Errorf("read the answer of virgate run: %w", err)
	}
	return printPlain(cmd.Root().Writer, func(w io.Writer) error { return printHealth(w, report) })
}

func printHealth(w io.Writer, report sharing.HealthReport) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "GPU\tUNIT\tSTATE\tSINCE\tREASON")
	for _, u := range report.Units {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", u.Index, u.Unit, u.State, u.Since.Format(time.RFC3339), u.Reason)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, m := range report.Monitors {
		if m.Degraded != "" {
			_, _ = fmt.Fprintf(w, "degraded: %s is watched by probes alone: %s\n", m.GPU, m.Degraded)
		}
	}
	return nil
}
