package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// TestProfileSchema checks configs/schema.json against documents: those that the program takes must be
// valid, and a typo must be found.
func TestProfileSchema(t *testing.T) {
	schema, err := jsonschema.NewCompiler().Compile("../../configs/schema.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text string) error {
		var document yaml.Node
		if err := yaml.Unmarshal([]byte(text), &document); err != nil {
			t.Fatal(err)
		}
		return schema.Validate(asJSON(t, &document))
	}
	good := []string{
		"{}", "flags:", "health: {xids: {79: fatal, other: ignore}}", "exclude: [0, GPU-1, {pattern: T4}]",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1}]}}",
		"mig: {configs: {a: [{device-filter: '0x20B010DE', devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]}}",
		"version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}, {devices: [0], mig-enabled: true, mig-devices: {}}]}",
		"rules: [{profile: a, nodeSelector: {}, mig: b}, {profile: c, matchExpressions: [{key: k, operator: In, values: ['1']}]}]\nspread: 5m",
		"flags: {plugin: {deviceListStrategy: [envvar, cdi-cri]}, gfd: {sleepInterval: 5}}\nretireAfter: {shrink: 1h30m}",
	}
	layouts, err := os.ReadFile("../../configs/testdata/cases/mig-parted-names.yaml")
	if err != nil {
		t.Fatal(err)
	}
	good = append(good, string(layouts))
	files, err := filepath.Glob("../../configs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(text), "# yaml-language-server: $schema=https://raw.githubusercontent.com/virgate/virgate/main/configs/schema.json\n") {
			t.Errorf("%s does not name the schema", file)
		}
		good = append(good, string(text))
	}
	for _, text := range good {
		if err := validate(text); err != nil {
			t.Errorf("%v in\n%s", err, text)
		}
	}
	for _, text := range []string{
		"flag: {}", "flags: {migStrategy: mixd}", "flags: {deviceDiscoveryStrategy: tegra}", "retireAfter: {shrink: 5}",
		"sharing: {timeSlicing: {resources: [{name: gpu}]}}", "sharing: {mps: {resources: [{name: gpu, replicas: 49}]}}",
		"mig: {configs: {a: []}}", "dra: {resources: some}", "exclude: [{}]", "sharing: []",
		"mig-configs: {a: [{devices: all, mig-enabled: false}]}", "version: v1\nmig-configs: {a: [{devices: all}]}",
		"version: v1\nmig-configs: {}", "rules: [{nodeSelector: {}}]", "rules: [{profile: a, nodeSelector: {b: 1}}]", "rules: []\nflags:",
		"rules: [{profile: a, matchExpressions: [{key: k, operator: Is}]}]", "mig: {allowed: [null]}", "dra: {resources: [null]}",
	} {
		if validate(text) == nil {
			t.Errorf("the schema accepts %s", text)
		}
	}
}

// asJSON returns the value of a node as JSON has it, with text keys only.
func asJSON(t *testing.T, node *yaml.Node) any {
	t.Helper()
	switch node.Kind {
	case yaml.DocumentNode:
		return asJSON(t, node.Content[0])
	case yaml.MappingNode:
		mapping := map[string]any{}
		for i := 0; i < len(node.Content); i += 2 {
			mapping[node.Content[i].Value] = asJSON(t, node.Content[i+1])
		}
		return mapping
	case yaml.SequenceNode:
		list := []any{}
		for _, item := range node.Content {
			list = append(list, asJSON(t, item))
		}
		return list
	}
	var value any
	if err := node.Decode(&value); err != nil {
		t.Fatal(err)
	}
	return value
}
