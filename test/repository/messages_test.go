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
	// logRow is a row of the table of messages in docs/reference/command-line.md, quoted a message that a
	// document mentions elsewhere.
	logRow = regexp.MustCompile(`(?m)^\| (?:INFO|WARN|ERROR) \| ([^|]*) \|`)
	quoted = regexp.MustCompile("(?:log's|log has|logs) `([^`]+)`|`([^`]+)` in the log")
	span   = regexp.MustCompile("`([^`]+)`")
)

// TestLogMessages checks that the program has each log message that a document mentions. It ignores the
// text after "…".
func TestLogMessages(t *testing.T) {
	source := programText(t)
	seen := 0
	for from, text := range documents(t) {
		var messages []string
		for _, row := range logRow.FindAllStringSubmatch(text, -1) {
			for _, message := range span.FindAllStringSubmatch(row[1], -1) {
				messages = append(messages, message[1])
			}
		}
		for _, match := range quoted.FindAllStringSubmatch(text, -1) {
			messages = append(messages, match[1]+match[2])
		}
		for _, message := range messages {
			message, _, _ = strings.Cut(message, "…")
			if seen++; !strings.Contains(source, `"`+strings.TrimSuffix(message, ", ")) {
				t.Errorf("%s: the program has no message %q", from, message)
			}
		}
	}
	if seen < 30 {
		t.Errorf("%d messages: are they read?", seen)
	}
}

// programText returns the program's source, without its tests.
func programText(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, folder := range []string{"cmd", "internal", "plugin", "sharing", "configs"} {
		err := filepath.WalkDir(filepath.Join(repository, folder), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			all.Write(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}
