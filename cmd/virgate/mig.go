package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func migCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "mig",
		Usage: "plans, checks and changes the MIG layout of a node's GPUs",
		Description: "Only apply changes anything.\n\n" +
			"Example: virgate mig plan --node sim:dgx-a100+all-1g.5gb --name all-balanced",
		Commands: []*cli.Command{
			migPlanCommand(environment), migApplyCommand(environment), migExportCommand(environment),
			migAssertCommand(environment),
		},
	}
}

// layoutFlags returns the flags of a layout. Without names it is for commands that change nothing.
func layoutFlags(environment environment, names ...string) []cli.Flag {
	if names == nil {
		names = []string{"busy"}
	}
	names = append(names, "[node]", "[profile, read once]", "mig/name")
	return append(flagTable.Of(environment, names...), planFlags()...)
}

// wantedLayout returns the layout that --config, --config-key and --name specify. Without any
// layout it returns an error, because nothing could be said about the node.
func wantedLayout(ctx context.Context, cmd *cli.Command, environment environment) (sharing.MIGConfig, error) {
	file := configs.File{Kind: configs.KindProfile}
	if err := checkPath(cmd, "config"); err != nil {
		return sharing.MIGConfig{}, err
	}
	if path := cmd.String("config"); path != "" {
		data, err := configsource.Read(ctx, path)
		if err != nil {
			return sharing.MIGConfig{}, err
		}
		file, err = configs.ParseKey(configsource.Name(path), data, cmd.String("config-key"),
			overrides(cmd, environment))
		if err != nil {
			return sharing.MIGConfig{}, err
		}
	}
	wanted, err := file.MIGLayout(cmd.String("config-key"), cmd.String("name"))
	switch {
	case err != nil:
		return wanted, err
	case wanted.Name == "":
		return wanted, errors.New("no MIG layout is wanted: the profile has no mig.config, and there is no --name")
	case !wanted.Manage:
		return wanted,
			errors.New("no MIG layout is wanted: the profile has no mig.manage: true; --name plans one all the same")
	}
	return wanted, nil
}

func openNode(cmd *cli.Command, environment environment, log *slog.Logger) (daemon.GPUs, error) {
	config, err := configs.Parse("", nil, overrides(cmd, environment))
	if err != nil {
		return daemon.GPUs{}, err
	}
	return openGPUs(cmd, config.Startup, log)
}

func partitionedNode(ctx context.Context, cmd *cli.Command, environment environment) ([]partitionedGPU, error) {
	node, err := openNode(cmd, environment, textLog(cmd))
	if err != nil {
		return nil, err
	}
	defer node.Close()
	gpus, err := nvml.Scan(node.Library)
	if err != nil {
		return nil, fmt.Errorf("read GPUs: %w", err)
	}
	list, err := readPartitions(ctx, node.Partitioner(nil), gpus)
	if err != nil {
		return nil, err
	}
	return list, markBusy(list, cmd.StringSlice("busy"))
}

func readPartitions(ctx context.Context, partitioner *nvml.Partitioner, gpus []sharing.GPU) ([]partitionedGPU, error) {
	list := make([]partitionedGPU, len(gpus))
	for i, gpu := range gpus {
		state, err := partitioner.State(ctx, gpu.UUID)
		if err != nil {
			return nil, err
		}
		state.GPU.Index = gpu.Index
		list[i] = partitionedGPU{gpu, state}
	}
	return list, nil
}

type partitionedGPU struct {
	gpu   sharing.GPU
	state sharing.MIGState
}

func markBusy(gpus []partitionedGPU, names []string) error {
	for _, name := range names {
		selector, err := sharing.ParseSelector(name)
		if err != nil {
			return command.Usage(fmt.Errorf("--busy: %w", err))
		}
		named := map[string]bool{}
		for i, gpu := range gpus {
			for _, partition := range gpu.gpu.Partitions {
				if selector.MatchPartition(gpu.gpu, partition) {
					named[partition.UUID] = true
				}
			}
			gpus[i].state = gpu.state.WithBusy(func(uuid string) bool { return named[uuid] })
		}
		if len(named) == 0 {
			return command.Usage(fmt.Errorf("--busy %q names no partition of this node", name))
		}
	}
	return nil
}

// gpuPlan is what a running Virgate would do to a GPU now.
type gpuPlan struct {
	partitionedGPU
	migchange.Decision
}

// planNode returns the plan for each GPU under the wanted layout, with warnings.
func planNode(
	ctx context.Context,
	cmd *cli.Command,
	environment environment,
) (wanted sharing.MIGConfig, plans []gpuPlan, warnings []string, err error) {
	wanted, err = wantedLayout(ctx, cmd, environment)
	if err != nil {
		return wanted, nil, nil, err
	}
	gpus, err := partitionedNode(ctx, cmd, environment)
	if err != nil {
		return wanted, nil, nil, err
	}
	plans, warnings = planLayout(gpus, wanted)
	return wanted, plans, warnings, nil
}

