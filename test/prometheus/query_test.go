package prometheus

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// query is an expression with the place where it stands.
type query struct{ place, text string }

// queries are all expressions of this repository: those of the rules, the
// dashboards and the questions.
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
	for _, q := range questions(t) {
		all = append(all, query{"question " + q.title, q.text})
	}
	return all
}

// substitute puts values where Grafana does.
func substitute(text string) string {
	return strings.NewReplacer("$node", "n1", "$gpu", ".*", "$__rate_interval", "1m").Replace(text)
}

// TestQueriesAreValid has promtool read every expression, as that of a rule.
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

// TestLegendsUseWhatIsLeft holds that a legend names only labels that the
// query's result has.
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
