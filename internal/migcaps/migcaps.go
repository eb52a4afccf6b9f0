// Package migcaps reads what the kernel driver publishes about MIG capabilities: the device nodes
// that a container needs for a partition. It creates no nodes and does not check whether they
// exist.
//
// The driver reserves the numbers of all possible capabilities and lists them in
// /proc/driver/nvidia-caps/mig-minors. Only the file "access" of an instance shows that the
// instance exists (open-gpu-kernel-modules, kernel-open/nvidia/nv-caps.c).
package migcaps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Folder contains the driver's capability files.
const Folder = "/proc/driver/nvidia/capabilities"

const (
	devicesPath = "/proc/devices"
	// moduleName is the name of the driver's capabilities in /proc/devices.
	moduleName = "nvidia-caps"
)

// Node is the device node of a capability. The node may not exist.
type Node struct {
	// Path is the node's path in containers: "/dev/nvidia-caps/nvidia-cap12".
	Path string
	// Access is the driver's file that describes the node, such as
	// "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access".
	Access string
	Major  int
	Minor  int
	// Mode holds the node's permissions.
	Mode fs.FileMode
}

// Reader reads the driver's files below the first of its roots that has them. The zero value reads
// them below this process's own root.
type Reader struct{ roots []string }

// NewReader returns a Reader for the first root that has the driver's files, or for "/" if none
// has. A container may see only some of the files in its own /proc, and all of them in the /proc of
// a root mounted into it. An empty root is "/".
func NewReader(roots ...string) Reader { return Reader{roots} }

// Partition returns the capability nodes of the GPU instance and of the compute instance in it, in
// this order. gpu is the GPU's minor number. The error names the file and the value that is
// invalid. It is fs.ErrNotExist if the driver has no such instance, or no capabilities.
func (r Reader) Partition(gpu, gi, ci int) ([]Node, error) {
	folder := fmt.Sprintf("%s/gpu%d/mig/gi%d", Folder, gpu, gi)
	major, err := r.Major()
	if err != nil {
		return nil, err
	}
	var nodes []Node
	for _, file := range []string{folder + "/access", fmt.Sprintf("%s/ci%d/access", folder, ci)} {
		data, err := r.read(file)
		if err != nil {
			return nil, err
		}
		minor, mode, err := ParseAccess(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		nodes = append(nodes, Node{
			Path:   "/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(minor),
			Access: file,
			Major:  major,
			Minor:  minor,
			Mode:   mode,
		})
	}
	return nodes, nil
}

// Major returns the major number of all capability nodes. The kernel chooses it when the driver is
// loaded.
func (r Reader) Major() (int, error) {
	data, err := r.read(devicesPath)
	if err != nil {
		return 0, err
	}
	major, err := ParseMajor(data)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", devicesPath, err)
	}
	return major, nil
}

// read reads the file below the first root that has the driver's capabilities. Errors contain the
// path without the root, as users know it.
func (r Reader) read(file string) (string, error) {
	root := "/"
	for _, each := range r.roots {
		each = filepath.Join("/", each)
		if info, err := os.Stat(filepath.Join(each, Folder)); err == nil && info.IsDir() {
			root = each
			break
		}
	}
	data, err := os.ReadFile(filepath.Join(root, file))
	if err == nil {
		return string(data), nil
	}
	if at, ok := errors.AsType[*fs.PathError](err); ok {
		err = at.Err
	}
	return "", fmt.Errorf("read %s: %w", file, err)
}

// ParseAccess parses a capability's file:
//
//	DeviceFileMinor: 12
//	DeviceFileMode: 292
//	DeviceFileModify: 1
//
// All numbers are decimal, including the mode (nv-caps.c prints each with %d). Lines with other
// names are skipped. Each number must occur exactly once, have no sign and be one that a node can
// have.
func ParseAccess(data string) (minor int, mode fs.FileMode, err error) {
	const (
		maxMinor = 1<<20 - 1 // linux/kdev_t.h: MINORBITS
		maxMode  = 0o777
	)
	minor, err = field(data, "DeviceFileMinor", maxMinor)
	if err != nil {
		return 0, 0, err
	}
	bits, err := field(data, "DeviceFileMode", maxMode)
	if err != nil {
		return 0, 0, err
	}
	return minor, fs.FileMode(bits), nil
}

func field(data, name string, limit uint64) (int, error) {
	found, value := false, uint64(0)
	for line := range strings.Lines(data) {
		key, text, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok || key != name {
			continue
		}
		text = strings.TrimSpace(text)
		number, err := strconv.ParseUint(text, 10, 32)
		switch {
		case found:
			return 0, fmt.Errorf("%s is there twice", name)
		case err != nil || number > limit:
			return 0, fmt.Errorf("%s is %q, which is no number up to %d", name, text, limit)
		}
		found, value = true, number
	}
	if !found {
		return 0, fmt.Errorf("%s is missing", name)
	}
	return int(value), nil
}

// ParseMajor finds the major number of capabilities in /proc/devices. The file's lines are a number
// and a name, under headings for character and block devices (Linux, fs/proc/devices.c).
func ParseMajor(data string) (int, error) {
	const maxMajor = 1<<12 - 1 // linux/kdev_t.h: 32 bits less MINORBITS
	for line := range strings.Lines(data) {
		words := strings.Fields(line)
		if len(words) > 0 && words[0] == "Block" {
			break
		}
		if len(words) != 2 || words[1] != moduleName {
			continue
		}
		major, err := strconv.ParseUint(words[0], 10, 32)
		if err != nil || major == 0 || major > maxMajor {
			return 0, fmt.Errorf("the major number of %s is %q, which is none from 1 to %d", moduleName, words[0],
				maxMajor)
		}
		return int(major), nil
	}
	return 0, fmt.Errorf("%s is not listed: %w", moduleName, fs.ErrNotExist)
}
