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
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// files is the result of one scan of the file system. It is never changed.
type files struct {
	// control lists the driver's control nodes that exist.
	control []string
	// nodes holds the driver's device nodes on the host; nil if the driver's dev is not visible.
	nodes map[string]bool
	// channels lists the requested IMEX channels that exist.
	channels []string
	// capabilities holds each partition's capability nodes, by the partition's UUID. unknown holds
	// the error of each partition whose nodes could not be read. Both are empty if no grant needs
	// them.
	capabilities map[string][]migcaps.Node
	unknown      map[string]error
	// noDriver describes what an installer still has to install; empty if nothing is missing or no
	// driver folder was requested.
	noDriver string
}

const (
	nodeControl = "/dev/nvidiactl"
	// nodeMemory is the node of unified memory, which has a kernel module of its own.
	nodeMemory = "/dev/nvidia-uvm"
)

// scan reads the files. It reads the driver's own files only if the driver is mounted into
// containers.
func (h *Host) scan(grants sharing.Grants, gpus []sharing.GPU) files {
	var f files
	for _, node := range []string{nodeControl, nodeMemory, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		// The driver root's dev may not be visible to this process. stat then finds the same node
		// elsewhere.
		if _, found := h.stat(node); found {
			f.control = append(f.control, node)
		}
	}
	for _, channel := range grants.IMEXChannels {
		node := grant.IMEXNode(channel)
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

// MayPartition reports whether this process may have the right to configure MIG. The driver
// requires both of the following; a requirement that cannot be checked counts as met:
//
//   - the capability SYS_ADMIN, read from this process's status in proc, or access to the driver's
//     device node nvidia-caps/nvidia-cap1 below dev;
//   - a device cgroup that lets the process open capability nodes. GPU instances get these nodes
//     when they are created, and creating a compute instance requires an open descriptor of its GPU
//     instance's node. In a container that is not privileged, the cgroup does not include such
//     nodes (open-gpu-kernel-modules, gpu_instance_subscription.c).
//
// MayPartition does not access any GPU. scratch lists folders in which it may create a device node;
// it uses the first one that works.
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

// mayOpenCapabilities creates a capability's node in a temporary folder and opens it. The kernel
// driver allows that to every process with the right to use capabilities, whether or not the
// instance exists. If the answer cannot be determined, it returns true.
func mayOpenCapabilities(capabilities migcaps.Reader, scratch []string) bool {
	major, err := capabilities.Major()
	if err != nil {
		return true // Without a driver that supports MIG, nothing can be refused.
	}
	const firstInstance = 3 // 1 and 2 are the rights to configure and to monitor MIG; 3 may be any instance's.
	for _, folder := range scratch {
		err := openNode(folder, major, firstInstance)
		switch {
		case err == nil, errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
			return true // The kernel checks the cgroup before it calls the driver.
		case errors.Is(err, unix.EPERM):
			return false
		}
		// The node cannot be created or opened here: the file system is read-only or is mounted
		// with nodev.
	}
	return true
}

// openNode creates a character device node in a new folder below folder, opens it and removes both.
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

// capabilities reads the capability nodes of the GPUs' partitions.
func (h *Host) capabilities(gpus []sharing.GPU) (nodes map[string][]migcaps.Node, unknown map[string]error) {
	nodes, unknown = map[string][]migcaps.Node{}, map[string]error{}
	for _, g := range gpus {
		for _, p := range g.Partitions {
			if g.Minor < 0 {
				continue // The GPU's own node is unknown, and assemble reports that first.
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

// nodes returns the device nodes at the paths that grants use. It returns nil if nvidiactl is not
// among them: then this is not the driver's dev, or the node is simulated.
func (h *Host) nodes() map[string]bool {
	if _, err := os.Stat(filepath.Join(h.options.Dev, nodeControl)); err != nil {
		return nil
	}
	nodes := map[string]bool{}
	for _, folder := range []string{"/dev", "/dev/nvidia-caps"} {
		// An unreadable folder counts as empty. Without MIG, nvidia-caps does not exist.
		entries, _ := os.ReadDir(filepath.Join(h.options.Dev, folder))
		for _, entry := range entries {
			nodes[filepath.Join(folder, entry.Name())] = true
		}
	}
	return nodes
}

// missingNodes describes which of the device nodes that every CUDA program opens are missing. A
// runtime does not create them if the driver is mounted, and an installer may load the kernel
// modules last. If the host's "/" is visible, the nodes must be at the paths that grants use,
// because there is no dev below the installer's folder.
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

// missingLibraries describes which of the libraries that every CUDA program needs are missing in
// the folder. An installer creates these links after it has copied everything else.
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

// notYet describes what is missing; empty if nothing is.
func notYet(place string, missing []string) string {
	if len(missing) == 0 {
		return ""
	}
	return "the driver is not installed yet: " + place + strings.Join(missing, " and no ")
}

// path returns where this process finds the host's path.
func (h *Host) path(path string) string { return filepath.Join(h.options.Root, path) }

// seesHost reports whether the host's "/" is mounted for this process.
func (h *Host) seesHost() bool { return filepath.Join("/", h.options.Root) != "/" }

func (h *Host) exists(path string) bool {
	_, err := os.Stat(h.path(path))
	return err == nil
}

// stat finds a device node in one of three places: first in the dev whose nodes are granted, if
// this process sees it; then in the same folder below Root, where a program outside a container
// finds it; last at the node's own path below Root.
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

// PCIeRoot returns the PCIe root complex of the device with that bus ID, such as pci0000:3a; empty
// if unknown. DRA drivers publish it to show which devices are close to each other. sys is the
// host's /sys.
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
