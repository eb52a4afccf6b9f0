package configs

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

const (
	referenceFile   = "../docs/reference/configuration-keys.md"
	referenceBegins = "<!-- From here on the page is made from the program: make reference -->\n"
)

// TestReference checks that docs/reference/configuration-keys.md matches the program; with -update it writes the
// page.
func TestReference(t *testing.T) {
	data, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(data), referenceBegins)
	if !ok {
		t.Fatalf("%s lacks the line %s", referenceFile, referenceBegins)
	}
	want := head + referenceBegins + reference(t)
	if *update {
		if err := os.WriteFile(referenceFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := gocmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the page is not what the program knows, make reference writes it (-want +got):\n%s", diff)
	}
}

// reference is the generated part of the page: a table for each section.
func reference(t *testing.T) string {
	var b strings.Builder
	section := func(title, columns string) {
		fmt.Fprintf(&b, "\n## %s\n\n| %s |\n%s\n", title, columns, strings.Repeat("|---", strings.Count(columns, "|")+1)+"|")
	}
	for _, part := range []struct{ title, prefix string }{
		{"flags", "flags."}, {"flags.plugin", "flags.plugin."}, {"flags.gfd", "flags.gfd."}, {"imex", "imex."},
	} {
		section(part.title, "key | flag | variable | value | default | meaning")
		for _, s := range settingKeys() {
			if sectionOf(s.Path) == part.prefix {
				row(&b, code(s.Path), flagNames(s), codes(variableNames(s)), settingForm(s), orNone(s.Default), settingMeaning(t, s))
			}
		}
	}
	for _, part := range []struct{ title, prefix string }{
		{"version and exclude", ""}, {"retireAfter", "retireAfter."}, {"resources", "resources."}, {"sharing.timeSlicing", "sharing.timeSlicing."}, {"sharing.mps", "sharing.mps."},
		{"mig", "mig."}, {"health", "health."}, {"dra", "dra."},
	} {
		section(part.title, "key | value | default | meaning")
		for _, key := range documentKeys() {
			if strings.HasPrefix(key.Path, part.prefix) && (part.prefix != "" || !strings.Contains(key.Path, ".")) {
				name := code(key.Path)
				if key.Formerly != "" {
					name += ", formerly " + code(key.Formerly)
				}
				row(&b, name, cmp.Or(key.Form, valueForm(key)), keyDefault(key), ownMeaning(key.Own, key.Usage))
			}
		}
	}
	section("Variables without a key", "variable | meaning")
	for _, s := range EnvOnlySettings() {
		row(&b, code(s.Env), s.Usage)
	}
	return b.String()
}

// sectionOf is the prefix of the setting's heading.
func sectionOf(path string) string {
	for _, prefix := range []string{"flags.plugin.", "flags.gfd.", "flags."} {
		if strings.HasPrefix(path, prefix) {
			return prefix
		}
	}
	return "imex."
}

func row(b *strings.Builder, cells ...string) {
	fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
}

func code(text string) string { return "`" + text + "`" }

func codes(texts []string) string {
	quoted := make([]string, len(texts))
	for i, text := range texts {
		quoted[i] = code(text)
	}
	return strings.Join(quoted, ", ")
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return code(text)
}

func keyDefault(key Setting) string {
	if key.Required {
		return "required"
	}
	return orNone(key.Default)
}

// flagNames are the flag and its older names, the usual one first.
func flagNames(s Setting) string {
	if s.Flag == "" {
		return ""
	}
	names := []string{"--" + s.Flag}
	for _, alias := range s.Aliases {
		names = append(names, "--"+alias)
	}
	return codes(names)
}

func variableNames(s Setting) []string {
	if s.Env == "" {
		return nil
	}
	return append([]string{s.Env}, s.EnvAliases...)
}

func settingForm(s Setting) string {
	form := map[SettingType]string{
		TypeBool: "true or false", TypeString: "text", TypePath: "absolute path", TypeKeyPrefix: "domain and slash",
		TypeList: "list, or text with commas", TypeNumbers: "list of whole numbers", TypeInterval: "duration, or `infinite`",
	}[s.Type]
	if s.Type == TypeList && s.Choices != nil {
		return "list, or text with commas, of " + codes(s.Choices)
	}
	if s.Type == TypeNumbers && s.Choices != nil {
		return "`[]` or `[" + strings.Join(s.Choices, ", ") + "]`"
	}
	return cmp.Or(s.Form, codes(s.Choices), form)
}

// valueForm describes the values of a key.
func valueForm(s Setting) string {
	number := "whole number from " + s.Min
	if s.Max != "" {
		number += " to " + s.Max
	}
	return map[SettingType]string{
		TypeBool: "true or false", TypeEnum: codes(s.Choices), TypeString: "text", typePattern: "text",
		typeResourceName: "resource name", typeNumber: number, typeDuration: s.form(),
	}[s.Type]
}

func ownMeaning(own bool, usage string) string {
	if own {
		return usage + ". Virgate's own"
	}
	return usage
}

// settingMeaning is the setting's effect, or why it has none, and whether a running program follows changes.
func settingMeaning(t *testing.T, s Setting) string {
	usage := s.Usage
	if s.Inert != "" || s.Only != nil {
		usage, _, _ = strings.Cut(usage, " (") // For the help, which has no column for it.
	}
	switch {
	case s.Inert != "":
		return usage + ". Inert: " + strings.TrimPrefix(s.Inert, "has no effect: ")
	case s.Only != nil:
		var refused []string
		for _, choice := range s.Choices {
			if !slices.Contains(s.Only, choice) {
				refused = append(refused, choice)
			}
		}
		usage += "; " + codes(refused) + " is refused"
	}
	meaning := ownMeaning(s.Own, usage)
	if readAtTheStart(t, s) {
		meaning += ". Read at the start"
	}
	return meaning
}

// readAtTheStart reports whether a running program refuses a document that changes the setting.
func readAtTheStart(t *testing.T, s Setting) bool {
	other := map[SettingType]string{TypeBool: "true", TypePath: "/other", TypeKeyPrefix: "other/", TypeInterval: "1s"}[s.Type]
	switch {
	case s.Default == other && s.Type == TypeBool:
		other = "false"
	case s.Type == TypeNumbers:
		other = "0"
	case s.Choices != nil:
		other = s.Choices[1]
	case s.Type == TypeString, s.Type == TypeList:
		other = "other"
	}
	changed, err := Parse("", nil, Overrides{s.Path: {Value: other}})
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, "").Startup.CheckUnchanged(changed.Startup) != nil
}
