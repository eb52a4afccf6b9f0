package host

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// files is what a scan of the file system found. It is never changed.
type files struct {
	// control are the driver's control nodes that exist.
	control []string
	// nodes are the driver's device nodes on the host; nil if its dev is not visible.
	nodes map[string]bool
	// channels are the IMEX channels that exist, of those that are asked for.
	channels []string
	// minors are those of MIG capabilities; minorsErr says why they are unknown.
	minors    map[capability]int
	minorsErr string
	// noDriver says what an installer still has to install; empty if nothing, or if
	// no folder with a driver was asked for.
	noDriver string
}

const (
	minorsPath  = "/proc/driver/nvidia-caps/mig-minors"
	nodeControl = "/dev/nvidiactl"
	// nodeMemory is for unified memory, which has a kernel module of its own.
	nodeMemory = "/dev/nvidia-uvm"
)

// scan reads the files, those of the driver only if it is mounted into containers.
func (h *Host) scan(grants sharing.Grants) files {
	var f files
	for _, node := range []string{nodeControl, nodeMemory, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		// The dev of the driver root may not be visible here; the nodes are the same.
		if h.exists(filepath.Join(h.options.DevRoot, node)) || h.exists(node) {
			f.control = append(f.control, node)
		}
	}
	for _, channel := range grants.IMEXChannels {
		node := plugin.IMEXNode(channel)
		if h.isDevice(filepath.Join(h.options.DevRoot, node)) || h.isDevice(node) {
			f.channels = append(f.channels, channel)
		}
	}
	if h.seesHost() {
		f.nodes = h.nodes()
	}
	data, err := os.ReadFile(h.path(minorsPath))
	switch {
	case err == nil:
		f.minors = parseMinors(string(data))
	case errors.Is(err, fs.ErrNotExist):
		f.minorsErr = "there is no " + minorsPath
	default:
		f.minorsErr = err.Error()
	}
	if driver := grants.DriverHostPath; driver != "" && grants.Uses(sharing.DriverMounts) {
		f.noDriver = cmp.Or(h.missingLibraries(driver), h.missingNodes())
	}
	return f
}

var effectiveCapabilities = regexp.MustCompile(`(?m)^CapEff:\s*([0-9a-f]{1,16})$`)

// MayPartition says whether this process may have the right to configure MIG: the capability
// SYS_ADMIN, as its status in proc says, or the driver's device node below dev. With neither
// the driver refuses.
func MayPartition(proc fs.FS, dev string) bool {
	if node, err := os.Open(filepath.Join(dev, "nvidia-caps/nvidia-cap1")); err == nil {
		_ = node.Close()
		return true
	}
	const sysAdmin = 21 // linux/capability.h
	status, _ := fs.ReadFile(proc, "self/status")
	set := effectiveCapabilities.FindSubmatch(status)
	if set == nil {
		return true
	}
	bits, _ := strconv.ParseUint(string(set[1]), 16, 64)
	return bits>>sysAdmin&1 == 1
}

// nodes are the device nodes at the paths that grants use; nil if nvidiactl is not
// among them, because then this is not the driver's dev, or the node is simulated.
func (h *Host) nodes() map[string]bool {
	if !h.exists(filepath.Join(h.options.DevRoot, nodeControl)) {
		return nil
	}
	nodes := map[string]bool{}
	for _, folder := range []string{"/dev", "/dev/nvidia-caps"} {
		// A folder that cannot be read has none. Without MIG there is no nvidia-caps.
		entries, _ := os.ReadDir(h.path(filepath.Join(h.options.DevRoot, folder)))
		for _, entry := range entries {
			nodes[filepath.Join(folder, entry.Name())] = true
		}
	}
	return nodes
}

// missingNodes says which of the device nodes that every CUDA program opens is missing.
// A runtime does not make them if the driver is mounted, and an installer may load the
// kernel modules last. If the host's "/" is visible they must be at the paths that
// grants use: below the installer's folder there is no dev.
func (h *Host) missingNodes() string {
	var missing []string
	for _, node := range []string{nodeControl, nodeMemory} {
		granted := filepath.Join("/", h.options.DevRoot, node)
		if !h.exists(granted) && (h.seesHost() || !h.exists(node)) {
			missing = append(missing, granted)
		}
	}
	return notYet("there is no ", missing)
}

// missingLibraries says which of the libraries that every CUDA program needs is missing
// in the folder. An installer makes these links after it has copied the rest.
func (h *Host) missingLibraries(driver string) string {
	var missing []string
	for _, library := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		found := slices.ContainsFunc([]string{"lib64", "lib", ""}, func(dir string) bool {
			info, err := os.Stat(h.path(filepath.Join(driver, dir, library)))
			return err == nil && info.Mode().IsRegular() && info.Size() > 0
		})
		if !found {
			missing = append(missing, library)
		}
	}
	return notYet(driver+" has no ", missing)
}

// notYet says what is missing; "" for nothing.
func notYet(place string, missing []string) string {
	if len(missing) == 0 {
		return ""
	}
	return "the driver is not installed yet: " + place + strings.Join(missing, " and no ")
}

// path is where this process finds the host's path.
func (h *Host) path(path string) string { return filepath.Join(h.options.Root, path) }

// seesHost says that the host's "/" is mounted for this process.
func (h *Host) seesHost() bool { return filepath.Join("/", h.options.Root) != "/" }

func (h *Host) exists(path string) bool {
	_, err := os.Stat(h.path(path))
	return err == nil
}

func (h *Host) isDevice(path string) bool {
	info, err := os.Stat(h.path(path))
	return err == nil && info.Mode()&fs.ModeCharDevice != 0
}

// capability is that of a GPU instance, with ci -1, or of a compute instance in it. gpu
// is the GPU's minor number.
type capability struct{ gpu, gi, ci int }

// parseMinors reads the driver's table of MIG capabilities,
// /proc/driver/nvidia-caps/mig-minors, which has the N of each instance's device node
// /dev/nvidia-caps/nvidia-capN:
//
//	line = "gpu" minor "/gi" id [ "/ci" id ] "/access " N
//
// All other lines are skipped: "config N" and "monitor N" are for changing and monitoring
// MIG, not for containers, and a later driver may have more. The source is NVIDIA's MIG
// User Guide, "Device Nodes and Capabilities".
func parseMinors(data string) map[capability]int {
	minors := map[capability]int{}
	for line := range strings.Lines(data) {
		found := capabilityLine.FindStringSubmatch(strings.TrimSpace(line))
		if found == nil {
			continue
		}
		number := func(field int) int {
			n, _ := strconv.Atoi(found[field])
			return n
		}
		c := capability{gpu: number(1), gi: number(2), ci: -1}
		if found[3] != "" {
			c.ci = number(3)
		}
		minors[c] = number(4)
	}
	return minors
}

var capabilityLine = regexp.MustCompile(`^gpu([0-9]{1,9})/gi([0-9]{1,9})(?:/ci([0-9]{1,9}))?/access ([0-9]{1,9})$`)

// PCIeRoot is the PCIe root complex of the device with that bus ID, such as pci0000:3a, by
// which DRA drivers tell what is near what; empty when unknown. sys is the host's /sys.
func PCIeRoot(sys fs.FS, busID string) string {
	address := strings.ToLower(strings.TrimPrefix(busID, "0000"))
	target, err := fs.ReadLink(sys, "bus/pci/devices/"+address)
	if err != nil {
		return ""
	}
	_, path, _ := strings.Cut(target, "devices/")
	root, _, below := strings.Cut(path, "/")
	if !below || !strings.HasPrefix(root, "pci") {
		return ""
	}
	return root
}
