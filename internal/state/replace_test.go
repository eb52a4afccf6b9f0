package state

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestDirectoryNotSynced holds what is told of a disk that fails at the last
// step: what was written is there, but for a journal, which is taken back.
func TestDirectoryNotSynced(t *testing.T) {
	dir := t.TempDir()
	broken := syscall.EIO
	file := NewFile(dir, discard())
	before := sharing.CutJournal{Enabled: []string{"GPU-1"}}
	if err := (Journal{file}).Save(before); err != nil {
		t.Fatal(err)
	}
	file.sync = func(*os.File) error { return broken }
	if err := file.Write("a", "new"); !errors.Is(err, errNotSynced) || !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if err := (Journal{file}).Save(sharing.CutJournal{Enabled: []string{"GPU-1", "GPU-2"}}); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	again := NewFile(dir, discard())
	again.Load()
	var a string
	if there, err := again.Read("a", &a); !there || err != nil || a != "new" {
		t.Errorf("the section is %q, %t, %v", a, there, err)
	}
	if journal, err := (Journal{again}).Load(); err != nil || !slices.Equal(journal.Enabled, before.Enabled) {
		t.Errorf("the journal is %v, %v", journal, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("files %q, %v", left, err)
	}
}

// TestTrouble holds that the last write counts, of whatever section.
func TestTrouble(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "comes and goes")
	file := NewFile(dir, discard())
	if err := file.Trouble(); err != nil {
		t.Errorf("before the first write: %v", err)
	}
	if err := file.Write("a", 1); !errors.Is(err, os.ErrNotExist) || !errors.Is(file.Trouble(), os.ErrNotExist) {
		t.Errorf("without the directory: %v, %v", err, file.Trouble())
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := file.Write("b", 2); err != nil || file.Trouble() != nil {
		t.Errorf("with the directory: %v, %v", err, file.Trouble())
	}
	again := NewFile(dir, discard())
	again.Load()
	if there, err := again.Read("a", new(int)); !there || err != nil {
		t.Errorf("what could not be written was not brought along: %t, %v", there, err)
	}
}
