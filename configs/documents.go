package configs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Documents are texts by name: the data of a ConfigMap, or the files of a
// directory where one is mounted. Unlike in a manifest, what is wrong with one
// of them does not concern the others: a node reads the one it was told to.
type Documents map[string]string

// Profiles returns the names of those that are not mig-parted documents, sorted.
// Whether they are right does not matter.
func (d Documents) Profiles() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(d)) {
		if !d.isLayouts(name) {
			names = append(names, name)
		}
	}
	return names
}

func (d Documents) isLayouts(name string) bool {
	// A ConfigMap may have a mebibyte of profiles, of which one is wanted. Only an
	// escape, or another encoding, can hide the key.
	if text := d[name]; !strings.Contains(text, migConfigsKey) && !strings.ContainsAny(text, "\\\x00") {
		return false
	}
	source := &source{file: name, problems: &Problems{}}
	root, ok := source.open([]byte(d[name]))
	return ok && kindOf(root) == KindMIGConfigs
}

// Select reads the profile with the name. It can use the layouts of the
// mig-parted documents beside it; what is wrong with those is told where the
// profile is wrong too. The source is where the documents are, for messages and
// for Selected.
func (d Documents) Select(source, name string, overrides Overrides) (Selected, error) {
	text, ok := d[name]
	if !ok {
		return Selected{}, fmt.Errorf("%s: no %s", source, quote(name))
	}
	used := map[string]string{name: text}
	var layouts MIGConfigs
	var missing []error
	for _, other := range slices.Sorted(maps.Keys(d)) {
		if other == name || !d.isLayouts(other) {
			continue
		}
		read, err := ParseMIGConfigs(inside(source, other), []byte(d[other]))
		if err != nil {
			missing = append(missing, err)
			continue
		}
		layouts = layouts.with(read)
		used[other] = d[other]
	}
	config, err := ParseWith(inside(source, name), []byte(text), overrides, layouts)
	if err != nil {
		return Selected{}, errors.Join(append([]error{err}, missing...)...)
	}
	return config.Select(source, name, used), nil
}

// inside is how a document is called in messages, as by Selected.String.
func inside(source, name string) string {
	return Selected{Source: source, Name: name}.String()
}
