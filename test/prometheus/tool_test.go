// Package prometheus checks the alert rules, the dashboards and the documented
// queries with Prometheus itself: its promtool, and a server that scrapes the
// running program.
//
// It requires Debian's package prometheus and is skipped without it. PROMETHEUS=required, which CI sets,
// makes that a failure.
package prometheus

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/program"
)

// Paths of the tested files, relative to this folder.
const (
	repository   = "../.."
	rulesFile    = repository + "/charts/virgate/rules/virgate.rules.yaml"
	dashboards   = repository + "/charts/virgate/dashboards/*.json"
	runbookFile  = repository + "/docs/reference/runbook.md"
	questionFile = repository + "/docs/reference/queries.md"
	metricsFile  = repository + "/docs/reference/metrics.md"
)

// tool returns the path of a program of Debian's package prometheus. It skips the test if the program is
// neither installed nor required.
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

// promtool runs promtool. If it fails, the test fails with its output.
func promtool(t *testing.T, arguments ...string) {
	t.Helper()
	if output, err := exec.Command(tool(t, "promtool"), arguments...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", arguments, err, output)
	}
}

// process is a program that runs until the test ends.
type process struct{ *program.Process }

// start starts a program, and ends it with SIGTERM when the test ends.
func start(t *testing.T, path string, arguments ...string) process {
	t.Helper()
	command := exec.Command(path, arguments...)
	command.Dir = t.TempDir()
	p, err := program.Start(command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Terminate() // How it ended is in its output.
		if t.Failed() {
			t.Logf("%s:\n%s", path, p.Output())
		}
	})
	return process{p}
}

// await waits until the program's output matches, and returns the first group.
func (p process) await(t *testing.T, written *regexp.Regexp) string {
	t.Helper()
	match, err := p.Await(written)
	if err != nil {
		t.Fatal(err)
	}
	return match[1]
}

// server is a Prometheus that scrapes each second and evaluates the rules.
type server struct{ address string }

// scraped is a Virgate for a server to scrape.
type scraped struct{ node, address string }

var serves = regexp.MustCompile(`msg="Listening on" address=(\S+)`)

// startServer starts a server with the settings that the chart's PodMonitor makes.
func startServer(t *testing.T, targets ...scraped) server {
	t.Helper()
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var config strings.Builder
	fmt.Fprintf(&config, "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n- job_name: virgate\n  honor_labels: true\n  static_configs:\n", rules)
	for _, target := range targets {
		fmt.Fprintf(&config, "  - {targets: [%q], labels: {node: %s}}\n", target.address, target.node)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(path, []byte(config.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, tool(t, "prometheus"), "--config.file="+path, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0")
	s := server{address: p.await(t, serves)}
	p.await(t, regexp.MustCompile(`msg="(Server is ready to receive web requests\.)"`))
	return s
}

// ask decodes the response of Prometheus' HTTP API into data.
func (s server) ask(path string, parameters url.Values, data any) error {
	response, err := http.Get("http://" + s.address + "/api/v1/" + path + "?" + parameters.Encode())
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s %v: %s", path, parameters, answer.Error)
	}
	return nil
}

// vector returns the query's result now: a sample a line, sorted.
func (s server) vector(query string) ([]string, error) {
	var data struct {
		Result []struct {
			Metric map[string]string
			Value  [2]any
		}
	}
	if err := s.ask("query", url.Values{"query": {query}}, &data); err != nil {
		return nil, err
	}
	lines := []string{}
	for _, sample := range data.Result {
		text, _ := sample.Value[1].(string)
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("value of %v: %w", sample.Metric, err)
		}
		var labels []string
		for name, of := range sample.Metric {
			labels = append(labels, fmt.Sprintf("%s=%q", name, of))
		}
		slices.Sort(labels)
		lines = append(lines, fmt.Sprintf("{%s} %s", strings.Join(labels, ", "), strconv.FormatFloat(value, 'g', 12, 64)))
	}
	slices.Sort(lines)
	return lines, nil
}

// series returns the labels of each metric that the server has had, except labels without a value.
func (s server) series() (map[string][]string, error) {
	var data []map[string]string
	if err := s.ask("series", url.Values{"match[]": {`{__name__!=""}`}}, &data); err != nil {
		return nil, err
	}
	known := map[string][]string{}
	for _, labels := range data {
		for name := range labels {
			known[labels["__name__"]] = append(known[labels["__name__"]], name)
		}
	}
	return known, nil
}
