package prometheus

import (
	"bufio"
	"net/http"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	exposedSeries = regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? `)
	exposedLabel  = regexp.MustCompile(`([a-z_]+)="(?:[^"\\]|\\.)*"`)
)

// exposed are the labels of each metric on a program's /metrics, those without a
// value too.
func exposed(t *testing.T, address string) map[string][]string {
	t.Helper()
	response, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	known := map[string][]string{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if metric, labels := readSeries(lines.Text()); metric != "" {
			known[metric] = labels
		}
	}
	return known
}

// readSeries reads a line of Prometheus' text format. A comment has no metric.
func readSeries(line string) (metric string, labels []string) {
	series := exposedSeries.FindStringSubmatch(line)
	if series == nil {
		return "", nil
	}
	for _, label := range exposedLabel.FindAllStringSubmatch(series[2], -1) {
		labels = append(labels, label[1])
	}
	return series[1], labels
}

func TestReadSeries(t *testing.T) {
	for _, test := range []struct {
		name, line, metric string
		labels             []string
	}{
		{"a comment", `# HELP virgate_x X{a="b"} of 1.`, "", nil},
		{"no labels", "virgate_x 1", "virgate_x", nil},
		{"empty and odd values", `virgate_x{a="",b="c=\"d\"} e=\"",f="g"} 1.5e+09`, "virgate_x", []string{"a", "b", "f"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			metric, labels := readSeries(test.line)
			if metric != test.metric {
				t.Errorf("metric %q, want %q", metric, test.metric)
			}
			if diff := cmp.Diff(test.labels, labels); diff != "" {
				t.Error(diff)
			}
		})
	}
}
