// Package driverroot knows the layout of a driver root: a folder in which a driver was installed as
// if the folder were "/". It only reads.
package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// LibraryFolders returns the folders below a driver root that may contain the driver's libraries,
// in search order: first the folders of NVIDIA's device plugin in its order (k8s-device-plugin,
// root.go of its plugin command), then the folders of distributions and installers that support
// only one architecture.
func LibraryFolders() []string {
	return append(SearchedByNVIDIA(), "usr/lib", "lib")
}

// SearchedByNVIDIA returns the LibraryFolders that NVIDIA's own libraries search too.
func SearchedByNVIDIA() []string {
	return []string{
		"usr/lib64",
		"usr/lib/x86_64-linux-gnu",
		"usr/lib/aarch64-linux-gnu",
		"lib64",
		"lib/x86_64-linux-gnu",
		"lib/aarch64-linux-gnu",
	}
}

// linkLimit is the number of symbolic links after which a path counts as a loop, as in Linux
// (path_resolution(7)).
const linkLimit = 40

// ErrLinks is Resolve's error for links that form a loop.
var ErrLinks = errors.New("too many symbolic links")

// Resolve follows the name's symbolic links like a process that has the tree as its root: absolute
// links start at the root, and .. does not leave it. The error is fs.ErrNotExist if there is no
// such file.
func Resolve(tree fs.FS, name string) (string, error) {
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
			return "", fmt.Errorf("resolve %s: %w", next, ErrLinks)
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
