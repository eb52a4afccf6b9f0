package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/status"
)

// outputFlag chooses between JSON and the formats for people; the first of these is the default.
func outputFlag(people ...string) cli.Flag {
	check := func(_ context.Context, _ *cli.Command, output string) error {
		if !slices.Contains(people, output) && output != "json" {
			return usageError{fmt.Errorf("--output %q is neither %s nor json", output, strings.Join(people, " nor "))}
		}
		return nil
	}
	return &cli.StringFlag{
		Name:    "output",
		Aliases: []string{"o"},
		Value:   people[0],
		Usage:   strings.Join(people, ", ") + " or json",
		Action:  check,
	}
}

// show prints the value with --output json, and otherwise the text of write without control
// characters.
func show(cmd *cli.Command, value any, write func(*text)) error {
	var out text
	if cmd.String("output") != "json" {
		write(&out)
		_, err := io.WriteString(cmd.Root().Writer, status.Plain(out.String()))
		return err
	}
	encoder := json.NewEncoder(cmd.Root().Writer)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// text is the output for people. It is complete before it is printed, so that writing it cannot
// fail.
type text struct{ bytes.Buffer }

func (t *text) line(format string, arguments ...any) {
	fmt.Fprintf(&t.Buffer, format+"\n", arguments...)
}

func (t *text) warnings(warnings []string) {
	for _, warning := range warnings {
		t.line("warning: %s", warning)
	}
}

// table begins a table; its end adds it to the text. The header is optional.
func (t *text) table(header ...any) table {
	rows := table{tabwriter.NewWriter(&t.Buffer, 0, 0, 2, ' ', 0)}
	if len(header) > 0 {
		rows.row(header...)
	}
	return rows
}

// table aligns the cells of its rows.
type table struct{ writer *tabwriter.Writer }

func (t table) row(cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = fmt.Sprint(cell)
	}
	_, _ = fmt.Fprintln(t.writer, strings.Join(texts, "\t"))
}

func (t table) end() { _ = t.writer.Flush() }
