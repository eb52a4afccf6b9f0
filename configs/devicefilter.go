package configs

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// ParseDeviceFilter reads a filter in the form that sharing.BoardFilter has;
// hexadecimal digits may be in either case. mig-parted takes what it cannot
// read for a filter that matches nothing; here that is an error, which quotes s.
func ParseDeviceFilter(s string) (sharing.BoardFilter, error) {
	id, subsystem, qualified := strings.Cut(s, ":")
	var filter sharing.BoardFilter
	var ok bool
	if filter.Device, ok = parsePCIPair(id); ok && qualified {
		filter.Subsystem, ok = parsePCIPair(subsystem)
	}
	if !ok {
		return sharing.BoardFilter{}, fmt.Errorf("device filter %s: want 0x20B010DE or 0x20B010DE:0x134F10DE", quote(s))
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
