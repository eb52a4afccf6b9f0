package state

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
)

func TestProfileIsKept(t *testing.T) {
	dir := t.TempDir()
	open := func() Profile { return Profile{NewFile(dir, slog.New(slog.DiscardHandler))} }
	if _, ok := open().Peek(); ok {
		t.Error("a profile without a file")
	}
	want := configs.Selected{Name: "four", Source: "ConfigMap gpu/profiles", Generation: "abc", Layout: "all-balanced", Documents: map[string]string{"four": "version: v1\n"}}
	if err := open().Save(want); err != nil {
		t.Fatal(err)
	}

	next := open()
	if _, ok, _ := next.Load(); ok {
		t.Error("a profile before the file is read")
	}
	if got, ok := next.Peek(); !ok || !cmp.Equal(got, want) {
		t.Errorf("peeked %+v, %v", got, ok)
	}
	if _, ok, _ := next.Load(); ok {
		t.Error("a profile after a peek")
	}
	next.File.Load()
	if got, ok, err := next.Load(); !ok || err != nil || !cmp.Equal(got, want) {
		t.Errorf("loaded %+v, %v, %v", got, ok, err)
	}
}

// TestPeekChangesNothing: a program that stands by must leave the file of the
// one that serves alone, also where it cannot read it.
func TestPeekChangesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, Name)
	for _, content := range []string{"{", `{"version":99,"checksum":0,"sections":{}}`} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, ok := (Profile{NewFile(dir, slog.New(slog.DiscardHandler))}).Peek(); ok {
			t.Errorf("a profile from %s", content)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != content {
			t.Errorf("%s is now %s, %v", content, data, err)
		}
	}
}

func TestProfileSectionOfAnotherForm(t *testing.T) {
	file := NewFile(t.TempDir(), slog.New(slog.DiscardHandler))
	if err := file.Write(profileSection, []int{1}); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := (Profile{file}).Load(); ok || err == nil {
		t.Errorf("loaded %v, %v", ok, err)
	}
	if _, ok := (Profile{file}).Peek(); ok {
		t.Error("peeked")
	}
}
