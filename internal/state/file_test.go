package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestWriteThenLoad(t *testing.T) {
	dir := t.TempDir()
	file := NewFile(dir, discard())
	file.Load()
	for section, value := range map[string]string{"a": "1", "b": "2", "c": "x<&>\u2028"} {
		if err := file.Write(section, value); err != nil {
			t.Fatal(err)
		}
	}
	again := NewFile(dir, discard())
	again.Load()
	for section, want := range map[string]string{"a": "1", "b": "2", "c": "x<&>\u2028"} {
		var got string
		if ok, err := again.Read(section, &got); !ok || err != nil || got != want {
			t.Errorf("%s: %q, %t, %v", section, got, ok, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 1 {
		t.Errorf("files %v, want the state alone", left)
	}
}

func TestBadFilesAreSetAside(t *testing.T) {
	valid := func(t *testing.T) []byte {
		dir := t.TempDir()
		if err := NewFile(dir, discard()).Write("a", "value"); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, Name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	for _, test := range []struct {
		name string
		make func(t *testing.T) []byte
	}{
		{"empty", func(*testing.T) []byte { return nil }},
		{"torn", func(t *testing.T) []byte { return valid(t)[:40] }},
		{"a flipped byte", func(t *testing.T) []byte { return bytes.Replace(valid(t), []byte("value"), []byte("valuf"), 1) }},
		{"of a later version", func(t *testing.T) []byte {
			return bytes.Replace(valid(t), []byte(`"version":1`), []byte(`"version":2`), 1)
		}},
		{"foreign", func(*testing.T) []byte { return []byte(`{"Data":{"PodDeviceEntries":null},"Checksum":1}`) }},
		{"not JSON", func(*testing.T) []byte { return []byte("\x00\x01\x02") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, Name)
			if err := os.WriteFile(path, test.make(t), 0o600); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			file := NewFile(dir, slog.New(slog.NewTextHandler(&log, nil)))
			file.Load()
			if ok, err := file.Read("a", new(string)); ok || err != nil {
				t.Errorf("read %t, %v from a bad file", ok, err)
			}
			if _, err := os.Stat(path + ".bad"); err != nil {
				t.Errorf("not set aside: %v", err)
			}
			if !strings.Contains(log.String(), "level=WARN") {
				t.Errorf("no warning: %s", log.String())
			}
			if err := file.Write("a", "new"); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLoadWithoutFile(t *testing.T) {
	var log bytes.Buffer
	file := NewFile(filepath.Join(t.TempDir(), "missing"), slog.New(slog.NewTextHandler(&log, nil)))
	file.Load()
	if log.Len() > 0 {
		t.Errorf("logged: %s", log.String())
	}
	if err := file.Write("a", 1); err == nil {
		t.Error("written into a directory that is not there")
	}
}

func TestFailedWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	// Even root's rename refuses a directory in the file's place.
	blocked := NewFile(dir, discard())
	blocked.path = filepath.Join(dir, "sub")
	if err := os.MkdirAll(filepath.Join(blocked.path, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := blocked.Write("a", "new"); err == nil {
		t.Error("a directory was replaced")
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"checksum":0,"sections":{}}`))
	f.Add([]byte(`{"version":1,"checksum":3523407757,"sections":{"a":1}}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, data []byte) {
		sections, err := parse(data)
		if (err == nil) != (sections != nil) {
			t.Fatalf("sections %v with error %v", sections, err)
		}
		for name, raw := range sections {
			if !json.Valid(raw) {
				t.Errorf("section %q is not JSON", name)
			}
		}
	})
}

// TestDirectoryNotSynced checks a disk that fails at the last step: a Write stays, but a WriteOrForget is undone.
func TestDirectoryNotSynced(t *testing.T) {
	dir := t.TempDir()
	broken := syscall.EIO
	file := NewFile(dir, discard())
	if err := file.WriteOrForget("b", 1); err != nil {
		t.Fatal(err)
	}
	file.sync = func(*os.File) error { return broken }
	if err := file.Write("a", "new"); !errors.Is(err, errNotSynced) || !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if err := file.WriteOrForget("b", 2); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	again := NewFile(dir, discard())
	again.Load()
	var a string
	if there, err := again.Read("a", &a); !there || err != nil || a != "new" {
		t.Errorf("the section is %q, %t, %v", a, there, err)
	}
	var b int
	if there, err := again.Read("b", &b); !there || err != nil || b != 1 {
		t.Errorf("the section that is forgotten on an error is %d, %t, %v", b, there, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("files %q, %v", left, err)
	}
}

// TestTrouble checks that the last write counts, of any section.
func TestTrouble(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "comes and goes")
	file := NewFile(dir, discard())
	if err := file.WriteError(); err != nil {
		t.Errorf("before the first write: %v", err)
	}
	if err := file.Write("a", 1); !errors.Is(err, os.ErrNotExist) || !errors.Is(file.WriteError(), os.ErrNotExist) {
		t.Errorf("without the directory: %v, %v", err, file.WriteError())
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := file.Write("b", 2); err != nil || file.WriteError() != nil {
		t.Errorf("with the directory: %v, %v", err, file.WriteError())
	}
	again := NewFile(dir, discard())
	again.Load()
	if there, err := again.Read("a", new(int)); !there || err != nil {
		t.Errorf("what could not be written was not brought along: %t, %v", there, err)
	}
}
