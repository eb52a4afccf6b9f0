package configs

import (
	"bytes"
	stdcmp "cmp"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"

	"github.com/virgate/virgate/sharing"
)

const (
	pathShare    = "sharing.timeSlicing.resources[]"
	pathMPS      = "sharing.mps"
	pathMIGBlock = "mig.configs.NAME[]"
)

// settingKeys are the documented keys that a flag or a variable may set; documentKeys are all others.
func settingKeys() []Setting { return keysWith(true) }

func documentKeys() []Setting { return keysWith(false) }

func keysWith(setting bool) (found []Setting) {
	for _, s := range keyTable.Profile {
		if s.Usage != "" && setting == (strings.HasPrefix(s.Path, "flags.") || strings.HasPrefix(s.Path, "imex.")) {
			found = append(found, s)
		}
	}
	return found
}

// sampleEntry is a minimal valid entry of the list at that path, in YAML.
func sampleEntry(list string) string {
	switch list {
	case pathMPS + ".resources[]":
		return "{name: nvidia.com/gpu, replicas: 2}"
	case "sharing.timeSlicing", pathMPS:
		return "{resources: [{name: nvidia.com/gpu, replicas: 2}]}"
	case pathShare:
		return "{name: nvidia.com/gpu, replicas: 1, policy: spread}"
	case pathShare + ".memory", pathMPS + ".resources[]" + ".memory":
		return "{limit: share}"
	case "resources.gpus[]", "resources.mig[]":
		return "{pattern: A, name: nvidia.com/a}"
	case pathMIGBlock:
		return "{devices: all, mig-enabled: true, mig-devices: {}}"
	}
	return "{}"
}

// sampleValue is a value that the key may have, in YAML.
func sampleValue(key Setting) string {
	switch {
	case len(key.Choices) > 0:
		return key.Choices[len(key.Choices)-1]
	case key.Default != "":
		return key.Default
	}
	switch key.Type {
	case typeResourceName:
		return "nvidia.com/gpu"
	case TypeBool:
		return "true"
	}
	switch key.Form {
	case "list of indexes, UUIDs, PCI bus IDs and patterns":
		return "[0]"
	case "list":
		return "[]"
	case "all, or a list of resource names":
		return "[nvidia.com/gpu]"
	case "mapping from MIG profiles to whole numbers":
		return "{1g.5gb: 1}"
	case "all, or a list of GPU indexes":
		return "all"
	}
	switch key.Path {
	case "health.temperature.limit":
		return "90"
	case pathShare + ".memory.limit", pathMPS + ".resources[]" + ".memory.limit":
		return "40%"
	case pathShare + ".replicas", pathMPS + ".resources[]" + ".replicas":
		return "4"
	case "retireAfter.shrink":
		return "5m"
	case "mig.config":
		return "all-balanced"
	case "mig.allowed":
		return "[all-balanced]"
	case "health.xids":
		return "{79: fatal, other: ignore}"
	case pathMIGBlock + ".device-filter":
		return `["0x20B010DE"]`
	}
	return "A"
}

