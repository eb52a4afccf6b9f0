package configs

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// settings are the values in force by path, in the form that an Override has.
type settings map[string]string

func (s settings) on(path string) bool { return s[path] == "true" }

// readSettings reads the sections flags and imex and applies the overrides.
func readSettings(root fields, overrides Overrides) settings {
	table := settingTable()
	written := locate(root, table)
	resolved := make(settings, len(table))
	for _, setting := range table {
		override, overridden := overrides[setting.Path]
		resolved[setting.Path] = setting.resolve(written[setting.Path], override, overridden)
	}
	for _, path := range slices.Sorted(maps.Keys(overrides)) {
		if _, known := resolved[path]; !known && !isVariable(path) {
			at := place{file: overrides[path].Source, path: path}
			root.parent.source.problem(at, quote(overrides[path].Value), "no such setting")
		}
	}
	return resolved
}

// locate finds what the document says about each setting, by path.
func locate(root fields, table []Setting) map[string]value {
	keys := make(map[string][]string)
	for _, setting := range table {
		section, key := cutLast(setting.Path)
		keys[section] = append(keys[section], key)
	}
	flags := root.field("flags").mapping(append(keys["flags"], "plugin", "gfd")...)
	plugin := flags.field("plugin").mapping(append(keys["flags.plugin"], "driverMounts")...)
	sections := map[string]fields{
		"flags":                     flags,
		"flags.plugin":              plugin,
		"flags.plugin.driverMounts": plugin.field("driverMounts").mapping(keys["flags.plugin.driverMounts"]...),
		"flags.gfd":                 flags.field("gfd").mapping(keys["flags.gfd"]...),
		"imex":                      root.field("imex").mapping(keys["imex"]...),
	}
	written := make(map[string]value, len(table))
	for _, setting := range table {
		section, key := cutLast(setting.Path)
		written[setting.Path] = sections[section].field(key)
	}
	return written
}

func cutLast(path string) (section, key string) {
	dot := strings.LastIndexByte(path, '.')
	return path[:dot], path[dot+1:]
}

// resolve returns the value in force: the override, else what is written, else
// the default, which an empty text stands for too. A value that cannot be is reported wherever it stands; one that
// this release does not serve only when it is in force, so that an override can
// make a document usable.
func (s Setting) resolve(written value, override Override, overridden bool) string {
	from, at, shown := written.source, written.place(), written.shown()
	result, ok := s.decode(written)
	if ok {
		if written.shape() == shapeList {
			shown = quote(result)
		}
		ok = s.possible(from, result, at, shown)
	}
	if overridden {
		at, shown = place{file: override.Source, path: s.Path}, quote(override.Value)
		result = s.normal(override.Value)
		ok = s.possible(from, result, at, shown)
	}
	if !ok {
		return s.Default
	}
	if s.only != nil && s.outside(s.only, result) {
		message := "is not supported yet"
		if len(s.only) > 0 {
			message += ", only " + alternatives(s.only)
		}
		from.problem(at, shown, message)
	}
	for _, note := range s.notes(result) {
		if overridden {
			note = override.Source + ": " + note
		}
		from.notes = append(from.notes, Note{Line: at.line, Path: at.path, Message: note})
	}
	return cmp.Or(result, s.Default)
}

// notes say what is special about the setting when it has this value.
func (s Setting) notes(text string) []string {
	if s.inert != "" {
		return []string{s.inert}
	}
	var notes []string
	if s.Own {
		notes = append(notes, "Virgate's own; NVIDIA's plugin has no such key")
	}
	items := []string{text}
	if s.Kind == KindList {
		items = listItems(text)
	}
	for _, item := range items {
		if note := s.differs[item]; note != "" && !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	return notes
}

// decode reads what is written in the form that an Override has.
func (s Setting) decode(written value) (string, bool) {
	switch s.Kind {
	case KindBool:
		on, ok := written.boolean()
		return fmt.Sprint(on), ok
	case KindNumbers:
		items, ok := written.items()
		return joinItems(items, func(item value) (string, bool) {
			n, ok := item.number()
			return fmt.Sprint(n), ok
		}, ok)
	case KindList:
		items, ok := written.texts()
		text, ok := joinItems(items, value.text, ok)
		return s.normal(text), ok
	}
	return written.text()
}

// joinItems writes the items between commas. ok is passed through, and false if
// one of them cannot be read.
func joinItems(items []value, read func(value) (string, bool), ok bool) (string, bool) {
	texts := make([]string, 0, len(items))
	for _, item := range items {
		text, readable := read(item)
		ok = ok && readable
		texts = append(texts, text)
	}
	return strings.Join(texts, ","), ok
}
