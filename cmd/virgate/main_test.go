package main

import (
	"bytes"
	"encoding/json"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/virgate/virgate/test/shortdir"
)

// TestWords checks which help or version the words of a command line show, and the errors for
// unknown words.
func TestWords(t *testing.T) {
	t.Setenv("KUBECONFIG", "/none/kubeconfig")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	const isVersion, isHelp = "virgate devel (go", "NAME:\n   virgate"
	for _, test := range []struct {
		line string
		code int
		// stdout is how standard output begins, stderr the last line of standard error.
		stdout, stderr string
	}{
		{"virgate version", 0, isVersion, ""},
		{"virgate --version", 0, isVersion, ""},
		{"virgate -v", 0, isVersion, ""},
		{"virgate -v plan --node sim:t4", 0, isVersion, ""},
		{"/usr/bin/nvidia-device-plugin --version", 0, isVersion, ""},
		{"config-manager -v", 0, isVersion, ""},
		{"virgate", 0, isHelp + " - ", ""},
		{"virgate -h", 0, isHelp + " - ", ""},
		{"virgate help", 0, isHelp + " - ", ""},
		{"virgate help mig export", 0, isHelp + " mig export - ", ""},
		{"virgate mig help export", 0, isHelp + " mig export - ", ""},
		{"virgate export help", 2, "", `no command "export"; see virgate --help`},
		{"virgate check help", 1, "", "help: open: no such file or directory"}, // Its arguments are files.
		{"virgate help config-manager", 0, isHelp + " config-manager - ", ""},
		{"virgate uninstall --all", 1, "", "find the API server: this is no pod: set --kubeconfig or KUBECONFIG"},
		{"virgate qwertz", 2, "", `no command "qwertz"; see virgate --help`},
		{"virgate ver", 2, "", `no command "ver", did you mean version?`},
		{"virgate h mig", 0, isHelp + " mig - ", ""},
		{"virgate Plan", 2, "", `no command "Plan", did you mean plan?`},
		{"virgate mig appl", 2, "", `no mig command "appl", did you mean apply?`},
		{"virgate mig p", 2, "", `no mig command "p", did you mean plan?`},
		{"virgate help mig ex", 2, "", `no help topic "mig ex", did you mean mig export?`},
		{"virgate --help mig", 0, isHelp + " mig - ", ""},
		{"virgate mig help qwertz", 2, "", `no help topic "mig qwertz"; see virgate mig --help`},
		{"virgate help plan qwertz", 2, "", `no help topic "plan qwertz"; see virgate plan --help`},
		{"virgate cluster", 2, "", `no command "cluster"; use kubectl virgate, which is a program of its own; see virgate --help`},
		{"virgate cluster --kubeconfig a why -n x p", 2, "", `no command "cluster"; use kubectl virgate, which is a program of its own; see virgate --help`},
		{"virgate help cluster", 2, "", `no help topic "cluster"; use kubectl virgate, which is a program of its own; see virgate --help`},
		{"virgate rollout start new -l a", 2, "", `no command "rollout"; use kubectl virgate rollout, which is a program of its own; see virgate --help`},
		{"virgate nodes -o wide", 2, "", `no command "nodes"; use kubectl virgate nodes, which is a program of its own; see virgate --help`},
		{"virgate gpus", 2, "", `no command "gpus"; use kubectl virgate gpus, which is a program of its own; see virgate --help`},
		{"virgate help tenants", 2, "", `no help topic "tenants"; use kubectl virgate tenants, which is a program of its own; see virgate --help`},
		{"virgate why -n a pod", 2, "", `no command "why"; use kubectl virgate why, which is a program of its own; see virgate --help`},
		{"virgate page", 2, "", `no command "page"; use kubectl virgate --serve 127.0.0.1:8080, which is a program of its own; see virgate --help`},
		{"virgate pla", 2, "", `no command "pla", did you mean plan?`},
		{"virgate g", 2, "", `no command "g", did you mean gpu?`},
		{"virgate demo --serve", 2, "", `no command "demo"; make demo in a clone of the repository runs virgate-demo; see virgate --help`},
		{"virgate install", 2, "", `no command "install"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate Instal", 2, "", `no command "Instal"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate help install", 2, "", `no help topic "install"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate unistall", 2, "", `no command "unistall", did you mean uninstall?`},
		{"virgate check --out", 2, "", `virgate check has no flag --out, did you mean --output?`},
		{"virgate health clear --control", 2, "", `virgate health clear has no flag --control, did you mean --control-socket?`},
		{"virgate --help rn", 2, "", `no help topic "rn", did you mean run?`},
		{"virgate run --help qwertz", 2, "", `no help topic "run qwertz"; see virgate run --help`},
		{"virgate check a.yaml --help", 0, isHelp + " check - ", ""},
		{"virgate sim xid 79 --help", 0, isHelp + " sim xid - ", ""},
		{"virgate --version qwertz", 2, "", `no command "qwertz"; see virgate --help`},
		{"virgate gpu release", 2, "", "gpu release needs --gpu"},
		{"virgate health", 1, "", "no Virgate answers at /run/virgate/control.sock: dial unix /run/virgate/control.sock: connect: no such file or directory; on a cluster: kubectl -n virgate exec POD -- virgate health"},
		{"virgate health --control-socket /none", 1, "", "no Virgate answers at /none: dial unix /none: connect: no such file or directory"},
		{"virgate sim qwertz", 2, "", `no sim command "qwertz"; see virgate sim --help`},
		{"virgate help qwertz", 2, "", `no help topic "qwertz"; see virgate --help`},
		{"virgate help nvidia-device-plugin", 2, "", `no help topic "nvidia-device-plugin"; see virgate --help`},
		{"virgate --vresion", 2, "", `virgate has no flag --vresion, did you mean --version?`},
		{"virgate plan --mig-stratgy=mixed", 2, "", `virgate plan has no flag --mig-stratgy, did you mean --mig-strategy?`},
		{"virgate run --probes 3s", 2, "", `virgate run has no flag --probes, did you mean --probe?`},
		{"virgate status -z", 2, "", `virgate status has no flag -z; see virgate status --help`},
		{"virgate plan --config - --from -", 2, "", "--config and --from are both standard input, which can be read once"},
		{"virgate check - a.yaml -", 2, "", "check: - is there twice, and standard input can be read once"},
		{"virgate run --config -", 2, "", "--config - is standard input, which check, plan and mig read once; virgate run follows a file: name one"},
		{"gpu-feature-discovery --config-file=-", 2, "", "--config-file - is standard input, which check, plan and mig read once; virgate gpu-feature-discovery follows a file: name one"},
	} {
		t.Run(test.line, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := run(t.Context(), strings.Fields(test.line), func(string) (string, bool) { return "", false }, &stdout, &stderr)
			lines := strings.Split(strings.TrimSuffix(stderr.String(), "\n"), "\n")
			complaint := strings.TrimPrefix(lines[len(lines)-1], "virgate: ")
			if code != test.code || !strings.HasPrefix(stdout.String(), test.stdout) || complaint != test.stderr {
				t.Errorf("exit code %d, want %d\nstandard output %.80q, want %q\nstandard error %q, want %q", code, test.code, stdout.String(), test.stdout, complaint, test.stderr)
			}
		})
	}
}

