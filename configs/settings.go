package configs

import (
	_ "embed" // for keyFile
	"encoding/json"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
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

// Schema is the JSON Schema of profiles, rules and mig-parted documents, for editors. It is made
// from keys.json.
//
//go:embed schema.json
var Schema string

// keyTable is keys.json, the possible content of documents, in the order of
// docs/reference/configuration-keys.md. It is read at every start, so it is JSON: decoding YAML
// makes ten times as many objects. It never changes.
var keyTable = readKeyTable(keyFile)

//go:embed keys.json
var keyFile []byte

// keys are the keys of each kind of document.
type keys struct {
	Profile, MIGParted, Rules, Rule, ConfigMap, List []Setting
	// Variables are the settings that only variables can set.
	Variables []Setting
}

func readKeyTable(file []byte) (table keys) {
	if err := json.Unmarshal(file, &table); err != nil {
		panic(fmt.Sprintf("keys.json: %v", err)) // Every test would find this.
	}
	return table
}

// The descriptions of documents, and of one rule.
var (
	profileKeys   = newTree(keyTable.Profile)
	migPartedKeys = newMIGPartedTree()
	rulesKeys     = newTree(keyTable.Rules)
	ruleKeys      = newTree(keyTable.Rule)
	configMapKeys = newTree(keyTable.ConfigMap)
	listKeys      = newTree(keyTable.List)
)

// newMIGPartedTree describes a mig-parted document, which has the layouts of a profile.
func newMIGPartedTree() *key {
	root := newTree(keyTable.MIGParted)
	root.child(migConfigsKey).children = profileKeys.child("mig").child("configs").children
	return root
}

// Setting describes a key of a document. Those of the sections flags and imex, and some of health,
// can also be set by a flag or an environment variable, of NVIDIA's plugin (every one that
// k8s-device-plugin v0.20.0 knows, and cdiDisableHooks) or Virgate's own; see
// docs/reference/nvidia-differences.md. The program makes its flags from these.
type Setting struct {
	// Path is the path of the key in a document, "mig.configs.NAME[].devices", and its key in
	// Overrides. A name in capitals stands for any name, "[]" for the entries of a list.
	Path string
	// Flag and Env are names without "--" and "$". Both are empty for what only documents have.
	Flag, Env string
	// Formerly is an older name of the key that still works.
	Formerly string
	// Aliases and EnvAliases are older names of the flag and the variable that still work.
	Aliases    []string
	EnvAliases []string
	// Default is the default value, in the form of an Override.
	Default string
	// Type is empty for a section, and for a list whose entries are described by themselves.
	Type SettingType
	// Form describes the value for people where the Type does not.
	Form string
	// Choices are the possible values, or items of a list, if they are few. For a list whose
	// entries are described by themselves, they are texts that may stand instead of it.
	Choices []string
	// Min and Max are the limits of a number or a duration; "" for none. A list with a Max has no
	// more entries, one with a Min may be a number instead. Example is a duration for messages.
	Min, Max, Example string
	// Required keys must be given. Required entries of a list must have a value.
	Required bool
	// Single is true for a list that may be its only entry instead.
	Single bool
	// Expected is the message about a value that is not of the Type or not possible, if it is not
	// made from the other fields; Empty that about a list or a mapping without entries, if it must
	// have one; Refused that about any value, if the key is only known to be refused.
	Expected, Empty, Refused string
	// Usage is one line of help. A key without Usage is not documented: a part of another one.
	Usage string
	// Own is true if NVIDIA's plugin, or mig-parted, has no such key.
	Own bool
	// Only are the values that this release supports; nil for all.
	Only []string
	// Notes are what NVIDIA's plugin does differently; Differs is the same by value or item.
	Notes   []string
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

	typeAny          SettingType = "any"
	typeNumber       SettingType = "number"
	typeDuration     SettingType = "duration"
	typeResourceName SettingType = "resource name"
	typePattern      SettingType = "pattern"
	typeSelector     SettingType = "selector"
	typeFilter       SettingType = "device filter"
	typeMemory       SettingType = "memory"
)

// Settings returns the settings with a flag, in the order of the documentation.
func Settings() []Setting {
	return slices.DeleteFunc(slices.Clone(keyTable.Profile), func(s Setting) bool { return s.Flag == "" })
}

// EnvOnlySettings returns the settings of NVIDIA's plugin that only variables can set. They have no
// Flag and no place in a document, but their Path is still a key for Overrides.
func EnvOnlySettings() []Setting { return slices.Clone(keyTable.Variables) }

// overridable reports whether an Override can set the key, even if it has neither flag nor variable.
func (s Setting) overridable() bool {
	return s.Env != "" || s.Type != "" && strings.HasPrefix(s.Path, "flags.")
}

// parse returns what the text means, in the Go type of the setting's Type: bool, int,
// time.Duration, []string, sharing.Pattern, sharing.Selector, sharing.GPUFilter or
// sharing.MemoryGuard; for all others, a string. problem is the message about an invalid text.
func (s Setting) parse(text string) (content any, problem string) {
	var err error
	ok := true
	switch s.Type {
	case TypeBool: // A variable may use other spellings, such as "1" and "t".
		content, err = strconv.ParseBool(text)
	case TypeEnum:
		content, ok = text, slices.Contains(s.Choices, text)
	case TypeList, TypeNumbers:
		return s.parseList(text)
	case TypePath:
		content, ok = text, text == "" || strings.HasPrefix(text, "/")
		if s.Own && path.Clean(text) == "/" {
			return nil, "expected a folder below /"
		}
	case TypeKeyPrefix:
		domain, slash := strings.CutSuffix(text, "/")
		if text != "" && (!slash || len(domain) > 253 || !domainForm.MatchString(domain)) {
			return nil, "expected a lower-case domain and a slash, such as cdi.k8s.io/"
		}
		content = text
	case TypeInterval:
		content, ok = parseInterval(text)
	case typeNumber: // One outside the limits can still be compared with others.
		number, ok := limited(s, text, strconv.Atoi)
		if !ok {
			problem = s.expected()
		}
		return number, problem
	case typeDuration:
		content, ok = limited(s, text, time.ParseDuration)
	case typeResourceName:
		name, err := parseResourceName(text)
		if err != nil {
			return nil, err.Error()
		}
		return name, ""
	case typePattern:
		if text == "" {
			return nil, "expected a pattern: * matches everything"
		}
		content = sharing.Pattern(text)
	case typeSelector:
		content, err = sharing.ParseSelector(text)
	case typeFilter: // "" is no filter.
		content, ok = parseDeviceFilter(text)
		ok = ok || text == ""
	case typeMemory:
		content, ok = parseMemoryLimit(text)
	default:
		content = text
	}
	if err != nil || !ok {
		return nil, s.expected()
	}
	return content, ""
}

// limited parses a text and reports whether its value is within the limits.
func limited[T int | time.Duration](s Setting, text string, parse func(string) (T, error)) (T, bool) {
	result, err := parse(text)
	least, _ := parse(s.Min)
	most, unlimited := parse(s.Max)
	return result, err == nil && result >= least && (unlimited != nil || result <= most)
}

func (s Setting) parseList(text string) (content any, problem string) {
	items := listItems(text)
	outside := s.Choices != nil &&
		slices.ContainsFunc(items, func(item string) bool { return !slices.Contains(s.Choices, item) })
	if s.Type == TypeNumbers {
		for _, item := range items {
			if _, err := strconv.ParseUint(item, 10, 31); err != nil {
				return nil, "expected whole numbers from 0"
			}
		}
		if outside || s.Choices != nil && len(items) > len(s.Choices) {
			return nil, "expected [] or [" + strings.Join(s.Choices, ", ") + "]"
		}
	} else if outside || s.Choices != nil && len(items) == 0 {
		return nil, s.expected()
	}
	return items, ""
}

// expected is the message about a value that is not one of the setting's.
func (s Setting) expected() string {
	switch {
	case s.Expected != "":
		return s.Expected
	case s.Choices != nil:
		return "expected " + alternatives(s.Choices)
	case s.Type == TypeBool:
		return "expected true or false"
	case s.Type == TypePath:
		return "expected an absolute path"
	case s.Type == TypeInterval:
		return "expected a duration such as 60s, or infinite"
	case s.Type == typeNumber && s.Max == "":
		return "expected " + s.Min + " or more"
	case s.Type == typeDuration:
		return "expected a " + s.form() + ", such as " + s.Example
	}
	return "expected text"
}

// form describes the values of a duration: "duration from 1s to 24h".
func (s Setting) form() string {
	if s.Max == "" {
		return "duration from " + s.Min
	}
	return "duration from " + s.Min + " to " + s.Max
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

// listItems splits a list at its commas. The empty string has no items.
func listItems(text string) []string {
	if text == "" {
		return nil
	}
	items := strings.Split(text, ",")
	for i, item := range items {
		items[i] = strings.TrimSpace(item)
	}
	return items
}
