// Package flagtable compares the tables of flags in docs/reference/command-line.md with the programs.
package flagtable

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"
)

const (
	page  = "../../docs/reference/command-line.md"
	begin = "<!-- The table is made from the program %s: make reference -->\n"
	end   = "<!-- end of the table -->"
)

// Compare checks that the page's table of the program matches the program's commands. With update, it
// writes the table.
func Compare(t *testing.T, program string, root *cli.Command, update bool) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), fmt.Sprintf(begin, program))
	old, after, ends := strings.Cut(rest, end)
	if !begins || !ends {
		t.Fatalf("%s has no table of %s", page, program)
	}
	rows := map[string][]string{}
	collect(root, "", rows)
	table := "| flag (default) | of | meaning |\n|---|---|---|\n"
	for _, row := range slices.Sorted(maps.Keys(rows)) {
		flag, meaning, _ := strings.Cut(row, "\t")
		table += "| " + flag + " | " + strings.Join(rows[row], ", ") + " | " + meaning + " |\n"
	}
	if old == table {
		return
	}
	if !update {
		t.Fatalf("%s is not what the program has: run the test with -update", page)
	}
	if err := os.WriteFile(page, []byte(before+fmt.Sprintf(begin, program)+table+end+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

var variable = regexp.MustCompile(` \[\$(\w+)\]`)

// collect adds the visible flags of the command and those below it, with the commands that have them.
func collect(cmd *cli.Command, name string, rows map[string][]string) {
	for _, flag := range cmd.VisibleFlags() {
		doc := flag.(cli.DocGenerationFlag)
		names := "`--" + flag.Names()[0] + "`"
		for _, alias := range flag.Names()[1:] {
			names += ", `" + strings.Repeat("-", min(2, len(alias))) + alias + "`"
		}
		for _, match := range variable.FindAllStringSubmatch(doc.GetUsage(), -1) {
			names += ", `" + match[1] + "`"
		}
		value := doc.GetDefaultText()
		if value == "" && doc.TakesValue() {
			value = strings.Trim(doc.GetValue(), `"`)
		}
		if value != "" && value != "false" {
			names += " (`" + value + "`)"
		}
		usage := strings.NewReplacer("<", "&lt;", "|", "\\|").Replace(variable.ReplaceAllString(doc.GetUsage(), ""))
		row := names + "\t" + usage
		rows[row] = append(rows[row], cmp.Or(name, "all"))
	}
	for _, child := range cmd.VisibleCommands() {
		if name != "sim" {
			collect(child, strings.TrimSpace(name+" "+child.Name), rows)
		}
	}
}
