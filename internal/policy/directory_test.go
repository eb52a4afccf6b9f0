package policy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
)

func TestDirectory(t *testing.T) {
	d := &Directory{Path: filepath.Join(t.TempDir(), "profiles")}
	if _, err := d.Documents(); err == nil || !strings.Contains(err.Error(), "read profiles: ") {
		t.Errorf("without the directory: %v", err)
	}
	for _, dir := range []string{"", "sub"} {
		if err := os.Mkdir(filepath.Join(d.Path, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	next := follow(t, d)
	next()
	put := func(name, content string) { write(t, filepath.Join(d.Path, name), content) }
	put("four", four)
	next()
	put("..hidden", ten)
	put(".dotted", ten)
	next()
	got, err := d.Documents()
	if diff := cmp.Diff(configs.Documents{"four": four, ".dotted": ten}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	put("four", strings.Repeat("#", maxDocument+1))
	next()
	if _, err := d.Documents(); err == nil || !strings.Contains(err.Error(), "four: longer than") {
		t.Errorf("a document that is too long: %v", err)
	}
}

// TestMountedDirectory: one reading is of one version, also when the links of
// single files point elsewhere.
func TestMountedDirectory(t *testing.T) {
	dir := t.TempDir()
	for version, content := range map[string]string{"..1": four, "..2": ten} {
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "a"), content)
	}
	for link, target := range map[string]string{"..data": "..1", "a": "..2/a"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := (&Directory{Path: dir}).Documents()
	if diff := cmp.Diff(configs.Documents{"a": four}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
