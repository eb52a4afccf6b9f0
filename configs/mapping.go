package configs

import (
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// entry is a key of a mapping with its value.
type entry struct {
	key   string
	line  int
	value value
}

// fields are the entries of a mapping whose keys are known.
type fields struct {
	parent  value
	entries map[string]value
}

// field returns the value under key; it is absent, at the parent's line, when
// the key is not there.
func (f fields) field(key string) value {
	if v, ok := f.entries[key]; ok {
		return v
	}
	return value{source: f.parent.source, path: join(f.parent.path, key), line: f.parent.line}
}

// required is field that reports an absent value.
func (f fields) required(key string) value {
	v := f.field(key)
	if v.absent() {
		v.source.problem(v.place(), "", "is required")
	}
	return v
}

// mapping reads a mapping that may have the known keys and no others.
func (v value) mapping(known ...string) fields {
	f := fields{parent: v, entries: make(map[string]value)}
	for _, e := range v.pairs() {
		if slices.Contains(known, e.key) {
			f.entries[e.key] = e.value
			continue
		}
		message := "unknown key"
		if near := nearest(e.key, known); near != "" {
			message += ", did you mean " + near + "?"
		}
		v.source.problem(place{v.source.file, e.line, e.value.path}, "", message)
	}
	return f
}

// pairs reads a mapping with any keys, in the order of the document. Of a
// repeated key it reports all but the first. A merge key ("<<") adds what its
// mappings have and this one has not, after its own keys.
func (v value) pairs() []entry {
	if v.absent() {
		return nil
	}
	if v.shape() != shapeMapping {
		v.problem("expected a mapping")
		return nil
	}
	var own []entry
	var merged []value
	lines := make(map[string]int)
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key := v.source.newValue(v.path, v.node.Content[i])
		if key.node.ShortTag() == "!!merge" {
			merged = append(merged, v.source.newValue(join(v.path, "<<"), v.node.Content[i+1]))
			continue
		}
		if key.node.Kind != yaml.ScalarNode || key.absent() {
			key.problem("expected text as the key")
			continue
		}
		name := key.node.Value
		path := join(v.path, name)
		if first, again := lines[name]; again {
			v.source.problem(place{v.source.file, key.line, path}, "", "the key is repeated, it is on line "+strconv.Itoa(first)+" already")
			continue
		}
		lines[name] = key.line
		own = append(own, entry{name, key.line, v.source.newValue(path, v.node.Content[i+1])})
	}
	for _, e := range mergedPairs(merged) {
		if _, has := lines[e.key]; !has {
			lines[e.key] = e.line
			e.value.path = join(v.path, e.key)
			own = append(own, e)
		}
	}
	return own
}

// mergedPairs are the entries behind merge keys, of which the first counts. A
// merge key has a mapping or a list of mappings.
func mergedPairs(merged []value) []entry {
	var pairs []entry
	for _, v := range merged {
		mappings := []value{v}
		if v.shape() == shapeList {
			mappings, _ = v.items()
		}
		for _, mapping := range mappings {
			pairs = append(pairs, mapping.pairs()...)
		}
	}
	return pairs
}

// join appends a key to a path, quoted where it would make the path unreadable.
func join(path, key string) string {
	plain := key != "" && len(key) <= valueShown && strings.Trim(key, keyCharacters) == ""
	switch {
	case !plain:
		return path + "[" + quote(key) + "]"
	case path == "":
		return key
	default:
		return path + "." + key
	}
}

const keyCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._+<,"
