package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"
	"golang.org/x/term"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/status"
)

// OutputFlag returns the flag that says how Show prints.
func OutputFlag() cli.Flag {
	return Flag{
		Names:   []string{"output", "o"},
		Kind:    KindText,
		Choices: []string{"table", "wide", "json", "yaml", "name"},
		Former:  "text",
		Value:   "table",
		Usage:   "table, wide, json, yaml or name",
	}.New(nil)
}

// Wide reports whether --output asks for all columns.
func Wide(cmd *cli.Command) bool { return cmd.String("output") == "wide" }

// ForPeople reports whether --output asks for text.
func ForPeople(cmd *cli.Command) bool {
	switch cmd.String("output") {
	case "json", "yaml", "name":
		return false
	}
	return true
}

// Show prints what a command found, as --output says: the value as JSON or YAML, the names of its parts,
// or the text. The text may have control characters, for example in the names of pods; it is printed
// without them.
func Show(cmd *cli.Command, value any, names []string, text func() string) error {
	out := cmd.Root().Writer
	switch output := cmd.String("output"); output {
	case "json", "yaml":
		var data bytes.Buffer
		encoder := json.NewEncoder(&data)
		encoder.SetIndent("", "  ")
		encoder.SetEscapeHTML(false)
		err := encoder.Encode(value)
		if err != nil {
			return err
		}
		answer := data.Bytes()
		if output == "yaml" {
			answer, err = yaml.JSONToYAML(answer)
			if err != nil {
				return err
			}
		}
		_, err = out.Write(answer)
		return err
	case "name":
		var lines Text
		for _, name := range names {
			lines.Line("%s", name)
		}
		text = lines.String
	}
	plain := status.Plain(text())
	if terminal, ok := out.(Terminal); ok && terminal.Colours && ForPeople(cmd) {
		plain = Paint(plain)
	}
	_, err := io.WriteString(out, plain)
	return err
}

// Terminal is an output that moves its cursor, and that a person looks at.
type Terminal struct {
	*os.File
	// Colours is false if they are turned off (no-color.org).
	Colours bool
}

// onTerminal returns the file as a Terminal if it is one.
func onTerminal(file *os.File, environment Environment) io.Writer {
	kind, _ := environment("TERM")
	if kind == "dumb" || !term.IsTerminal(int(file.Fd())) {
		return file
	}
	off, _ := environment("NO_COLOR")
	return Terminal{file, off == ""}
}

// states are the words of a state that is bad, or in which something waits, as words of their own: names
// may have them in the middle.
var states = regexp.MustCompile(`(?m)(^|\s)(?:` +
	`([Uu]nhealthy|suspect|rejected|refused|failed|stopped|not ready|not read|status not read|nothing heard|` +
	`NotRegistered|GPUsNotRead|GPUsNotListed|NoProfile)|` +
	`(held|pending|switching|blocked|reset-required|recovering|waiting|waits|starting|stopping|paused|undoing|` +
	`released)` +
	`)($|[\s:;,.)])`)

// Paint colours the states in the text: bad ones red, those in which something waits yellow.
func Paint(text string) string {
	return states.ReplaceAllStringFunc(text, func(found string) string {
		parts := states.FindStringSubmatch(found)
		colour, word := "\x1b[31m", parts[2]
		if word == "" {
			colour, word = "\x1b[33m", parts[3]
		}
		return parts[1] + colour + word + "\x1b[0m" + parts[4]
	})
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
