package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// files is what one look at the file system found. It is never changed.
type files struct {
	// control are the control nodes that exist.
	control []string
	// minors are those of MIG capabilities; minorsErr says why there are none.
	minors    map[capability]int
	minorsErr string
	// noDriver says what the driver's folder lacks; empty when it is complete,
	// and when no folder was asked for.
	noDriver string
}

const minorsPath = "/proc/driver/nvidia-caps/mig-minors"

// look reads the files. driver is the host's folder with the driver; empty for
// none.
func (h *Host) look(driver string) files {
	var f files
	for _, node := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		// The driver root's dev may be out of our sight; the nodes are the same.
		if h.exists(filepath.Join(h.options.DevRoot, node)) || h.exists(node) {
			f.control = append(f.control, node)
		}
	}
	data, err := os.ReadFile(h.seen(minorsPath))
	if err == nil {
		f.minors, err = parseMinors(string(data))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.minorsErr = "there is no " + minorsPath
	case err != nil:
		f.minorsErr = err.Error()
	}
	if driver != "" {
		f.noDriver = h.missingLibraries(driver)
	}
	return f
}

// missingLibraries says which of the libraries that every CUDA program needs
// the folder lacks. An installer links them when it has copied the rest, and
// both are asked for in case it has not.
func (h *Host) missingLibraries(driver string) string {
	var missing []string
	for _, library := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		found := slices.ContainsFunc([]string{"lib64", "lib", ""}, func(dir string) bool {
			info, err := os.Stat(h.seen(filepath.Join(driver, dir, library)))
			return err == nil && info.Mode().IsRegular() && info.Size() > 0
		})
		if !found {
			missing = append(missing, library)
		}
	}
	if len(missing) == 0 {
		return ""
	}
	return fmt.Sprintf("the driver is not installed yet: %s has no %s", driver, strings.Join(missing, " and no "))
}

// seen is where this process sees the host's path.
func (h *Host) seen(path string) string { return filepath.Join(h.options.Root, path) }

func (h *Host) exists(path string) bool {
	_, err := os.Stat(h.seen(path))
	return err == nil
}
