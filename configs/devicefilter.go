package configs

import (
	"fmt"
	"strconv"
	"strings"
)

// DeviceFilter chooses boards by PCI IDs, as mig-parted's device-filter does:
//
//	filter = "0x" DDDDVVVV [ ":0x" SDEVSVEN ]
//
// The device ID is in the upper and the vendor ID in the lower 16 bits, as NVML
// has them (nvmlPciInfo_t). Hexadecimal digits may be in either case.
type DeviceFilter struct {
	ID uint32
	// Subsystem is 0 if any will do.
	Subsystem uint32
}

// ParseDeviceFilter reads a filter. mig-parted takes what it cannot read for a
// filter that matches nothing; here that is an error, which quotes s.
func ParseDeviceFilter(s string) (DeviceFilter, error) {
	id, subsystem, qualified := strings.Cut(s, ":")
	var filter DeviceFilter
	var ok bool
	if filter.ID, ok = parsePCIPair(id); ok && qualified {
		filter.Subsystem, ok = parsePCIPair(subsystem)
	}
	if !ok {
		return DeviceFilter{}, fmt.Errorf("device filter %s: want 0x20B010DE or 0x20B010DE:0x134F10DE", quote(s))
	}
	return filter, nil
}

// parsePCIPair reads a device and a vendor ID, which are never both 0.
func parsePCIPair(s string) (uint32, bool) {
	digits, ok := strings.CutPrefix(s, "0x")
	if !ok || len(digits) != 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	return uint32(n), err == nil && n != 0
}

// String is the filter as ParseDeviceFilter reads it, digits in upper case.
func (f DeviceFilter) String() string {
	if f.Subsystem == 0 {
		return fmt.Sprintf("0x%08X", f.ID)
	}
	return fmt.Sprintf("0x%08X:0x%08X", f.ID, f.Subsystem)
}

// Match says that a board with these PCI IDs passes the filter.
func (f DeviceFilter) Match(id, subsystem uint32) bool {
	return id == f.ID && (f.Subsystem == 0 || subsystem == f.Subsystem)
}
