package cdi

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// files are the names of what lies in the folder.
func (b *bench) files() []string {
	b.t.Helper()
	entries, err := os.ReadDir(b.options.Dir)
	if err != nil {
		b.t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// limitFiles lets no file of this process grow beyond so many bytes, as a full
// disk does, until free is called.
func limitFiles(t *testing.T, bytes uint64) (free func()) {
	t.Helper()
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	set := func(limit syscall.Rlimit) {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
			t.Error(err)
		}
	}
	set(syscall.Rlimit{Cur: bytes, Max: before.Max})
	return func() { set(before) }
}

// TestFullDisk holds that a disk that stays full is told of in the same words
// each time, which the log and the plan go by, and that nothing is left lying
// there at each attempt.
func TestFullDisk(t *testing.T) {
	b := newBench(t)
	b.names(boards(1))
	// Far above what the testing package writes about this process.
	free := limitFiles(t, 1<<20)
	defer free()
	const many = 6000
	var said []string
	for range 3 {
		names, err := b.Write(t.Context(), boards(many), nil)
		if err == nil || !errors.Is(err, syscall.EFBIG) || !strings.Contains(err.Error(), b.path()) {
			t.Fatalf("error is %v", err)
		}
		said = append(said, err.Error())
		b.wants([]string{"gpu=0", "gpu=GPU-0"}, b.checked(names))
	}
	if slices.Sort(said); len(slices.Compact(said)) != 1 {
		t.Errorf("the errors differ: %q", said)
	}
	free()
	b.wants([]string{filepath.Base(b.path())}, b.files())
	if names := b.names(boards(many)); len(names) != 2*many {
		t.Errorf("%d entries when there is room", len(names))
	}
}

// TestNoFileInItsPlace holds that what is no file is not read, where it can be
// replaced it is, and where not the log is told no more than the caller.
func TestNoFileInItsPlace(t *testing.T) {
	for _, test := range []struct {
		name     string
		make     func(path string) error
		replaced bool
		logged   int
	}{
		{"a folder", func(path string) error { return os.MkdirAll(filepath.Join(path, "in"), 0o755) }, false, 0},
		{"a pipe", func(path string) error { return syscall.Mkfifo(path, 0o644) }, true, 1},
		{"a link to nothing", func(path string) error { return os.Symlink("nowhere", path) }, true, 0},
		{"a link to another file", func(path string) error {
			other := filepath.Join(filepath.Dir(path), "other")
			return errors.Join(os.WriteFile(other, []byte("kept"), 0o600), os.Symlink("other", path))
		}, true, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			var log bytes.Buffer
			b.options.Logger = slog.New(slog.NewTextHandler(&log, nil))
			b.Writer = NewWriter(b.options)
			if err := test.make(b.path()); err != nil {
				t.Fatal(err)
			}
			var said []string
			for range 3 {
				names, err := b.Write(t.Context(), boards(1), nil)
				if test.replaced != (err == nil) || test.replaced != (len(names) == 2) {
					t.Fatalf("names %v, error %v", names, err)
				}
				if err != nil {
					said = append(said, err.Error())
				}
			}
			if test.replaced {
				if info, err := os.Lstat(b.path()); err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o644 {
					t.Errorf("the spec is %v, %v", info.Mode(), err)
				}
			}
			for _, name := range b.files() {
				if name != filepath.Base(b.path()) && name != "other" {
					t.Errorf("%s is left there", name)
				}
			}
			if slices.Sort(said); len(slices.Compact(said)) > 1 {
				t.Errorf("the errors differ: %q", said)
			}
			if lines := strings.Count(log.String(), "\n"); lines != test.logged {
				t.Errorf("logged %s", log.String())
			}
			if kept, err := os.ReadFile(filepath.Join(b.options.Dir, "other")); err == nil && string(kept) != "kept" {
				t.Errorf("the file behind the link is now %q", kept)
			}
		})
	}
}

// TestFileLeavesWithItsLastEntry holds that no names outlive the file, and that
// one which somebody else has removed is as good as removed.
func TestFileLeavesWithItsLastEntry(t *testing.T) {
	for _, removed := range []bool{false, true} {
		b := newBench(t)
		b.names(boards(1))
		b.names(nil)
		b.now = b.now.Add(24 * time.Hour)
		if removed {
			if err := os.Remove(b.path()); err != nil {
				t.Fatal(err)
			}
		}
		b.wants(nil, b.names(nil))
		// Nor do they come back with the next one.
		b.wants([]string{"gpu=0:0", "gpu=MIG-a"}, b.names(boards(1, "MIG-a")))
	}
}

// foreign writes another spec to the path, of the same size and as old as the
// one that info is of, but for what differs.
func foreign(path string, info os.FileInfo, size int, age time.Duration) error {
	text := `{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A=B"]}}]}`
	text += strings.Repeat(" ", int(info.Size())-len(text)+size)
	return errors.Join(os.WriteFile(path, []byte(text), 0o644), os.Chtimes(path, time.Time{}, info.ModTime().Add(age)))
}

func TestFileIsBroughtBack(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(path string) error
	}{
		{"removed", os.Remove},
		{"emptied", func(path string) error { return os.Truncate(path, 0) }},
		{"torn", func(path string) error { return os.WriteFile(path, []byte(`{"cdiVersion": "0.5`), 0o644) }},
		{"overwritten, as long", func(path string) error {
			info, err := os.Stat(path)
			return errors.Join(err, foreign(path, info, 0, time.Nanosecond))
		}},
		{"overwritten, as old", func(path string) error {
			info, err := os.Stat(path)
			return errors.Join(err, foreign(path, info, 1, 0))
		}},
		{"replaced, as long and as old", func(path string) error {
			info, err := os.Stat(path)
			return errors.Join(err, foreign(path+".new", info, 0, 0), os.Rename(path+".new", path))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			want := b.names(boards(2))
			if err := test.spoil(b.path()); err != nil {
				t.Fatal(err)
			}
			made := b.made
			b.wants(want, b.names(boards(2)))
			if b.made != made {
				t.Error("the source was asked for what is known")
			}
		})
	}
}
