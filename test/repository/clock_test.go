package repository

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// clockCall matches a line that sleeps or measures time.
var clockCall = regexp.MustCompile(`\btime\.(Sleep|After|Since)\(`)

// TestOtherModulesKeepNoTime checks .golangci.yml's rule for tests, neither to sleep nor to judge by the
// clock, in the modules that make lint does not read, because that would require Kubernetes' types.
func TestOtherModulesKeepNoTime(t *testing.T) {
	read := 0
	for _, module := range []string{"test/kubernetes", "test/chart", "cmd/image"} {
		err := filepath.WalkDir(filepath.Join(repository, module), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			read++
			for i, line := range strings.Split(string(text), "\n") {
				if clockCall.MatchString(line) && !strings.Contains(line, "//nolint:forbidigo // ") {
					t.Errorf("%s:%d: wait for the condition with test/await: %s", path, i+1, strings.TrimSpace(line))
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if read < 50 {
		t.Errorf("only %d files were read", read)
	}
}
