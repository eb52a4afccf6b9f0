package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
)

func migApplyCommand(environment environment) *cli.Command {
	flags := append(wantedFlags(environment),
		&cli.StringFlag{Name: "device-plugin-dir", Value: "/var/lib/kubelet/device-plugins", Usage: "the kubelet's device-plugins directory, where the journal is too"},
		&cli.StringFlag{Name: "pod-resources-socket", Value: "/var/lib/kubelet/pod-resources/kubelet.sock", Usage: "the kubelet's PodResources socket, which says what pods hold"},
		&cli.BoolFlag{Name: "without-kubelet", Usage: "take it that no pod holds a GPU of this machine; always so with a simulated node"},
	)
	return &cli.Command{
		Name:  "apply",
		Usage: "cuts the GPUs of a node that no Virgate serves, once, as far as that goes now",
		Description: "What pods or processes use stays as it is. Where a Virgate serves the node, set mig.config\n" +
			"in its profile instead. Ends with exit code 1 when a GPU does not have its layout then.\n\n" +
			"Example: virgate mig apply --node sim:h100 --name all-balanced",
		Flags: append(flags, settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("%s takes no argument, got %q", cmd.FullName(), cmd.Args().First())}
			}
			wanted, err := wantedLayout(cmd, environment)
			if err != nil {
				return err
			}
			config, err := configs.Parse("", nil, overrides(cmd, environment))
			if err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(cmd.Root().ErrWriter, nil))
			node, err := openBackend(cmd, config.Process, log)
			if err != nil {
				return err
			}
			defer node.close()
			once := agent.Once{
				Partitioner: nvml.NewPartitioner(node, nil), Journal: &memoryJournal{}, Wish: wanted, Logger: log,
				Inventory: func() ([]sharing.GPU, error) { return nvml.Scan(node) },
			}
			if node.simulated == nil {
				end, err := onMachine(ctx, cmd, log, &once)
				if err != nil {
					return err
				}
				defer end()
			}
			boards, err := agent.RepartitionOnce(ctx, once)
			if err != nil {
				return fmt.Errorf("read GPUs: %w", err)
			}
			return printLayouts(cmd.Root().Writer, boards)
		},
	}
}

// onMachine makes sure that no Virgate serves this machine, and has the kubelet
// and the journal asked.
func onMachine(ctx context.Context, cmd *cli.Command, log *slog.Logger, once *agent.Once) (end func(), err error) {
	dir := cmd.String("device-plugin-dir")
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("find --device-plugin-dir: %w", err)
	}
	waiting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	lock, err := state.Acquire(waiting, dir, func(err error) { giveUp(err) })
	if err != nil {
		return nil, errors.Join(context.Cause(waiting), err)
	}
	file := state.NewFile(dir, log)
	file.Load()
	once.Journal = state.Journal{File: file}
	kubelet := podresources.New(podresources.Options{Socket: cmd.String("pod-resources-socket"), CheckpointDir: dir, Logger: log})
	if !cmd.Bool("without-kubelet") {
		once.Holders = kubelet
	}
	return func() { _, _ = kubelet.Close(), lock.Release() }, nil
}

// printLayouts shows the boards; it is errSilent when one is not as it should
// be.
func printLayouts(w io.Writer, boards []sharing.BoardLayout) error {
	var failed error
	for _, board := range boards {
		line := fmt.Sprintf("GPU %d: %q %s", board.Index, board.Wanted, board.State)
		if board.State != sharing.LayoutApplied {
			failed = errSilent
		}
		if board.Reason != "" {
			line += ": " + board.Reason
		}
		if _, err := io.WriteString(w, line+"\n"+drawLayout(board)); err != nil {
			return err
		}
	}
	return failed
}

// memoryJournal is for a node that ends with the program.
type memoryJournal struct{ kept sharing.CutJournal }

func (j *memoryJournal) Load() (sharing.CutJournal, error) { return j.kept, nil }

func (j *memoryJournal) Save(journal sharing.CutJournal) error {
	j.kept = journal
	return nil
}
