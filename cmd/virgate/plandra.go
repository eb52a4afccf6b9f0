package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v3"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// planDRA prints what the node would offer by Dynamic Resource Allocation in its present state.
// Warnings go to standard error, so that the output can be passed to kubectl.
func planDRA(
	ctx context.Context,
	cmd *cli.Command,
	profile sharing.Profile,
	node daemon.GPUs,
	gpus []sharing.GPU,
) error {
	output := cmd.String("output")
	switch {
	case !cmd.Bool("dra"):
		return command.Usage(errors.New("--output yaml goes with --dra"))
	case cmd.IsSet("from"):
		return command.Usage(errors.New("--dra and --from exclude each other"))
	case cmd.IsSet("output") && output != "yaml" && output != "json":
		return command.Usage(fmt.Errorf("--output %q is neither yaml nor json, which --dra takes", output))
	}
	plan := sharing.NewPlan(gpus, profile)
	n := dra.Node{
		Name:      cmd.String("node-name"),
		Driver:    driverName(cmd),
		GPUs:      gpus,
		Profile:   profile,
		Plan:      plan,
		PCIeRoots: map[string]string{},
		OnDemand:  map[string]mig.Geometry{},
	}
	if err := node.Library.Init(); err != nil {
		return fmt.Errorf("open the driver: %w", err)
	}
	versions := nvml.ReadVersions(node.Library)
	if err := node.Library.Shutdown(); err != nil {
		return fmt.Errorf("close the driver: %w", err)
	}
	n.DriverVersion, n.CUDA = versions.Driver, versions.CUDA
	if name := cmd.String("node"); name == "auto" || name == "nvml" {
		for _, gpu := range gpus {
			n.PCIeRoots[gpu.UUID] = host.PCIeRoot(os.DirFS("/sys"), gpu.PCIBusID)
		}
	}
	var warnings []string
	if profile.DRA.DynamicMIG {
		list, err := readPartitions(ctx, node.Partitioner(nil), gpus)
		if err != nil {
			return err
		}
		for _, gpu := range list {
			yes, why := dra.OnDemand(gpu.gpu, gpu.state, profile)
			if yes {
				n.OnDemand[gpu.gpu.UUID] = gpu.state.Geometry
			} else if why != "" {
				warnings = append(warnings, why)
			}
		}
	}
	offer, err := dra.Build(n)
	if err != nil {
		return err
	}
	for _, warning := range append(warnings, offer.Warnings...) {
		_, _ = fmt.Fprintln(cmd.Root().ErrWriter, "warning:", warning)
	}
	var objects []any
	for _, slice := range offer.Slices {
		objects = append(objects, slice)
	}
	for _, class := range offer.Classes {
		objects = append(objects, class)
	}
	list := map[string]any{
		"apiVersion": "v1",
		"kind":       "List",
		"items":      objects,
	}
	var documents []string
	for _, object := range objects {
		text, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		documents = append(documents, string(text))
	}
	return show(cmd, list, func(out *text) { out.WriteString(strings.Join(documents, "---\n")) })
}
