package state_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// TestJournal holds that what has begun is read back by the next run, and that
// it is over when it was said to be.
func TestJournal(t *testing.T) {
	dir := t.TempDir()
	open := func() state.Journal {
		file := state.NewFile(dir, slog.New(slog.DiscardHandler))
		file.Load()
		return state.Journal{File: file}
	}
	if empty, err := open().Load(); !reflect.DeepEqual(empty, sharing.CutJournal{}) || err != nil {
		t.Errorf("an empty journal is %v, %v", empty, err)
	}
	small, err := mig.ParseProfile("1c.2g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	want := sharing.CutJournal{Enabled: []string{"GPU-2"}, Underway: []sharing.Recut{{
		GPU:    "GPU-1",
		Before: sharing.Arrangement{MIG: true, Partitions: []mig.Placed{{Profile: small, Placement: mig.Placement{Start: 2, Size: 2}}}},
		After:  sharing.Arrangement{},
	}}}
	if err := open().Save(want); err != nil {
		t.Fatal(err)
	}
	got, err := open().Load()
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("journal, %v (-want +got):\n%s", err, diff)
	}
	if err := open().Save(sharing.CutJournal{}); err != nil {
		t.Fatal(err)
	}
	if ended, err := open().Load(); len(ended.Underway)+len(ended.Enabled) > 0 || err != nil {
		t.Errorf("an ended journal is %v, %v", ended, err)
	}
}

// TestJournalNotKept holds that a change which could not be kept, and so did not
// begin, is not on disk when something else is written later.
func TestJournalNotKept(t *testing.T) {
	for name, before := range map[string]sharing.CutJournal{
		"nothing before":   {},
		"something before": {Enabled: []string{"GPU-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gone")
			file := state.NewFile(dir, slog.New(slog.DiscardHandler))
			journal := state.Journal{File: file}
			if len(before.Enabled) > 0 {
				must(t, os.Mkdir(dir, 0o700))
				must(t, journal.Save(before))
				must(t, os.RemoveAll(dir))
			}
			if err := journal.Save(sharing.CutJournal{Underway: []sharing.Recut{{GPU: "GPU-1"}}}); err == nil {
				t.Fatal("kept in a directory that there is not")
			}
			must(t, os.Mkdir(dir, 0o700))
			must(t, file.Write("other", 1))
			file = state.NewFile(dir, slog.New(slog.DiscardHandler))
			file.Load()
			got, err := state.Journal{File: file}.Load()
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
