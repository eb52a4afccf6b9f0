package prometheus

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

func TestRulesAreValid(t *testing.T) { promtool(t, "check", "rules", rulesFile) }

// TestScripts runs the promtool tests: synthetic series in, alerts out.
func TestScripts(t *testing.T) {
	for _, file := range scriptFiles(t) {
		t.Run(file, func(t *testing.T) { promtool(t, "test", "rules", file) })
	}
}

// TestEveryRuleHasAScript checks that the scripts see each alert fire and, with series of its metrics, not
// fire before and after it, and that they check each recorded series.
func TestEveryRuleHasAScript(t *testing.T) {
	const quiet, firing, quietAgain = "quiet", "firing", "quiet again"
	seen := map[string][]string{} // The states of an alert in the scripts, in order.
	inputs := map[string]string{}
	var looked strings.Builder
	for _, file := range scriptFiles(t) {
		var script scripts
		readYAML(t, file, &script)
		for _, test := range script.Tests {
			for _, alert := range test.Alerts {
				if test.Name != alert.AlertName {
					t.Errorf("%s: test %q looks at alert %s", file, test.Name, alert.AlertName)
				}
				was := seen[alert.AlertName]
				switch {
				case len(alert.Expected) > 0:
					was = append(was, firing)
				case slices.Contains(was, firing):
					was = append(was, quietAgain)
				default:
					was = append(was, quiet)
				}
				seen[alert.AlertName] = slices.Compact(was)
			}
			for _, input := range test.InputSeries {
				inputs[test.Name] += input.Series + "\n"
			}
			for _, expression := range test.Expressions {
				looked.WriteString(expression.Expression + "\n")
			}
		}
	}
	for _, rule := range allRules(t) {
		if rule.Record != "" {
			if !strings.Contains(looked.String(), rule.Record) {
				t.Errorf("record %s: no promql_expr_test looks at it", rule.Record)
			}
			continue
		}
		if diff := cmp.Diff([]string{quiet, firing, quietAgain}, seen[rule.Alert]); diff != "" {
			t.Errorf("alert %s (-want +seen):\n%s", rule.Alert, diff)
		}
		for _, used := range scan(rule.Expression).selectors {
			if !strings.Contains(used.metric, ":") && !strings.Contains(inputs[rule.Alert], used.metric+"{") {
				t.Errorf("alert %s: its script has no series of %s", rule.Alert, used.metric)
			}
		}
	}
}

// indexAndModel is the template by which a text says which GPU is meant, if known.
const indexAndModel = `{{ with query (printf "virgate_gpu_info{node=%q,gpu_uuid=%q}" $labels.node $labels.gpu_uuid) }}{{ first . | label "index" }} ({{ first . | label "model" }}), {{ end }}{{ $labels.gpu_uuid }}`

// TestThresholds checks that an alert has at most one number that users may replace, that its text does not
// repeat the number, and that the page names it.
func TestThresholds(t *testing.T) {
	page, err := os.ReadFile(metricsFile)
	if err != nil {
		t.Fatal(err)
	}
	marked := regexp.MustCompile(`([0-9.]+) # threshold`)
	rows := regexp.MustCompile("(?m)^\\| `(Virgate[A-Za-z]+)` \\| ([0-9.]+) \\|").FindAllStringSubmatch(string(page), -1)
	documented := map[string]string{}
	for _, row := range rows {
		documented[row[1]] = row[2]
	}
	replaceable := map[string]string{}
	for _, rule := range allRules(t) {
		found := marked.FindAllStringSubmatch(rule.Expression, -1)
		if len(found) > 1 || len(found) != strings.Count(rule.Expression, "#") {
			t.Errorf("alert %s: thresholds %q in %s", rule.Alert, found, rule.Expression)
		}
		for _, threshold := range found {
			replaceable[rule.Alert] = threshold[1]
		}
	}
	if diff := cmp.Diff(replaceable, documented); diff != "" || len(replaceable) == 0 {
		t.Errorf("thresholds of the rules and those in docs/reference/metrics.md (-rules +page):\n%s", diff)
	}
}

// TestAlertsByDesign checks that alerts about intended effects of sharing have the severity info.
func TestAlertsByDesign(t *testing.T) {
	for _, rule := range allRules(t) {
		if slices.Contains([]string{"VirgateTenantsMixed", "VirgateLowUtilization", "VirgateHighUtilization", "VirgateNoFreeShares"}, rule.Alert) && rule.Labels["severity"] != "info" {
			t.Errorf("alert %s: severity %s", rule.Alert, rule.Labels["severity"])
		}
	}
}

