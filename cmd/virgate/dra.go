package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/kube"
)

func draFlags(environment environment) []cli.Flag {
	uid, _ := environment("POD_UID")
	category := "Dynamic Resource Allocation; requires --node-name and an API server"
	return []cli.Flag{
		&cli.BoolFlag{
			Name:     "dra",
			Category: category,
			Usage:    "serve what the profile's dra.resources name by claims, as the DRA driver gpu.virgate.github.io",
		},
		nvidiaNames(category),
		&cli.StringFlag{
			Name:     "dra-plugins-dir",
			Category: category,
			Value:    "/var/lib/kubelet/plugins",
			Usage:    "the kubelet's plugins directory, with the same path on the host; so too the next",
		},
		&cli.StringFlag{
			Name:     "dra-registry-dir",
			Category: category,
			Value:    "/var/lib/kubelet/plugins_registry",
			Usage:    "the kubelet's plugins_registry directory",
		},
		&cli.StringFlag{
			Name:     "pod-uid",
			Category: category,
			Value:    uid,
			Usage:    "the UID of this program's pod, by which its sockets differ from those of another one [$POD_UID]",
		},
	}
}

func nvidiaNames(category string) cli.Flag {
	return &cli.BoolFlag{
		Name:     "dra-nvidia-names",
		Category: category,
		Usage: "be the DRA driver gpu.nvidia.com, whose claims and classes run unchanged then; not beside " +
			"NVIDIA's on a node",
	}
}

func driverName(cmd *cli.Command) string {
	if cmd.Bool("dra-nvidia-names") {
		return dra.NVIDIADriver
	}
	return dra.DriverName
}

// draOptions returns nil if no claims are served.
func draOptions(cmd *cli.Command) (*dradriver.Options, error) {
	if !cmd.Bool("dra") {
		return nil, nil
	}
	if cmd.String("node-name") == "" {
		return nil, command.Usage(errors.New("--dra: --node-name is missing"))
	}
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err != nil {
		return nil, fmt.Errorf("--dra: %w", err)
	}
	return &dradriver.Options{
		Driver:      driverName(cmd),
		Dir:         cmd.String("dra-plugins-dir"),
		RegistryDir: cmd.String("dra-registry-dir"),
		PodUID:      cmd.String("pod-uid"),
		Config:      config,
	}, nil
}
