package prometheus

import (
	"os"
	"regexp"
	"testing"
)

// question is one of docs/monitoring.md.
type question struct{ number, title, text string }

var asked = regexp.MustCompile("(?ms)^### (\\d+)\\. ([^\n]*)$(?:[^#`]|`[^`])*```promql\n(.*?)\n```$")

// questions are those that docs/monitoring.md answers.
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
