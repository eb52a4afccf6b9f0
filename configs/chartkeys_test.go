package configs

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

const chartKeysFile = "../charts/virgate/files/profile-keys.txt"

// TestReferenceOfChart checks that the chart, which checks the profiles in config.map before they are installed,
// knows the program's keys; with -update it writes the list.
func TestReferenceOfChart(t *testing.T) {
	want := chartKeys()
	if *update {
		if err := os.WriteFile(chartKeysFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	data, err := os.ReadFile(chartKeysFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the list is not what the program knows, make reference writes it (-want +got):\n%s", diff)
	}
}

// chartKeys has a line for each path of a profile: {} after a section, which must be a mapping, {?} after one
// that may be, and the choices after a text with choices.
func chartKeys() string {
	marks := map[string]string{}
	add := func(path string, choices []string) {
		marks[path] = strings.Join(choices, " ")
		for i, c := range path {
			if above := path[:i]; c == '.' && marks[above] == "" {
				marks[above] = "{}"
			}
		}
	}
	for _, key := range slices.Concat(settingKeys(), documentKeys()) {
		if key.Type == TypeEnum {
			add(key.Path, key.Choices)
		} else {
			add(key.Path, nil)
		}
		if key.Formerly != "" {
			add(key.Path[:strings.LastIndexByte(key.Path, '.')+1]+key.Formerly, nil)
		}
	}
	for _, key := range documentKeys() { // In exclude, entries may be text.
		if _, list := marks[key.Path+"[]"]; list {
			marks[key.Path+"[]"] = "{?}"
		}
	}
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(marks)) {
		fmt.Fprintln(&b, strings.TrimSpace(path+" "+marks[path]))
	}
	return b.String()
}

const chartSchemaFile = "../charts/virgate/values.schema.json"

// TestReferenceOfChartValues checks that chart values that stand for a profile's keys have the keys' types and
// choices; with -update it writes them.
func TestReferenceOfChartValues(t *testing.T) {
	data, err := os.ReadFile(chartSchemaFile)
	if err != nil {
		t.Fatal(err)
	}
	want := string(data)
	written := 0
	for _, s := range settingKeys() {
		_, after, found := strings.Cut(want, "\n    \""+s.Path[strings.LastIndexByte(s.Path, '.')+1:]+"\": ")
		if !found {
			continue
		}
		decoder := json.NewDecoder(strings.NewReader(after))
		var old any
		if err := decoder.Decode(&old); err != nil {
			t.Fatal(err)
		}
		schema, err := json.MarshalIndent(chartValue(s), "    ", "  ")
		if err != nil {
			t.Fatal(err)
		}
		want = want[:len(want)-len(after)] + string(schema) + after[decoder.InputOffset():]
		written++
	}
	if *update {
		if err := os.WriteFile(chartSchemaFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := gocmp.Diff(want, string(data)); diff != "" || written != 10 {
		t.Errorf("%d values are not what the program knows, make reference writes them (-want +got):\n%s", written, diff)
	}
}

type valueSchema struct {
	Enum        []any        `json:"enum,omitempty"`
	Type        []string     `json:"type,omitempty"`
	Pattern     string       `json:"pattern,omitempty"`
	Items       *valueSchema `json:"items,omitempty"`
	Description string       `json:"description,omitempty"`
}

// chartValue describes a chart value that stands for the setting; null leaves the setting alone.
func chartValue(s Setting) valueSchema {
	switch s.Type {
	case TypeEnum:
		choices := []any{nil}
		for _, choice := range s.Choices {
			if s.Only == nil || slices.Contains(s.Only, choice) {
				choices = append(choices, choice)
			}
		}
		return valueSchema{Enum: choices}
	case TypeBool:
		return valueSchema{Type: []string{"boolean", "null"}}
	case TypeList:
		last := len(s.Choices) - 1
		choice := "(" + strings.Join(s.Choices, "|") + ")"
		items := &valueSchema{}
		for _, choice := range s.Choices {
			items.Enum = append(items.Enum, choice)
		}
		return valueSchema{
			Type: []string{"string", "array", "null"}, Pattern: "^(" + choice + "(, *" + choice + ")*)?$", Items: items,
			Description: "One or several of " + strings.Join(s.Choices[:last], ", ") + " and " + s.Choices[last] + ", with commas between.",
		}
	}
	return valueSchema{Type: []string{"string", "null"}}
}
