package repository

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// generated are the pages that are generated from the code.
var generated = []string{"docs/reference/configuration-keys.md", "docs/reference/chart-values.md"}

// TestLineLength keeps lines readable in a terminal and in a diff. A line may be longer for a link or code that has no
// space to break at.
func TestLineLength(t *testing.T) {
	for from, text := range documents(t) {
		if slices.Contains(generated, from) {
			continue
		}
		for _, line := range prose(text) {
			if utf8.RuneCountInString(line) > 120 && !strings.HasPrefix(strings.TrimSpace(line), "|") && len(strings.Fields(line)) > 3 {
				t.Errorf("%s: a line of %d characters, more than 120: %.60s…", from, utf8.RuneCountInString(line), line)
			}
		}
	}
}

// TestNothingTwice finds paragraphs and table rows that occur in two places: one of them will be wrong one
// day.
func TestNothingTwice(t *testing.T) {
	places := map[string][]string{}
	texts := documents(t)
	for _, from := range slices.Sorted(maps.Keys(texts)) {
		for _, paragraph := range paragraphs(texts[from]) {
			places[paragraph] = append(places[paragraph], from)
		}
	}
	for paragraph, from := range places {
		if len(from) > 1 {
			t.Errorf("%v have the same text: %.80s…", from, paragraph)
		}
	}
}

// paragraphs are the document's paragraphs, list items and table rows of some length, with spaces normalised.
func paragraphs(text string) (all []string) {
	var current []string
	end := func() {
		if whole := strings.Join(current, " "); len(whole) > 80 {
			all = append(all, whole)
		}
		current = nil
	}
	for _, line := range prose(text) {
		words := strings.Join(strings.Fields(line), " ")
		row, item := strings.HasPrefix(words, "|"), strings.HasPrefix(words, "* ")
		if words == "" || row || item || strings.HasPrefix(words, "#") {
			end()
		}
		if words != "" && strings.Trim(words, "|-: ") != "" {
			current = append(current, words)
		}
		if row {
			end()
		}
	}
	end()
	return all
}

// TestWords limits the length of the documents.
func TestWords(t *testing.T) {
	total := 0
	for from, text := range documents(t) {
		words := 0
		for word := range strings.FieldsSeq(withoutGenerated(text)) {
			if strings.ContainsFunc(word, unicode.IsLetter) || strings.ContainsFunc(word, unicode.IsDigit) {
				words++
			}
		}
		if most := 600; strings.HasPrefix(from, "docs/how-to/") && words > most {
			t.Errorf("%s has %d words; a page for one task has at most %d", from, words, most)
		}
		if (strings.HasPrefix(from, "docs/") || from == "README.md") && !slices.Contains(generated, from) {
			total += words
		}
	}
	if most := 45_000; total > most {
		t.Errorf("README and docs have %d words, more than %d", total, most)
	}
}

// withoutGenerated returns the text without its generated tables.
func withoutGenerated(text string) string {
	before, rest, found := strings.Cut(text, "<!-- The table is made from the program")
	if !found {
		return text
	}
	_, after, _ := strings.Cut(rest, "<!-- end of the table -->")
	return before + withoutGenerated(after)
}

// TestPackagesAreListed compares the packages with the table in CONTRIBUTING.md.
func TestPackagesAreListed(t *testing.T) {
	_, table, _ := strings.Cut(documents(t)["CONTRIBUTING.md"], "\n## Packages\n")
	table, _, _ = strings.Cut(table, "\n## ")
	command := exec.Command("go", "list", "./...")
	command.Dir = repository
	listed, err := command.Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(listed)) {
		name = strings.TrimPrefix(name, "github.com/virgate/virgate/")
		if !strings.HasPrefix(name, "test/") && !strings.Contains(table, "`"+name+"`") {
			t.Errorf("the table of packages in CONTRIBUTING.md lacks %s", name)
		}
	}
}
