package driver

import (
	"fmt"
	"io/fs"
	"strconv"
	"strings"
)

// address is a place on the PCI bus. Boards are function 0.
type address struct{ domain, bus, device uint32 }

// String is the address as NVML writes it, "00000000:3B:00.0".
func (a address) String() string { return fmt.Sprintf("%08X:%02X:%02X.0", a.domain, a.bus, a.device) }

// sysfs is the address as the kernel writes it, "0000:3b:00.0".
func (a address) sysfs() string { return fmt.Sprintf("%04x:%02x:%02x.0", a.domain, a.bus, a.device) }

// numaNode is the NUMA node next to the device, from the machine's sysfs; -1
// when the kernel knows none, which it writes as -1 itself
// (Documentation/ABI/testing/sysfs-bus-pci).
func numaNode(machine fs.FS, a address) int {
	text, err := fs.ReadFile(machine, "sys/bus/pci/devices/"+a.sysfs()+"/numa_node")
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || node < 0 {
		return -1
	}
	return node
}
