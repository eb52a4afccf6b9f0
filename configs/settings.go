package configs

import (
	"cmp"
	_ "embed" // for keyFile
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The paths of settings that are used in several places.
const (
	pathMIGStrategy         = "flags.migStrategy"
	pathFailOnInitError     = "flags.failOnInitError"
	pathDriverRoot          = "flags.nvidiaDriverRoot"
	pathDevRoot             = "flags.nvidiaDevRoot"
	pathDiscovery           = "flags.deviceDiscoveryStrategy"
	pathPolicy              = "flags.plugin.sharedDevicesAllocationPolicy"
	pathContainerDriverRoot = "flags.plugin.containerDriverRoot"
	pathCDIHook             = "flags.plugin.nvidiaCTKPath"
	pathCDIFeatures         = "flags.plugin.cdiFeatureFlags"
	pathCDIDisableHooks     = "flags.plugin.cdiDisableHooks"
	pathMPSRoot             = "flags.mpsRoot"
)

// keyTable is keys.json, the possible content of profiles, in the order of
// docs/reference/configuration-keys.md. It is read at every start, so it is JSON: decoding YAML
// makes ten times as many objects. It never changes.
var keyTable = readKeyTable(keyFile)

//go:embed keys.json
var keyFile []byte

// keysAndSettings are all possible keys of documents, flags and variables. Settings are those that
// a flag or a variable can also set: every key of the sections flags and imex that
// k8s-device-plugin v0.20.0 knows, cdiDisableHooks, and Virgate's own; see
// docs/reference/nvidia-differences.md.
type keysAndSettings struct {
	Settings, Variables []Setting
	Keys                []documentKey
}

func readKeyTable(file []byte) (table keysAndSettings) {
	if err := json.Unmarshal(file, &table); err != nil {
		panic(fmt.Sprintf("keys.json: %v", err)) // Every test would find this.
	}
	return table
}

// documentKey describes a key that is not a Setting. Documents may have only
// these keys, and docs/reference/configuration-keys.md is generated from them.
type documentKey struct {
	// Path is the path of the key: "mig.configs.NAME[].devices".
	Path string
	// Form describes the value: "text", "whole number from 1".
	Form string
	// Default is the default as in a document; "" for none.
	Default  string
	Required bool
	// Choices are the possible values, if they are few.
	Choices []string
	// Usage describes what the key does.
	Usage string
	// Own is true if NVIDIA's plugin, or mig-parted, has no such key.
	Own bool
}

// keysOf returns the sorted keys that a mapping at the path may have.
func keysOf(path string) []string {
	var keys []string
	for _, key := range keyTable.Keys {
		if rest, ok := strings.CutPrefix(key.Path, path+"."); ok {
			first, _, _ := strings.Cut(rest, ".")
			keys = append(keys, strings.TrimSuffix(first, "[]"))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// The paths of sections and list entries that have their own readers.
const (
	pathTimeSlicing = "sharing.timeSlicing"
	pathShare       = pathTimeSlicing + ".resources[]"
	pathMPS         = "sharing.mps"
	pathMIGBlock    = "mig.configs.NAME[]"
	pathTemperature = "health.temperature"
	pathRetireAfter = "retireAfter"
)

// Setting is a setting that a flag or an environment variable can set, of NVIDIA's plugin or
// Virgate's own. The program makes its flags from these.
type Setting struct {
	// Path is the path of the setting in a document, and its key in Overrides.
	Path string
	// Flag and Env are names without "--" and "$". Both are empty for a setting that only documents
	// have.
	Flag, Env string
	// Aliases and EnvAliases are older names that still work.
	Aliases    []string
	EnvAliases []string
	// Default is the default value, in the form of an Override.
	Default string
	Type    SettingType
	// Choices are the possible values, or items of a list, if they are few.
	Choices []string
	// Usage is one line of help.
	Usage string
	// Own is true if NVIDIA's plugin has no such setting.
	Own bool
	// Only are the values that this release supports; nil for all.
	Only []string
	// Differs is what NVIDIA's plugin does differently, by value or item.
	Differs map[string]string
	// Inert is why the setting has no effect; "" if it has one.
	Inert string
}

// SettingType is the type of a setting's value.
type SettingType string

const (
	// TypeBool is true or false.
	TypeBool SettingType = "bool"
	// TypeString is any text.
	TypeString SettingType = "string"
	// TypePath is an absolute path, or empty for none.
	TypePath SettingType = "path"
	// TypeKeyPrefix is the prefix of an annotation's key: a lower-case domain of at
	// most 253 characters and a slash (Kubernetes, apimachinery
	// validation.IsQualifiedName). It is empty for the default.
	TypeKeyPrefix SettingType = "key prefix"
	// TypeEnum is one of the Choices.
	TypeEnum SettingType = "enum"
	// TypeList is a list of strings. A document may also give it as one string with commas.
	TypeList SettingType = "list"
	// TypeNumbers is a list of whole numbers from 0.
	TypeNumbers SettingType = "numbers"
	// TypeInterval is a duration such as "60s", or "infinite". A document may also give it as a
	// number of nanoseconds; see parseInterval.
	TypeInterval SettingType = "interval"
)

// Settings returns the settings with a flag, in the order of the documentation.
func Settings() []Setting {
	return slices.DeleteFunc(slices.Clone(keyTable.Settings), func(s Setting) bool { return s.Flag == "" })
}

// EnvOnlySettings returns the settings of NVIDIA's plugin that only variables can set. They have no
// Flag and no place in a document, but their Path is still a key for Overrides.
func EnvOnlySettings() []Setting { return slices.Clone(keyTable.Variables) }

// settings are the values in force by path, written as in an Override.
type settings map[string]string

func (s settings) on(path string) bool { return s[path] == "true" }

// readSettings reads the sections flags and imex and applies the overrides. An invalid inert
// setting must not withdraw GPUs: its problem becomes a note, and is returned for GPU feature
// discovery, which uses the setting.
func readSettings(root fields, overrides Overrides) (settings, error) {
	var wrong Problems
	inert := *root.parent.source
	inert.problems, inert.notes = &wrong, nil
	written := findSettings(root, &inert)
	resolved := make(settings, len(keyTable.Settings))
	for _, setting := range keyTable.Settings {
		override, overridden := overrides[setting.Path]
		resolved[setting.Path] = setting.resolve(written[setting.Path], override, overridden)
	}
	for _, path := range slices.Sorted(maps.Keys(overrides)) {
		_, known := resolved[path]
		if !known && !slices.ContainsFunc(keyTable.Variables, func(s Setting) bool { return s.Path == path }) {
			at := position{file: overrides[path].Source, path: path}
			root.parent.source.problem(at, quote(overrides[path].Value), "no such setting")
		}
	}
	root.parent.source.notes = append(root.parent.source.notes, inert.notes...)
	for _, p := range wrong {
		note := Note{
			Line:    p.Line,
			Path:    p.Path,
			Message: "has no effect here; virgate gpu-feature-discovery refuses it: " + p.Reason(),
		}
		if p.Line == 0 {
			note.Message = p.File + ": " + note.Message
		}
		root.parent.source.notes = append(root.parent.source.notes, note)
	}
	return resolved, wrong.err()
}

// findSettings finds each setting's value in the document, by path. Inert settings, and the whole
// section flags.gfd, get inert as their source.
func findSettings(root fields, inert *source) map[string]value {
	keys := make(map[string][]string)
	for _, setting := range keyTable.Settings {
		section, key := cutLast(setting.Path)
		keys[section] = append(keys[section], key)
	}
	flags := root.field("flags").mapping(append(keys["flags"], "plugin", "gfd")...)
	plugin := flags.field("plugin").mapping(append(keys["flags.plugin"], "driverMounts")...)
	gfd := flags.field("gfd")
	gfd.source = inert
	sections := map[string]fields{
		"flags":                     flags,
		"flags.plugin":              plugin,
		"flags.plugin.driverMounts": plugin.field("driverMounts").mapping(keys["flags.plugin.driverMounts"]...),
		"flags.gfd":                 gfd.mapping(keys["flags.gfd"]...),
		"imex":                      root.field("imex").mapping(keys["imex"]...),
	}
	written := make(map[string]value, len(keyTable.Settings))
	for _, setting := range keyTable.Settings {
		section, key := cutLast(setting.Path)
		found := sections[section].field(key)
		if setting.Inert != "" {
			found.source = inert
		}
		written[setting.Path] = found
	}
	return written
}

func cutLast(path string) (section, key string) {
	dot := strings.LastIndexByte(path, '.')
	return path[:dot], path[dot+1:]
}

// resolve returns the value in force: the override, else the document's value, else (or if that is
// empty) the default. It always reports an invalid value. It reports a value that this release does
// not support only if the value is in force, so an override can make a document usable.
func (s Setting) resolve(written value, override Override, overridden bool) string {
	from := written.source
	at := written.position()
	shown := written.shown()
	if s.unread() {
		if overridden {
			from.notes = append(from.notes, Note{Path: s.Path, Message: override.Source + ": " + s.Inert})
		} else if !written.absent() {
			written.note(s.Inert)
		}
		return s.Default
	}
	result, ok := s.decode(written)
	if ok {
		if written.shape() == shapeList {
			shown = quote(result)
		}
		ok = s.validate(from, result, at, shown)
	}
	if overridden {
		at, shown = position{file: override.Source, path: s.Path}, quote(override.Value)
		result = s.normalize(override.Value)
		ok = s.validate(from, result, at, shown)
	}
	if !ok {
		return s.Default
	}
	if s.Only != nil && s.outside(s.Only, result) {
		message := "is not supported yet"
		if len(s.Only) > 0 {
			message += ", only " + alternatives(s.Only)
		}
		from.problem(at, shown, message)
	}
	for _, note := range s.notes(result) {
		if overridden {
			note = override.Source + ": " + note
		}
		from.notes = append(from.notes, Note{
			Line:    at.line,
			Path:    at.path,
			Message: note,
		})
	}
	return cmp.Or(result, s.Default)
}

// unread reports whether neither the plugin nor GPU feature discovery reads the setting, so that
// any value is valid.
func (s Setting) unread() bool {
	return s.Inert != "" && !strings.HasPrefix(s.Path, "flags.gfd.") && s.Path != "flags.useNodeFeatureAPI"
}

// notes returns how NVIDIA's plugin differs if the setting has this value.
func (s Setting) notes(text string) []string {
	if s.Inert != "" {
		return []string{s.Inert}
	}
	var notes []string
	if s.Own {
		notes = append(notes, "Virgate's own; NVIDIA's plugin has no such key")
	}
	for _, item := range s.items(text) {
		if note := s.Differs[item]; note != "" && !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	return notes
}

// decode reads a value from a document and returns it in the form of an Override.
func (s Setting) decode(written value) (string, bool) {
	var items []value
	var ok bool
	switch s.Type {
	case TypeBool:
		on, ok := written.boolean()
		return strconv.FormatBool(on), ok
	case TypeNumbers:
		items, ok = written.items()
	case TypeList:
		items, ok = written.texts()
	case TypeInterval:
		if !written.absent() && slices.Contains([]string{"!!int", "!!float"}, written.node.ShortTag()) {
			number, err := strconv.ParseFloat(written.node.Value, 64)
			if err != nil || math.IsNaN(number) || math.Abs(number) >= math.MaxInt64 {
				return written.node.Value, true // validate reports it.
			}
			return time.Duration(number).String(), true
		}
		return written.text()
	default:
		return written.textOf(s.expected())
	}
	texts := make([]string, len(items))
	for i, item := range items {
		readable := false
		if s.Type == TypeNumbers {
			_, readable = item.number()
		} else {
			_, readable = item.textOf(s.expected())
		}
		texts[i], ok = item.node.Value, ok && readable
	}
	return s.normalize(strings.Join(texts, ",")), ok
}

// expected describes the valid values of a text setting, or of a list's items.
func (s Setting) expected() string {
	switch {
	case s.Type == TypePath:
		return "expected an absolute path"
	case s.Choices != nil:
		return "expected " + alternatives(s.Choices)
	}
	return "expected text"
}

// normalize returns true or false for the spellings of a boolean that a variable may use, such as
// "1" and "t", and trims the items of a list.
func (s Setting) normalize(text string) string {
	switch s.Type {
	case TypeBool:
		if on, err := strconv.ParseBool(text); err == nil {
			return strconv.FormatBool(on)
		}
	case TypeList, TypeNumbers:
		items := listItems(text)
		for i, item := range items {
			items[i] = strings.TrimSpace(item)
		}
		return strings.Join(items, ",")
	}
	return text
}

// validate reports a value that is invalid for the setting, and then returns false.
func (s Setting) validate(from *source, text string, at position, shown string) bool {
	var expected string
	switch s.Type {
	case TypeBool:
		if text != "true" && text != "false" {
			expected = "expected true or false"
		}
	case TypeEnum, TypeList:
		if s.Choices != nil && (text == "" || s.outside(s.Choices, text)) {
			expected = s.expected()
		}
	case TypeNumbers:
		for _, item := range listItems(text) {
			if _, err := strconv.ParseUint(item, 10, 31); err != nil {
				expected = "expected whole numbers from 0"
			}
		}
		if s.Choices != nil && expected == "" && (s.outside(s.Choices, text) || len(listItems(text)) > len(s.Choices)) {
			expected = "expected [] or [" + strings.Join(s.Choices, ", ") + "]"
		}
	case TypePath:
		if text != "" && !strings.HasPrefix(text, "/") {
			expected = s.expected()
		} else if s.Own && text != "" && path.Clean(text) == "/" {
			expected = "expected a folder below /"
		}
	case TypeKeyPrefix:
		domain, slash := strings.CutSuffix(text, "/")
		if text != "" && (!slash || len(domain) > 253 || !domainForm.MatchString(domain)) {
			expected = "expected a lower-case domain and a slash, such as cdi.k8s.io/"
		}
	case TypeInterval:
		if _, ok := parseInterval(text); !ok {
			expected = "expected a duration such as 60s, or infinite"
		}
	}
	if expected == "" {
		return true
	}
	from.problem(at, shown, expected)
	return false
}

// parseInterval parses an interval as GPU feature discovery does: "infinite" means forever. Only a
// document can have a number without a unit, which means nanoseconds (k8s-device-plugin,
// api/config/v1/duration.go).
func parseInterval(text string) (time.Duration, bool) {
	if text == "infinite" {
		return math.MaxInt64, true
	}
	interval, err := time.ParseDuration(text)
	return interval, err == nil
}

// outside reports whether the value, or one of its items, is not in the set.
func (s Setting) outside(set []string, text string) bool {
	return slices.ContainsFunc(s.items(text), func(item string) bool { return !slices.Contains(set, item) })
}

func (s Setting) items(text string) []string {
	if s.Type == TypeList || s.Type == TypeNumbers {
		return listItems(text)
	}
	return []string{text}
}

// listItems splits a list at its commas. The empty string has no items.
func listItems(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}
