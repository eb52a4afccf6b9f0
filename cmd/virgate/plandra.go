package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
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
	if cmd.IsSet("from") {
		return command.Usage(errors.New("--dra and --from exclude each other"))
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
	return showOffer(cmd, offer)
}

// showOffer prints the objects; unless another --output is given, as a stream of YAML documents, which
// kubectl reads.
func showOffer(cmd *cli.Command, offer dra.Offer) error {
	var objects []any
	var names []string
	for _, slice := range offer.Slices {
		objects = append(objects, slice)
		names = append(names, "resourceslice.resource.k8s.io/"+slice.Name)
	}
	for _, class := range offer.Classes {
		objects = append(objects, class)
		names = append(names, "deviceclass.resource.k8s.io/"+class.Name)
	}
	if cmd.IsSet("output") && cmd.String("output") != "yaml" {
		return show(cmd, map[string]any{
			"apiVersion": "v1",
			"kind":       "List",
			"items":      objects,
		}, names, func(out *text) { out.offer(offer, command.Wide(cmd)) })
	}
	var documents []string
	for _, object := range objects {
		text, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		documents = append(documents, string(text))
	}
	_, err := io.WriteString(cmd.Root().Writer, strings.Join(documents, "---\n"))
	return err
}

func (t *text) offer(offer dra.Offer, wide bool) {
	table := t.Table("KIND", "NAME", "DEVICES")
	for _, slice := range offer.Slices {
		devices := []string{strconv.Itoa(len(slice.Spec.Devices))}
		if wide {
			devices = nil
			for _, device := range slice.Spec.Devices {
				devices = append(devices, device.Name)
			}
		}
		table.Row("ResourceSlice", slice.Name, strings.Join(devices, " "))
	}
	for _, class := range offer.Classes {
		table.Row("DeviceClass", class.Name, "-")
	}
	table.End()
}
