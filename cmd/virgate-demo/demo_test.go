package main

import (
	"bytes"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/simnode"
)

// TestDemo plays the demo, and compares its output with the README.
func TestDemo(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, scenario := range scenarios() {
		node, err := simnode.New(scenario.node)
		if err != nil {
			t.Fatal(err)
		}
		if err := node.SetWorld("passthrough,moving-minors"); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			if err := demo(t.Context(), &out, slog.New(slog.DiscardHandler), "", node, scenario); err != nil {
				t.Fatalf("%v\n%s", err, &out)
			}
			if name != "main" {
				return
			}
			_, shown, _ := strings.Cut(string(readme), "\n4. ")
			shown, _, found := strings.Cut("4. "+shown, "```")
			numbers := regexp.MustCompile(`after \d+ ms(, never fewer than \d+)?`)
			if got := numbers.ReplaceAllString(out.String(), ""); !found || !strings.Contains(got, numbers.ReplaceAllString(shown, "")) {
				t.Errorf("the README shows\n%s\nand the demo prints\n%s", shown, &out)
			}
		})
	}
}

// TestWrongCommandLine checks that a wrong command line is refused before anything starts.
func TestWrongCommandLine(t *testing.T) {
	for words, want := range map[string]string{
		"--scenario none":  `virgate-demo: --scenario "none" is none of main, mig, guard, mps, dra`,
		"--sim-world moon": "virgate-demo: --sim-world: ",
		"extra":            `virgate-demo: `,
		"--qwertz":         "virgate-demo: virgate-demo has no flag --qwertz",
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"virgate-demo"}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if code != 2 || !strings.HasPrefix(errors.String(), want) || out.String() != "" {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}
