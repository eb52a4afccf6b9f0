package main

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// FuzzAnswers checks that any answer of a running program is shown without characters that a terminal acts on.
func FuzzAnswers(f *testing.F) {
	answer, err := json.Marshal(status.Status{
		Node: "n", Warnings: []string{"\x1b]0;title\a"},
		GPUs: []status.GPU{{UUID: "GPU-a", Units: []status.Unit{{ID: "GPU-a", Holders: []status.Holder{{Pod: "\u202epod\x1b[2J"}}}}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(answer)
	f.Add([]byte(`{"units":[{"unit":"\u001b","reason":"a\tb\nc"}],"monitors":[{"gpu":"\u0007","degraded":"\r"}]}`))
	f.Add([]byte(`{"profile":{"applied":{}},"resources":[{"held":-1}],"layouts":[{}],"elsewhere":[{"holders":null}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var status status.Status
		var report sharing.HealthReport
		var shown strings.Builder
		err := show(&cli.Command{Writer: &shown}, nil, nil, func(out *text) {
			if json.Unmarshal(data, &status) == nil {
				out.status(status)
			}
			if json.Unmarshal(data, &report) == nil {
				out.health(report)
			}
		})
		if err != nil {
			t.Error(err)
		}
		if strings.ContainsFunc(shown.String(), func(r rune) bool {
			return r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
		}) {
			t.Errorf("a terminal obeys %q", shown.String())
		}
	})
}

// FuzzFlags checks that any value of a flag or a variable of NVIDIA's plugin is accepted, or ends the program
// with an error and its exit code. The node is simulated, and flags that name files are left out.
func FuzzFlags(f *testing.F) {
	settings := configs.Settings()
	for i, s := range settings {
		for _, value := range append([]string{s.Default, "", "true", "-1", "--", "\x1b", "a,b", "/", "10h"}, s.Choices...) {
			f.Add(uint8(i), value, false)
			f.Add(uint8(i), value, true)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, value string, variable bool) {
		setting := settings[int(which)%len(settings)]
		args := []string{"/usr/bin/virgate", "plan", "--node", "sim:t4"}
		none := func(string) (string, bool) { return "", false }
		environment := none
		if variable {
			environment = func(name string) (string, bool) { return value, name == setting.Env }
		} else {
			args = append(args, "--"+setting.Flag+"="+value)
		}
		var stdout, stderr strings.Builder
		code := run(t.Context(), args, environment, &stdout, &stderr)
		if (code == 0) != (stderr.Len() == 0) || code < 0 || code > 2 {
			t.Errorf("%s=%q ends with %d: %s", setting.Flag, value, code, stderr.String())
		}
	})
}
