package repository

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var link = regexp.MustCompile(`\]\(([^()\s]+)\)`)

// targets returns the targets of the text's links.
func targets(text string) []string {
	var found []string
	for _, match := range link.FindAllStringSubmatch(strings.Join(prose(text), "\n"), -1) {
		found = append(found, match[1])
	}
	return found
}

var dropped = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

// anchors returns the anchors that GitHub gives the text's headings: lower case, without punctuation, "-"
// for a space.
func anchors(text string) []string {
	var names []string
	for _, line := range prose(text) {
		if heading := strings.TrimLeft(line, "#"); heading != line && strings.HasPrefix(heading, " ") {
			names = append(names, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-"))
		}
	}
	return names
}

// broken returns why the document's link leads nowhere; "" if it is valid.
func broken(from, target string, texts map[string]string) string {
	path, anchor, _ := strings.Cut(target, "#")
	where := from
	if path != "" {
		where = filepath.Join(filepath.Dir(from), path)
		if _, err := os.Stat(filepath.Join(repository, where)); err != nil {
			return "there is no " + where
		}
	}
	if anchor != "" && !slices.Contains(anchors(texts[where]), anchor) {
		return where + " has no heading " + anchor
	}
	return ""
}

// TestLinks checks that each link leads to a file of the repository and, after "#", to a heading of it.
// Links to other sites are not followed.
func TestLinks(t *testing.T) {
	texts := documents(t)
	links := 0
	for from, text := range texts {
		for _, target := range targets(text) {
			if strings.Contains(target, "://") {
				continue
			}
			links++
			if why := broken(from, target, texts); why != "" {
				t.Errorf("%s: %s: %s", from, target, why)
			}
		}
	}
	if links < 50 {
		t.Errorf("%d links in %d documents: are they read?", links, len(texts))
	}
}

// TestEveryPageIsInTheIndex checks that docs/README.md links to every page, and README.md to it.
func TestEveryPageIsInTheIndex(t *testing.T) {
	texts := documents(t)
	if !slices.Contains(targets(texts["README.md"]), "docs/README.md") {
		t.Error("README.md does not link to docs/README.md")
	}
	index := targets(texts["docs/README.md"])
	for path := range texts {
		page, isPage := strings.CutPrefix(path, "docs/")
		if isPage && page != "README.md" && !slices.Contains(index, page) {
			t.Errorf("docs/README.md does not link to %s", path)
		}
	}
}

func TestBroken(t *testing.T) {
	texts := map[string]string{
		"docs/a.md": "# A page\n\n## `run` and *what* it needs, 2.0\n\n```\n# no heading [x](no-link.md)\n```\n[one](b.md#x) [two](#a-page)",
	}
	if got := targets(texts["docs/a.md"]); !slices.Equal(got, []string{"b.md#x", "#a-page"}) {
		t.Errorf("links are %q", got)
	}
	for _, test := range []struct {
		name, target, want string
	}{
		{"its own heading", "#a-page", ""},
		{"punctuation", "#run-and-what-it-needs-20", ""},
		{"a file", "../README.md", ""},
		{"a folder", "../docs", ""},
		{"no heading", "#b", "docs/a.md has no heading b"},
		{"a comment in code", "#no-heading-xno-linkmd", "docs/a.md has no heading no-heading-xno-linkmd"},
		{"no file", "nowhere.md", "there is no docs/nowhere.md"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := broken("docs/a.md", test.target, texts); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
