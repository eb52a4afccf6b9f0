package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
)

func migCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "mig",
		Usage: "plans and checks the MIG partitions of a node's GPUs",
		Description: "Changes nothing, but for apply.\n\n" +
			"Example: virgate mig plan --node sim:dgx-a100+all-1g.5gb --name all-balanced",
		Commands: []*cli.Command{migPlanCommand(environment), migApplyCommand(environment), migExportCommand(environment), migAssertCommand(environment)},
		Action: func(_ context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usageError{fmt.Errorf("no mig command %q; see virgate mig --help", name)}
			}
			return cli.ShowSubcommandHelp(cmd)
		},
	}
}

// wantedFlags choose the node and the wanted layout.
func wantedFlags(environment environment) []cli.Flag {
	return append(append(nodeFlags(), configFlags(environment)...),
		&cli.StringFlag{Name: "name", Usage: "the layout: one of the document, or all-disabled, all-enabled, all-balanced, all-<profile>; default: mig.config of the profile"},
	)
}

// layoutFlags are wantedFlags for what only looks, with what it is to suppose.
func layoutFlags(environment environment) []cli.Flag {
	return append(wantedFlags(environment),
		&cli.StringSliceFlag{Name: "busy", Usage: "a partition to take for one in use, as 0:1 or by UUID; may be repeated"},
	)
}

// wantedLayout is what --config, --config-key and --name ask for. With no
// layout at all it is an error: nothing could be said about the node.
func wantedLayout(cmd *cli.Command, environment environment) (sharing.Repartition, error) {
	var file configs.File
	if path := cmd.String("config"); path != "" {
		data, err := os.ReadFile(path)
		if err != nil {
			return sharing.Repartition{}, err
		}
		if file, err = configs.ParseFile(path, data, overrides(cmd, environment)); err != nil {
			return sharing.Repartition{}, err
		}
	} else {
		file.Kind = configs.KindProfile
	}
	wanted, err := file.MIGLayout(cmd.String("config-key"), cmd.String("name"))
	switch {
	case err != nil:
		return wanted, err
	case wanted.Name == "":
		return wanted, errors.New("no MIG layout is wanted: the profile has no mig.config, and there is no --name")
	case !wanted.Manage:
		return wanted, errors.New("no MIG layout is wanted: the profile has no mig.manage: true; --name plans one all the same")
	}
	return wanted, nil
}

// cutNode reads how the node's boards are cut.
func cutNode(ctx context.Context, cmd *cli.Command, environment environment) ([]cutBoard, error) {
	if cmd.Args().Len() > 0 {
		return nil, usageError{fmt.Errorf("%s takes no argument, got %q", cmd.FullName(), cmd.Args().First())}
	}
	config, err := configs.Parse("", nil, overrides(cmd, environment))
	if err != nil {
		return nil, err
	}
	node, err := openBackend(cmd, config.Process, slog.New(slog.NewTextHandler(cmd.Root().ErrWriter, nil)))
	if err != nil {
		return nil, err
	}
	defer node.close()
	boards, err := readCuts(ctx, node)
	if err != nil {
		return nil, err
	}
	return boards, markBusy(boards, cmd.StringSlice("busy"))
}
