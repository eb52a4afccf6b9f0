package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestWords checks what becomes of the words of a command line: which help or version they show,
// and what is said of those that nothing has.
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
		{"kubectl-virgate --version", 0, isVersion, ""},
		{"virgate", 0, isHelp + " - ", ""},
		{"virgate -h", 0, isHelp + " - ", ""},
		{"virgate help", 0, isHelp + " - ", ""},
		{"virgate h rollout", 0, isHelp + " rollout - ", ""},
		{"virgate help mig export", 0, isHelp + " mig export - ", ""},
		{"virgate mig help export", 0, isHelp + " mig export - ", ""},
		{"virgate export help", 2, "", `no command "export"; see virgate --help`},
		{"virgate demo help", 0, isHelp + " demo - ", ""},
		{"virgate check help", 1, "", "help: open: no such file or directory"}, // Its arguments are files.
		{"virgate help config-manager", 0, isHelp + " config-manager - ", ""},
		{"kubectl-virgate help why", 0, "NAME:\n   kubectl virgate why - ", ""},
		{"kubectl-virgate --help", 0, "NAME:\n   kubectl virgate - ", ""},
		{"kubectl-virgate why --help", 0, "NAME:\n   kubectl virgate why - ", ""},
		{"kubectl-virgate help cluster", 2, "", `no help topic "cluster"; see kubectl virgate --help`},
		{"kubectl-virgate --qwertz", 2, "", `kubectl virgate has no flag --qwertz; see kubectl virgate --help`},
		{"kubectl-virgate why", 2, "", "why takes one pod, got 0; see kubectl virgate why --help"},
		{"kubectl-virgate -v", 1, "", "find the API server: no kubeconfig found: set --kubeconfig or KUBECONFIG"},
		{"virgate uninstall --all", 1, "", "find the API server: this is no pod: set --kubeconfig or KUBECONFIG"},
		{"virgate rollout status", 1, "", "find the API server: no kubeconfig found: set --kubeconfig or KUBECONFIG"},
		{"virgate rollot", 2, "", `no command "rollot", did you mean rollout?`},
		{"virgate Demo", 2, "", `no command "Demo", did you mean demo?`},
		{"virgate qwertz", 2, "", `no command "qwertz"; see virgate --help`},
		{"virgate rollout stat", 2, "", `no rollout command "stat", did you mean status?`},
		{"virgate rollout sta", 2, "", `no rollout command "sta", did you mean start or status?`},
		{"virgate help rollout sta", 2, "", `no help topic "rollout sta", did you mean rollout start or rollout status?`},
		{"virgate ver", 2, "", `no command "ver", did you mean version?`},
		{"virgate install", 2, "", `no command "install"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate Instal", 2, "", `no command "Instal"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate help install", 2, "", `no help topic "install"; the Helm chart installs Virgate; see virgate --help`},
		{"virgate unistall", 2, "", `no command "unistall", did you mean uninstall?`},
		{"virgate check --out", 2, "", `virgate check has no flag --out, did you mean --output?`},
		{"virgate health clear --control", 2, "", `virgate health clear has no flag --control, did you mean --control-socket?`},
		{"virgate --help rn", 2, "", `no help topic "rn", did you mean run?`},
		{"virgate --help rollout", 0, isHelp + " rollout - ", ""},
		{"virgate run --help qwertz", 2, "", `no help topic "run qwertz"; see virgate run --help`},
		{"virgate check a.yaml --help", 0, isHelp + " check - ", ""},
		{"virgate sim xid 79 --help", 0, isHelp + " sim xid - ", ""},
		{"virgate --version qwertz", 2, "", `no command "qwertz"; see virgate --help`},
		{"virgate gpu release", 2, "", "gpu release needs --gpu"},
		{"virgate health", 1, "", "no Virgate answers at /run/virgate/control.sock: dial unix /run/virgate/control.sock: connect: no such file or directory; on a cluster: kubectl -n virgate exec POD -- virgate health"},
		{"virgate health --control-socket /none", 1, "", "no Virgate answers at /none: dial unix /none: connect: no such file or directory"},
		{"virgate sim qwertz", 2, "", `no sim command "qwertz"; see virgate sim --help`},
		{"kubectl-virgate node", 2, "", `no command "node", did you mean nodes?`},
		{"virgate help rollot", 2, "", `no help topic "rollot", did you mean rollout?`},
		{"virgate help qwertz", 2, "", `no help topic "qwertz"; see virgate --help`},
		{"virgate help rollout pauze", 2, "", `no help topic "rollout pauze", did you mean rollout pause?`},
		{"virgate rollout help qwertz", 2, "", `no help topic "rollout qwertz"; see virgate rollout --help`},
		{"virgate help demo qwertz", 2, "", `no help topic "demo qwertz"; see virgate demo --help`},
		{"virgate help nvidia-device-plugin", 2, "", `no help topic "nvidia-device-plugin"; see virgate --help`},
		{"virgate --vresion", 2, "", `virgate has no flag --vresion, did you mean --version?`},
		{"virgate plan --mig-stratgy=mixed", 2, "", `virgate plan has no flag --mig-stratgy, did you mean --mig-strategy?`},
		{"virgate run --probes 3s", 2, "", `virgate run has no flag --probes, did you mean --probe?`},
		{"virgate rollout start --qwertz", 2, "", `virgate rollout start has no flag --qwertz; see virgate rollout start --help`},
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
