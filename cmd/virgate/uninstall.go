package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/wake"
)

func uninstallCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "uninstall",
		Usage: "takes away what a Virgate that has ended left on Nodes, and on this machine",
		Description: "From Nodes: the condition, labels and annotations that Virgate wrote, and resources of which " +
			"there are 0;\n" +
			"and their NodeFeature objects of --feature-output nfd-api, in all namespaces.\n" +
			"The kubelet keeps a resource for five minutes after Virgate's end, and puts back what is removed\n" +
			"before: --wait 6m looks again until then. Running it twice does no harm.\n\n" +
			"Example: virgate uninstall --kubeconfig ~/.kube/config --all --wait 6m",
		Flags:  flagTable.Of(environment, "[kubelet]", "[uninstall]", "kubeconfig"),
		Action: uninstall,
	}
}

// uninstallInterval is the time between two checks with --wait.
const uninstallInterval = 10 * time.Second

func uninstall(ctx context.Context, cmd *cli.Command) error {
	nodes := cmd.StringSlice("node")
	switch {
	case cmd.Bool("all") && len(nodes) > 0:
		return command.Usage(errors.New("--node and --all exclude each other"))
	case !cmd.Bool("all") && len(nodes) == 0 && !cmd.Bool("host"):
		return command.Usage(errors.New("uninstall needs --node, --all or --host"))
	case cmd.Duration("wait") < 0:
		return command.Usage(fmt.Errorf("--wait must not be less than 0, got %s", cmd.Duration("wait")))
	case strings.Contains(cmd.String("domain"), "/") || cmd.String("domain") == "":
		return command.Usage(fmt.Errorf("--domain: expected a domain such as nvidia.com, got %q", cmd.String("domain")))
	}
	out := cmd.Root().Writer
	if cmd.Bool("host") {
		removed, err := daemon.RemoveHostFiles(ctx, pluginDir(cmd), cmd.String("cdi-dir"), cmd.String("feature-file"))
		for _, path := range removed {
			_, _ = fmt.Fprintln(out, "removed", path)
		}
		if err != nil {
			return err
		}
	}
	if !cmd.Bool("all") && len(nodes) == 0 {
		return nil
	}
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err != nil {
		return err
	}
	if cmd.Bool("all") {
		nodes, err = nodestatus.NodeNames(ctx, config)
		if err != nil {
			return err
		}
	}
	objects, err := nodestatus.RemoveNodeFeatures(ctx, config, nodes)
	for _, object := range objects {
		_, _ = fmt.Fprintln(out, "removed NodeFeature", object)
	}
	var left []string
	if apierrors.IsForbidden(err) { // As in the chart's pod: there the object goes with the DaemonSet.
		left, err = []string{"NodeFeatures of --feature-output nfd-api, which go with the DaemonSet that wrote them, " +
			"are left: " + err.Error()}, nil
	}
	notRemoved := err
	waiting, stop := context.WithTimeout(ctx, cmd.Duration("wait"))
	defer stop()
	for {
		errs, left := []error{notRemoved}, slices.Clone(left)
		for _, node := range nodes {
			removed, err := nodestatus.Uninstall(ctx, config, node, cmd.String("domain"))
			errs = append(errs, err)
			if len(removed.Done) > 0 {
				_, _ = fmt.Fprintf(out, "node %s: removed %s\n", node, strings.Join(removed.Done, ", "))
			}
			if len(removed.Left) > 0 {
				left = append(left, fmt.Sprintf(
					"node %s: still has %s, which the kubelet gives up 5 minutes after its plugin's end", node,
					strings.Join(removed.Left, ", ")))
			}
		}
		if !wake.Sleep(waiting, uninstallInterval) {
			for _, line := range left {
				_, _ = fmt.Fprintln(out, line)
			}
			return errors.Join(errs...)
		}
	}
}
