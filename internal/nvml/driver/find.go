package driver

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/virgate/virgate/internal/driverroot"
)

// libraryName is the library's name with its ABI version, which NVIDIA has never changed.
const libraryName = "libnvidia-ml.so.1"

// root is a folder in which a driver was installed as if it were "/".
type root struct {
	path  string
	files fs.FS
}

func newRoot(path string) root { return root{path: path, files: os.DirFS(path)} }

// find returns the first file of that name in one of the folders below the roots: its root, and its
// path in the root with symbolic links resolved; empty if there is none. looked lists the searched
// folders.
func find(roots []root, folders []string, name string) (in root, file string, looked []string) {
	for _, in := range roots {
		for _, folder := range folders {
			looked = append(looked, filepath.Join(in.path, folder))
			file, err := driverroot.Resolve(in.files, path.Join(folder, name))
			if err != nil {
				continue
			}
			if info, err := fs.Stat(in.files, file); err == nil && info.Mode().IsRegular() {
				return in, file, looked
			}
		}
	}
	return root{}, "", looked
}

// ErrNoCgo is Open's error in a program that was built without cgo.
var ErrNoCgo = errors.New("built without cgo: this program cannot open a driver")

// Options says where the driver is. The zero value means a driver in the usual places of this
// machine.
type Options struct {
	// DriverRoot is where the driver is installed on the host; "/" when empty. It works only if
	// this process sees the host's files under the same paths, as outside a container.
	DriverRoot string
	// ContainerDriverRoot is where the driver root is mounted in this process's container; empty if
	// it is not. If the folder exists, it is searched first.
	ContainerDriverRoot string
	// DevRoot is the host's folder whose dev provides the device nodes for containers; "/" when
	// empty.
	DevRoot string
	// HostRoot is where the host's "/" is mounted for this process; empty if it is not.
	HostRoot string
	// MachineRoot is the folder with this machine's sys, dev and etc; "/" when empty. Tests set it.
	MachineRoot string
}

// roots returns the driver roots to search for the library, in order.
func (o Options) roots() []root {
	var roots []root
	if o.ContainerDriverRoot != "" {
		if info, err := os.Stat(o.ContainerDriverRoot); err == nil && info.IsDir() {
			roots = append(roots, newRoot(o.ContainerDriverRoot))
		}
	}
	return append(roots, newRoot(cmp.Or(o.DriverRoot, "/")))
}

// The platforms on which programs do not reach NVIDIA's GPUs as they do on a server.
var (
	errWSL = errors.New(
		"WSL (there is /dev/dxg) is not supported: its GPUs have no device nodes that a container could be given")
	errTegra = errors.New("a Tegra system is not supported: its GPU is part of the processor and cannot be enumerated")
)

// platform returns the reason why the machine, a tree like "/", is not supported; nil if it is. It
// checks the same files as NVIDIA's go-nvlib.
func platform(machine fs.FS) error {
	if _, err := fs.Stat(machine, "dev/dxg"); err == nil {
		return errWSL
	}
	if _, err := fs.Stat(machine, "etc/nv_tegra_release"); err == nil {
		return errTegra
	}
	family, err := fs.ReadFile(machine, "sys/devices/soc0/family")
	if err == nil && strings.HasPrefix(strings.ToLower(string(family)), "tegra") {
		return errTegra
	}
	return nil
}

// address is an address on the PCI bus. GPUs are function 0.
type address struct{ domain, bus, device uint32 }

// String returns the address as NVML writes it, "00000000:3B:00.0".
func (a address) String() string { return fmt.Sprintf("%08X:%02X:%02X.0", a.domain, a.bus, a.device) }

// sysfs returns the address as the kernel writes it, "0000:3b:00.0".
func (a address) sysfs() string { return fmt.Sprintf("%04x:%02x:%02x.0", a.domain, a.bus, a.device) }

// numaNode returns the NUMA node closest to the device, from the machine's sysfs. It returns -1 if
// the kernel knows none, as the kernel itself does (Documentation/ABI/testing/sysfs-bus-pci).
func numaNode(machine fs.FS, a address) int {
	// A file that cannot be read is empty, and so not a number.
	text, _ := fs.ReadFile(machine, "sys/bus/pci/devices/"+a.sysfs()+"/numa_node")
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || node < 0 {
		return -1
	}
	return node
}

// binding returns the value for nvml.PCIInfo.Binding: the inode number of the binding's node in
// sysfs, which the kernel gives to no other node before the next boot (Linux, fs/kernfs/dir.c:
// kernfs_new_node).
func binding(machine fs.FS, a address) uint64 {
	info, err := fs.Lstat(machine, "sys/bus/pci/devices/"+a.sysfs()+"/driver")
	if err != nil {
		return 0
	}
	stat, known := info.Sys().(*syscall.Stat_t)
	if !known {
		return 0
	}
	return stat.Ino
}

// class returns the value for nvml.PCIInfo.Class, from the machine's sysfs: "0x030200".
func class(machine fs.FS, a address) uint32 {
	text, _ := fs.ReadFile(machine, "sys/bus/pci/devices/"+a.sysfs()+"/class")
	class, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 32)
	if err != nil {
		return 0
	}
	return uint32(class)
}

// libraryVersion returns the driver's version from the name of a library's file,
// libnvidia-ml.so.580.65.06; empty if the name has none.
func libraryVersion(file string) string {
	_, version, _ := strings.Cut(filepath.Base(file), ".so.")
	return versions.FindString(version)
}

// versions matches the versions of drivers, such as 580.65.06.
var versions = regexp.MustCompile(`\b\d{3,}(\.\d+)+\b`)

// moduleVersion returns the version of the kernel module that the machine has loaded; empty if
// unknown. In a container, NVIDIA's runtime may have replaced the file in proc by a copy when the
// container started, so the file in sysfs comes first.
func moduleVersion(machine fs.FS) string {
	text, err := fs.ReadFile(machine, "sys/module/nvidia/version")
	if err != nil {
		text, _ = fs.ReadFile(machine, "proc/driver/nvidia/version")
	}
	// The file in proc also has the compiler's version.
	first, _, _ := strings.Cut(string(text), "\n")
	return versions.FindString(first)
}
