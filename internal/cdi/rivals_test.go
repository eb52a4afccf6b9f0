package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestEntryInTwoFiles holds that an entry that another file has as well counts
// as none: a runtime takes neither.
func TestEntryInTwoFiles(t *testing.T) {
	for _, test := range []struct {
		file, kind string
		rival      bool
	}{
		{"other.yaml", "k8s.device-plugin.nvidia.com/gpu", true},
		{"other.json", "k8s.device-plugin.nvidia.com/gpu", true},
		{"other.yaml", "k8s.device-plugin.nvidia.com/gds", false},
		{"other.yaml", "nvidia.com/gpu", false},
		{"other.txt", "k8s.device-plugin.nvidia.com/gpu", false},
	} {
		t.Run(test.file+" of "+test.kind, func(t *testing.T) {
			b := newBench(t)
			want := b.names(boards(2), "gds")
			path := filepath.Join(b.options.Dir, test.file)
			text := `{"cdiVersion": "0.5.0", "kind": "` + test.kind + `", "devices": [` +
				`{"name": "0", "containerEdits": {"env": ["A=B"]}}, {"name": "GPU-0", "containerEdits": {"env": ["A=B"]}}, {"name": "own", "containerEdits": {"env": ["A=B"]}}]}`
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			names, err := b.Write(t.Context(), boards(2), []string{"gds"})
			if rival := strings.HasPrefix(fmt.Sprint(err), path+" has the entry k8s.device-plugin.nvidia.com/gpu=0 too"); rival != test.rival {
				t.Errorf("error is %v", err)
			}
			for i, name := range names {
				names[i] = strings.TrimPrefix(name, "k8s.device-plugin.nvidia.com/")
			}
			if test.rival {
				want = []string{"gpu=1", "gpu=GPU-1", "gds=all"}
			}
			b.wants(want, names)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1", "gds=all"}, b.names(boards(2), "gds"))
		})
	}
}

// TestStrangeRivals holds that what is no spec does no harm.
func TestStrangeRivals(t *testing.T) {
	b := newBench(t)
	want := b.names(boards(1))
	dir := b.options.Dir
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, "torn.json"), []byte("{"), 0o644),
		os.Mkdir(filepath.Join(dir, "folder.json"), 0o755),
		syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o644),
		os.Symlink("nowhere", filepath.Join(dir, "link.yaml")),
	); err != nil {
		t.Fatal(err)
	}
	names, err := b.Write(t.Context(), boards(1), nil)
	if err != nil || len(names) != len(want) {
		t.Errorf("names %v, error %v", names, err)
	}
}

// TestRivalsAreReadOnce holds that a file that stays as it is is not read again.
func TestRivalsAreReadOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "other.yaml")
	if err := os.WriteFile(path, []byte("no spec"), 0o644); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	var r rivals
	read := func() bool {
		if r.entries != nil {
			r.entries["mark"] = ""
		}
		r.look(dir, nil)
		_, marked := r.entries["mark"]
		return !marked
	}
	if !read() || read() {
		t.Error("a new file is not read, or an old one is")
	}
	if err := os.Chtimes(path, time.Time{}, info.ModTime().Add(time.Nanosecond)); err != nil {
		t.Fatal(err)
	}
	if !read() {
		t.Error("a newer file is not read")
	}
	if err := errors.Join(os.Truncate(path, 2), os.Chtimes(path, time.Time{}, info.ModTime().Add(time.Nanosecond))); err != nil {
		t.Fatal(err)
	}
	if !read() {
		t.Error("a shorter file is not read")
	}
}
