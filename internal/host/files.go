package host

import (
	"errors"
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
	// nodes are the driver's device nodes that the host has; nil where its dev is
	// out of sight.
	nodes map[string]bool
	// minors are those of MIG capabilities; minorsErr says why there are none.
	minors    map[capability]int
	minorsErr string
	// noDriver says what an installer has yet to bring; empty when all is there,
	// and when no driver's folder was asked for.
	noDriver string
}

const (
	minorsPath  = "/proc/driver/nvidia-caps/mig-minors"
	nodeControl = "/dev/nvidiactl"
	// nodeMemory is that of unified memory, which has a module of its own.
	nodeMemory   = "/dev/nvidia-uvm"
	notInstalled = "the driver is not installed yet: "
)

// look reads the files. driver is the host's folder with the driver; empty for
// none.
func (h *Host) look(driver string) files {
	var f files
	for _, node := range []string{nodeControl, nodeMemory, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		// The driver root's dev may be out of our sight; the nodes are the same.
		if h.exists(filepath.Join(h.options.DevRoot, node)) || h.exists(node) {
			f.control = append(f.control, node)
		}
	}
	if h.seesHost() {
		f.nodes = h.nodes()
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
	if driver != "" && f.noDriver == "" {
		f.noDriver = h.missingNodes()
	}
	return f
}

// nodes are those that lie where grants have them; nil without the first one
// that a driver makes, because that is another dev than the driver's, or a node
// that is simulated.
func (h *Host) nodes() map[string]bool {
	if !h.exists(filepath.Join(h.options.DevRoot, nodeControl)) {
		return nil
	}
	nodes := map[string]bool{}
	for _, folder := range []string{"/dev", "/dev/nvidia-caps"} {
		// A folder that cannot be read has none; a board without MIG has no second.
		entries, _ := os.ReadDir(h.seen(filepath.Join(h.options.DevRoot, folder)))
		for _, entry := range entries {
			nodes[filepath.Join(folder, entry.Name())] = true
		}
	}
	return nodes
}

// missingNodes says which of the nodes that every CUDA program opens is not
// there. No runtime brings them where the driver is mounted, and an installer may
// load the kernel's modules last. Where the host's "/" is in sight they must lie
// where grants have them: below the installer's folder there is no dev.
func (h *Host) missingNodes() string {
	var missing []string
	for _, node := range []string{nodeControl, nodeMemory} {
		granted := filepath.Join("/", h.options.DevRoot, node)
		if !h.exists(granted) && (h.seesHost() || !h.exists(node)) {
			missing = append(missing, granted)
		}
	}
	if len(missing) == 0 {
		return ""
	}
	return notInstalled + "there is no " + strings.Join(missing, " and no ")
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
	return notInstalled + driver + " has no " + strings.Join(missing, " and no ")
}

// seen is where this process sees the host's path.
func (h *Host) seen(path string) string { return filepath.Join(h.options.Root, path) }

// seesHost says that the host's "/" is mounted for this process.
func (h *Host) seesHost() bool { return filepath.Join("/", h.options.Root) != "/" }

func (h *Host) exists(path string) bool {
	_, err := os.Stat(h.seen(path))
	return err == nil
}
