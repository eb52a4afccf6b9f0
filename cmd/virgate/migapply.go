package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/nodereport"
)

func migApplyCommand(environment environment) *cli.Command {
	flags := append(wantedFlags(environment),
		&cli.StringFlag{Name: "device-plugin-dir", Value: "/var/lib/kubelet/device-plugins", Usage: "the kubelet's device-plugins directory, which also has the journal"},
		&cli.StringFlag{Name: "pod-resources-socket", Value: "/var/lib/kubelet/pod-resources/kubelet.sock", Usage: "the kubelet's PodResources socket, which says what pods hold"},
		&cli.BoolFlag{Name: "without-kubelet", Usage: "assume that no pod holds a GPU of this machine; always so with a simulated node"},
	)
	return &cli.Command{
		Name:  "apply",
		Usage: "changes the MIG layout of a node that no Virgate serves, once, as far as it can now",
		Description: "What pods or processes use stays as it is. Where a Virgate serves the node, set mig.config\n" +
			"in its profile instead. The exit code is 1 when a GPU does not have its layout afterwards.\n\n" +
			"Example: virgate mig apply --node sim:h100 --name all-balanced",
		Flags: append(flags, settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			wanted, err := wantedLayout(cmd, environment)
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
				GPUs: node, Simulated: node.Control != nil,
				PluginDir: cmd.String("device-plugin-dir"), PodResourcesSocket: cmd.String("pod-resources-socket"),
				WithoutKubelet: cmd.Bool("without-kubelet"), Logger: log,
			}, wanted)
			if err != nil {
				return err
			}
			var failed error
			err = show(cmd, nil, func(out *text) {
				for _, gpu := range gpus {
					out.line("%s", strings.TrimSuffix(fmt.Sprintf("GPU %d: %q %s: %s", gpu.Index, gpu.Wanted, gpu.State, gpu.Reason), ": "))
					out.WriteString(drawLayout(gpu))
					if gpu.State != nodereport.LayoutApplied {
						failed = errSilent
					}
				}
			})
			return cmp.Or(err, failed)
		},
	}
}
