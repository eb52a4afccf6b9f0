package configs

import (
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

// TestReferenceOfSchema checks that schema.json, which editors read, matches keys.json; with -update it writes
// the file. A document with mig-configs is mig-parted's, one with rules has rules for profiles.
func TestReferenceOfSchema(t *testing.T) {
	rules := jsonSchema(rulesKeys)
	rules["properties"].(map[string]any)[rulesKey].(map[string]any)["items"] = jsonSchema(ruleKeys)
	schema := map[string]any{
		"$schema": "http://json-schema.org/draft-07/schema#",
		"title":   "A profile of Virgate, rules for profiles, or MIG layouts of mig-parted",
		"if":      map[string]any{"required": []string{migConfigsKey}},
		"then":    jsonSchema(migPartedKeys),
		"else": map[string]any{
			"if":   map[string]any{"required": []string{rulesKey}},
			"then": rules,
			"else": jsonSchema(profileKeys),
		},
	}
	text, err := json.MarshalIndent(schema, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	want := string(text) + "\n"
	if *update {
		if err := os.WriteFile("schema.json", []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := gocmp.Diff(want, Schema); diff != "" {
		t.Errorf("the schema is not what the program knows, make reference writes it (-want +got):\n%s", diff)
	}
}

// jsonSchema describes a key in JSON Schema. Optional keys may be null.
func jsonSchema(k *key) map[string]any {
	ways := schemaWays(k)
	orNull := !k.Required && k.name != "" && k.name != "[]"
	s := map[string]any{}
	if len(ways) == 1 {
		s = ways[0]
		if kind, ok := s["type"]; ok && orNull {
			s["type"] = []any{kind, "null"}
		}
		if choices, ok := s["enum"].([]any); ok && orNull {
			s["enum"] = append(choices, nil)
		}
	} else if len(ways) > 1 {
		if orNull {
			ways = append(ways, map[string]any{"type": "null"})
		}
		s["anyOf"] = ways
	}
	if k.Usage != "" {
		s["description"] = k.Usage
	}
	if k.Default != "" {
		s["default"] = schemaDefault(k)
	}
	return s
}

// schemaWays are the schemas of the values that a key may have; nil if it may have any.
func schemaWays(k *key) (ways []map[string]any) {
	if entries := k.child("[]"); entries != nil {
		list := map[string]any{"type": "array", "items": jsonSchema(entries)}
		if k.Empty != "" {
			list["minItems"] = 1
		}
		ways = append(ways, list)
		if k.Choices != nil {
			ways = append(ways, map[string]any{"enum": k.Choices})
		}
		if k.Single {
			ways = append(ways, jsonSchema(entries))
		}
		if k.Min != "" {
			ways = append(ways, map[string]any{"type": "integer", "minimum": 1})
		}
		return ways
	}
	if len(k.children) > 0 {
		ways = append(ways, schemaOfMapping(k))
	}
	if scalar := schemaOfScalar(k); scalar != nil {
		ways = append(ways, scalar...)
	}
	return ways
}

func schemaOfMapping(k *key) map[string]any {
	properties, required := map[string]any{}, []string{}
	s := map[string]any{"type": "object", "additionalProperties": false}
	for _, child := range k.children {
		switch {
		case child.Refused != "": // Like an unknown key.
		case child.isAnyName():
			s["additionalProperties"] = jsonSchema(child)
		default:
			properties[child.name] = jsonSchema(child)
			if child.Formerly != "" {
				properties[child.Formerly] = map[string]any{"deprecated": true, "description": "now " + child.name}
			}
			if child.Required {
				required = append(required, child.name)
			}
		}
	}
	if len(properties) > 0 {
		s["properties"] = properties
	}
	if len(required) > 0 {
		s["required"] = required
	}
	if k.Empty != "" {
		s["minProperties"] = 1
	}
	return s
}

func schemaOfScalar(k *key) []map[string]any {
	text := map[string]any{"type": "string"}
	number := map[string]any{"type": "integer", "minimum": 0}
	switch k.Type {
	case "", typeAny:
		return nil
	case TypeBool:
		return []map[string]any{{"type": "boolean"}}
	case TypeEnum:
		var choices []any
		for _, choice := range k.Choices {
			if k.Only == nil || slices.Contains(k.Only, choice) {
				choices = append(choices, choice)
			}
		}
		return []map[string]any{{"enum": choices}}
	case typeNumber:
		number["minimum"] = json.Number(k.Min)
		if k.Max != "" {
			number["maximum"] = json.Number(k.Max)
		}
		return []map[string]any{number}
	case TypeNumbers:
		return []map[string]any{{"type": "array", "items": number}}
	case TypeList:
		if k.Choices != nil {
			return []map[string]any{text, {"type": "array", "items": map[string]any{"enum": k.Choices}}}
		}
		return []map[string]any{text, {"type": "array", "items": text}}
	case TypeInterval:
		return []map[string]any{text, {"type": "number"}}
	case typeSelector:
		return []map[string]any{text, number}
	case TypePath:
		text["pattern"] = "^(/.*)?$"
	case typeDuration:
		text["pattern"] = `^(0|([0-9.]+(h|m|s|ms|us|µs|ns))+)$`
	case typeMemory:
		text["pattern"] = `^(share|[0-9]+(%|MiB|GiB))$`
	case typePattern, typeResourceName:
		text["minLength"] = 1
	}
	return []map[string]any{text}
}

func schemaDefault(k *key) any {
	switch k.Type {
	case TypeBool:
		return k.Default == "true"
	case typeNumber:
		n, _ := strconv.Atoi(k.Default)
		return n
	case TypeList:
		return strings.Split(k.Default, ",")
	}
	return k.Default
}
