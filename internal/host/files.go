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

	"golang.org/x/sys/unix"

	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/internal/migcaps"
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
	// capabilities are the nodes of each partition's capabilities, by its UUID, and unknown says why
	// a partition's are not known. Both are empty where nothing needs them.
	capabilities map[string][]migcaps.Node
	unknown      map[string]error
	// noDriver says what an installer still has to install; empty if nothing, or if
	// no folder with a driver was asked for.
	noDriver string
}

const (
	nodeControl = "/dev/nvidiactl"
	// nodeMemory is for unified memory, which has a kernel module of its own.
	nodeMemory = "/dev/nvidia-uvm"
)

// scan reads the files, those of the driver only if it is mounted into containers.
func (h *Host) scan(grants sharing.Grants, gpus []sharing.GPU) files {
	var f files
	for _, node := range []string{nodeControl, nodeMemory, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		// The dev of the driver root may not be visible here; the nodes are the same.
		if _, found := h.stat(node); found {
			f.control = append(f.control, node)
		}
	}
	for _, channel := range grants.IMEXChannels {
		node := plugin.IMEXNode(channel)
		if info, found := h.stat(node); found && info.Mode()&fs.ModeCharDevice != 0 {
			f.channels = append(f.channels, channel)
		}
	}
	if h.options.Dev != "" {
		f.nodes = h.nodes()
	}
	if grants.Nodes() || h.makes(grants) {
		f.capabilities, f.unknown = h.capabilities(gpus)
	}
	if driver := grants.DriverHostPath; driver != "" && grants.Uses(sharing.DriverMounts) {
		f.noDriver = cmp.Or(h.missingLibraries(driver), h.missingNodes())
	}
	return f
}

var effectiveCapabilities = regexp.MustCompile(`(?m)^CapEff:\s*([0-9a-f]{1,16})$`)

// MayPartition reports whether this process may have the right to configure MIG. It takes both of
// these, as far as they can be told, and the driver refuses without them:
//
//   - the capability SYS_ADMIN, as its status in proc says, or the driver's device node below dev;
//   - a device cgroup that lets it open the nodes of capabilities, which GPU instances get when they
//     are made: a compute instance takes an open descriptor of its GPU instance's. In a container
//     that is not privileged, the cgroup knows no such node (open-gpu-kernel-modules,
//     gpu_instance_subscription.c).
//
// No GPU is touched. scratch are folders for a device node, of which the first that can be used is.
func MayPartition(proc fs.FS, dev string, capabilities migcaps.Reader, scratch ...string) bool {
	return mayConfigure(proc, dev) && mayOpenCapabilities(capabilities, scratch)
}

func mayConfigure(proc fs.FS, dev string) bool {
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

// mayOpenCapabilities makes a capability's node in a folder of its own and opens it, which the kernel's
// driver lets everybody who may, whether or not the instance exists. What cannot be told is true.
func mayOpenCapabilities(capabilities migcaps.Reader, scratch []string) bool {
	major, err := capabilities.Major()
	if err != nil {
		return true // Without a driver that has MIG there is nothing to be refused.
	}
	const firstInstance = 3 // 1 and 2 are the rights to configure and to monitor MIG, and this may be any instance's.
	for _, folder := range scratch {
		err := openNode(folder, major, firstInstance)
		switch {
		case err == nil, errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
			return true // The cgroup is asked before the driver.
		case errors.Is(err, unix.EPERM):
			return false
		}
		// No node can be made here, or none opened: the file system is read-only, or has the option nodev.
	}
	return true
}

// openNode makes a character device's node in a new folder below folder, opens it and removes both.
func openNode(folder string, major, minor int) error {
	own, err := os.MkdirTemp(folder, ".virgate-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(own) }()
	path := filepath.Join(own, "node")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(uint32(major), uint32(minor)))); err != nil {
		return err
	}
	node, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return node.Close()
}

// capabilities reads the nodes of the GPUs' partitions.
func (h *Host) capabilities(gpus []sharing.GPU) (nodes map[string][]migcaps.Node, unknown map[string]error) {
	nodes, unknown = map[string][]migcaps.Node{}, map[string]error{}
	for _, g := range gpus {
		for _, p := range g.Partitions {
			if g.Minor < 0 {
				continue // The GPU's own node is missing first.
			}
			read, err := h.options.Capabilities.Partition(g.Minor, p.GI, p.CI)
			if err != nil {
				unknown[p.UUID] = err
				continue
			}
			nodes[p.UUID] = read
		}
	}
	return nodes, unknown
}

// nodes are the device nodes at the paths that grants use; nil if nvidiactl is not
// among them, because then this is not the driver's dev, or the node is simulated.
func (h *Host) nodes() map[string]bool {
	if _, err := os.Stat(filepath.Join(h.options.Dev, nodeControl)); err != nil {
		return nil
	}
	nodes := map[string]bool{}
	for _, folder := range []string{"/dev", "/dev/nvidia-caps"} {
		// A folder that cannot be read has none. Without MIG there is no nvidia-caps.
		entries, _ := os.ReadDir(filepath.Join(h.options.Dev, folder))
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
		found := slices.ContainsFunc(append(driverroot.LibraryFolders(), ""), func(dir string) bool {
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

// stat looks at a device node where this process sees the dev of which nodes are granted, else below
// Root, where a program outside a container has that folder, and last at the node's own path.
func (h *Host) stat(node string) (fs.FileInfo, bool) {
	paths := []string{h.path(filepath.Join(h.options.DevRoot, node)), h.path(node)}
	if h.options.Dev != "" {
		paths = append([]string{filepath.Join(h.options.Dev, node)}, paths...)
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil {
			return info, true
		}
	}
	return nil, false
}

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
