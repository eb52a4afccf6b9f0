package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/host"
)

// grantFlags say where what containers receive lies.
func grantFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "cdi-dir", Value: "/var/run/cdi", Usage: "where container runtimes look for CDI specs; on a simulated node the default is below --device-plugin-dir"},
		&cli.StringFlag{Name: "host-root", Value: "/", Usage: "where the host's / is mounted, to look for device nodes and for an installer's driver"},
	}
}

// newHost puts together what readies the node for grants.
func newHost(cmd *cli.Command, process configs.Process, holders cdi.Holders, log *slog.Logger) *host.Host {
	options := cdi.Options{Dir: cmd.String("cdi-dir"), Holders: holders, Logger: log}
	if strings.HasPrefix(cmd.String("node"), "sim:") {
		options.Source = cdi.Simulated{}
		if !cmd.IsSet("cdi-dir") {
			// Simulated entries must not take the place of real ones.
			options.Dir = filepath.Join(pluginDir(cmd), "cdi")
		}
	} else {
		options.Source = cdi.NewDriver(driverOptions(process, log))
	}
	return host.New(host.Options{
		Root: cmd.String("host-root"), DevRoot: process.DevRoot, Specs: cdi.NewWriter(options), Logger: log,
	})
}

// driverOptions find the driver as NVIDIA's plugin does: where it is mounted in
// this program's container, else where it is on the host.
func driverOptions(process configs.Process, log *slog.Logger) cdi.DriverOptions {
	options := cdi.DriverOptions{
		Find: func() cdi.Roots {
			roots := cdi.Roots{Driver: process.DriverRoot, Dev: "/"}
			if isFolder(process.ContainerDriverRoot) {
				roots.Driver = process.ContainerDriverRoot
			}
			if isFolder(filepath.Join(roots.Driver, "dev")) {
				roots.Dev = roots.Driver
			}
			return roots
		},
		Host:     cdi.Roots{Driver: process.DriverRoot, Dev: process.DevRoot},
		HookPath: process.CDIHookPath, Logger: log,
	}
	if process.CDIFeatures != "" {
		options.Features = strings.Split(process.CDIFeatures, ",")
	}
	return options
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
