package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCheckEmpty checks that an empty file, as a failed helm template leaves it, is a valid profile, and that check
// prints that profile.
func TestCheckEmpty(t *testing.T) {
	const note = "empty: every GPU is offered whole"
	for text, empty := range map[string]bool{"": true, "# nothing\n\n": true, "version: v1\n": false} {
		path := filepath.Join(t.TempDir(), "p.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var stdout, stderr strings.Builder
		code := run(t.Context(), []string{"virgate", "check", path}, func(string) (string, bool) { return "", false }, &stdout, &stderr)
		if code != 0 || !strings.HasPrefix(stdout.String(), path+": ok (profile)\n") || strings.Contains(stdout.String(), note) != empty {
			t.Errorf("%q: exit code %d, %s%s", text, code, stdout.String(), stderr.String())
		}
	}
}
