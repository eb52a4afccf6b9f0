package prometheus

import (
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"
)

// ruleFile is a Prometheus rule file, as far as the tests look at it.
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

// scripts is a promtool test file, as far as the tests look at it.
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

// allRules are the rules of all groups.
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

// scriptFiles are the promtool tests of this folder.
func scriptFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.test.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no promtool tests: %v", err)
	}
	return files
}
