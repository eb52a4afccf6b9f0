package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/sharing"
)

func planCommand(environment environment) *cli.Command {
	flags := append(nodeFlags(),
		&cli.StringFlag{Name: "from", Usage: "an older profile: shows what would change from it"},
		outputFlag("table"),
	)
	flags = append(flags, configFlags(environment)...)
	return &cli.Command{
		Name:  "plan",
		Usage: "shows what the node would advertise, without a kubelet",
		Description: "Reads the node's GPUs once and changes nothing.\n\n" +
			"Example: virgate plan --node sim:dgx-a100 --config configs/examples/time-slicing-4.yaml",
		Flags: append(flags, settingFlags()...),
		Action: func(_ context.Context, cmd *cli.Command) error {
			asJSON, err := wantsJSON(cmd, "table")
			if err != nil {
				return err
			}
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("plan takes no argument, got %q", cmd.Args().First())}
			}
			overrides := overrides(cmd, environment)
			config, err := readConfig(cmd.String("config"), cmd.String("config-key"), overrides)
			if err != nil {
				return err
			}
			node, err := openBackend(cmd, config.Process, slog.New(slog.NewTextHandler(cmd.Root().ErrWriter, nil)))
			if err != nil {
				return err
			}
			defer node.close()
			gpus, err := nvml.Scan(node)
			if err != nil {
				return fmt.Errorf("read GPUs: %w", err)
			}
			plan := sharing.NewPlan(gpus, config.Profile)
			if !cmd.IsSet("from") {
				return printPlan(cmd.Root().Writer, plan, asJSON)
			}
			older, err := readConfig(cmd.String("from"), cmd.String("config-key"), overrides)
			if err != nil {
				return err
			}
			return printChanges(cmd.Root().Writer, sharing.Diff(sharing.NewPlan(gpus, older.Profile), plan), plan.Warnings, asJSON)
		},
	}
}

func readConfig(path, key string, overrides configs.Overrides) (configs.Config, error) {
	return (&policy.File{Path: path, Key: key, Overrides: overrides}).Config()
}

func printPlan(w io.Writer, plan sharing.Plan, asJSON bool) error {
	summary := plan.Summary()
	if asJSON {
		return printJSON(w, summary)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "RESOURCE\tSTRATEGY\tREPLICAS\tUNITS\tDEVICES\tHEALTHY")
	for _, r := range summary.Resources {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d\t%d\t%d\t%d\n", r.Name, r.Strategy, r.Replicas, r.Units, r.Devices, r.Healthy)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printWarnings(w, summary.Warnings)
}

func printChanges(w io.Writer, changes []sharing.Change, warnings []string, asJSON bool) error {
	if asJSON {
		return printJSON(w, struct {
			Changes  []sharing.Change `json:"changes"`
			Warnings []string         `json:"warnings"`
		}{append([]sharing.Change{}, changes...), append([]string{}, warnings...)})
	}
	if len(changes) == 0 {
		_, _ = fmt.Fprintln(w, "nothing changes")
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range changes {
		what := string(c.Kind)
		if c.OldName != "" {
			what += " from " + c.OldName
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d → %d devices\n", c.Name, what, c.Before, c.After)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printWarnings(w, warnings)
}
