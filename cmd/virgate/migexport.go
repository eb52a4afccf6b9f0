package main

import (
	"context"
	"errors"
	"io"
	"reflect"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func migExportCommand(environment environment) *cli.Command {
	flags := append(nodeFlags(), &cli.StringFlag{Name: "name", Value: "current", Usage: "the name of the layout in the document"})
	return &cli.Command{
		Name:  "export",
		Usage: "writes how the node is cut as a mig-parted document",
		Description: "GPUs without MIG are left out, and so are GPU instances without a partition, which the\n" +
			"document has no words for.\n\n" +
			"Example: virgate mig export --node sim:dgx-a100+all-balanced",
		Flags: append(flags, settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			boards, err := cutNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			blocks := exportBlocks(boards)
			if blocks == nil {
				return errors.New("no GPU of this node has MIG")
			}
			document, err := configs.FormatMIGConfigs(configs.MIGConfigs{{Name: cmd.String("name"), Blocks: blocks}})
			if err != nil {
				return err
			}
			_, err = io.WriteString(cmd.Root().Writer, document)
			return err
		},
	}
}

// exportBlocks has a block for each way in which boards are cut, in the order of
// the first board of each; all boards are called so where one block is enough.
func exportBlocks(boards []cutBoard) []sharing.LayoutBlock {
	var blocks []sharing.LayoutBlock
	for _, board := range boards {
		if len(board.cut.Geometry.Shapes) == 0 {
			continue
		}
		layout := mig.Layout{MIG: board.cut.MIG, Partitions: countPartitions(board.cut.Instances)}
		i := slices.IndexFunc(blocks, func(b sharing.LayoutBlock) bool { return reflect.DeepEqual(b.Layout, layout) })
		if i < 0 {
			i = len(blocks)
			blocks = append(blocks, sharing.LayoutBlock{Layout: layout})
		}
		blocks[i].Indexes = append(blocks[i].Indexes, board.gpu.Index)
	}
	if len(blocks) == 1 && len(blocks[0].Indexes) == len(boards) {
		blocks[0].All, blocks[0].Indexes = true, nil
	}
	return blocks
}

// countPartitions counts them by profile, smaller ones first; nil for none.
func countPartitions(instances []mig.Instance) []mig.Count {
	var counts []mig.Count
	for _, instance := range instances {
		for _, compute := range instance.Computes {
			profile := instance.Partition(compute)
			i := slices.IndexFunc(counts, func(c mig.Count) bool { return c.Profile == profile })
			if i < 0 {
				i = len(counts)
				counts = append(counts, mig.Count{Profile: profile})
			}
			counts[i].Count++
		}
	}
	slices.SortFunc(counts, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return counts
}
