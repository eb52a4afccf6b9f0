package configs

import (
	"slices"
	"strings"
)

// documentKey describes a key that is no Setting. The reader of documents knows
// no keys but these, and docs/configuration-reference.md is made from them.
type documentKey struct {
	// path is the key's place, with "[]" behind a key whose value is a list and
	// NAME for a key that the document itself chooses:
	// "mig.configs.NAME[].devices".
	path string
	// form is what the value is, for people: "text", "whole number from 1".
	form string
	// initial is the value without the key, as a document would say it; empty
	// for none, and for what is required.
	initial  string
	required bool
	// choices are the values that can be meant, where they are few.
	choices []string
	// usage says what the key does.
	usage string
	// own says that NVIDIA's plugin, or mig-parted, has no such key.
	own bool
}

// keysOf returns the keys that a mapping at the path may have, sorted.
func keysOf(path string) []string {
	var keys []string
	for _, key := range documentKeys() {
		if rest, ok := strings.CutPrefix(key.path, path+"."); ok {
			first, _, _ := strings.Cut(rest, ".")
			keys = append(keys, strings.TrimSuffix(first, "[]"))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}
