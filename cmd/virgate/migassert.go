package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/mig"
)

func migAssertCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "assert",
		Usage: "ends with exit code 1 where the node is not cut as a layout asks",
		Description: "Says on standard output where it differs. A GPU of which the layout asks nothing does not\n" +
			"differ; one that cannot have what is asked of it does.\n\n" +
			"Example: virgate mig assert --node sim:dgx-a100+all-balanced --name all-balanced",
		Flags: append(layoutFlags(environment), settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			wanted, err := wantedLayout(cmd, environment)
			if err != nil {
				return err
			}
			boards, err := cutNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			plans, warnings := planBoards(boards, wanted)
			differs := false
			for _, p := range plans {
				if text := p.difference(); text != "" {
					differs = true
					_, _ = fmt.Fprintf(cmd.Root().Writer, "GPU %d: %s\n", p.gpu.Index, text)
				}
			}
			if err := printWarnings(cmd.Root().Writer, warnings); err != nil {
				return err
			}
			if differs {
				return errSilent
			}
			return nil
		},
	}
}

// difference says how the board differs from its layout; empty when it does
// not.
func (p boardPlan) difference() string {
	switch {
	case p.problem != nil:
		return p.problem.Error()
	case !p.wanted || p.change.Empty() && p.change.Complete():
		return ""
	}
	return fmt.Sprintf("has %s, wanted %s", describeLayout(p.cut.MIG, countPartitions(p.cut.Instances)), describeLayout(p.layout.MIG, p.layout.Partitions))
}

// describeLayout writes "2 × 1g.5gb, 1 × 3g.20gb".
func describeLayout(on bool, partitions []mig.Count) string {
	var texts []string
	for _, c := range partitions {
		if c.Count > 0 {
			texts = append(texts, fmt.Sprintf("%d × %s", c.Count, c.Profile))
		}
	}
	switch {
	case !on:
		return "MIG off"
	case texts == nil:
		return "no partition"
	}
	return strings.Join(texts, ", ")
}
