package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/agent"
)

// outputFlag chooses between JSON and the form for people, which is the default.
func outputFlag(people string) cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: people, Usage: people + " or json"}
}

// wantsJSON reads outputFlag.
func wantsJSON(cmd *cli.Command, people string) (bool, error) {
	output := cmd.String("output")
	if output != people && output != "json" {
		return false, usageError{fmt.Errorf("--output %q is neither %s nor json", output, people)}
	}
	return output == "json", nil
}

func printWarnings(w io.Writer, warnings []string) error {
	for _, warning := range warnings {
		if _, err := fmt.Fprintf(w, "warning: %s\n", warning); err != nil {
			return err
		}
	}
	return nil
}

// printPlain writes what a running program has answered so that nothing in it
// does anything to a terminal.
func printPlain(w io.Writer, write func(io.Writer) error) error {
	var text bytes.Buffer
	if err := write(&text); err != nil {
		return err
	}
	_, err := io.WriteString(w, agent.Plain(text.String()))
	return err
}

func printJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}
