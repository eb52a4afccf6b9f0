package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func migPlanCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "plan",
		Usage: "shows how a layout would be reached, with the slices before and after",
		Description: "Reads the node's GPUs once and changes nothing. The exit code is 1 when the layout asks " +
			"something of\n" +
			"GPUs that none of them can have, and 0 when one has it, can be changed, or waits until it is not in " +
			"use.\n\n" +
			"Example: virgate mig plan --node sim:a30x4+all-1g.6gb --name all-balanced --busy 0:1",
		Flags: append(layoutFlags(environment), command.OutputFlag()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			wanted, plans, warnings, err := planNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			var gpus []string
			for _, p := range plans {
				gpus = append(gpus, p.gpu.UUID)
			}
			err = show(cmd, migReport(plans, warnings), gpus, func(out *text) {
				for _, p := range plans {
					out.plan(p, wanted)
				}
				out.Warnings(warnings)
			})
			return cmp.Or(err, impossible(plans))
		},
	}
}

// impossible returns an error if the layout applies to GPUs, but none of them can have it, not even
// when it is unused.
func impossible(plans []gpuPlan) (err error) {
	for _, p := range plans {
		switch p.State {
		case "":
		case nodereport.LayoutFailed, nodereport.LayoutResetRequired:
			err = command.ErrSilent
		default:
			return nil
		}
	}
	return err
}

func (t *text) plan(p gpuPlan, wanted sharing.MIGConfig) {
	t.Line("GPU %d, %s: %s", p.gpu.Index, p.gpu.Model, p.verdict(wanted))
	if p.state.Enabled || p.Steps != nil {
		t.WriteString(p.drawing("now", p.state.Enabled, p.Change.Before(p.state.Instances)))
	}
	if !p.Change.Empty() {
		t.WriteString(p.drawing("then", p.Change.MIG, p.Change.After(p.state.Instances)))
	}
	for n, step := range p.Steps {
		t.Line("  %d. %s", n+1, step)
	}
	for _, blocked := range p.Change.Blocked {
		t.Line("  waits: %s (%s)", blocked, blocked.UUID)
	}
}

// drawing draws the GPU's slots under a title; a GPU without MIG mode has none.
func (p gpuPlan) drawing(title string, mode bool, blocks []mig.Block) string {
	if !mode {
		return "  " + title + ": MIG off\n"
	}
	return "  " + title + ": MIG on\n" + drawBlocks("  ", p.state.Geometry.Slots, blocks)
}

// verdict summarizes the plan in a few words.
func (p gpuPlan) verdict(wanted sharing.MIGConfig) string {
	c := p.Change
	switch {
	case p.Problem() != "":
		return "cannot be changed: " + p.Problem()
	case p.State == "":
		return fmt.Sprintf("nothing is asked of it by %q", wanted.Name)
	case p.State == nodereport.LayoutApplied:
		return fmt.Sprintf("has the layout %q", wanted.Name)
	case !c.Complete() && wanted.WhenBusy == sharing.RefuseWhenBusy:
		return fmt.Sprintf("refuses %q while partitions in use are in the way (whenBusy: refuse)", wanted.Name)
	case c.Complete() && c.Empty():
		return p.Reason
	}
	text := fmt.Sprintf("%q keeps %d, destroys %d and makes %d", wanted.Name, len(c.Kept), len(c.Doomed), p.Made())
	if !c.Complete() {
		text += " now; the rest waits"
	}
	return text
}

func migAssertCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "assert",
		Usage: "checks whether the node has the layout; the exit code is 1 if not",
		Description: "Prints the differences; with -o name, the GPUs that differ. A GPU that the layout does not\n" +
			"mention does not differ; one that cannot have its part of the layout does.\n\n" +
			"Example: virgate mig assert --node sim:dgx-a100+all-balanced --name all-balanced",
		Flags: append(layoutFlags(environment), command.OutputFlag()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			_, plans, warnings, err := planNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			var differing []string
			for _, p := range plans {
				if p.difference() != "" {
					differing = append(differing, p.gpu.UUID)
				}
			}
			err = show(cmd, migReport(plans, warnings), differing, func(out *text) {
				for _, p := range plans {
					if difference := p.difference(); difference != "" {
						out.Line("GPU %d: %s", p.gpu.Index, difference)
					}
				}
				out.Warnings(warnings)
			})
			if err == nil && differing != nil {
				return command.ErrSilent
			}
			return err
		},
	}
}

// difference describes how the GPU differs from its layout; empty if it does not.
func (p gpuPlan) difference() string {
	switch {
	case p.Problem() != "":
		return p.Problem()
	case p.State == "", p.State == nodereport.LayoutApplied:
		return ""
	case p.Change.Complete() && p.Change.Empty():
		return p.Reason
	}
	return fmt.Sprintf("has %s, wanted %s",
		mig.Layout{MIG: p.state.Enabled, Partitions: countPartitions(p.state.Instances)}, p.Layout)
}

func migExportCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "export",
		Usage: "writes the node's MIG layout as a mig-parted document",
		Description: "GPUs without MIG are left out, and so are GPU instances without a partition, which the\n" +
			"document cannot express.\n\n" +
			"Example: virgate mig export --node sim:dgx-a100+all-balanced",
		Flags: append(flagTable.Of(environment, "[node]", "[mig export]"), planFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			gpus, err := partitionedNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			blocks := exportBlocks(gpus)
			if blocks == nil {
				return errors.New("no GPU of this node has MIG")
			}
			document, err := configs.FormatMIGConfigs(configs.MIGLayouts{{Name: cmd.String("name"), Blocks: blocks}})
			if err != nil {
				return err
			}
			_, err = io.WriteString(cmd.Root().Writer, document)
			return err
		},
	}
}

// exportBlocks returns a block for each way in which GPUs are partitioned, in the order of the
// first GPU of each. If one block covers all GPUs, it says all instead of listing them.
func exportBlocks(gpus []partitionedGPU) []sharing.LayoutBlock {
	var blocks []sharing.LayoutBlock
	for _, gpu := range gpus {
		if len(gpu.state.Geometry.Profiles) == 0 {
			continue
		}
		layout := mig.Layout{MIG: gpu.state.Enabled, Partitions: countPartitions(gpu.state.Instances)}
		i := slices.IndexFunc(blocks, func(b sharing.LayoutBlock) bool { return reflect.DeepEqual(b.Layout, layout) })
		if i < 0 {
			i = len(blocks)
			blocks = append(blocks, sharing.LayoutBlock{Layout: layout})
		}
		blocks[i].Indexes = append(blocks[i].Indexes, gpu.gpu.Index)
	}
	if len(blocks) == 1 && len(blocks[0].Indexes) == len(gpus) {
		blocks[0].All, blocks[0].Indexes = true, nil
	}
	return blocks
}

// countPartitions counts the partitions by profile, smaller ones first; nil for none.
func countPartitions(instances []mig.Instance) []mig.PartitionCount {
	var counts []mig.PartitionCount
	for _, instance := range instances {
		for _, compute := range instance.Computes {
			profile := instance.Partition(compute)
			i := slices.IndexFunc(counts, func(c mig.PartitionCount) bool { return c.Profile == profile })
			if i < 0 {
				i = len(counts)
				counts = append(counts, mig.PartitionCount{Profile: profile})
			}
			counts[i].Count++
		}
	}
	slices.SortFunc(counts, func(a, b mig.PartitionCount) int { return a.Profile.Compare(b.Profile) })
	return counts
}
