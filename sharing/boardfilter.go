package sharing

import "fmt"

// BoardID is what a layout chooses a board by.
type BoardID struct {
	// Index is the driver's enumeration index.
	Index int
	// Device and Subsystem are PCI IDs, the device's in the upper and the
	// vendor's in the lower 16 bits, as NVML has them (nvmlPciInfo_t).
	Device, Subsystem uint32
}

// BoardFilter chooses boards by PCI IDs, as mig-parted's device-filter does:
//
//	filter = "0x" DDDDVVVV [ ":0x" SDEVSVEN ]
type BoardFilter struct {
	Device uint32
	// Subsystem is 0 if any will do.
	Subsystem uint32
}

// String is the filter as mig-parted writes it, digits in upper case.
func (f BoardFilter) String() string {
	if f.Subsystem == 0 {
		return fmt.Sprintf("0x%08X", f.Device)
	}
	return fmt.Sprintf("0x%08X:0x%08X", f.Device, f.Subsystem)
}

// Match says that the board passes the filter.
func (f BoardFilter) Match(board BoardID) bool {
	return board.Device == f.Device && (f.Subsystem == 0 || board.Subsystem == f.Subsystem)
}
