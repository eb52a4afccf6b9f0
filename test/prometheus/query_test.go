package prometheus

import (
	"bufio"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// query is an expression and its place.
type query struct{ place, text string }

// queries returns all expressions of this repository: those of the rules, the dashboards and the documents.
func queries(t *testing.T) []query {
	t.Helper()
	var all []query
	for _, rule := range allRules(t) {
		all = append(all, query{"rule " + rule.Alert + rule.Record, rule.Expression})
	}
	for _, file := range dashboardFiles(t) {
		for _, panel := range readDashboard(t, file).Panels {
			for _, target := range panel.Targets {
				all = append(all, query{filepath.Base(file) + ", " + panel.Title, substitute(target.Expression)})
			}
		}
	}
	return append(all, documentQueries(t)...)
}

var (
	queryBlock = regexp.MustCompile("(?s)```promql\n(.*?)\n```")
	// inlineQuery is a span of code with a matcher or a function, so `metric{label}` is not one.
	inlineQuery = regexp.MustCompile("`([^`\n]*virgate_[^`\n]*(?:=\"|\\()[^`\n]*|[^`\n]*\\([^`\n]*virgate_[^`\n]*)`")
)

// documentQueries returns those in the documents, in blocks and within sentences.
func documentQueries(t *testing.T) []query {
	t.Helper()
	files, err := filepath.Glob(repository + "/docs/*/*.md")
	if err != nil || len(files) < 20 {
		t.Fatalf("documents: %v, %v", files, err)
	}
	var all []query
	for _, file := range append(files, repository+"/README.md") {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		blocks := queryBlock.FindAllStringSubmatch(string(data), -1)
		rest := queryBlock.ReplaceAllString(string(data), "")
		for _, match := range append(blocks, inlineQuery.FindAllStringSubmatch(rest, -1)...) {
			all = append(all, query{filepath.Base(file), match[1]})
		}
	}
	if len(all) < 15 {
		t.Fatalf("%d queries in the documents: the patterns miss some", len(all))
	}
	return all
}

// ofOthers are the labels of other programs' metrics that queries use.
func ofOthers() map[string][]string {
	// dcgm-exporter's; vgpu with --kubernetes-virtual-gpus, the instance's with MIG enabled.
	dcgm := []string{"UUID", "GPU_I_ID", "GPU_I_PROFILE", "gpu", "device", "Hostname", "namespace", "pod", "container", "vgpu", "instance", "job"}
	return map[string][]string{
		"kube_node_info":                {"node"},
		"DCGM_FI_DEV_POWER_USAGE":       dcgm,
		"DCGM_FI_PROF_GR_ENGINE_ACTIVE": dcgm,
	}
}

// substitute replaces Grafana's variables by values.
func substitute(text string) string {
	return strings.NewReplacer("$node", "n1", "$gpu", ".*", "$__rate_interval", "1m").Replace(text)
}

// TestQueriesAreValid has promtool check every expression as a rule's.
func TestQueriesAreValid(t *testing.T) {
	type recorded struct {
		Record     string `json:"record"`
		Expression string `json:"expr"`
	}
	all := queries(t)
	rules := make([]recorded, len(all))
	for i, q := range all {
		rules[i] = recorded{"x", q.text}
	}
	data, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "queries", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "queries.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", "--lint=none", path)
}

var templated = regexp.MustCompile(`\{\{ ?\$?(?:labels\.)?([a-z_]+) ?\}\}`)

// TestLegendsUseWhatIsLeft checks that a legend names only labels that the query's result has.
func TestLegendsUseWhatIsLeft(t *testing.T) {
	for _, file := range dashboardFiles(t) {
		for _, panel := range readDashboard(t, file).Panels {
			for _, target := range panel.Targets {
				kept := scan(substitute(target.Expression)).kept()
				for _, match := range templated.FindAllStringSubmatch(target.Legend, -1) {
					if !slices.Contains(kept, match[1]) {
						t.Errorf("%s, %s: legend %q, but the result has %v", filepath.Base(file), panel.Title, target.Legend, kept)
					}
				}
			}
		}
	}
}

// question is one of docs/reference/queries.md.
type question struct{ number, title, text string }

var asked = regexp.MustCompile("(?ms)^### (\\d+)\\. ([^\n]*)$(?:[^#`]|`[^`])*```promql\n(.*?)\n```$")

// questions returns the questions that docs/reference/queries.md answers.
func questions(t *testing.T) []question {
	t.Helper()
	data, err := os.ReadFile(questionFile)
	if err != nil {
		t.Fatal(err)
	}
	var all []question
	for _, match := range asked.FindAllStringSubmatch(string(data), -1) {
		all = append(all, question{match[1], match[2], match[3]})
	}
	if len(all) != len(headings(t, questionFile, "###")) || len(all) != 10 {
		t.Fatalf("%d questions with a query, want 10", len(all))
	}
	return all
}

// expression lists what a PromQL expression uses.
type expression struct {
	// selectors are the metrics, each with the labels that its braces match.
	selectors []selector
	// groupings are the labels of by, without, on, ignoring, group_left and
	// group_right.
	groupings []grouping
}

type selector struct {
	metric string
	labels []string
}

type grouping struct {
	keyword string
	labels  []string
}

// kept returns the labels of the first grouping by, which in the rules of this repository are those of the
// result.
func (e expression) kept() []string {
	for _, g := range e.groupings {
		if g.keyword == "by" {
			return g.labels
		}
	}
	return nil
}

