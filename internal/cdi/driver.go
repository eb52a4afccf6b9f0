package cdi

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
)

// DriverOptions say where the driver is. The paths of a spec are the host's,
// while what is looked at to make it is in this process's sight.
type DriverOptions struct {
	// Find says where the driver and its dev folder are in this process's sight.
	// It is asked anew each time: a driver may come after this program.
	Find func() Roots
	// Host is where the host has them.
	Host Roots
	// HookPath is the host's program that specs name as hook:
	// "/usr/bin/nvidia-cdi-hook".
	HookPath string
	// Features are nvcdi's feature flags.
	Features []string
	Logger   *slog.Logger
}

// Roots are the folder with the driver and the one with its dev folder; often
// the same one.
type Roots struct{ Driver, Dev string }

// ErrNoDriver is what a Driver answers in a program that was built without cgo,
// which nvcdi needs.
var ErrNoDriver = errors.New("this program was built without cgo and cannot make CDI specs of a real driver; use another deviceListStrategy than cdi-annotations and cdi-cri, or a program with cgo")

// installed changes whenever something is installed or removed beside the
// driver's libraries: their names have the driver's version in them, and a spec
// lists them. It is empty where they are in none of the usual folders.
func installed(root string) string {
	for _, folder := range []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
	} {
		path := filepath.Join(root, folder, "libnvidia-ml.so.1")
		library, err := os.Lstat(path)
		if err != nil {
			continue
		}
		around, err := os.Stat(filepath.Dir(path))
		if err != nil {
			continue
		}
		return fmt.Sprintf("%s %d %d", path, library.ModTime().UnixNano(), around.ModTime().UnixNano())
	}
	return ""
}
