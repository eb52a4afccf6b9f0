package command

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

// OutputFlag chooses between JSON and the formats for people; the first of these is the default.
func OutputFlag(people ...string) cli.Flag {
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

// Show prints the value with --output json, and otherwise the text without control characters.
func Show(cmd *cli.Command, value any, text func() string) error {
	if cmd.String("output") != "json" {
		_, err := io.WriteString(cmd.Root().Writer, status.Plain(text()))
		return err
	}
	encoder := json.NewEncoder(cmd.Root().Writer)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// Text is the output for people. It is complete before it is printed, so that writing it cannot
// fail.
type Text struct{ bytes.Buffer }

// Line adds a line.
func (t *Text) Line(format string, arguments ...any) {
	fmt.Fprintf(&t.Buffer, format+"\n", arguments...)
}

// Warnings adds a line for each.
func (t *Text) Warnings(warnings []string) {
	for _, warning := range warnings {
		t.Line("warning: %s", warning)
	}
}

// Table begins a table; its end adds it to the text. The header is optional.
func (t *Text) Table(header ...any) Table {
	rows := Table{tabwriter.NewWriter(&t.Buffer, 0, 0, 2, ' ', 0)}
	if len(header) > 0 {
		rows.Row(header...)
	}
	return rows
}

// Table aligns the cells of its rows.
type Table struct{ writer *tabwriter.Writer }

// Row adds a row.
func (t Table) Row(cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = fmt.Sprint(cell)
	}
	_, _ = fmt.Fprintln(t.writer, strings.Join(texts, "\t"))
}

// End adds the table to the text.
func (t Table) End() { _ = t.writer.Flush() }
