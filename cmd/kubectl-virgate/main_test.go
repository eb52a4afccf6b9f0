package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestWords checks which help or version the words of a command line show, and the errors for
// unknown words.
func TestWords(t *testing.T) {
	t.Setenv("KUBECONFIG", "/none/kubeconfig")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	const isHelp = "NAME:\n   kubectl virgate"
	const noServer = "find the API server: no kubeconfig found: set --kubeconfig or KUBECONFIG"
	for _, test := range []struct {
		line string
		code int
		// stdout is how standard output begins, stderr the last line of standard error.
		stdout, stderr string
	}{
		{"--version", 0, "kubectl virgate devel (go", ""},
		{"version", 0, "kubectl virgate devel (go", ""},
		{"help why", 0, isHelp + " why - ", ""},
		{"--help", 0, isHelp + " - ", ""},
		{"why --help", 0, isHelp + " why - ", ""},
		{"h rollout", 0, isHelp + " rollout - ", ""},
		{"--help rollout", 0, isHelp + " rollout - ", ""},
		{"rollout", 0, isHelp + " rollout - ", ""},
		{"help cluster", 0, isHelp + " - ", ""},
		{"help cluster why", 0, isHelp + " why - ", ""},
		{"cluster help why", 0, isHelp + " why - ", ""},
		{"--qwertz", 2, "", `kubectl virgate has no flag --qwertz; see kubectl virgate --help`},
		{"why", 2, "", "why takes one pod, got 0; see kubectl virgate why --help"},
		{"cluster why", 2, "", "why takes one pod, got 0; see kubectl virgate why --help"},
		{"-v", 1, "", noServer},
		{"node", 2, "", `no command "node", did you mean nodes?`},
		{"rollout status", 1, "", noServer},
		{"-v rollout status --virgate-namespace a", 1, "", noServer},
		{"rollot", 2, "", `no command "rollot", did you mean rollout?`},
		{"help rollot", 2, "", `no help topic "rollot", did you mean rollout?`},
		{"rollout stat", 2, "", `no rollout command "stat", did you mean status?`},
		{"rollout sta", 2, "", `no rollout command "sta", did you mean start or status?`},
		{"help rollout sta", 2, "", `no help topic "rollout sta", did you mean rollout start or rollout status?`},
		{"help rollout pauze", 2, "", `no help topic "rollout pauze", did you mean rollout pause?`},
		{"rollout help qwertz", 2, "", `no help topic "rollout qwertz"; see kubectl virgate rollout --help`},
		{"rollout start --qwertz", 2, "", `kubectl virgate rollout start has no flag --qwertz; see kubectl virgate rollout start --help`},
		// Flags of the commands that show the cluster.
		{"rollout status --watch", 2, "", `kubectl virgate rollout has no flag --watch; see kubectl virgate rollout --help`},
		{"rollout -w status", 2, "", `kubectl virgate rollout has no flag --watch; see kubectl virgate rollout --help`},
		{"-w rollout status", 2, "", `kubectl virgate rollout has no flag --watch; see kubectl virgate rollout --help`},
		{"rollout pause -o json", 2, "", `kubectl virgate rollout has no flag --output; see kubectl virgate rollout --help`},
		{"rollout undo --all-timeout 5s", 2, "", `kubectl virgate rollout has no flag --all-timeout; see kubectl virgate rollout --help`},
		{"-l a rollout start new", 2, "", `kubectl virgate rollout has no flag --selector; see kubectl virgate rollout --help`},
	} {
		t.Run(test.line, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			args := append([]string{"kubectl-virgate"}, strings.Fields(test.line)...)
			code := run(t.Context(), args, func(string) (string, bool) { return "", false }, &stdout, &stderr)
			lines := strings.Split(strings.TrimSuffix(stderr.String(), "\n"), "\n")
			complaint := strings.TrimPrefix(lines[len(lines)-1], "kubectl virgate: ")
			if code != test.code || !strings.HasPrefix(stdout.String(), test.stdout) || complaint != test.stderr {
				t.Errorf("exit code %d, want %d\nstandard output %.80q, want %q\nstandard error %q, want %q", code, test.code, stdout.String(), test.stdout, complaint, test.stderr)
			}
		})
	}
}

// TestHelp lists options and commands, sorted.
func TestHelp(t *testing.T) {
	var stdout, stderr bytes.Buffer
	run(t.Context(), []string{"kubectl-virgate", "--help"}, func(string) (string, bool) { return "", false }, &stdout, &stderr)
	rest := stdout.String()
	for _, name := range []string{
		" gpus ", " nodes ", " rollout ", " tenants ", " why ", "--all-timeout ", "--context ", "--domain ", "--kubeconfig ", "--watch",
	} {
		_, after, found := strings.Cut(rest, name)
		if !found {
			t.Fatalf("no %s in its place in\n%s", name, stdout.String())
		}
		rest = after
	}
}

// TestHelpOfRollout has no flags of the commands that show the cluster.
func TestHelpOfRollout(t *testing.T) {
	var stdout, stderr bytes.Buffer
	run(t.Context(), []string{"kubectl-virgate", "rollout", "undo", "--help"}, func(string) (string, bool) { return "", false }, &stdout, &stderr)
	for _, name := range []string{"--now", "--kubeconfig", "--context", "--virgate-namespace", "--verbose"} {
		if !strings.Contains(stdout.String(), name) {
			t.Errorf("%s is not in it", name)
		}
	}
	for _, name := range []string{"--selector", "--output", "--domain", "-timeout", "--watch", "--serve"} {
		if strings.Contains(stdout.String(), name) {
			t.Errorf("%s is in it", name)
		}
	}
	if t.Failed() {
		t.Log(stdout.String())
	}
}
