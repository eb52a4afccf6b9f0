package repository

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	testName = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)`")
	scenario = regexp.MustCompile("`((?:case|cli|cluster|invariant|kubelet|metrics|peer|status)-[a-z0-9-]+)`")
	// place matches a file or folder of the repository.
	place = regexp.MustCompile("`((?:charts|cmd|configs|deployments|docs|internal|mig|plugin|sharing|test)/[A-Za-z0-9_./-]+)`")
)

// TestNames checks that the tests, scenarios, files and folders which a document names exist.
func TestNames(t *testing.T) {
	tests := testNames(t)
	seen := 0
	for from, text := range documents(t) {
		if from == "CHANGELOG.md" {
			continue // It describes the past.
		}
		for _, match := range testName.FindAllStringSubmatch(text, -1) {
			if seen++; !tests[match[1]] {
				t.Errorf("%s: there is no test %s", from, match[1])
			}
		}
		for _, match := range scenario.FindAllStringSubmatch(text, -1) {
			files, err := filepath.Glob(filepath.Join(repository, "test/scenario", match[1]+"*.txt"))
			if seen++; err != nil || len(files) == 0 {
				t.Errorf("%s: there is no scenario %s", from, match[1])
			}
		}
		for _, match := range place.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(repository, match[1])); err != nil {
				t.Errorf("%s: there is no %s", from, match[1])
			}
			seen++
		}
	}
	if seen < 50 {
		t.Errorf("%d names: are they read?", seen)
	}
}

// testNames returns the test functions of the repository.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	names := map[string]bool{}
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range function.FindAllSubmatch(text, -1) {
			names[string(match[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

var namedFunctions = regexp.MustCompile("`([a-z/]+\\.go)` \\(([A-Za-z]+(?:, [A-Za-z]+)*)\\)")

// TestFunctions checks that functions named after their file, `plugin/next.go` (held, removable), are in
// it.
func TestFunctions(t *testing.T) {
	functions := 0
	for from, text := range documents(t) {
		for _, match := range namedFunctions.FindAllStringSubmatch(text, -1) {
			source, err := os.ReadFile(filepath.Join(repository, match[1]))
			if err != nil {
				continue // TestNames reports that.
			}
			for _, name := range strings.Split(match[2], ", ") {
				functions++
				if !regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + name + `\b`).Match(source) {
					t.Errorf("%s: %s has no function %s", from, match[1], name)
				}
			}
		}
	}
	if functions < 10 {
		t.Errorf("%d functions are named: are they found?", functions)
	}
}