// unknown lists what in the expression is not among the known metrics and their labels.
func (e expression) unknown(known map[string][]string) (problems []string) {
	if len(e.selectors) == 0 {
		return []string{"no metric in it"}
	}
	var labels []string
	for _, s := range e.selectors {
		has, ok := known[s.metric]
		if !ok {
			problems = append(problems, "there is no metric "+s.metric)
			continue
		}
		labels = append(labels, has...)
		for _, label := range s.labels {
			if !slices.Contains(has, label) {
				problems = append(problems, fmt.Sprintf("%s has no label %s", s.metric, label))
			}
		}
	}
	for _, g := range e.groupings {
		for _, label := range g.labels {
			if !slices.Contains(labels, label) {
				problems = append(problems, fmt.Sprintf("%s %s: no metric in it has that label", g.keyword, label))
			}
		}
	}
	return problems
}

var (
	comment = regexp.MustCompile(`(?m) # .*$`)
	tokens  = regexp.MustCompile("\"(?:[^\"\\\\]|\\\\.)*\"|'(?:[^'\\\\]|\\\\.)*'|`[^`]*`" + // strings
		`|\[[^\]]*\]` + // ranges
		`|[0-9][0-9a-zA-Z_.]*` + // numbers and durations
		`|[a-zA-Z_:][a-zA-Z0-9_:]*` + // names
		`|\S`)
	named = regexp.MustCompile(`^[a-zA-Z_:]`)
)

// scan reads an expression that promtool has found valid. It knows just enough grammar to tell metrics,
// labels and functions apart.
func scan(text string) expression {
	var e expression
	words := tokens.FindAllString(comment.ReplaceAllString(text, ""), -1)
	after := func(i int) string {
		if i+1 < len(words) {
			return words[i+1]
		}
		return ""
	}
	for i := 0; i < len(words); i++ {
		word := words[i]
		switch next := after(i); {
		case !named.MatchString(word):
		case slices.Contains([]string{"by", "without", "on", "ignoring", "group_left", "group_right"}, word):
			g := grouping{keyword: word}
			if next == "(" {
				for i += 2; words[i] != ")"; i++ {
					if named.MatchString(words[i]) {
						g.labels = append(g.labels, words[i])
					}
				}
			}
			e.groupings = append(e.groupings, g)
		case slices.Contains([]string{"and", "or", "unless", "bool", "offset"}, word), next == "(", next == "by", next == "without":
		default:
			s := selector{metric: word}
			if next == "{" {
				for i += 2; words[i] != "}"; i++ {
					if named.MatchString(words[i]) {
						s.labels = append(s.labels, words[i])
					}
				}
			}
			e.selectors = append(e.selectors, s)
		}
	}
	return e
}

func TestScan(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       expression
	}{
		{"a metric", `up`, expression{selectors: []selector{{metric: "up"}}}},
		{"matchers", `a{b="x,}", c=~'d'} == 1`, expression{selectors: []selector{{"a", []string{"b", "c"}}}}},
		{
			"an aggregation", `sum by (node, gpu) (rate(a_total{b="1"}[5m:1m] offset 10m)) > 0.5`,
			expression{[]selector{{"a_total", []string{"b"}}}, []grouping{{"by", []string{"node", "gpu"}}}},
		},
		{"grouping behind", `sum(a) without (pod)`, expression{[]selector{{metric: "a"}}, []grouping{{"without", []string{"pod"}}}}},
		{
			"a join", `x:a:sum / on (node) group_left () max(b) and ignoring (c) 1e9 * d unless e`,
			expression{
				[]selector{{metric: "x:a:sum"}, {metric: "b"}, {metric: "d"}, {metric: "e"}},
				[]grouping{{"on", []string{"node"}}, {keyword: "group_left"}, {"ignoring", []string{"c"}}},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, scan(test.text), cmp.AllowUnexported(expression{}, selector{}, grouping{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestUnknown(t *testing.T) {
	known := map[string][]string{"a": {"x", "y"}, "b": {"z"}}
	for _, test := range []struct {
		name, text string
		want       []string
	}{
		{"all known", `sum by (x, z) (a{y="1"} * on (z) b)`, nil},
		{"no metric", `vector(1)`, []string{"no metric in it"}},
		{"a metric", `c{x="1"}`, []string{"there is no metric c"}},
		{"another metric's label", `a{z="1"} and b`, []string{"a has no label z"}},
		{"a grouping", `sum by (w) (a)`, []string{"by w: no metric in it has that label"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, scan(test.text).unknown(known)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

var (
	exposedSeries = regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? `)
	exposedLabel  = regexp.MustCompile(`([a-z_]+)="(?:[^"\\]|\\.)*"`)
)

// exposed returns the labels of each metric on a program's /metrics, including those without a value.
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

// TestQueriesUseDocumentedMetrics checks the same as TestLive, without Prometheus: docs/reference/metrics.md is
// generated from the program's descriptors.
func TestQueriesUseDocumentedMetrics(t *testing.T) {
	known := documentedMetrics(t)
	for metric := range known {
		// Labels that Prometheus adds, and those that the chart's PodMonitor makes it add.
		known[metric] = append(known[metric], "job", "instance", "node", "namespace", "pod", "container")
	}
	known["up"] = []string{"job", "instance", "node"}
	maps.Copy(known, ofOthers())
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

// documentedMetrics returns the labels of each metric in docs/reference/metrics.md. A histogram has the series that
// Prometheus makes of it.
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
