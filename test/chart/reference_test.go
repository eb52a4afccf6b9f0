package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

const (
	referenceFile   = "../../docs/reference/chart-values.md"
	referenceBegins = "<!-- From here on the page is made from the chart: make reference -->\n"
)

// TestValuesReference checks that docs/reference/chart-values.md has each value of the chart with its
// default, its allowed values and the comment of values.yaml, and that each has a comment. With -update it
// writes the page.
func TestValuesReference(t *testing.T) {
	data, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(data), referenceBegins)
	if !ok {
		t.Fatalf("%s lacks the line %s", referenceFile, referenceBegins)
	}
	want := head + referenceBegins + valuesTable(t)
	if *update {
		if err := os.WriteFile(referenceFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the page is not what the chart has, make reference writes it (-want +got):\n%s", diff)
	}
}

func valuesTable(t *testing.T) string {
	t.Helper()
	var all schema
	if err := json.Unmarshal(load(t).Schema, &all); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(folder + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString("\n| value | default | may be | meaning |\n|---|---|---|---|\n")
	for _, path := range all.paths() {
		comment, value := lookUp(document.Content[0], strings.Split(path, "."))
		if comment == "" {
			t.Errorf("values.yaml says nothing of %s", path)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", path, defaultText(t, value), all.at(path).allowed(), comment)
	}
	return b.String()
}

// lookUp returns the comment of a value in one line, and the value. A comment with a blank line before the
// key belongs to a group.
func lookUp(node *yaml.Node, path []string) (string, *yaml.Node) {
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if key.Value != path[0] {
			continue
		}
		if len(path) > 1 {
			return lookUp(value, path[1:])
		}
		paragraphs := strings.Split(strings.TrimSpace(key.HeadComment), "\n\n")
		lines := strings.Split(paragraphs[len(paragraphs)-1], "\n")
		for i := range lines {
			lines[i] = strings.TrimPrefix(lines[i], "# ")
		}
		return strings.Join(lines, " "), value
	}
	return "", nil
}

// defaultText returns the default as YAML in one line, if that is short.
func defaultText(t *testing.T, value *yaml.Node) string {
	t.Helper()
	if value == nil {
		return "none"
	}
	var content any
	if err := value.Decode(&content); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	const shown = 60
	if len(text) > shown {
		return "see values.yaml"
	}
	return "`" + string(text) + "`"
}

// at returns the schema of a value.
func (s schema) at(path string) schema {
	for name := range strings.SplitSeq(path, ".") {
		s = s.Properties[name]
	}
	return s
}

// allowed describes the allowed values besides null, which stands for the default.
func (s schema) allowed() string {
	var texts []string
	for _, value := range s.Enum {
		if value != nil {
			texts = append(texts, fmt.Sprintf("`%v`", value))
		}
	}
	switch types := s.Type.(type) {
	case string:
		texts = append(texts, types)
	case []any:
		for _, name := range types {
			if name != "null" && (name != "string" || s.MaxLength == nil) { // --set NAME= gives an empty text instead of nothing.
				texts = append(texts, fmt.Sprint(name))
			}
		}
	}
	return strings.Join(texts, ", ")
}
