// Package prometheus holds the alert rules, the dashboards and the documented
// questions against Prometheus itself: its promtool, and a server that scrapes
// the running program.
//
// It needs Debian's package prometheus and is skipped where that is not
// installed. PROMETHEUS=required, which CI sets, makes that a failure.
package prometheus

import (
	"os"
	"os/exec"
	"testing"
)

// Paths of what is tested, relative to this folder.
const (
	repository   = "../.."
	rulesFile    = repository + "/charts/virgate/rules/virgate.rules.yaml"
	dashboards   = repository + "/charts/virgate/dashboards/*.json"
	runbookFile  = repository + "/docs/runbook.md"
	questionFile = repository + "/docs/monitoring.md"
	metricsFile  = repository + "/docs/metrics.md"
)

// tool is the path of a program of Debian's package prometheus. The test is
// skipped where it is not installed and need not be.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("PROMETHEUS") == "required" {
		t.Fatalf("PROMETHEUS=required: %v", err)
	}
	t.Skipf("%s is not installed (Debian: apt-get install prometheus)", name)
	return ""
}

// promtool runs promtool and fails the test with its output when it does.
func promtool(t *testing.T, arguments ...string) {
	t.Helper()
	if output, err := exec.Command(tool(t, "promtool"), arguments...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", arguments, err, output)
	}
}
