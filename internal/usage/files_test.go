package usage

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func write(tb testing.TB, root, name string, data []byte) {
	tb.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		tb.Fatal(err)
	}
}

func dirFS(root string) fs.FS { return os.DirFS(root) }
