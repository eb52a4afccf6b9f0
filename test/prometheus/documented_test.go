package prometheus

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestQueriesUseDocumentedMetrics is what TestLive holds too, for those without
// Prometheus: docs/metrics.md is made from the program's descriptors.
func TestQueriesUseDocumentedMetrics(t *testing.T) {
	known := documentedMetrics(t)
	for metric := range known {
		// What Prometheus adds, and what the chart's PodMonitor has it add.
		known[metric] = append(known[metric], "job", "instance", "node", "namespace", "pod", "container")
	}
	known["up"] = []string{"job", "instance", "node"}
	known["ALERTS"] = []string{"alertname", "alertstate"}
	for _, rule := range allRules(t) {
		if rule.Record != "" {
			known[rule.Record] = scan(rule.Expression).kept()
		}
	}
	for _, q := range queries(t) {
		for _, problem := range scan(q.text).unknown(known) {
			t.Errorf("%s: %s", q.place, problem)
		}
	}
}

// documentedMetrics are the labels of each metric in docs/metrics.md. A histogram
// has the series that Prometheus makes of it.
func documentedMetrics(t *testing.T) map[string][]string {
	t.Helper()
	data, err := os.ReadFile(metricsFile)
	if err != nil {
		t.Fatal(err)
	}
	const columns = "| metric | type | labels | meaning |"
	if !strings.Contains(string(data), columns) {
		t.Fatalf("%s has no table %s", metricsFile, columns)
	}
	known := map[string][]string{}
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || !strings.HasPrefix(cells[1], " `virgate_") {
			continue
		}
		metric, kind := strings.Trim(cells[1], " `"), strings.TrimSpace(cells[2])
		labels := strings.FieldsFunc(cells[3], func(r rune) bool { return strings.ContainsRune(" ,`", r) })
		if kind == "histogram" {
			known[metric+"_bucket"] = append(slices.Clone(labels), "le")
			known[metric+"_sum"], known[metric+"_count"] = labels, labels
			continue
		}
		known[metric] = labels
	}
	return known
}
