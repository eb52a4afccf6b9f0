package main

import (
	"bytes"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestDemo plays the demo, and compares what the README shows of it.
func TestDemo(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, scenario := range scenarios() {
		node, err := openSimulated(scenario.node, "passthrough,moving-minors")
		if err != nil {
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
