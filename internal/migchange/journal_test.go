package migchange

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/mig"
)

// TestJournal checks that the next run reads a change that has begun, and checks the format in the state file,
// which the next version must be able to read.
func TestJournal(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func() *state.File {
		file := state.NewFile(dir, slog.New(slog.DiscardHandler))
		file.Load()
		return file
	}
	if empty, err := loadJournal(open()); err != nil || !cmp.Equal(empty, Journal{}) {
		t.Errorf("an empty journal is %v, %v", empty, err)
	}
	want := Journal{Enabled: []string{"GPU-2"}, Underway: []Record{{
		GPU:    "GPU-1",
		Before: mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{{Profile: parsed(t, "1c.2g.10gb"), Placement: mig.Placement{Start: 2, Size: 2}}}},
		After:  mig.PlacedLayout{},
	}}}
	if err := want.save(open()); err != nil {
		t.Fatal(err)
	}
	got, err := loadJournal(open())
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("journal, %v (-want +got):\n%s", err, diff)
	}
	var stored any
	if _, err := open().Read("journal", &stored); err != nil {
		t.Fatal(err)
	}
	placed := map[string]any{"profile": "1c.2g.10gb", "placement": map[string]any{"start": 2., "size": 2.}}
	form := map[string]any{"enabled": []any{"GPU-2"}, "underway": []any{map[string]any{
		"gpu": "GPU-1", "before": map[string]any{"mig": true, "partitions": []any{placed}}, "after": map[string]any{"mig": false, "partitions": nil},
	}}}
	if diff := cmp.Diff(form, stored); diff != "" {
		t.Errorf("the state file has (-want +got):\n%s", diff)
	}
	if err := (Journal{}).save(open()); err != nil {
		t.Fatal(err)
	}
	if ended, err := loadJournal(open()); len(ended.Underway)+len(ended.Enabled) > 0 || err != nil {
		t.Errorf("an ended journal is %v, %v", ended, err)
	}
}

// TestJournalNotKept checks that a change that could not be kept, and so did not begin, is not on disk after a
// later write of something else.
func TestJournalNotKept(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]Journal{
		"nothing before":   {},
		"something before": {Enabled: []string{"GPU-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gone")
			file := state.NewFile(dir, slog.New(slog.DiscardHandler))
			if len(before.Enabled) > 0 {
				must(t, os.Mkdir(dir, 0o700))
				must(t, before.save(file))
				must(t, os.RemoveAll(dir))
			}
			if err := before.begin(Record{GPU: "GPU-1"}).save(file); err == nil {
				t.Fatal("kept in a directory that there is not")
			}
			must(t, os.Mkdir(dir, 0o700))
			must(t, file.Write("other", 1))
			file = state.NewFile(dir, slog.New(slog.DiscardHandler))
			file.Load()
			got, err := loadJournal(file)
			if len(got.Underway) != 0 || !slices.Equal(got.Enabled, before.Enabled) || err != nil {
				t.Errorf("journal %+v, %v; want %+v", got, err, before)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
