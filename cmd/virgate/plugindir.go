package main

import (
	"path/filepath"

	"github.com/urfave/cli/v3"
)

// pluginDirFlags say where the kubelet's sockets are.
func pluginDirFlags(environment environment) []cli.Flag {
	socket, _ := environment("KUBELET_SOCKET")
	return []cli.Flag{
		&cli.StringFlag{Name: "device-plugin-dir", Value: "/var/lib/kubelet/device-plugins", Usage: "the kubelet's device-plugins directory"},
		&cli.StringFlag{Name: "kubelet-socket", Value: socket, Usage: "as in NVIDIA's plugin: without --device-plugin-dir, this socket's directory is it [$KUBELET_SOCKET]"},
	}
}

func pluginDir(cmd *cli.Command) string {
	if socket := cmd.String("kubelet-socket"); socket != "" && !cmd.IsSet("device-plugin-dir") {
		return filepath.Dir(socket)
	}
	return cmd.String("device-plugin-dir")
}