func planLayout(gpus []partitionedGPU, wanted sharing.MIGConfig) (plans []gpuPlan, warnings []string) {
	ids := make([]sharing.GPUID, len(gpus))
	for i, gpu := range gpus {
		ids[i] = gpu.state.GPU
		plans = append(plans, gpuPlan{gpu, migchange.Decide(migchange.Situation{
			GPU:    gpu.gpu.UUID,
			State:  gpu.state,
			Wanted: wanted,
		})})
	}
	return plans, wanted.Unmatched(ids)
}

// afterChange returns the GPUs as they will be after all changes that are possible now, and
// warnings about GPUs that cannot be changed completely.
func afterChange(gpus []partitionedGPU, wanted sharing.MIGConfig) (after []sharing.GPU, warnings []string) {
	plans, warnings := planLayout(gpus, wanted)
	for _, p := range plans {
		gpu := p.gpu
		switch {
		case p.Problem() != "", p.State == nodereport.LayoutPending && p.Record == nil:
			warnings = append(warnings, fmt.Sprintf("GPU %d stays as it is: %s", gpu.Index, p.Reason))
		case p.State == nodereport.LayoutBlocked || !p.Change.Complete():
			warnings = append(warnings, fmt.Sprintf(
				"GPU %d cannot have all of its layout while it is in use: virgate mig plan says more", gpu.Index))
		}
		after = append(after, p.After(gpu))
	}
	return after, warnings
}

// drawingWidth leaves room for the indent on a terminal of 80 columns.
const drawingWidth = 76

// drawLayout draws the GPU's slices as they are, indented; without MIG mode there are none.
func drawLayout(gpu nodereport.GPULayout) string {
	if !gpu.MIG {
		return "  MIG off\n"
	}
	return drawBlocks("  ", gpu.Slots, mig.Change{}.Before(gpu.Instances))
}

// drawBlocks draws the blocks with indent before each line.
func drawBlocks(indent string, slots int, blocks []mig.Block) string {
	drawing := mig.Draw(slots, drawingWidth, blocks)
	return indent + strings.ReplaceAll(strings.TrimSuffix(drawing, "\n"), "\n", "\n"+indent) + "\n"
}

type migGPUReport struct {
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Wanted is true if the layout applies to the GPU and the GPU can have it.
	Wanted bool `json:"wanted"`
	// Complete is true if the GPU has its layout after the steps.
	Complete bool       `json:"complete"`
	Problem  string     `json:"problem,omitempty"`
	Change   mig.Change `json:"change"`
}

type migNodeReport struct {
	GPUs     []migGPUReport `json:"gpus"`
	Warnings []string       `json:"warnings"`
}

func migReport(plans []gpuPlan, warnings []string) migNodeReport {
	report := migNodeReport{GPUs: []migGPUReport{}, Warnings: append([]string{}, warnings...)}
	for _, p := range plans {
		change := p.Change
		change.Steps = p.Steps
		report.GPUs = append(report.GPUs, migGPUReport{
			GPU:      p.gpu.UUID,
			Index:    p.gpu.Index,
			Wanted:   p.State != "" && p.State != nodereport.LayoutFailed,
			Complete: p.Problem() == "" && change.Complete(),
			Problem:  p.Problem(),
			Change:   change,
		})
	}
	return report
}

func migApplyCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "apply",
		Usage: "changes the MIG layout of a node that no Virgate serves, once, as far as it can now",
		Description: "What pods or processes use stays as it is. Where a Virgate serves the node, set mig.config\n" +
			"in its profile instead. The exit code is 1 when a GPU does not have its layout afterwards.\n\n" +
			"Example: virgate mig apply --node sim:h100 --name all-balanced",
		Flags: append(layoutFlags(environment, "[mig apply]"), command.OutputFlag()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			wanted, err := wantedLayout(ctx, cmd, environment)
			if err != nil {
				return err
			}
			log := textLog(cmd)
			node, err := openNode(cmd, environment, log)
			if err != nil {
				return err
			}
			defer node.Close()
			gpus, err := daemon.ApplyMIG(ctx, daemon.MIGOptions{
				GPUs:               node,
				Simulated:          node.Control != nil,
				PluginDir:          cmd.String("device-plugin-dir"),
				PodResourcesSocket: cmd.String("pod-resources-socket"),
				WithoutKubelet:     cmd.Bool("without-kubelet"),
				Logger:             log,
			}, wanted)
			if err != nil {
				return err
			}
			var failed error
			var names []string
			report := struct {
				GPUs []nodereport.GPULayout `json:"gpus"`
			}{[]nodereport.GPULayout{}}
			for _, gpu := range gpus {
				names = append(names, gpu.GPU)
				report.GPUs = append(report.GPUs, gpu)
				if gpu.State != nodereport.LayoutApplied {
					failed = command.ErrSilent
				}
			}
			err = show(cmd, report, names, func(out *text) {
				for _, gpu := range gpus {
					out.Line("%s", strings.TrimSuffix(
						fmt.Sprintf("GPU %d: %q %s: %s", gpu.Index, gpu.Wanted, gpu.State, gpu.Reason), ": "))
					out.WriteString(drawLayout(gpu))
				}
			})
			return cmp.Or(err, failed)
		},
	}
}
