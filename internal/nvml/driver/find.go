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

// libraryName is the name of the library with its ABI version, which NVIDIA has
// never changed.
const libraryName = "libnvidia-ml.so.1"

// root is a folder in which a driver was installed as if it were "/".
type root struct {
	path  string
	files fs.FS
}

func newRoot(path string) root { return root{path: path, files: os.DirFS(path)} }

// find returns the first file of that name in one of the folders below the roots: its root,
// and its path there with symbolic links resolved, "" when there is none. looked has the
// folders that were searched.
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

// Options say where the driver is. The zero value stands for a driver that is
// installed in the usual places of this machine.
type Options struct {
	// DriverRoot is where the driver is installed on the host, "/" when empty. It is
	// of use only if this process sees the host's files under the same paths, as
	// outside a container.
	DriverRoot string
	// ContainerDriverRoot is where the driver root is mounted in this process's
	// container. If it exists it is searched first. Empty for nowhere.
	ContainerDriverRoot string
	// DevRoot is the host's folder with the dev of which containers are given nodes; "/" when empty.
	DevRoot string
	// HostRoot is where the host's "/" is mounted for this process; empty for nowhere.
	HostRoot string
	// MachineRoot is the folder with the sys, dev and etc of this machine, "/" when
	// empty. Tests set it.
	MachineRoot string
}

// roots are searched for the library, in order.
func (o Options) roots() []root {
	var roots []root
	if o.ContainerDriverRoot != "" {
		if info, err := os.Stat(o.ContainerDriverRoot); err == nil && info.IsDir() {
			roots = append(roots, newRoot(o.ContainerDriverRoot))
		}
	}
	return append(roots, newRoot(cmp.Or(o.DriverRoot, "/")))
}

// The platforms on which NVIDIA's GPUs are not reached as they are on a server.
var (
	errWSL = errors.New(
		"WSL (there is /dev/dxg) is not supported: its GPUs have no device nodes that a container could be given")
	errTegra = errors.New("a Tegra system is not supported: its GPU is part of the processor and cannot be enumerated")
)

// platform says why the machine, a tree like "/", is not supported; nil when it
// is. It looks for the same files as NVIDIA's go-nvlib.
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

// address is a place on the PCI bus. GPUs are function 0.
type address struct{ domain, bus, device uint32 }

// String is the address as NVML writes it, "00000000:3B:00.0".
func (a address) String() string { return fmt.Sprintf("%08X:%02X:%02X.0", a.domain, a.bus, a.device) }

// sysfs is the address as the kernel writes it, "0000:3b:00.0".
func (a address) sysfs() string { return fmt.Sprintf("%04x:%02x:%02x.0", a.domain, a.bus, a.device) }

// numaNode is the NUMA node next to the device, from the machine's sysfs; -1 when
// the kernel knows none, for which it writes -1 too
// (Documentation/ABI/testing/sysfs-bus-pci).
func numaNode(machine fs.FS, a address) int {
	// A file that cannot be read is empty, which is no number.
	text, _ := fs.ReadFile(machine, "sys/bus/pci/devices/"+a.sysfs()+"/numa_node")
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || node < 0 {
		return -1
	}
	return node
}

// binding is nvml.PCIInfo's: the number of sysfs's node for it, which the kernel gives to no
// other node before the next boot (Linux, fs/kernfs/dir.c: kernfs_new_node).
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

// class is nvml.PCIInfo's, from the machine's sysfs: "0x030200".
func class(machine fs.FS, a address) uint32 {
	text, _ := fs.ReadFile(machine, "sys/bus/pci/devices/"+a.sysfs()+"/class")
	class, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 32)
	if err != nil {
		return 0
	}
	return uint32(class)
}

// libraryVersion is the driver's version in the name of a library's file, libnvidia-ml.so.580.65.06; "" where there
// is none.
func libraryVersion(file string) string {
	_, version, _ := strings.Cut(filepath.Base(file), ".so.")
	return versions.FindString(version)
}

// versions are those of drivers, 580.65.06.
var versions = regexp.MustCompile(`\b\d{3,}(\.\d+)+\b`)

// moduleVersion is the version of the kernel module that the machine has loaded, "" when unknown. In a container,
// NVIDIA's runtime may have put a copy in the place of proc's file when the container started, so sysfs's comes first.
func moduleVersion(machine fs.FS) string {
	text, err := fs.ReadFile(machine, "sys/module/nvidia/version")
	if err != nil {
		text, _ = fs.ReadFile(machine, "proc/driver/nvidia/version")
	}
	// Proc's goes on with the compiler's version.
	first, _, _ := strings.Cut(string(text), "\n")
	return versions.FindString(first)
}
