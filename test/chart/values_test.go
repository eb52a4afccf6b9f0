package chart

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// schema is what values.schema.json says of a value.
type schema struct {
	Properties  map[string]schema
	Description string
	// Type is a name or a list of names.
	Type any
	Enum []any
	// MaxLength of a text is 0 for a list or a mapping that may be an empty text, too.
	MaxLength *int `json:"maxLength"`
}

// paths are those of the values that the schema knows, without values.global,
// which is Helm's, and without those of which it says that they have no meaning.
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

// TestEveryValueCounts checks that for each value that the schema allows some
// file of testdata sets it, and renders another manifest than without it.
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

// remove says whether there was a value at the path.
func remove(values map[string]any, path []string) bool {
	value, set := values[path[0]]
	if len(path) == 1 {
		delete(values, path[0])
		return set
	}
	inner, ok := value.(map[string]any)
	return ok && remove(inner, path[1:])
}
