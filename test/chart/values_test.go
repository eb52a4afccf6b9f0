package chart

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// schema is the entry of a value in values.schema.json.
type schema struct {
	Properties  map[string]schema
	Description string
	// Type is a name or a list of names.
	Type any
	Enum []any
	// MaxLength is 0 for a list or a mapping that may also be an empty text.
	MaxLength *int `json:"maxLength"`
}

// paths returns the paths of the values in the schema, without values.global, which is Helm's, and without
// those that the schema describes as having no meaning.
func (s schema) paths() []string {
	var paths []string
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		value := s.Properties[name]
		switch {
		case name == "global" || strings.HasSuffix(value.Description, "it has no meaning here."):
		case value.Properties == nil:
			paths = append(paths, name)
		default:
			for _, path := range value.paths() {
				paths = append(paths, name+"."+path)
			}
		}
	}
	return paths
}

// TestEveryValueCounts checks that for each value in the schema some file of testdata sets it, and that
// this changes the manifest.
func TestEveryValueCounts(t *testing.T) {
	var all schema
	if err := json.Unmarshal(load(t).Schema, &all); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	with := map[string]string{}
	for _, file := range files {
		if with[file], _, err = render(t, read(t, file)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range all.paths() {
		if !slices.ContainsFunc(files, func(file string) bool {
			values := read(t, file)
			if !remove(values, strings.Split(path, ".")) {
				return false
			}
			without, _, err := render(t, values)
			return err != nil || without != with[file]
		}) {
			t.Errorf("%s makes no difference in any file of testdata", path)
		}
	}
}

// remove removes the value at the path and reports whether it was set.
func remove(values map[string]any, path []string) bool {
	value, set := values[path[0]]
	if len(path) == 1 {
		delete(values, path[0])
		return set
	}
	inner, ok := value.(map[string]any)
	return ok && remove(inner, path[1:])
}
