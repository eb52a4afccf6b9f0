package shortdir_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/shortdir"
)

func TestNew(t *testing.T) {
	short, err := os.MkdirTemp("/tmp", "v") //nolint:usetesting // TMPDIR may not be fit
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(short) }()
	long := filepath.Join(short, strings.Repeat("long", 10))
	if err := os.Mkdir(long, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		temporary string
		mode      os.FileMode
		want      string
	}{{short, 0o755, short}, {short, 0o700, "/tmp"}, {long, 0o755, "/tmp"}} {
		if err := os.Chmod(short, test.mode); err != nil {
			t.Fatal(err)
		}
		t.Setenv("TMPDIR", test.temporary)
		dir := shortdir.New(t)
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 || filepath.Dir(dir) != test.want {
			t.Errorf("TMPDIR %s of mode %o: %s, want one in %s with mode 755 (%v)", test.temporary, test.mode, dir, test.want, err)
		}
	}
}
