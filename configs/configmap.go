package configs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// ConfigMap is a Kubernetes ConfigMap whose keys hold documents.
type ConfigMap struct {
	// Name is metadata.name; empty if the manifest has none.
	Name string
	// Entries are the documents, by key.
	Entries []ConfigMapEntry
}

// ConfigMapEntry is one key of a ConfigMap.
type ConfigMapEntry struct {
	Key string
	// Kind says which of Config and MIG has the content.
	Kind   Kind
	Config Config
	MIG    MIGConfigs
}

// readConfigMap reads the manifest of a ConfigMap and the documents in its data:
// device-plugin documents, each with the overrides, and mig-parted documents.
//
// A document is called "FILE[data.KEY]" in problems and notes. Its lines are
// those of the manifest where it is written as a literal block ("|"), else its
// own.
func readConfigMap(root value, manifest []byte, overrides Overrides) ConfigMap {
	f := root.mapping("apiVersion", "kind", "metadata", "data", "binaryData", "immutable")
	if version, ok := f.required("apiVersion").text(); ok && version != "v1" {
		f.field("apiVersion").problem("expected v1")
	}
	if kind, ok := f.required("kind").text(); ok && kind != "ConfigMap" {
		f.field("kind").problem("expected ConfigMap")
	}
	f.field("immutable").boolean()
	if v := f.field("binaryData"); !v.absent() {
		v.problem("is not read: put documents under data")
	}
	var result ConfigMap
	for _, e := range f.field("metadata").pairs() {
		if e.key == "name" {
			result.Name, _ = e.value.text()
		}
	}
	result.Entries = readEntries(openEntries(f.field("data"), manifest), overrides)
	return result
}

// openedEntry is a key whose document can be read.
type openedEntry struct {
	key  string
	root value
}

// openEntries opens the documents, by key.
func openEntries(data value, manifest []byte) []openedEntry {
	lines := strings.Split(string(manifest), "\n")
	var opened []openedEntry
	for _, e := range data.pairs() {
		text, ok := readData(e)
		if !ok {
			continue
		}
		inner := &source{
			file:     fmt.Sprintf("%s[%s]", data.source.file, e.value.path),
			offset:   literalOffset(e.value, text, lines),
			problems: data.source.problems,
		}
		if root, ok := inner.open([]byte(text)); ok {
			opened = append(opened, openedEntry{e.key, root})
		}
	}
	slices.SortFunc(opened, func(a, b openedEntry) int { return cmp.Compare(a.key, b.key) })
	return opened
}

// readEntries reads the documents; profiles come last, because they can name
// the layouts of the others.
func readEntries(opened []openedEntry, overrides Overrides) []ConfigMapEntry {
	var entries []ConfigMapEntry
	var layouts MIGConfigs
	for _, o := range opened {
		entry := ConfigMapEntry{Key: o.key, Kind: kindOf(o.root)}
		if entry.Kind == KindMIGConfigs {
			entry.MIG = readMIGConfigs(o.root)
			layouts = layouts.with(entry.MIG)
		} else {
			// Whatever else it looks like, a key has no ConfigMap in it.
			entry.Kind = KindProfile
		}
		entries = append(entries, entry)
	}
	for i, o := range opened {
		if entries[i].Kind == KindProfile {
			entries[i].Config = readProfile(o.root, overrides, layouts)
		}
	}
	return entries
}

// readData reads the text of a key. The API server refuses other keys
// (Kubernetes, apimachinery validation.IsConfigMapKey) and other values.
func readData(e entry) (string, bool) {
	if e.key == "" || len(e.key) > 253 || e.key == "." || strings.HasPrefix(e.key, "..") ||
		strings.Trim(e.key, dataKeyCharacters) != "" {
		e.value.source.problem(place{e.value.source.file, e.line, e.value.path}, quote(e.key),
			"a ConfigMap's key has letters, digits, '-', '_' and '.' only")
		return "", false
	}
	if e.value.shape() != shapeText {
		e.value.problem("expected a document as text, as after \"|\"")
		return "", false
	}
	return e.value.node.Value, true
}

const dataKeyCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."

// literalOffset is the number of lines of the manifest before the text, if the
// text stands there line for line; 0 if not, as for quoted text.
func literalOffset(v value, text string, manifest []string) int {
	for i, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		at := v.line + i
		if at >= len(manifest) || !strings.HasSuffix(strings.TrimRight(manifest[at], "\r"), line) {
			return 0
		}
	}
	return v.line
}
