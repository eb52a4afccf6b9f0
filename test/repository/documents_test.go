// Package repository checks what the compiler does not. Documents: links resolve, commands have the flags
// that are shown, profiles are valid, and the tests, files and messages that a page names exist. Examples:
// each plans what its golden file says. Imports: each package imports only what its layer allows. Licences:
// those of all linked modules.
package repository

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const repository = "../.."

// documents are the Markdown files of the repository, by path from its top.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		switch name := entry.Name(); {
		case err != nil:
			return err
		case entry.IsDir() && (name == "bin" || name == "testdata" || strings.HasPrefix(name, ".") && name != ".."):
			return filepath.SkipDir
		case strings.HasSuffix(name, ".md"):
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			relative, err := filepath.Rel(repository, path)
			texts[relative] = string(text)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return texts
}

// prose returns the text without its code blocks.
func prose(text string) []string {
	var lines []string
	block := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			block = !block
		} else if !block {
			lines = append(lines, strings.TrimRight(line, "\n"))
		}
	}
	return lines
}
