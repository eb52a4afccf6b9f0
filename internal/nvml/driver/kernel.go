package driver

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Kernel reads what the machine's kernel knows about the driver. It implements nvml.Kernel.
type Kernel struct {
	Options
	// VisibleDevices is this container's NVIDIA_VISIBLE_DEVICES; empty if not set. If it names only
	// some GPUs, it is correct that others are missing.
	VisibleDevices string
}

// givesSome reports whether the container was given only some of the node's GPUs. The other values
// of the variable ask NVIDIA's runtime for all GPUs, or to do nothing.
func (k Kernel) givesSome() bool {
	return !slices.Contains([]string{"", "all", "void", "none", "management.nvidia.com/gpu=all"}, k.VisibleDevices)
}

const boundGPUs = "sys/bus/pci/drivers/nvidia"

// Bound returns the addresses of the GPUs that are bound to the driver nvidia, sorted. It leaves
// out virtual functions of a vGPU host and GPUs that the driver was told to exclude, because NVML
// does not list them.
func (k Kernel) Bound() ([]string, error) {
	if k.givesSome() {
		return nil, nil
	}
	machine := os.DirFS(cmp.Or(k.MachineRoot, "/"))
	entries, err := fs.ReadDir(machine, boundGPUs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	const display = 0x03
	var bound []string
	for _, entry := range entries {
		a, isDevice := parseAddress(entry.Name())
		if !isDevice || class(machine, a)>>16 != display {
			continue
		}
		if _, err := fs.Lstat(machine, "sys/bus/pci/devices/"+a.sysfs()+"/physfn"); err == nil || k.excluded(a) {
			continue
		}
		bound = append(bound, a.String())
	}
	slices.Sort(bound)
	return bound, nil
}

// excluded reports whether the driver was told not to use the GPU. NVIDIA's runtime may hide the
// file with this setting in the container's own /proc.
func (k Kernel) excluded(a address) bool {
	for _, root := range []string{cmp.Or(k.MachineRoot, "/"), k.ContainerDriverRoot, k.HostRoot} {
		if root == "" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia/gpus", a.sysfs(), "information"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if name, value, _ := strings.Cut(line, ":"); name == "GPU Excluded" {
				return strings.TrimSpace(value) == "Yes"
			}
		}
	}
	return false
}

var sysfsAddress = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.0$`)

// parseAddress parses an address as the kernel writes it. A GPU is function 0 of its device.
func parseAddress(s string) (a address, ok bool) {
	parts := sysfsAddress.FindStringSubmatch(s)
	if parts == nil {
		return address{}, false
	}
	for i, field := range []*uint32{&a.domain, &a.bus, &a.device} {
		number, err := strconv.ParseUint(parts[i+1], 16, 32)
		if err != nil {
			return address{}, false
		}
		*field = uint32(number)
	}
	return a, true
}

// OpenControl opens /dev/nvidiactl for reading and writing, as the driver's library does, and closes it.
func (k Kernel) OpenControl() error {
	file, err := os.OpenFile(filepath.Join(cmp.Or(k.MachineRoot, "/"), "dev/nvidiactl"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("close the driver's control node: %w", err)
	}
	return nil
}

var gpuNode = regexp.MustCompile(`/nvidia[0-9]+( \(deleted\))?$`)

// GPUOpen reports whether this process has a device node /dev/nvidiaN open.
func (k Kernel) GPUOpen() bool {
	const own = "/proc/self/fd"
	files, _ := os.ReadDir(own)
	return slices.ContainsFunc(files, func(file fs.DirEntry) bool {
		path, err := os.Readlink(filepath.Join(own, file.Name()))
		return err == nil && gpuNode.MatchString(path)
	})
}
