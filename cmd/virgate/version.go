package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/urfave/cli/v3"
)

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "prints the version",
		Action: func(_ context.Context, cmd *cli.Command) error {
			_, err := fmt.Fprintf(cmd.Root().Writer, "virgate %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