// edit is a document that has the key's section, changed.
func edit(t *testing.T, key Setting, change func(section map[string]any, name string)) string {
	t.Helper()
	section, name := cutLast("." + key.Path)
	section = strings.TrimPrefix(section, ".")
	inner := map[string]any{}
	if err := yaml.Unmarshal([]byte(sampleEntry(section)), &inner); err != nil {
		t.Fatal(err)
	}
	change(inner, name)
	var document any = inner
	for section != "" {
		outer, last := cutLast("." + section)
		if entry := strings.TrimPrefix(outer, "."); entry == pathShare || entry == pathMPS+".resources[]" {
			document = map[string]any{"name": "nvidia.com/gpu", "replicas": 4, last: document}
			section = entry
			continue
		}
		section = strings.TrimPrefix(outer, ".")
		if plain, list := strings.CutSuffix(last, "[]"); list {
			last, document = plain, []any{document}
		}
		document = map[string]any{last: document}
	}
	text, err := yaml.Marshal(document)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// written is a document in which the key has the value.
func (key Setting) written(t *testing.T, value string) string {
	return edit(t, key, func(section map[string]any, name string) {
		var content any
		if err := yaml.Unmarshal([]byte(value), &content); err != nil {
			t.Fatal(err)
		}
		section[name] = content
	})
}

// inDocument is the key's path in such a document.
func (key Setting) inDocument() string { return strings.ReplaceAll(key.Path, "[]", "[0]") }

// TestDocumentKeys checks that the reader matches the table for each key: its values, its default, whether it is
// required, and whether it is Virgate's own.
func TestDocumentKeys(t *testing.T) {
	seen := map[string]bool{}
	for _, key := range documentKeys() {
		t.Run(key.Path, func(t *testing.T) {
			if seen[key.Path] || stdcmp.Or(key.Form, valueForm(key)) == "" {
				t.Fatal("is there twice, or says nothing")
			}
			seen[key.Path] = true
			without := edit(t, key, func(section map[string]any, name string) { delete(section, name) })
			config := parse(t, key.written(t, sampleValue(key)))
			if note := slices.ContainsFunc(config.Notes, func(n Note) bool { return strings.Contains(n.Message, "Virgate's own") }); key.Own && !note {
				t.Errorf("own, but the notes are %v", config.Notes)
			}
			for _, choice := range key.Choices {
				parse(t, key.written(t, choice))
			}
			if key.Choices != nil {
				key.refused(t, key.written(t, "nonsense"), "expected")
			}
			if key.Type == TypeBool {
				key.refused(t, key.written(t, "nonsense"), "expected true or false")
			}
			if key.Required {
				key.refused(t, without, "is required")
			}
			if key.Default != "" {
				if diff := cmp.Diff(parse(t, without), parse(t, key.written(t, key.Default)), compareSelectors, cmpopts.IgnoreFields(Config{}, "Notes")); diff != "" {
					t.Errorf("the default changes something (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// TestEveryKeyIsRead checks that each key changes the profile. TestKeysAreUsed in test/repository checks that the
// program uses each field of the profile.
func TestEveryKeyIsRead(t *testing.T) {
	ofEachType := []string{"true", "false", "7", "2s", "2h", "30%", "other", "/other", "other/", "[0]", "{}", "nvidia.com/mig-1g.5gb"}
	for _, key := range slices.Concat(settingKeys(), documentKeys()) {
		if key.Path == "version" || key.Type == typeAny {
			continue // The version has one value; the program ignores values of keys of any type.
		}
		results := []Config{}
		for _, value := range slices.Concat(ofEachType, key.Choices, []string{sampleValue(key)}) {
			if config, err := Parse("", []byte(key.written(t, value)), nil); err == nil {
				results = append(results, config)
			}
		}
		changes := func(c Config) bool {
			return !cmp.Equal(results[0], c, compareSelectors, cmpopts.EquateErrors(), cmpopts.IgnoreFields(Config{}, "Notes"))
		}
		if without, err := Parse("", []byte(edit(t, key, func(section map[string]any, name string) { delete(section, name) })), nil); err == nil {
			results = append(results, without)
		}
		if !slices.ContainsFunc(results, changes) {
			t.Errorf("%s: %d values give the same profile: nothing reads it", key.Path, len(results))
		}
	}
}

// refused checks that the key, and so the document, is refused.
func (key Setting) refused(t *testing.T, document, want string) {
	t.Helper()
	_, err := Parse("", []byte(document), nil)
	var problems Problems
	errors.As(err, &problems)
	if !slices.ContainsFunc(problems, func(p Problem) bool {
		return p.Path == key.inDocument() && strings.Contains(p.Message, want)
	}) {
		t.Errorf("error is %v, want %q at %s of:\n%s", err, want, key.inDocument(), document)
	}
}

// TestKeysOfTheRoot checks that the table and the settings have exactly the keys at the top of a profile.
func TestKeysOfTheRoot(t *testing.T) {
	tops := map[string]bool{}
	for _, key := range documentKeys() {
		top, _, _ := strings.Cut(strings.ReplaceAll(key.Path, "[]", ""), ".")
		tops[top] = true
	}
	for _, s := range settingKeys() {
		top, _, _ := strings.Cut(s.Path, ".")
		tops[top] = true
	}
	for top := range maps.Keys(tops) {
		if _, err := Parse("", []byte(top+":"), nil); err != nil {
			t.Errorf("%s: %v", top, err)
		}
	}
	if _, err := Parse("", []byte("{version: , flags: , resources: , sharing: , imex: , exclude: , retireAfter: , mig: , health: , dra: }"), nil); err != nil || len(tops) != 10 {
		t.Errorf("%d keys, %v", len(tops), err)
	}
}

// TestKeyTable checks that keys.json has no unknown field, and every policy.
func TestKeyTable(t *testing.T) {
	decoder := json.NewDecoder(bytes.NewReader(keyFile))
	decoder.DisallowUnknownFields()
	var table keys
	if err := decoder.Decode(&table); err != nil {
		t.Error(err)
	}
	choices := map[string][]string{}
	for _, s := range settingKeys() {
		choices[s.Path] = s.Choices
	}
	for _, key := range documentKeys() {
		choices[key.Path] = key.Choices
	}
	var policies []string
	for _, policy := range sharing.AllocationPolicies() {
		policies = append(policies, string(policy))
	}
	for _, path := range []string{pathPolicy, pathShare + ".policy"} {
		if diff := cmp.Diff(policies, choices[path]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}

func cutLast(path string) (section, key string) {
	dot := strings.LastIndexByte(path, '.')
	return path[:dot], path[dot+1:]
}
