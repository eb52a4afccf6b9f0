package prometheus

import (
	"fmt"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// expression is what a PromQL expression uses.
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

// kept are the labels of the first grouping by, which in the rules of this
// repository are those of the result.
func (e expression) kept() []string {
	for _, g := range e.groupings {
		if g.keyword == "by" {
			return g.labels
		}
	}
	return nil
}

// unknown says what of the expression is not among the known metrics and their
// labels.
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
	tokens = regexp.MustCompile("\"(?:[^\"\\\\]|\\\\.)*\"|'(?:[^'\\\\]|\\\\.)*'|`[^`]*`" + // strings
		`|\[[^\]]*\]` + // ranges
		`|[0-9][0-9a-zA-Z_.]*` + // numbers and durations
		`|[a-zA-Z_:][a-zA-Z0-9_:]*` + // names
		`|\S`)
	named = regexp.MustCompile(`^[a-zA-Z_:]`)
)

// scan reads an expression that promtool has found valid. It knows as much of
// the grammar as it takes to tell metrics, labels and functions apart.
func scan(text string) expression {
	var e expression
	words := tokens.FindAllString(text, -1)
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
