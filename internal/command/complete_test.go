package command

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"
)

// completed lists the completions of a command line with these words.
func completed(t *testing.T, words ...string) string {
	t.Helper()
	var out strings.Builder
	format := Flag{Names: []string{"format", "f"}, Kind: KindText, Choices: []string{"text", "json"}, Usage: "how; at length"}.New(nil)
	root := &cli.Command{
		Name:      "x",
		Writer:    &out,
		ErrWriter: &out,
		Flags:     []cli.Flag{&cli.BoolFlag{Name: "verbose"}, &cli.BoolFlag{Name: "version", Local: true}},
		Commands: []*cli.Command{
			{Name: "show", Usage: "shows", Flags: []cli.Flag{OutputFlag(), format}},
			{Name: "secret", Hidden: true},
			{
				Name:      "nodes",
				ArgsUsage: "NODE",
				Flags:     []cli.Flag{&cli.StringFlag{Name: "at"}},
				ShellComplete: func(_ context.Context, cmd *cli.Command) {
					_, _ = fmt.Fprintln(cmd.Root().Writer, "n1 of", cmd.String("at"))
				},
			},
			{Name: "group", Commands: []*cli.Command{{Name: "one"}, {Name: "two"}}},
			CompletionCommand(),
		},
	}
	if code := Run(t.Context(), root, append([]string{"x", CompleteWord}, words...)); code != 0 {
		t.Fatalf("exit code %d: %s", code, out.String())
	}
	return out.String()
}

func TestComplete(t *testing.T) {
	for line, want := range map[string]string{
		"s":                 "show\tshows\n:4\n",
		"qwertz":            ":0\n",
		"--ver":             "--verbose\t\n--version\t\n:4\n",
		"show --":           "--output\ttable, wide, json, yaml or name\n--format\thow\n--verbose\t\n--help\tshow help\n:4\n",
		"show -o ":          "table\nwide\njson\nyaml\nname\n:4\n",
		"show --output j":   "json\n:4\n",
		"show --output=j":   "--output=json\n:4\n",
		"show --output = j": "json\n:4\n",
		"show -o json -f t": "text\n:4\n",
		"show -- -o ":       ":0\n",
		"show a.yaml":       ":0\n",
		"show --none ":      ":0\n",
		"group t":           "two\t\n:4\n",
		"--verbose group t": "two\t\n:4\n",
		"nodes --at here ":  "n1 of here\n:4\n",
		"nodes --at ":       ":0\n",
		"completion b":      "bash\tprints the script for bash\n:4\n",
	} {
		if got := completed(t, strings.Split(line, " ")...); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
	if got := completed(t); got != "" {
		t.Errorf("without words: %q", got)
	}
}

// TestCompletionInShells has each shell of this machine load its script and complete a word.
func TestCompletionInShells(t *testing.T) {
	folder := t.TempDir()
	program := "#!/bin/sh\nprintf '%s|' \"$@\" >>" + folder + "/asked\nprintf 'json\\tas JSON\\njs\\n:4\\n'\n"
	if err := os.WriteFile(filepath.Join(folder, "x"), []byte(program), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	for shell, commands := range map[string]string{
		"bash": "COMP_WORDS=(x show --output = j); COMP_CWORD=4; _x; printf '%s\\n' \"${COMPREPLY[@]}\"",
		"fish": "complete -C 'x show --output j'",
		"zsh": "_describe() { print -l ${choices%%:*} }; compdef() { }; words=(x show --output j); CURRENT=4;" +
			" functions[_x]=$functions[_x]; _x",
	} {
		t.Run(shell, func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil {
				t.Skip(err)
			}
			script, err := completionScripts.ReadFile("completion/" + shell)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(folder, shell)
			text := strings.ReplaceAll(string(script), "PROGRAM", "x")
			if shell == "zsh" {
				text = "compdef() { }\n" + text
			}
			if err := os.WriteFile(path, []byte(text+"\n"+commands+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			command := exec.CommandContext(t.Context(), shell, path) //nolint:gosec // of this test
			command.Env = append(os.Environ(), "PATH="+folder+":"+os.Getenv("PATH"), "HOME="+folder)
			output, err := command.CombinedOutput()
			if err != nil || !strings.Contains(string(output), "json") || !strings.Contains(string(output), "js\n") {
				t.Errorf("%v: %q", err, output)
			}
			asked, err := os.ReadFile(filepath.Join(folder, "asked"))
			if err != nil || !strings.HasPrefix(string(asked), "__complete|show|--output|") || !strings.HasSuffix(string(asked), "|j|") {
				t.Errorf("asked %q, %v", asked, err)
			}
			_ = os.Remove(filepath.Join(folder, "asked"))
		})
	}
}
