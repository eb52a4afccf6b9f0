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
	referenceFile   = "../docs/configuration-reference.md"
	referenceBegins = "<!-- From here on the page is made from the program: make reference -->\n"
)

// TestReference holds that docs/configuration-reference.md is what the program
// knows; with -update it writes the page.
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
		for _, s := range settingTable() {
			if sectionOf(s.Path) == part.prefix {
				row(&b, code(s.Path), flagNames(s), codes(variableNames(s)), settingForm(s), orNone(s.Default), settingMeaning(t, s))
			}
		}
	}
	for _, part := range []struct{ title, prefix string }{
		{"version and exclude", ""}, {"resources", "resources."}, {"sharing.timeSlicing", "sharing.timeSlicing."}, {"sharing.mps", "sharing.mps."},
		{"mig", "mig."}, {"health", "health."},
	} {
		section(part.title, "key | value | default | meaning")
		for _, key := range documentKeys() {
			if strings.HasPrefix(key.path, part.prefix) && (part.prefix != "" || !strings.Contains(key.path, ".")) {
				row(&b, code(key.path), cmp.Or(codes(key.choices), key.form), keyDefault(key), ownMeaning(key.own, key.usage))
			}
		}
	}
	section("Variables without a key", "variable | meaning")
	for _, s := range Variables() {
		row(&b, code(s.Env), s.Usage)
	}
	return b.String()
}

// sectionOf is the heading's prefix under which the setting stands.
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

func keyDefault(key documentKey) string {
	if key.required {
		return "required"
	}
	return orNone(key.initial)
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
	form := map[SettingKind]string{
		KindBool: formSwitch, KindString: formText, KindPath: "absolute path", KindKeyPrefix: "domain and slash",
		KindList: "list, or text with commas", KindNumbers: "list of whole numbers", KindDuration: "duration",
	}[s.Kind]
	if s.Kind == KindList && s.Choices != nil {
		return "list, or text with commas, of " + codes(s.Choices)
	}
	return cmp.Or(codes(s.Choices), form)
}

func ownMeaning(own bool, usage string) string {
	if own {
		return usage + ". Virgate's own"
	}
	return usage
}

// settingMeaning is what the setting does, or why it does nothing, and whether a
// running program follows it.
func settingMeaning(t *testing.T, s Setting) string {
	usage := s.Usage
	if s.inert != "" || s.only != nil {
		usage, _, _ = strings.Cut(usage, " (") // For the help, which has no column for it.
	}
	switch {
	case s.inert != "":
		return usage + ". Inert: " + strings.TrimPrefix(s.inert, "has no effect: ")
	case s.only != nil && len(s.only) == 0:
		return usage + ". Refused, unless it is empty"
	case s.only != nil:
		var refused []string
		for _, choice := range s.Choices {
			if !slices.Contains(s.only, choice) {
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

// readAtTheStart says that a running program refuses a document which changes
// the setting.
func readAtTheStart(t *testing.T, s Setting) bool {
	other := map[SettingKind]string{KindBool: "true", KindPath: "/other", KindKeyPrefix: "other/", KindNumbers: "", KindDuration: "1s"}[s.Kind]
	switch {
	case s.Default == other && s.Kind == KindBool:
		other = "false"
	case s.Choices != nil:
		other = s.Choices[1]
	case s.Kind == KindString, s.Kind == KindList:
		other = "other"
	}
	changed, err := Parse("", nil, Overrides{s.Path: {Value: other}})
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, "").Process.Check(changed.Process) != nil
}
