package configs

import "slices"

// Setting is one of NVIDIA's settings, or of Virgate's beside them, that a flag
// or an environment variable can give. The program makes its flags from these.
type Setting struct {
	// Path is the setting's place in a document, the key for Overrides.
	Path string
	// Flag and Env are the names without "--" and "$". Both are empty for what
	// only a document can say.
	Flag, Env string
	// Aliases and EnvAliases are older names that still work.
	Aliases, EnvAliases []string
	// Default is the value in the form that an Override has.
	Default string
	Kind    SettingKind
	// Choices are the values that can be meant, where they are few; for a list,
	// the items.
	Choices []string
	// Usage is one line of help.
	Usage string
	// Own says that NVIDIA's plugin has no such setting.
	Own bool

	// only are the values that this release can serve; nil for all.
	only []string
	// differs says, by value or item, what NVIDIA's plugin does differently with
	// it.
	differs map[string]string
	// inert says why the setting has no effect; empty if it has one.
	inert string
}

// SettingKind is the type of a setting's value.
type SettingKind string

const (
	// KindBool is true or false.
	KindBool SettingKind = "bool"
	// KindString is any text.
	KindString SettingKind = "string"
	// KindPath is an absolute path, or empty for none.
	KindPath SettingKind = "path"
	// KindKeyPrefix is what the key of an annotation begins with: a lower-case
	// domain of at most 253 characters and a slash (Kubernetes, apimachinery
	// validation.IsQualifiedName). Empty for the default.
	KindKeyPrefix SettingKind = "key prefix"
	// KindEnum is one of the Choices.
	KindEnum SettingKind = "enum"
	// KindList is text items; a document may write them as a list or as one text
	// with commas.
	KindList SettingKind = "list"
	// KindNumbers is a list of whole numbers from 0.
	KindNumbers SettingKind = "numbers"
	// KindDuration is text such as "60s".
	KindDuration SettingKind = "duration"
)

// Settings returns the settings that have a flag, in the order of the document.
func Settings() []Setting {
	return slices.DeleteFunc(settingTable(), func(s Setting) bool { return s.Flag == "" })
}
