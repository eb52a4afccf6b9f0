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
