package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// libraryName is the driver's name for the version of the library that has not
// changed since there is one.
const libraryName = "libnvidia-ml.so.1"

// libraryFolders are the folders below a driver root in which NVIDIA's device
// plugin looks, in its order (k8s-device-plugin, root.go of its plugin command).
func libraryFolders() []string {
	return []string{
		"usr/lib64",
		"usr/lib/x86_64-linux-gnu",
		"usr/lib/aarch64-linux-gnu",
		"lib64",
		"lib/x86_64-linux-gnu",
		"lib/aarch64-linux-gnu",
	}
}

// root is a folder that a driver was installed under, as if it were "/".
type root struct {
	path  string
	files fs.FS
}

func newRoot(path string) root { return root{path: path, files: os.DirFS(path)} }

// find is the path of the first driver library under the roots, free of
// symbolic links: each version of a driver then has a path of its own, which is
// what the loader tells libraries apart by. It is "" when there is none, and
// looked has the folders in which it would have been.
func find(roots []root) (library string, looked []string) {
	for _, r := range roots {
		for _, folder := range libraryFolders() {
			looked = append(looked, filepath.Join(r.path, folder))
			name, err := resolve(r.files, path.Join(folder, libraryName))
			if err != nil {
				continue
			}
			if info, err := fs.Stat(r.files, name); err == nil && info.Mode().IsRegular() {
				return filepath.Join(r.path, name), looked
			}
		}
	}
	return "", looked
}

// linkLimit is the number of symbolic links after which a path is taken to go
// round in circles; Linux has the same (path_resolution(7)).
const linkLimit = 40

var errLinks = errors.New("too many symbolic links")

// resolve follows the name's symbolic links as a process would that has the
// tree as its root: absolute ones begin at the root, and .. ends there.
func resolve(tree fs.FS, name string) (string, error) {
	done := "."
	for links := 0; name != ""; {
		var element string
		element, name, _ = strings.Cut(name, "/")
		next := path.Join("/", done, element)[1:]
		if next == "" {
			done = "."
			continue
		}
		info, err := fs.Lstat(tree, next)
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			done = next
			continue
		}
		if links++; links > linkLimit {
			return "", fmt.Errorf("resolve %s: %w", next, errLinks)
		}
		target, err := fs.ReadLink(tree, next)
		if err != nil {
			return "", err
		}
		if strings.HasPrefix(target, "/") {
			done = "."
		}
		name = path.Join(target, name)
	}
	return done, nil
}