// TestAlertsSayWhatToDo checks the form of alerts: how urgent, what it means, where if the expression keeps
// that, and an existing section of the runbook.
func TestAlertsSayWhatToDo(t *testing.T) {
	sections := headings(t, runbookFile, "###")
	const runbook = "https://github.com/virgate/virgate/blob/main/docs/reference/runbook.md#"
	name := regexp.MustCompile(`^Virgate[A-Z][A-Za-z]+$`)
	var alerts []string
	for _, rule := range allRules(t) {
		if rule.Alert == "" {
			continue
		}
		alerts = append(alerts, rule.Alert)
		if !name.MatchString(rule.Alert) {
			t.Errorf("alert %s: not of the form %s", rule.Alert, name)
		}
		if diff := cmp.Diff([]string{"description", "runbook_url", "summary"}, slices.Sorted(maps.Keys(rule.Annotations))); diff != "" {
			t.Errorf("alert %s: annotations (-want +got):\n%s", rule.Alert, diff)
		}
		if severity := rule.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info"}, severity) {
			t.Errorf("alert %s: severity %q", rule.Alert, severity)
		}
		if got, want := rule.Annotations["runbook_url"], runbook+strings.ToLower(rule.Alert); got != want {
			t.Errorf("alert %s: runbook_url %s, want %s", rule.Alert, got, want)
		}
		description := rule.Annotations["description"]
		for _, label := range []string{"node", "gpu_uuid", "unit_uuid", "namespace", "pod", "container", "resource"} {
			if slices.Contains(scan(rule.Expression).kept(), label) && !strings.Contains(description, "$labels."+label) {
				t.Errorf("alert %s: the description does not name the %s", rule.Alert, label)
			}
		}
		if slices.Contains(scan(rule.Expression).kept(), "gpu_uuid") && !strings.Contains(description, indexAndModel) {
			t.Errorf("alert %s: the description lacks the GPU's index and model, which is: %s", rule.Alert, indexAndModel)
		}
	}
	slices.Sort(alerts)
	slices.Sort(sections)
	if diff := cmp.Diff(alerts, sections); diff != "" {
		t.Errorf("alerts and sections of the runbook differ (-alerts +sections):\n%s", diff)
	}
}

// headings returns the Markdown headings of one level.
func headings(t *testing.T, path, level string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(data)) {
		if heading, ok := strings.CutPrefix(line, level+" "); ok {
			found = append(found, strings.TrimSpace(heading))
		}
	}
	return found
}

// ruleFile is a Prometheus rule file, with the fields that the tests check.
type ruleFile struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	} `json:"groups"`
}

// rule is an alert or a recorded series.
type rule struct {
	Alert       string            `json:"alert,omitempty"`
	Record      string            `json:"record,omitempty"`
	Expression  string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// scripts is a promtool test file, with the fields that the tests check.
type scripts struct {
	RuleFiles          []string `json:"rule_files"`
	EvaluationInterval string   `json:"evaluation_interval"`
	GroupEvalOrder     []string `json:"group_eval_order"`
	Tests              []struct {
		Name        string `json:"name"`
		Interval    string `json:"interval"`
		InputSeries []struct {
			Series string `json:"series"`
			Values string `json:"values"`
		} `json:"input_series"`
		Alerts []struct {
			At        string           `json:"eval_time"`
			AlertName string           `json:"alertname"`
			Expected  []map[string]any `json:"exp_alerts"`
		} `json:"alert_rule_test"`
		Expressions []struct {
			Expression string           `json:"expr"`
			At         string           `json:"eval_time"`
			Samples    []map[string]any `json:"exp_samples"`
		} `json:"promql_expr_test"`
	} `json:"tests"`
}

func readYAML(t *testing.T, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(data, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// allRules returns the rules of all groups.
func allRules(t *testing.T) []rule {
	t.Helper()
	var file ruleFile
	readYAML(t, rulesFile, &file)
	var all []rule
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("no rules")
	}
	return all
}

// scriptFiles returns the promtool tests of this folder.
func scriptFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.test.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no promtool tests: %v", err)
	}
	return files
}
