package driverroot

import (
	"errors"
	"io/fs"
	"testing"
	"testing/fstest"
)

func link(target string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
}

func TestResolve(t *testing.T) {
	tree := fstest.MapFS{
		"a/file":   {Data: []byte("\x7fELF")},
		"up":       link("../../a"),
		"absolute": link("/"),
		"circle":   link("circle"),
	}
	tests := []struct {
		name, want string
		err        error
	}{
		{"a/file", "a/file", nil},
		{"up/file", "a/file", nil},
		{"absolute/a/file", "a/file", nil},
		{"absolute", ".", nil},
		{"a/../a/./file", "a/file", nil},
		{"circle", "", ErrLinks},
		{"a/none", "", fs.ErrNotExist},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := Resolve(tree, test.name)
			if got != test.want || !errors.Is(err, test.err) {
				t.Errorf("%q, %v, want %q, %v", got, err, test.want, test.err)
			}
		})
	}
}

func FuzzResolve(f *testing.F) {
	f.Add("a/b", "../c", "/d")
	f.Add("a", "a", "a")
	f.Fuzz(func(t *testing.T, name, first, second string) {
		tree := fstest.MapFS{"a": link(first), "b/c": link(second), "d/e": {Data: []byte("\x7fELF")}}
		got, err := Resolve(tree, name)
		if err != nil {
			return
		}
		if !fs.ValidPath(got) {
			t.Fatalf("%q resolves to %q, which is outside", name, got)
		}
		if info, err := fs.Lstat(tree, got); err != nil || info.Mode()&fs.ModeSymlink != 0 {
			t.Fatalf("%q resolves to %q: %v, %v", name, got, info, err)
		}
	})
}
