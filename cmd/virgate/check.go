package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "validates profiles, mig-parted documents and ConfigMap manifests",
		ArgsUsage: "FILE…",
		Description: "Prints every problem of every file on standard error and ends with exit code 1 when there\n" +
			"is one. On standard output it lists where Virgate does more or other than NVIDIA's\n" +
			"device plugin would with the same document.\n\n" +
			"Example: virgate check configs/examples/*.yaml",
		Action: func(_ context.Context, cmd *cli.Command) error {
			if cmd.Args().Len() == 0 {
				return usageError{errors.New("check needs at least one FILE")}
			}
			failed := false
			for _, name := range cmd.Args().Slice() {
				data, err := os.ReadFile(name)
				if err == nil {
					var file configs.File
					if file, err = configs.ParseFile(name, data, nil); err == nil {
						_, _ = fmt.Fprintf(cmd.Root().Writer, "%s: ok (%s)\n", name, file.Kind)
						printNotes(cmd.Root().Writer, name, file)
						continue
					}
				}
				failed = true
				_, _ = fmt.Fprintln(cmd.Root().ErrWriter, err)
			}
			if failed {
				return errSilent
			}
			return nil
		},
	}
}

// printNotes lists where Virgate differs from NVIDIA's plugin.
func printNotes(w io.Writer, name string, file configs.File) {
	show := func(name string, config configs.Config) {
		for _, note := range config.Notes {
			_, _ = fmt.Fprintf(w, "%s:%d: %s: %s\n", name, note.Line, note.Path, note.Message)
		}
	}
	show(name, file.Config)
	for _, entry := range file.ConfigMap.Entries {
		show(fmt.Sprintf("%s[data.%s]", name, entry.Key), entry.Config)
	}
}
