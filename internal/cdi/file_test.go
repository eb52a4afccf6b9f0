package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// files are the names in the folder.
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

// limitFiles limits the size of files that this process writes, like a full disk, until
// free is called.
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

// TestFullDisk checks that the error of a full disk is the same each time, because the
// log and the plan compare it, and that attempts leave no files behind.
func TestFullDisk(t *testing.T) {
	const child = "VIRGATE_TEST_FULL_DISK"
	if os.Getenv(child) == "" { // The limit is per process, and go test writes files, too.
		command := exec.Command(os.Args[0], "-test.run=^TestFullDisk$")
		command.Env = append(os.Environ(), child+"=1")
		if said, err := command.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
		return
	}
	b := newBench(t)
	b.names(gpus(1))
	free := limitFiles(t, 1<<20)
	defer free()
	const many = 6000
	var said []string
	for range 3 {
		names, err := b.Write(t.Context(), gpus(many), nil)
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
	if names := b.names(gpus(many)); len(names) != 2*many {
		t.Errorf("%d entries when there is room", len(names))
	}
}

// TestNoFileInItsPlace checks that something that is not a regular file is not read, is
// replaced if possible, and is otherwise reported to the caller and not logged.
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
				names, err := b.Write(t.Context(), gpus(1), nil)
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

// TestFileLeavesWithItsLastEntry checks that no names remain after the file is gone, even if someone else has
// removed it.
func TestFileLeavesWithItsLastEntry(t *testing.T) {
	for _, removed := range []bool{false, true} {
		b := newBench(t)
		b.names(gpus(1))
		b.names(nil)
		b.now = b.now.Add(24 * time.Hour)
		if removed {
			if err := os.Remove(b.path()); err != nil {
				t.Fatal(err)
			}
		}
		b.wants(nil, b.names(nil))
		// Nor do they return with the next file.
		b.wants([]string{"gpu=0:0", "gpu=MIG-a"}, b.names(gpus(1, "MIG-a")))
	}
}

// foreign writes another spec to the path, with the size and time of info plus the
// given differences.
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
			want := b.names(gpus(2))
			if err := test.spoil(b.path()); err != nil {
				t.Fatal(err)
			}
			made := b.made
			b.wants(want, b.names(gpus(2)))
			if b.made != made {
				t.Error("the source was asked for what is known")
			}
		})
	}
}

// TestEntryInTwoFiles checks that an entry that is also in another file counts as missing, as a runtime accepts
// neither.
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
			want := b.names(gpus(2), "gds")
			path := filepath.Join(b.options.Dir, test.file)
			text := `{"cdiVersion": "0.5.0", "kind": "` + test.kind + `", "devices": [` +
				`{"name": "0", "containerEdits": {"env": ["A=B"]}}, {"name": "GPU-0", "containerEdits": {"env": ["A=B"]}}, {"name": "own", "containerEdits": {"env": ["A=B"]}}]}`
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			names, err := b.Write(t.Context(), gpus(2), []string{"gds"})
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
			b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1", "gds=all"}, b.names(gpus(2), "gds"))
		})
	}
}

// TestUnreadableOtherSpecs checks that files that are not specs do no harm.
func TestUnreadableOtherSpecs(t *testing.T) {
	b := newBench(t)
	want := b.names(gpus(1))
	dir := b.options.Dir
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, "torn.json"), []byte("{"), 0o644),
		os.Mkdir(filepath.Join(dir, "folder.json"), 0o755),
		syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o644),
		os.Symlink("nowhere", filepath.Join(dir, "link.yaml")),
	); err != nil {
		t.Fatal(err)
	}
	names, err := b.Write(t.Context(), gpus(1), nil)
	if err != nil || len(names) != len(want) {
		t.Errorf("names %v, error %v", names, err)
	}
}

// TestOtherSpecsAreReadOnce checks that an unchanged file is not read again.
func TestOtherSpecsAreReadOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "other.yaml")
	if err := os.WriteFile(path, []byte("no spec"), 0o644); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	var r specFiles
	read := func() bool {
		if r != nil {
			r[path] = specFile{r[path].info, map[string][]string{"mark": nil}}
		}
		r.refresh(nil, dir)
		_, marked := r[path].entries["mark"]
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