// TestShortHelp checks that the help of run fits on a screen, and that --help-all has the rest under headings.
func TestShortHelp(t *testing.T) {
	help := func(args ...string) string {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), append([]string{"virgate"}, args...), func(string) (string, bool) { return "", false }, &stdout, &stderr); code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr.String())
		}
		return stdout.String()
	}
	short := help("run", "--help")
	lines := strings.Split(short, "\n")
	for _, line := range lines {
		if utf8.RuneCountInString(line) > 100 {
			t.Errorf("wider than 100 columns: %s", line)
		}
	}
	if flags := strings.Count(short, "\n   --"); len(lines) > 40 || flags < 20 || !strings.HasSuffix(short, "\n--help-all shows all options, with their defaults and variables.\n") {
		t.Errorf("%d lines with %d flags:\n%s", len(lines), flags, short)
	}
	if other := help("help", "run"); other != short {
		t.Errorf("help run shows\n%s", other)
	}
	all := help("run", "--help-all")
	for _, want := range []string{"\n   HTTP\n", "--pprof ", "[$MIG_STRATEGY]", `(default: "auto")`} {
		if !strings.Contains(all, want) || strings.Contains(short, want) {
			t.Errorf("%q must be in the long help alone", want)
		}
	}
	for line := range strings.Lines(short) {
		if flag, _, found := strings.Cut(strings.TrimPrefix(line, "   --"), " "); found && strings.HasPrefix(line, "   --") && !strings.Contains(all, "--"+flag) {
			t.Errorf("the long help has no --%s", flag)
		}
	}
}

// TestLogFormat checks that each line of the log is an object with the time, the level and the message, and so is a
// command's final error. Without the flag the log is text.
func TestLogFormat(t *testing.T) {
	root := shortdir.New(t)
	for _, test := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"run", []string{"run", "--node", "sim:t4", "--device-plugin-dir", root, "--listen", "", "--control-socket", "", "--watch-pods", "--node-name", "n", "--kubeconfig", "/none"}, 1, "ended"},
		{"mps", []string{"mps", "--node", "sim:t4", "--mps-root", "/dev/null/mps"}, 1, "ended"},
		{"config-manager", []string{"config-manager", "--config-dir", root, "--config-file-dst", filepath.Join(root, "none/link"), "--oneshot"}, 0, "no label is looked at"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, format := range []string{"text", "json"} {
				var stderr bytes.Buffer
				code := run(t.Context(), append(append([]string{"virgate"}, test.args...), "--log-format", format), func(string) (string, bool) { return "", false }, io.Discard, &stderr)
				if code != test.code {
					t.Fatalf("exit code %d: %s", code, stderr.String())
				}
				var messages []string
				for line := range strings.Lines(stderr.String()) {
					var entry struct {
						Time       time.Time
						Level, Msg string
					}
					err := json.Unmarshal([]byte(line), &entry)
					if inJSON := err == nil && !entry.Time.IsZero() && entry.Level != "" && entry.Msg != ""; inJSON != (format == "json") {
						t.Errorf("%s: %s%v", format, line, err)
					}
					messages = append(messages, entry.Msg)
				}
				if format == "json" && !slices.Contains(messages, test.says) {
					t.Errorf("no message %q in %q", test.says, messages)
				}
			}
		})
	}
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"virgate", "mps", "--log-format", "xml"}, func(string) (string, bool) { return "", false }, io.Discard, &stderr); code != 2 || stderr.String() != "virgate: --log-format \"xml\" is none of text, json\n" {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
}
