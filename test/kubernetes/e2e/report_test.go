package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// report is what the run took, as a Markdown table.
type report struct {
	started time.Time
	rows    []string
}

// step plays it and notes the time.
func (r *report) step(name string, play func()) {
	began := time.Now()
	play()
	r.note(name, time.Since(began).Round(10*time.Millisecond).String())
}

// note adds a row.
func (r *report) note(name, value string) {
	r.rows = append(r.rows, fmt.Sprintf("| %s | %s |", name, value))
}

// write puts the table into the file that E2E_REPORT names, and into the log.
func (r *report) write(t *testing.T) {
	r.note("all", time.Since(r.started).Round(time.Second).String())
	text := "| Step | Time or count |\n| --- | --- |\n" + strings.Join(r.rows, "\n") + "\n"
	t.Log("\n" + text)
	if path := os.Getenv("E2E_REPORT"); path != "" {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}
