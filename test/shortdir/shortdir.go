// Package shortdir gives tests directories for Unix sockets. The path of such a socket may have 107
// bytes (sun_path in unix(7)), and those of testing.T.TempDir contain the test's name.
package shortdir

import (
	"os"
	"path/filepath"
	"testing"
)

// most leaves room for ROOT/GPU-UUID/pipe/control, the longest path of a socket.
const most = 40

// New returns a new directory that every user can enter, as an MPS server's user must, and removes
// it when the test ends. It is in /tmp if the path in TMPDIR would be too long, or if other users
// cannot enter that one.
func New(t testing.TB) string {
	t.Helper()
	base := os.TempDir()
	if len(base) > most || !open(base) {
		base = "/tmp"
	}
	dir, err := os.MkdirTemp(base, "v") //nolint:usetesting // Those of t.TempDir are too long.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // See above.
		t.Fatal(err)
	}
	return dir
}

// open reports whether every user can enter the directory.
func open(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&0o001 != 0 && (dir == filepath.Dir(dir) || open(filepath.Dir(dir)))
}
